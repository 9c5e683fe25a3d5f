"""How the decode kernel's work is cut up: tiles, stages of the ring, and shares of the sequence."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

_SMS = 132
_MAX_SHARED_BYTES = 227 * 1024
_COMBINE_TILES = 4  # what the second computation costs, in tiles an SM could have read meanwhile (about 1 us each)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut up. More than 16 queries per key/value head leave room only for shorter tiles and fewer stages."""

    block_kv: int = 64  # positions per tile
    stages: int = 3  # tiles of K, and as many of V, in the ring
    splits: int | None = None  # shares of the sequence; None: as many as keep every SM busy

    def __post_init__(self):
        if self.block_kv <= 0 or self.block_kv % 64:
            raise ValueError(f"{self.block_kv=} must be a positive multiple of 64")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2, or loads and products cannot overlap")
        if self.splits is not None and self.splits < 1:
            raise ValueError(f"{self.splits=} must be at least 1")
        if 2 * self.stages * self.block_kv * 64 > _MAX_SHARED_BYTES:
            raise ValueError(f"{self.stages=} of {self.block_kv=} do not fit {_MAX_SHARED_BYTES} bytes of shared memory at any head dim")


def fit(tuning: Tuning, head_dim: int, rows: int, itemsize: int) -> Tuning:
    """`tuning` with what many queries cost: registers for the scores (no long tiles) and shared memory (fewer stages)."""
    columns, eight_bit = pl.cdiv(rows, 8) * 8, itemsize == 1
    block_kv = tuning.block_kv if columns <= 16 else 64
    fixed = columns * (4 * head_dim + 2 * block_kv + 128) + eight_bit * 2 * block_kv * head_dim + 1024  # the last for barriers
    stage = 2 * block_kv * (head_dim * itemsize + 4 * eight_bit)
    return dataclasses.replace(tuning, block_kv=block_kv, stages=min(tuning.stages, (_MAX_SHARED_BYTES - fixed) // stage))


def choose_splits(items: int, tiles: int, resident: int) -> int:
    """The split count whose busiest SM is done first; with fewer than `resident` blocks an SM cannot keep up with the memory."""
    cost = {j: max(pl.cdiv(items * j, _SMS), resident) * pl.cdiv(tiles, j) + (j > 1) * _COMBINE_TILES for j in range(1, tiles + 1)}
    return min(cost, key=cost.__getitem__)
