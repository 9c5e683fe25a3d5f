"""Random operands of the ops: one dict of arrays per set, drawn on the device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .shapes import Decode, Prefill, Shape

Set = dict[str, Any]
"""q `B T N H`; k, v `B K S H`, or a pool `X K page H`; and those of d_out, segment_ids, offset,
length, k_scale, v_scale and page_table that the shape has."""

ROTATED_BYTES = 8e9
"""Room for the sets of one row. Together they are far larger than any cache: reading one evicts the
others."""


def draw(shape: Shape, key: jax.Array, count: int | None = None) -> list[Set]:
    """Independent sets: two of prefill, two to eight of decode, whose single call is short."""
    if count is None:
        fitting = int(min(8, max(2, ROTATED_BYTES // shape.input_bytes)))
        count = 2 if isinstance(shape, Prefill) else fitting
    keys = [jax.random.fold_in(key, i) for i in range(count)]
    return [jax.block_until_ready(draw_one(shape, key)) for key in keys]


def draw_one(shape: Shape, key: jax.Array) -> Set:
    return _prefill(shape, key) if isinstance(shape, Prefill) else _decode(shape, key)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(shape: Prefill, key) -> Set:
    arrays = _q_k_v(shape, key)
    if shape.gradient:
        arrays["d_out"] = _normal(jax.random.fold_in(key, 3), arrays["q"].shape)
    if shape.packed:
        ids = np.repeat(np.arange(1, len(shape.documents) + 1, dtype=np.int32), shape.documents)
        arrays["segment_ids"] = jnp.broadcast_to(jnp.asarray(ids), (shape.batch, shape.queries))
    if shape.offset:
        arrays["offset"] = jnp.int32(shape.offset)  # an array, as serving passes it
    return arrays


@functools.partial(jax.jit, static_argnums=0)
def _decode(shape: Decode, key) -> Set:
    arrays = _q_k_v(shape, key)
    arrays["length"] = jnp.asarray(shape.lengths, jnp.int32)
    if jnp.dtype(shape.cache).itemsize == 1:
        for name in ("k", "v"):
            arrays[name], arrays[f"{name}_scale"] = quantise(arrays[name], shape.cache)
    if shape.page is not None:
        pages = shape.keys // shape.page
        table = jax.random.permutation(jax.random.fold_in(key, 4), shape.batch * pages)
        table = table.astype(jnp.int32)
        for name in {"k", "v", "k_scale", "v_scale"} & arrays.keys():
            arrays[name] = _pool(arrays[name], pages, shape.page, table)
        table = table.reshape(shape.batch, pages)
        unused = (shape.table or shape.keys) // shape.page - pages
        arrays["page_table"] = jnp.pad(table, ((0, 0), (0, unused)))
    return arrays


def _q_k_v(shape: Shape, key) -> Set:
    q_shape = (shape.batch, shape.queries, shape.heads, shape.head_dim)
    kv_shape = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    sizes = {"q": q_shape, "k": kv_shape, "v": kv_shape}
    return {
        name: _normal(jax.random.fold_in(key, i), size)
        for i, (name, size) in enumerate(sizes.items())
    }


def _normal(key, size):
    return jax.random.normal(key, size, jnp.float32).astype(jnp.bfloat16)


def quantise(x, dtype: str):
    """(stored, float32 scale per position and head): what is stored times its scale is about
    `x`."""
    x = x.astype(jnp.float32)
    largest = 448 if dtype == "float8_e4m3fn" else 127
    scale = jnp.abs(x).max(axis=-1) / largest
    x = x / scale[..., None]
    return (jnp.round(x) if dtype == "int8" else x).astype(dtype), scale


def dequantised(arrays: Set, name: str) -> jax.Array:
    """float32 keys or values, scaled; still a pool if they are one."""
    x = arrays[name].astype(jnp.float32)
    scale = arrays.get(f"{name}_scale")
    return x if scale is None else x * scale[..., None]


def _pool(x, pages: int, page: int, table):
    """B K S ... -> X K page ...: page p of row b lies at `table[b * pages + p]`."""
    x = jnp.moveaxis(x.reshape(*x.shape[:2], pages, page, *x.shape[3:]), 2, 1)
    x = x.reshape(-1, *x.shape[2:])
    return jnp.zeros_like(x).at[table].set(x)
