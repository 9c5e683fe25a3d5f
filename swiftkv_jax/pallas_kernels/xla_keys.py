"""Keys and values as XLA's attention reads them: in rows or in pages, one block at a time, with the
mask of what each query sees of a block.

Letters are those of `xla`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from . import segments
from .operands import AttentionOperands


class Keys(NamedTuple):
    """Keys and values, and their optional scales, segment ids, page table and restrictions."""

    k: Array  # B K S H; with a page table X K page H
    v: Array
    k_scale: Array | None = None  # k and v without H
    v_scale: Array | None = None
    segment_ids: Array | None = None  # B S
    page_table: Array | None = None  # B P
    window: Array | None = None  # i32[]: counted back from the last position that a query sees
    # i32[B, T]: the first position that each query sees, where no window tells
    first: Array | None = None

    @classmethod
    def of(cls, operands: AttentionOperands, window, first=None) -> Keys:
        return cls(
            operands.k,
            operands.v,
            operands.k_scale,
            operands.v_scale,
            operands.segment_ids,
            operands.page_table,
            window,
            first,
        )

    @property
    def length(self) -> int:  # S
        if self.page_table is None:
            return self.k.shape[2]
        return self.k.shape[2] * self.page_table.shape[1]


def scalar(window) -> Array | None:
    if window is None:
        return None
    return jnp.asarray(window, jnp.int32)


def restrict(last, position, window, kv_lengths):
    """(`last`, `window`, first) of `Keys` for queries at `position`, B T, that see the first
    `kv_lengths[b]` positions of row b, and of these the last `window` up to their own."""
    last = jnp.minimum(last, kv_lengths[:, None] - 1)
    if window is None:
        return last, None, None
    # A query past the keys sees fewer than `window` of them, or none.
    first = position - window + 1
    return jnp.where(first <= last, last, -1), None, first


def visible_rows(q, keys: Keys, last):
    """The last position that each row sees, -1 for none, its segment id or None, and the first
    position or None: arrays B R."""
    return jax.tree.map(
        lambda x: jnp.repeat(x, q.shape[2] // keys.k.shape[1], axis=1),
        (last, keys.segment_ids, keys.first),
    )


def visible_blocks(q, keys: Keys, last, block_q: int, block_kv: int):
    """`visible_rows` of each query block; the first key block that any of them sees, over all b;
    one past the last."""
    rows = block_q * (q.shape[2] // keys.k.shape[1])
    visible = jax.tree.map(lambda x: split(x, rows, padding=-1), visible_rows(q, keys, last))
    end = (visible[0].max(axis=(1, 2)) + block_kv) // block_kv
    first = jnp.zeros_like(end)
    if keys.segment_ids is not None:
        first, segment_end = segments.visible_kv_blocks(keys.segment_ids, block_q, block_kv)
        first = first.min(axis=0)
        end = jnp.minimum(end, segment_end.max(axis=0))
    if keys.window is not None or keys.first is not None:
        oldest = jnp.where(
            visible[0] < 0,
            keys.length,
            visible[2] if keys.window is None else visible[0] - keys.window + 1,
        )
        first = jnp.maximum(first, oldest.min(axis=(1, 2)) // block_kv)
    return visible, first, end


def load(keys: Keys, j, size: int, dtype, visible):
    """Key block j: keys and values in `dtype`, their scales, and the mask `B 1 R S` of the visible
    ones.

    Where `size` does not divide S the last block begins earlier, and what it shares with the block
    before is masked: padding would copy the cache.
    """
    last, segment_ids, first = visible
    start = jnp.minimum(j * size, keys.length - size)

    def read(x, axis=2):
        if keys.page_table is None:
            return x if size == keys.length else lax.dynamic_slice_in_dim(x, start, size, axis)
        page = x.shape[2]
        pages = lax.dynamic_slice_in_dim(keys.page_table, start // page, size // page, axis=1)
        # B K pages page; entries of unused pages may be anything.
        gathered = jnp.moveaxis(x.at[pages].get(mode="clip"), 1, 2)
        return gathered.reshape(*gathered.shape[:2], size, *x.shape[3:])

    position = start + jnp.arange(size, dtype=jnp.int32)
    mask = (position <= last[:, :, None]) & (position >= j * size)
    if keys.window is not None:
        mask &= position > last[:, :, None] - keys.window
    if first is not None:
        mask &= position >= first[:, :, None]
    if keys.segment_ids is not None:
        mask &= segment_ids[:, :, None] == read(keys.segment_ids, axis=1)[:, None]
    k_scale, v_scale = (None if x is None else read(x) for x in (keys.k_scale, keys.v_scale))
    return read(keys.k).astype(dtype), read(keys.v).astype(dtype), k_scale, v_scale, mask[:, None]


def add_block(total, j, block):
    """`total` with `block` added at key block j."""
    size = block.shape[2]
    start = jnp.minimum(j * size, total.shape[2] - size)
    return lax.dynamic_update_slice_in_dim(
        total, lax.dynamic_slice_in_dim(total, start, size, 2) + block, start, 2
    )


def even(count: int, block: int, page: int = 1) -> int:
    """Size of equal blocks of whole pages, as many as there would be of `block`, of which the last
    could be almost empty."""
    pages = count // page
    most = max(block // page, 1)
    return -(-pages // -(-pages // most)) * page


def split(x, block: int, padding: int = 0):
    """B T ... -> I B block ..."""
    x = jnp.pad(
        x, [(0, 0), (0, -x.shape[1] % block), *[(0, 0)] * (x.ndim - 2)], constant_values=padding
    )
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def join(x, length: int):
    """I B block ... -> B T ..."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]
