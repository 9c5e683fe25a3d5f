"""The two attention ops: check the arguments, choose an implementation, run it.

`implementation=None` chooses for the device; a name is obeyed or refused with `NotImplementedError`. Arguments that do
not belong together are a `ValueError`. Queries are `B T N H` as the projection leaves them, keys and values head-major
`B K S H` as the cache holds them.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from . import cudnn, xla
from .device import current_device, is_hopper
from .tuning import tuning_for

Implementation = Literal["xla", "hopper", "tpu", "cudnn"]
HEAD_DIMS = (64, 80, 96, 128, 256)
"""What the device kernels are built and tested for. XLA takes any."""
CACHE_FORMATS = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8))
"""Dtypes of keys and values that need scales."""


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B K S H"],
    v: Num[Array, "B K S H"],
    *,
    q_offset: Int[Array, ""] | Int[Array, " B"] | int = 0,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    k_scale: Float[Array, "B K S"] | None = None,
    v_scale: Float[Array, "B K S"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Causal grouped-query attention of many queries.

    Query t of row b stands at key position `q_offset[b] + t` and sees the positions up to and including its own: with a
    cache as `k`, `v`, a chunk attends to all that came before it. `q_offset + T` must not exceed S. Of row b only the
    first `lengths[b]` queries are real; the others yield zeros. `segment_ids` (only with S = T and no offset) confines
    each query to the keys with its own id, its packed document.

    Keys and values have the dtype of `q`, or are float8_e4m3fn or int8 with a float32 scale per position and head: the
    value is what is stored times its scale. The device kernels read them widened to the dtype of `q`, one copy of
    this layer's cache, which costs about 3 % of an 8k prefill chunk's attention.

    Differentiable in q, k, v; on the device kernels only for whole rows (no offset, no `lengths`, no scales, S = T).
    Raises `ValueError` for operands that do not fit together, `NotImplementedError` for what a named implementation
    cannot do. Values of offsets and lengths are checked where they are known, that is outside of `jax.jit`.
    """
    _check_operands(q, k, v, k_scale, v_scale)
    batch, queries, keys = *q.shape[:2], k.shape[2]
    if k.shape[0] != batch:
        raise ValueError(f"q and k must have as many rows, got {q.shape=} and {k.shape=}")
    _check_range("q_offset", q_offset, keys - queries, f"the {keys} keys less {queries} queries")
    if jnp.shape(q_offset) not in ((), (batch,)):
        raise ValueError(f"q_offset must be a scalar or one a row, got {jnp.shape(q_offset)=} and {q.shape=}")
    if lengths is not None:
        _check_rows("lengths", lengths, batch)
        _check_range("lengths", lengths, queries, "the queries")
    starts_at_zero = isinstance(q_offset, int) and q_offset == 0
    if segment_ids is not None:
        if segment_ids.shape != q.shape[:2]:
            raise ValueError(f"segment_ids must be B T, got {segment_ids.shape=} and {q.shape=}")
        if keys != queries or not starts_at_zero:
            raise ValueError(f"segment_ids need as many keys as queries and q_offset=0, got {k.shape=}, {q.shape=}, {q_offset=}")

    name = _choose("prefill", implementation, q, segmented=segment_ids is not None, offset=not starts_at_zero)
    offset = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))
    if name == "xla":
        return xla.prefill(q, k, v, offset, lengths, segment_ids, k_scale, v_scale)
    k, v = _widened(q, k, k_scale), _widened(q, v, v_scale)
    if name == "cudnn":
        return cudnn.prefill(q, k, v, lengths)
    if starts_at_zero and keys == queries and lengths is None and k_scale is None:
        return _whole_rows(name, q, k, v, segment_ids)
    return _forward_only(name, q, k, v, offset, jnp.full((batch,), queries, jnp.int32) if lengths is None else lengths, segment_ids)


