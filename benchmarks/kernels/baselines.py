"""Attention of other libraries, each in its preferred layout, to compare with. Each builder returns
a `Candidate` or raises `NotImplementedError` with the reason why its library cannot run a shape."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..timing import Program, Run
from .candidates import Candidate, with_gradient
from .inputs import Set
from .shapes import Decode, Prefill, Shape

CUDNN = "cudnn-btnh"
"""Baseline of the ratios; `cudnn` is this package's op, which first transposes keys and values."""


def builders() -> dict[str, Callable[[Shape], Candidate]]:
    """The baselines for the current platform, by name."""
    platform = jax.default_backend()
    if platform == "gpu":
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
    """`shape` if it is causal attention of whole rows, which every library has."""
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
                "takes neither 8-bit caches nor page tables through JAX's public API"
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


# PyTorch ----------------------------------------------------------------------


def torch_flash(shape: Shape) -> Candidate:
    """PyTorch's `scaled_dot_product_attention` with the flash backend and no other; torch's own B N
    T H over B T N H memory. Arrays are shared with JAX, not copied."""
    if isinstance(shape, Decode):
        raise NotImplementedError("takes no lengths to decode with")
    if shape.packed:
        raise NotImplementedError("takes no documents but as a mask of T x S")
    torch = _torch()
    attend = _torch_attend(torch, shape)

    def prepare(s: Set) -> dict[str, Any]:
        position_major = {name: s[name].transpose(0, 2, 1, 3) for name in ("k", "v")}
        arrays = {name: s[name] for name in ("q", "d_out") if name in s} | position_major
        jax.block_until_ready(arrays)
        tensors = {name: torch.from_dlpack(x).transpose(1, 2) for name, x in arrays.items()}
        if shape.gradient:
            tensors |= {name: tensors[name].detach().requires_grad_() for name in ("q", "k", "v")}
        return tensors

    def call(s):
        out = attend(s["q"], s["k"], s["v"])
        return (
            (out, *torch.autograd.grad(out, (s["q"], s["k"], s["v"]), s["d_out"]))
            if shape.gradient
            else (out,)
        )

    def canonical(outputs) -> tuple:
        out, *gradients = outputs
        swapped = [out.transpose(1, 2), *(x.transpose(1, 2) for x in gradients[:1]), *gradients[1:]]
        torch.cuda.synchronize()
        return tuple(jnp.from_dlpack(x.detach().contiguous()) for x in swapped)

    return Candidate(
        "torch-flash",
        call,
        prepare,
        canonical,
        lambda call, sets: _torch_program(torch, call, sets),
    )


def _torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation must not lose the other rows
        raise NotImplementedError(f"torch cannot be imported: {type(error).__name__}") from error
    if not torch.cuda.is_available():
        raise NotImplementedError("this torch has no CUDA device")
    return torch


def _torch_attend(torch: Any, shape) -> Callable:
    """Causal attention; with an offset the mask is causal from the lower right corner, which the
    flash backend supports."""
    attention = importlib.import_module("torch.nn.attention")
    bias = None
    if shape.offset:
        if shape.offset + shape.queries != shape.keys:
            raise NotImplementedError("takes a chunk at the end of the cache only")
        bias = importlib.import_module("torch.nn.attention.bias").causal_lower_right(
            shape.queries, shape.keys
        )
    mask = {"is_causal": True} if bias is None else {"attn_mask": bias}

    def attend(q, k, v):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, **mask, enable_gqa=q.shape[1] != k.shape[1]
            )

    return attend


def _torch_program(torch: Any, call: Callable, sets: Sequence) -> Program:
    """A program timed by events on torch's stream, by the device's clock."""
    start_time = time.perf_counter()
    outputs = [call(one) for one in sets]
    torch.cuda.synchronize()
    first_seconds = time.perf_counter() - start_time
    output_bytes = sum(x.numel() * x.element_size() for output in outputs for x in output)
    last = tuple(x.detach() for x in outputs[-1])
    del outputs

    def run(repeats: int) -> Run:
        first, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        first.record()
        for _ in range(repeats):
            for one in sets:
                call(one)
        end.record()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        return Run(
            first.elapsed_time(end) / 1e3, min(queued - start, first.elapsed_time(end) / 1e3)
        )

    return Program(run, len(sets), last, output_bytes, first_seconds)
