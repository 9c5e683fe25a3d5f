"""Batches from packed rows, through Grain. The whole data state is one integer: the index of the next batch."""

from __future__ import annotations

from collections.abc import Iterator

import grain

from ..model import Batch
from .packing import PackedRows


def batches(rows: PackedRows, batch_size: int, *, seed: int, start: int = 0, stop: int) -> Iterator[Batch]:
    """Batches `start` to `stop - 1` of the endless shuffled repetition of `rows`; every epoch has its own order.

    Batch i is a function of (rows, batch_size, seed, i) alone, so a resumed run sees what the uninterrupted one would.
    """
    dataset = grain.MapDataset.source(rows).seed(seed).shuffle().repeat().batch(batch_size, drop_remainder=True)  # pyright: ignore
    iterator = iter(dataset[start:stop].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
    for _ in range(start, stop):
        yield Batch(**next(iterator))


def batches_once(rows: PackedRows, batch_size: int) -> Iterator[Batch]:
    """Every row once, in order; the last batch is filled up with empty rows that carry no weight."""
    for start in range(0, len(rows), batch_size):
        block = PackedRows(**rows[slice(start, start + batch_size)])  # pyright: ignore
        yield Batch(**block.padded(batch_size)[slice(None)])  # pyright: ignore
