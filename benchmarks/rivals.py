"""Attention by others, each in the layout it likes best, to compare with. Each builder returns a
`Candidate` or raises `NotImplementedError` with the reason why that library cannot do the shape."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .candidates import Candidate, with_gradient
from .inputs import Set
from .shapes import Decode, Prefill, Shape

CUDNN = "cudnn-btnh"
"""The baseline of the ratios. (`cudnn` is the op of this package, which transposes keys and values
first.)"""


def builders() -> dict[str, Callable[[Shape], Candidate]]:
    """Those for the platform at hand, by name."""
    platform = jax.default_backend()
    if platform == "gpu":
        from .torch_rival import torch_flash

        return {CUDNN: cudnn, "jax-mgpu": jax_mgpu, "torch-flash": torch_flash}
    if platform == "tpu":
        return {"jax-splash": jax_splash, "jax-paged": jax_paged}
    return {}


@jax.jit
def _position_major(s: Set) -> Set:
    """Keys and values as B S K H."""
    return s | {name: s[name].transpose(0, 2, 1, 3) for name in ("k", "v")}


def _head_major_gradients(outputs) -> tuple:
    """(out, dq, dk, dv) with dk and dv back as B K S H; just (out,) if there are none."""
    out, *gradients = outputs if isinstance(outputs, tuple) else (outputs,)
    return out, *gradients[:1], *(x.transpose(0, 2, 1, 3) for x in gradients[1:])


def require_plain(shape: Shape) -> Prefill:
    """Causal attention of whole rows, which everyone has."""
    if isinstance(shape, Decode):
        raise NotImplementedError("has no decode attention")
    if shape.packed:
        raise NotImplementedError("takes no documents but as a mask of T x S")
    if shape.offset:
        raise NotImplementedError("takes no offset but as a mask of T x S")
    return shape


def cudnn(shape: Shape) -> Candidate:
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    if isinstance(shape, Decode):
        if shape.cache != "bfloat16" or shape.page is not None:
            raise NotImplementedError(
                "takes neither 8-bit caches nor block tables through JAX's public API"
            )
        return Candidate(
            CUDNN,
            lambda s: attend(s["q"], s["k"], s["v"], key_value_seq_lengths=s["length"]),
            _position_major,
        )
    causal = functools.partial(attend, is_causal=True)
    if require_plain(shape).gradient:
        return Candidate(
            CUDNN, lambda s: with_gradient(causal, s), _position_major, _head_major_gradients
        )
    return Candidate(CUDNN, lambda s: causal(s["q"], s["k"], s["v"]), _position_major)


def jax_mgpu(shape: Shape) -> Candidate:
    """The Hopper kernel that JAX ships. It runs in float16 and does not scale, so the queries come
    scaled."""
    if require_plain(shape).gradient:
        raise NotImplementedError("has no causal backward pass")
    if shape.head_dim % 64:
        raise NotImplementedError("takes head dims that are multiples of 64")
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    tuning = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=128 if shape.head_dim <= 128 else 64,
        max_concurrent_steps=2,
        causal=True,
    )

    @jax.jit
    def prepare(s: Set) -> Set:
        scaled = _position_major(s) | {"q": s["q"].astype(jnp.float32) * shape.head_dim**-0.5}
        return {name: x.astype(jnp.float16) for name, x in scaled.items()}

    return Candidate(
        "jax-mgpu", lambda s: attention_mgpu.attention(s["q"], s["k"], s["v"], tuning), prepare
    )


def jax_splash(shape: Shape) -> Candidate:
    """JAX's splash attention on TPU: head-major, no scale of its own."""
    if isinstance(shape, Decode):
        raise NotImplementedError("has no decode attention")
    if shape.offset:
        raise NotImplementedError("takes no offset known only at run time")
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block, compute = min(1024, shape.queries), min(512, shape.queries)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        use_fused_bwd_kernel=True,
    )
    mask = splash.MultiHeadMask([splash.CausalMask((shape.queries, shape.keys))] * shape.heads)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes)

    def attend(q, k, v, ids):  # each N T H
        return kernel(q, k, v, None if ids is None else splash.SegmentIds(ids, ids))

    def prepare(s: Set) -> Set:
        head_major = {name: s[name].transpose(0, 2, 1, 3) for name in ("q", "d_out") if name in s}
        return (
            s
            | head_major
            | {
                "q": (head_major["q"].astype(jnp.float32) * shape.head_dim**-0.5).astype(
                    jnp.bfloat16
                )
            }
        )

    def call(s: Set):
        ids = s.get("segment_ids")
        rows = jax.vmap(attend, in_axes=(0, 0, 0, None if ids is None else 0))
        if not shape.gradient:
            return rows(s["q"], s["k"], s["v"], ids)
        return with_gradient(lambda q, k, v: rows(q, k, v, ids), s)

    def canonical(outputs) -> tuple:
        out, *gradients = outputs if isinstance(outputs, tuple) else (outputs,)
        if gradients:  # with respect to the scaled queries
            gradients[0] = (
                gradients[0].transpose(0, 2, 1, 3).astype(jnp.float32) * shape.head_dim**-0.5
            )
        return out.transpose(0, 2, 1, 3), *gradients

    return Candidate("jax-splash", call, jax.jit(prepare), canonical)


def jax_paged(shape: Shape) -> Candidate:
    """JAX's paged attention on TPU: pages of each head, no scale of its own."""
    if not isinstance(shape, Decode):
        raise NotImplementedError("has no prefill attention")
    if shape.cache != "bfloat16":
        raise NotImplementedError("scales whole pages, not positions")
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    page = shape.page or min(128, shape.keys)
    pages = shape.keys // page

    def prepare(s: Set) -> Set:
        if shape.page is None:
            kv = {
                name: s[name]
                .transpose(1, 0, 2, 3)
                .reshape(shape.kv_heads, -1, page, shape.head_dim)
                for name in ("k", "v")
            }
            table = jnp.arange(shape.batch * pages, dtype=jnp.int32).reshape(shape.batch, pages)
        else:
            kv, table = (
                {name: s[name].transpose(1, 0, 2, 3) for name in ("k", "v")},
                s["page_table"],
            )
        q = (s["q"][:, 0].astype(jnp.float32) * shape.head_dim**-0.5).astype(jnp.bfloat16)
        return kv | {"q": q, "length": s["length"], "page_table": table}

    attend = functools.partial(
        paged_attention, pages_per_compute_block=min(pages, max(1, 512 // page))
    )

    def call(s: Set):
        return attend(s["q"], s["k"], s["v"], s["length"], s["page_table"])

    return Candidate("jax-paged", call, jax.jit(prepare), lambda out: (out[:, None],))