def decode_attention(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B K S H"] | Num[Array, "X K page H"],
    v: Num[Array, "B K S H"] | Num[Array, "X K page H"],
    length: Int[Array, " B"],
    *,
    k_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
    v_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
    block_table: Int[Array, "B P"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of the last T tokens of each row against a static cache. Not differentiable, but for `xla`.

    `length[b]` counts the valid positions of row b, the T new ones included; query t sees the first
    `length[b] - T + t + 1`. A row of length 0 is idle and yields zeros. Cache formats are those of `prefill_attention`,
    widened on the way to the product: the kernels read them as they are stored.

    With `block_table`, `k` and `v` are a pool of X blocks of positions: position s of row b is position `s % page` of
    block `block_table[b, s // page]`. Raises as `prefill_attention` does.
    """
    _check_operands(q, k, v, k_scale, v_scale)
    batch = q.shape[0]
    _check_rows("length", length, batch)
    if block_table is None:
        if k.shape[0] != batch:
            raise ValueError(f"q and k must have as many rows, got {q.shape=} and {k.shape=}")
        keys = k.shape[2]
    else:
        if block_table.ndim != 2 or block_table.shape[0] != batch:
            raise ValueError(f"block_table must be B P, got {block_table.shape=} and {q.shape=}")
        keys = block_table.shape[1] * k.shape[2]
    _check_range("length", length, keys, "the cache's positions")

    name = _choose("decode", implementation, q, segmented=False, offset=False)
    if name == "xla":
        return xla.decode(q, k, v, length, k_scale, v_scale, block_table)
    if name == "cudnn":
        if block_table is not None or k_scale is not None:
            raise NotImplementedError("implementation='cudnn' takes neither block_table nor scaled keys and values; 'xla' does")
        return cudnn.decode(q, k, v, length)
    kernel = _kernels(name).decode
    tuning = tuning_for(kernel.Tuning, f"{name}.decode", q.shape[3], k.dtype)
    return _once(kernel.attention, tuning)(q, k, v, length.astype(jnp.int32), k_scale, v_scale, block_table)


# Choosing -------------------------------------------------------------------------------------------------------


def _choose(op: str, implementation: str | None, q, *, segmented: bool, offset: bool) -> str:
    """The implementation to run. Raises `NotImplementedError` if the named one cannot."""
    if implementation is None:
        return next((name for name in ("hopper", "tpu") if _obstacle(name, q) is None), "xla")
    if implementation not in get_args(Implementation):
        raise NotImplementedError(f"{implementation=} is not available; available: {', '.join(map(repr, get_args(Implementation)))}")
    obstacle = _obstacle(implementation, q)
    if implementation == "cudnn" and obstacle is None and segmented:
        obstacle = "takes no segment_ids (only a mask of T x S)"
    if implementation == "cudnn" and obstacle is None and offset:
        obstacle = "takes no q_offset but a static 0"
    if obstacle:
        raise NotImplementedError(f"{implementation=} {obstacle}; 'xla' runs {op} everywhere")
    return implementation


def _obstacle(name: str, q) -> str | None:
    """Why `name` cannot run on queries like `q` on the current device; None if it can."""
    platform, kind = current_device()
    if name in ("hopper", "tpu"):
        dtypes = (jnp.bfloat16,) if name == "hopper" else (jnp.bfloat16, jnp.float32)
        if not (is_hopper(platform, kind) if name == "hopper" else platform == "tpu"):
            return f"needs a {'Hopper GPU' if name == 'hopper' else 'TPU'}, this is {platform} ({kind})"
        if q.shape[3] not in HEAD_DIMS:
            return f"takes head dims {HEAD_DIMS}, got {q.shape=}"
        if q.dtype not in dtypes:
            return f"takes {' or '.join(jnp.dtype(dtype).name for dtype in dtypes)}, got {q.dtype=}"
    if name == "cudnn" and platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, this is {platform} ({kind})"
    return None


# Device kernels -------------------------------------------------------------------------------------------------


def _kernels(name: str) -> ModuleType:
    """Imported when first used: Mosaic GPU alone takes half a second."""
    if name == "hopper":
        from . import hopper as kernels
    else:
        from . import tpu as kernels
    return kernels


@functools.cache
def _once(kernel, tuning, **options):
    """`kernel` as a function of arrays that is traced and lowered once for all layers of a program, not once for each."""
    return jax.jit(functools.partial(kernel, tuning=tuning, **options))


def _forward(name: str, q, k, v, offset, lengths, segment_ids, save_lse=False):
    kernel = _kernels(name).prefill
    entry = f"{name}.prefill" if segment_ids is None else f"{name}.prefill.packed"
    tuning = tuning_for(kernel.Tuning, entry, q.shape[3], q.dtype)
    return _once(kernel.attention, tuning, save_lse=save_lse)(q, k, v, offset, lengths, segment_ids)


def _all_queries(q):
    """(offset, lengths) of whole rows."""
    return jnp.zeros(q.shape[:1], jnp.int32), jnp.full(q.shape[:1], q.shape[1], jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole_rows(name: str, q, k, v, segment_ids):
    return _forward(name, q, k, v, *_all_queries(q), segment_ids)[0]


def _whole_rows_forward(name, q, k, v, segment_ids):
    out, lse = _forward(name, q, k, v, *_all_queries(q), segment_ids, save_lse=True)
    return out, (q, k, v, segment_ids, out, lse)


def _whole_rows_backward(name, residuals, d_out):
    kernel, q = _kernels(name).backward, residuals[0]
    tuning = tuning_for(kernel.Tuning, f"{name}.backward", q.shape[3], q.dtype)
    return *_once(kernel.attention_grad, tuning)(*residuals, d_out), None


_whole_rows.defvjp(_whole_rows_forward, _whole_rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward_only(name: str, *operands):
    return _forward(name, *operands)[0]


def _refuse_gradient(name, *_):
    raise NotImplementedError(f"implementation={name!r} has no gradient with q_offset, lengths, scales or S != T; 'xla' has")


_forward_only.defvjp(_refuse_gradient, _refuse_gradient)


def _widened(q, x, scale):
    return x if scale is None else (x.astype(jnp.float32) * scale[..., None]).astype(q.dtype)


# Checks ---------------------------------------------------------------------------------------------------------


def _check_operands(q, k, v, k_scale, v_scale):
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"k and v must have the same shape and dtype, got {k.shape=}, {k.dtype=}, {v.shape=}, {v.dtype=}")
    if q.ndim != 4 or k.ndim != 4 or q.shape[3] != k.shape[3]:
        raise ValueError(f"q must be B T N H and k, v B K S H with the same H, got {q.shape=} and {k.shape=}")
    if q.shape[2] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {q.shape=} and {k.shape=}")
    if not jnp.issubdtype(q.dtype, jnp.floating) or q.dtype.itemsize < 2:
        raise ValueError(f"q must be bfloat16, float16 or float32, got {q.dtype=}")
    if k.dtype not in (q.dtype, *CACHE_FORMATS):
        raise ValueError(f"k and v must have q's dtype, or be float8_e4m3fn or int8 with scales; got {k.dtype=} and {q.dtype=}")
    for name, scale in {"k_scale": k_scale, "v_scale": v_scale}.items():
        if (scale is None) == (k.dtype in CACHE_FORMATS):
            raise ValueError(f"{name} goes with float8_e4m3fn or int8 keys and values, and only with them; got {k.dtype=}")
        if scale is not None and (scale.shape != k.shape[:3] or scale.dtype != jnp.float32):
            raise ValueError(f"{name} must be float32 and B K S, got {scale.shape=}, {scale.dtype=} and {k.shape=}")


def _check_rows(name, value, batch):
    if value.shape != (batch,) or not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} must be one integer a row, got {value.shape=}, {value.dtype=} for {batch} rows")


def _check_range(name, value, high, what):
    """0 <= value <= high, for a value that is known."""
    if isinstance(value, Tracer):
        return
    if (value := np.asarray(value)).size and (value.min() < 0 or value.max() > high):
        raise ValueError(f"{name} must be from 0 to {high}, {what}; got {int(value.min())} to {int(value.max())}")
