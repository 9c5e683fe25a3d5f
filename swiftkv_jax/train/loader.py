"""Batches from packed rows, through Grain. The whole data state is one integer: the index of the next batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from ..model import Batch
from .packing import PackedRows


def batches(rows: PackedRows, batch_size: int, *, seed: int, start: int = 0, stop: int) -> Iterator[Batch]:
    """Batches `start` to `stop - 1` of the endless shuffled repetition of `rows`; every epoch has its own order.

    Batch i is a function of (rows, batch_size, seed, i) alone, so a resumed run sees what the uninterrupted one would.
    """
    source: Any = rows
    dataset = grain.MapDataset.source(source).seed(seed).shuffle().repeat().batch(batch_size, drop_remainder=True)
    iterator = iter(dataset[start:stop].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
    for _ in range(start, stop):
        yield Batch(**next(iterator))


def first_batches(rows: PackedRows, batch_size: int, *, limit: int) -> Iterator[Batch]:
    """At most `limit` batches of `rows` in order, each row once; empty rows, which carry no weight, fill the last one."""
    for start in range(0, min(len(rows), limit * batch_size), batch_size):
        fields = rows[slice(start, start + batch_size)]
        missing = batch_size - len(fields["tokens"])
        yield Batch(**{name: np.pad(field, [(0, missing), (0, 0)]) for name, field in fields.items()})
