"""Sizes of the decode kernel: tiles, stages of the ring, splits of the work list; and the operands
that it does not take."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from ..operands import AttentionSpec, page_size

_SMS = 132
_MAX_SHARED_BYTES = 227 * 1024
_MOST_STAGES = 16  # a group holds at most 32 barriers, and each stage has one for K and one for V
_ROWS = 64  # queries per key/value head: the columns of a tile
LEAST_TILES = 4
"""Tiles of a split of a row, at least. With 64 positions in bfloat16 these are 128 KiB, which an SM
reads in 4 us; the result of the split has 4 KiB."""
# Two at a time on each SM, twice: the last to end is then short beside the whole.
_BLOCKS = 4 * _SMS


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Tile sizes. More than 16 queries per key/value head leave room only for shorter
    tiles and fewer stages."""

    block_kv: int = 64  # positions per tile
    stages: int = 3  # tiles of K, and as many of V, in the ring

    def __post_init__(self):
        if self.block_kv <= 0 or self.block_kv % 64:
            raise ValueError(f"{self.block_kv=} must be a positive multiple of 64")
        if self.stages < 2:
            raise ValueError(
                f"{self.stages=} must be at least 2, or loads and products cannot overlap"
            )
        if self.stages > _MOST_STAGES:
            raise ValueError(
                f"{self.stages=} must be at most {_MOST_STAGES}: each has two barriers, and a "
                f"group holds 32"
            )
        if 2 * self.stages * self.block_kv * 64 > _MAX_SHARED_BYTES:
            raise ValueError(
                f"{self.stages=} of {self.block_kv=} do not fit {_MAX_SHARED_BYTES} bytes of "
                f"shared memory at any head dim"
            )


def unsupported_reason(spec: AttentionSpec, tuning: Tuning) -> str | None:
    """Why the kernel cannot run such a call; None if it can. Head dim and dtype are right."""
    q = spec.q
    k = spec.k
    (_, T, N, H), (K, page) = q.shape, k.shape[1:3]
    rows = T * (N // K)
    if rows > _ROWS:
        return (
            f"takes at most {_ROWS} queries per key/value head (T N / K), got {rows} with "
            f"{q.shape=}, {k.shape=}"
        )
    if spec.page_table is not None and page % 64:
        return f"takes pages of a multiple of 64 positions, got {page} with {k.shape=}"
    try:
        fit(tuning, H, rows, k.dtype.itemsize, page_size(spec))
    except NotImplementedError as error:
        return str(error)
    return None


def fit(tuning: Tuning, head_dim: int, rows: int, itemsize: int, page: int | None = None) -> Tuning:
    """`tuning` less what many queries need: registers for the scores (no long tiles) and shared
    memory (fewer stages).

    A tile that does not divide `page`, a multiple of 64, is shortened to one that does, with as
    many more stages, up to the 16 for which there are barriers. Raises `NotImplementedError` where
    two stages do not fit.
    """
    columns = pl.cdiv(rows, 8) * 8
    eight_bit = itemsize == 1
    block_kv = tuning.block_kv if columns <= 16 else 64
    stages = tuning.stages
    if page is not None and page % block_kv:
        longest = block_kv
        block_kv = max(b for b in range(64, block_kv, 64) if page % b == 0)
        stages *= longest // block_kv
    fixed = columns * ((2 + 2 * eight_bit) * head_dim + 2 * block_kv + 128)
    fixed += eight_bit * 2 * block_kv * head_dim
    fixed += 1024  # for barriers
    stage = 2 * block_kv * (head_dim * itemsize + 4 * eight_bit)
    stages = min(stages, _MOST_STAGES, (_MAX_SHARED_BYTES - fixed) // stage)
    if stages < 2:
        raise NotImplementedError(
            f"has no room in shared memory for two stages of {block_kv=} with {head_dim=}, "
            f"{rows=} and {itemsize=}"
        )
    return dataclasses.replace(tuning, block_kv=block_kv, stages=stages)


def splits(kv_heads: int) -> int:
    """Splits of rows that keep every SM busy; each is a thread block for every head."""
    return pl.cdiv(_BLOCKS, kv_heads)
