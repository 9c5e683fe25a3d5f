"""The tiles of the prefill kernel: the order in which thread blocks work on them, the keys that
each sees, and the loads of these keys and their values into shared memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import segments
from ..device import num_multiprocessors
from .prefill_tuning import CLUSTER, CONSUMERS, Tuning

GRID = ("tile", "batch", "head")
"""The axes of the tiles, from the slowest to the fastest: all heads of the longest tiles start
first. With `multicast` a "head" is a pair of heads, one for each thread block of a cluster."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """The queries that the consumers of a thread block work on at a time, of one head of one row.

    Key blocks [end - steps, end) are visible to it. They are counted backwards: step i works on
    block end - 1 - i.
    """

    number: Any  # of the row's tiles
    batch: Any
    head: Any
    start: Any  # the first of its queries
    offset: Any  # position of the row's first query
    end: Any
    steps: Any
    block_kv: int

    def keys(self, i):
        return pl.ds((self.end - 1 - i) * self.block_kv, self.block_kv)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that blocks of keys, or of values, pass through."""

    gmem: Any  # B K S H, or X K page H
    smem: Any  # stages block_kv H
    ready: Any  # stages: the block is there
    free: Any  # stages: all consumers have read it; in a cluster, those of both thread blocks
    stages: int

    def slot(self, n):
        """The slot of the n-th block."""
        return lax.rem(n, jnp.int32(self.stages))

    def before(self, slot):
        """The slot before another; a remainder takes three times the instructions."""
        return jnp.where(slot == 0, self.stages - 1, slot - 1)

    def after(self, slot):
        return jnp.where(slot == self.stages - 1, 0, slot + 1)


def launch(grid: tuple[int, int, int], tuning: Tuning) -> dict[str, Any]:
    """The axes of the kernel, as arguments of `plgpu.kernel`, for `grid` tiles along `GRID`."""
    axes = {"grid": grid, "grid_names": GRID}
    if tuning.persistent:
        at_once = num_multiprocessors() // (CLUSTER if tuning.multicast else 1)
        blocks = min(max(at_once, 1), math.prod(grid))
        axes = {"grid": (blocks,), "grid_names": ("block",)}
    if tuning.multicast:
        axes |= {"cluster": (CLUSTER,), "cluster_names": ("rank",)}
    return axes


def walk(
    grid: tuple[int, int, int], tuning: Tuning, find: Callable[[Any, Any, Any], Tile]
) -> Callable[[Callable[[Tile, Any], None]], Any]:
    """A function that calls `work(tile, done)` on each tile of this thread block, `done` being the
    steps of its tiles before, and returns the steps of all.

    `find` makes the tile at a place in `grid`.
    """
    if not tuning.persistent:
        head, batch, index = (lax.axis_index(name) for name in reversed(GRID))
        only = find(index, batch, head)

        def one(work):
            work(only, 0)
            return only.steps

        return one

    def all_of_block(work):
        block = lax.axis_index("block")
        blocks = lax.axis_size("block")
        heads = jnp.int32(grid[2])
        per_tile = jnp.int32(grid[1] * grid[2])

        def one(turn, done):
            index = nth_tile(turn, block, blocks)
            rest = lax.rem(index, per_tile)
            tile = find(lax.div(index, per_tile), lax.div(rest, heads), lax.rem(rest, heads))
            work(tile, done)
            return done + tile.steps

        count = num_tiles(block, blocks, math.prod(grid))
        return lax.fori_loop(jnp.int32(0), count, one, jnp.int32(0))

    return all_of_block


def full_from(ids, block_q, block_kv, window):
    """int32[B, I]: the first key block from which on all keys before query block i are of the
    document, and in the window, of all its queries."""
    first = segments.run_starts(ids)[:, block_q - 1 :: block_q]
    if window is not None:
        last_query = jnp.arange(block_q - 1, ids.shape[1], block_q, dtype=jnp.int32)
        first = jnp.maximum(first, last_query - (window - 1))
    return pl.cdiv(first, block_kv)


def entry_of(gmem, batch, default):
    """The entry of a row; `default` where there are none."""
    if gmem is None:
        return default
    return gmem[batch]


