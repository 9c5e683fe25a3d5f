"""The work list of decode attention: splits of rows of about equal length, whatever the rows'.

A thread block that reads a long row alone would still read when all others have ended, and a cut of
every row into as many splits as the page table has room for would be mostly of empty ones. So the
cut follows the lengths. They change each step and are the same for all layers: a plan is made once
a step, by a few small fusions over B^2 + B W numbers.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Int


@struct.dataclass
class DecodePlan:
    """Result of `plan_decode` for `decode_attention`, from the lengths of B rows.

    An entry is a split of a row, for all heads. The entries of a row follow one another, in the
    order of rows and of positions. W, their largest number, depends on shapes alone; entries past
    the last split are empty, with equal tiles.
    """

    entries: Any  # i32[W, 3]
    """Row, first tile, and one past the last tile."""
    row_entries: Any  # i32[B, 2]
    """The first entry of each row, and one past its last: equal for a row of length 0."""
    tile: int = struct.field(pytree_node=False)
    """Positions of a tile."""
    window: int | None = struct.field(pytree_node=False, default=None)
    """The window of the layers it is for: tiles that lie before it are in no entry."""


def make_plan(
    length: Int[Array, " B"],
    *,
    tile: int,
    room: int,
    splits: int,
    least: int,
    window: int | None = None,
    queries: int = 1,
) -> DecodePlan:
    """Rows of `length` positions, at most `room` tiles each, cut into splits of at most one chunk.
    Those of a row have equally many tiles, but that the last may have fewer.

    A chunk has at least `least` tiles, and as many more as make it about `splits` chunks in all: at
    most B + `splits`, as each row may end in a part of one.

    With `window` a row begins with the tile of the first position that the earliest of its last
    `queries` positions sees.
    """
    rows = length.shape[0]
    tiles = _ceil(length, jnp.int32(tile))
    skipped = None
    if window is not None:
        seen = window + queries - 1
        skipped = lax.div(jnp.maximum(length - seen, 0), jnp.int32(tile))
        tiles -= skipped
        room = min(room, most_tiles(seen, tile))
    chunk = jnp.maximum(least, _ceil(tiles.sum(dtype=jnp.int32), jnp.int32(splits)))
    counts = _ceil(tiles, chunk)
    size = _ceil(tiles, jnp.maximum(counts, 1))
    # Sums over masks are fusions of the GPU compiler; cumsum and searchsorted are loops of kernels.
    before = jnp.arange(rows)[:, None] > jnp.arange(rows)
    first = jnp.where(before, counts, 0).sum(axis=1, dtype=jnp.int32)
    end = first + counts
    entry = jnp.arange(max_entries(rows, room, splits, least), dtype=jnp.int32)
    row = (end <= entry[:, None]).sum(axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, rows - 1)
    start = jnp.minimum((entry - first[row]) * size[row], tiles[row])
    stop = jnp.minimum(start + size[row], tiles[row])
    if skipped is not None:
        start += skipped[row]
        stop += skipped[row]
    entries = jnp.stack([row, start, stop], axis=1)
    return DecodePlan(entries, jnp.stack([first, end], axis=1), tile, window)


def most_tiles(positions: int, tile: int) -> int:
    """Tiles that so many positions next to each other lie in at most."""
    return (positions + tile - 2) // tile + 1


def max_entries(rows: int, room: int, splits: int, least: int) -> int:
    """W of a plan: no more than its cut can give, and than rows have room for."""
    return min(rows + splits, rows * -(-room // least))


def _ceil(x, divisor):
    """The quotient of integers that are not negative, rounded up."""
    return lax.div(x + (divisor - 1), jnp.broadcast_to(divisor, x.shape))
