"""Shared by the two backward kernels: the recomputed weights of a block, its mask, and small
helpers."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .padding import pad

ROWS = 64  # rows of a tile that one warpgroup owns: the M of a WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # a vector with one value per row of a tile
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # and per column
REGISTERS = {
    2: (24, 240),
    3: (32, 160),
}  # of the producer and of each compute warpgroup, by their number
LOG2E = math.log2(math.e)
Accumulator = plgpu.WGMMAAccumulatorRef


def weights(s, mask, lse, head_dim):
    """P of a block of unscaled scores."""
    if mask is not None:
        s = jnp.where(mask(), s, -jnp.inf)
    return jnp.exp2(s * (head_dim**-0.5 * LOG2E) - lse)


def documents_of(segment_ids, batch, length, multiple):
    """(segment ids padded to a multiple of `multiple`, None if there are none; the document of each
    position, B T)"""
    if segment_ids is None:
        return None, jnp.zeros((batch, length), jnp.int32)
    return pad(segment_ids, 1, multiple), segment_ids


def load_rows(gmem, b, rows):
    """Values of the rows of a tile, B T in memory; None without them."""
    if gmem is None:
        return None
    return plgpu.load(gmem.at[b, rows], layout=ROW, optimized=False)


def causal_mask(row_start, row_ids, col_start, ids_gmem, b, shape, compare, window):
    """The mask of a block: True where the query sees the key, which is not later, of the same
    document and within the window. `compare` is ge where rows are queries, le where they are
    keys."""
    # Vectors, not tiles, of positions: the compiler keeps what does not change with the block in
    # registers.
    row = row_start + plgpu.broadcasted_iota(jnp.int32, (shape[0],), 0, layout=ROW)
    col = col_start + plgpu.broadcasted_iota(jnp.int32, (shape[1],), 0, layout=COLUMN)
    mask = compare(down(row, shape), across(col, shape))
    if window is not None:
        last, opposite = (1 - window, lax.le) if compare is lax.ge else (window - 1, lax.ge)
        mask &= opposite(down(row + last, shape), across(col, shape))
    if ids_gmem is not None:
        col_ids = plgpu.load(
            ids_gmem.at[b, pl.ds(col_start, shape[1])], layout=COLUMN, optimized=False
        )
        mask &= down(row_ids, shape) == across(col_ids, shape)
    return mask


def hidden_zero(step):
    """A zero that the compiler cannot fold: a WGMMA descriptor that depends on it is not hoisted
    out of the loop into a register."""
    return lax.shift_right_logical(step, i32(30))


def down(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [0])


def across(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [1])


def i32(x):
    return jnp.int32(x)


def compiler_params():
    return plgpu.CompilerParams(
        approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    )