def tile_at(
    offset_gmem,  # B, or None
    lengths_gmem,  # B, or None
    kv_lengths_gmem,  # B, or None
    first_visible_gmem,  # B tiles, or None without segment_ids
    index,
    batch,
    head,
    *,
    tiles: int,
    queries: int,
    tuning: Tuning,
    window: int | None,
) -> Tile:
    """The tile at a place in the grid."""
    rows = CONSUMERS * tuning.block_q
    block_kv = tuning.block_kv
    if tuning.multicast:
        head = CLUSTER * head + lax.axis_index("rank")
    number = tiles - 1 - index
    start = number * rows
    offset = entry_of(offset_gmem, batch, jnp.int32(0))
    length = entry_of(lengths_gmem, batch, jnp.int32(queries))
    end = offset + lax.min(start + rows, length)
    if kv_lengths_gmem is not None:
        end = lax.min(end, kv_lengths_gmem[batch])
    end = pl.cdiv(end, jnp.int32(block_kv))
    first = jnp.int32(0)
    if first_visible_gmem is not None:
        first = first_visible_gmem[batch, number]
    elif window is not None:
        first = lax.div(lax.max(offset + start - (window - 1), 0), jnp.int32(block_kv))
    if kv_lengths_gmem is not None:  # the window may begin past them
        end = lax.max(end, first)
    steps = jnp.where(start < length, end - first, 0)
    return Tile(number, batch, head, start, offset, end, steps, block_kv)


def nth_tile(n, block, blocks):
    """Index of the tile that thread block `block` works on as its n-th.

    Tiles are dealt out from the longest to the shortest, forth and back over the blocks, so that
    each gets about as much work as the others. With 3 blocks: 0 1 2, 5 4 3, 6 7 8, ...
    """
    return n * blocks + jnp.where(lax.rem(n, 2) == 0, block, blocks - 1 - block)


def num_tiles(block, blocks, count: int):
    """How many of `count` tiles `nth_tile` gives to thread block `block`."""
    rounds, rest = divmod(count, blocks)
    place = block if rounds % 2 == 0 else blocks - 1 - block
    return rounds + (place < rest).astype(jnp.int32)


def load_keys_and_values(
    tile: Tile,
    done,
    keys: Ring,
    values: Ring,
    kv_head,
    table_gmem,
    *,
    multicast: bool,
    load_queries: Callable[[], None] | None,
):
    """Copy the keys and values that `tile` sees into their rings, each as soon as a slot is free.

    `done` steps went through the rings before. `load_queries` is called after the first keys.
    """
    per_page = jnp.int32(keys.gmem.shape[2] // tile.block_kv)

    def copy(ring: Ring, i):
        n = done + i
        block = tile.end - 1 - i
        rows = tile.keys(i)
        index = tile.batch
        if table_gmem is not None:  # read before the wait for a slot, which hides the latency
            index = table_gmem[tile.batch, lax.div(block, per_page)]
            rows = pl.ds(lax.rem(block, per_page) * tile.block_kv, tile.block_kv)
        pl.when(n >= ring.stages)(lambda: plgpu.barrier_wait(ring.free.at[ring.slot(n)]))
        plgpu.copy_gmem_to_smem(
            ring.gmem.at[index, kv_head, rows],
            ring.smem.at[ring.slot(n)],
            ring.ready.at[ring.slot(n)],
            collective_axes="rank" if multicast else None,
        )

    # In the order of use: K_0, K_1 V_0, K_2 V_1, ..., V_last.
    @pl.loop(0, tile.steps + 1)
    def _(i):
        pl.when(i < tile.steps)(lambda: copy(keys, i))
        if load_queries is not None:
            pl.when((i == 0) & (tile.steps > 0))(load_queries)
        pl.when(i > 0)(lambda: copy(values, i - 1))


def drain(total, keys: Ring, values: Ring):
    """Wait until all that `total` steps loaded has been read. No thread block of a cluster may end
    before: the other writes into its shared memory, and arrives at its barriers."""

    @pl.loop(lax.max(total - keys.stages, 0), total)
    def _(n):
        plgpu.barrier_wait(keys.free.at[keys.slot(n)])
        plgpu.barrier_wait(values.free.at[values.slot(n)])
