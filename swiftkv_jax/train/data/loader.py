"""Batches from packed datasets, through Grain.

Batch i of the endless mixture is a function of the datasets, their weights, the batch size, the
seed and i. Neither the number of processes nor threads nor a restart changes it, so the whole data
state of a run is one integer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import grain
import numpy as np

from ...errors import DataError
from ...model.batch import Batch
from .dataset import PackedDataset
from .packing import EMPTY_ROW, LossMask, PackedRow, Padding

_NamedRow = tuple[str, PackedRow]

_READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


class LocalBatch(NamedTuple):
    """The rows of a batch that one process reads."""

    batch: Batch
    """NumPy arrays, one row for each position asked for."""
    row_ids: list[str]
    """Origin of each row, such as `a.jsonl#1234`, for messages; empty for a row of padding."""


@dataclasses.dataclass(frozen=True)
class DatasetMixture:
    """Packed datasets of one row length, and the proportions in which their rows are drawn.

    Without weights all rows count alike: the proportions are the numbers of rows, and an epoch
    holds every row once. If there is one, None is 1: rows are drawn in proportion to the weights,
    and an epoch ends, to a row, when every dataset has been read once; those that are small for
    their weight have been repeated by then. Every pass over a dataset has its own order.
    """

    datasets: tuple[PackedDataset, ...]
    weights: tuple[float | None, ...]

    def __post_init__(self):
        if len({data.manifest.length for data in self.datasets}) > 1:
            lengths = ", ".join(f"{data.path}: {data.manifest.length}" for data in self.datasets)
            raise DataError(
                f"prepared datasets of different `max_length` cannot be mixed ({lengths})"
            )

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self.datasets[0].manifest.length

    @functools.cached_property
    def proportions(self) -> tuple[int, ...]:
        """Whole numbers without a common divisor."""
        if set(self.weights) == {None}:
            parts = [len(data) for data in self.datasets]
        else:
            fractions = [
                Fraction(str(weight or 1)) for weight in self.weights
            ]  # 0.7 is meant, not the nearest float
            parts = [
                int(part * math.lcm(*(fraction.denominator for fraction in fractions)))
                for part in fractions
            ]
        return tuple(part // math.gcd(*parts) for part in parts)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        total = sum(self.proportions)
        return max(
            math.ceil(len(data) * total / part)
            for data, part in zip(self.datasets, self.proportions, strict=True)
        )

    @property
    def num_distinct_rows(self) -> int:
        """Rows of the shuffled mixture until one of them comes a second time."""
        total = sum(self.proportions)
        return min(
            len(data) * total // part
            for data, part in zip(self.datasets, self.proportions, strict=True)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all datasets, each counted once, without padding."""
        return sum(data.manifest.tokens for data in self.datasets)

    @property
    def fingerprint(self) -> str:
        """The same exactly if the batches are the same, up to batch size and seed."""
        parts = [
            (data.manifest.fingerprint, part)
            for data, part in zip(self.datasets, self.proportions, strict=True)
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def batches(
    mixture: DatasetMixture,
    batch_size: int,
    *,
    positions: Sequence[int],
    seed: int,
    start: int = 0,
    stop: int | None = None,
    rows: range | None = None,
    loss_mask: LossMask = "shifted",
    padding: Padding = "separate",
    own_tail: int | None = None,
) -> Generator[LocalBatch, None, None]:
    """Batches `start` to `stop - 1` of the endless shuffled mixture, or of those of its `rows`,
    whose last batch is filled with empty ones. One of `stop` and `rows` is given.

    `positions` are those of the batch's `batch_size` rows that this process needs; it reads no
    others. `own_tail` as in `PackedRow.fields`. Threads read ahead until the generator is closed.
    """
    shuffled = [_shuffled(data, seed, number) for number, data in enumerate(mixture.datasets)]

    def row(number: int) -> _NamedRow:
        if rows is not None:
            if number >= len(rows):
                return "", EMPTY_ROW
            number = rows[number]
        dataset, index = choose(number, mixture.proportions)
        return shuffled[dataset][index]

    def read(batch: int) -> list[_NamedRow]:
        return [row(batch * batch_size + at) for at in positions]

    stack = functools.partial(
        _stack,
        length=mixture.length,
        loss_mask=loss_mask,
        padding=padding,
        own_tail=own_tail,
    )
    if stop is None:
        assert rows is not None
        stop = math.ceil(len(rows) / batch_size)
    dataset = grain.MapDataset.range(start, stop).map(read).map(stack).to_iter_dataset(_READ)
    with contextlib.closing(iter(dataset)) as iterator:
        yield from iterator


class FirstRows(NamedTuple):
    """Rows from the start of the shuffled mixture, of which the last may count in part."""

    rows: int
    tokens: int
    """Tokens of them all that count."""
    last: int
    """Tokens of the last one that count, the first ones."""


def rows_with_tokens(mixture: DatasetMixture, seed: int, tokens: int) -> FirstRows:
    """The rows, of one epoch at most, that hold `tokens` tokens beside their padding."""
    shuffled = [_shuffled(data, seed, number) for number, data in enumerate(mixture.datasets)]
    total = size = count = 0
    while total < tokens and count < mixture.num_rows:
        dataset, index = choose(count, mixture.proportions)
        size = min(len(shuffled[dataset][index][1].tokens), tokens - total)
        total += size
        count += 1
    return FirstRows(count, total, size)


def first_batches(
    mixture: DatasetMixture,
    batch_size: int,
    *,
    positions: Sequence[int],
    limit: int,
    own_tail: int | None = None,
) -> Iterator[LocalBatch]:
    """Yield at most `limit` batches of all rows in order, each once; empty rows, which carry no
    weight, fill the last batch."""
    datasets = [_numbered(data) for data in mixture.datasets]
    starts = [0, *itertools.accumulate(map(len, datasets))]

    def row(index: int) -> _NamedRow:
        if index >= starts[-1]:
            return "", EMPTY_ROW
        number = next(i for i in range(len(datasets)) if index < starts[i + 1])
        return datasets[number][index - starts[number]]

    for batch in range(min(limit, math.ceil(starts[-1] / batch_size))):
        yield _stack(
            [row(batch * batch_size + at) for at in positions],
            length=mixture.length,
            loss_mask="shifted",
            padding="separate",
            own_tail=own_tail,
        )


def choose(index: int, proportions: Sequence[int]) -> tuple[int, int]:
    """Dataset of row `index` of a mixture, and the number of its rows before that one.

    The rows of the first dataset are spread evenly, those of the second evenly over what is left,
    and so on: at any point each dataset has had its share to within two rows. (Grain's own `mix`
    rounds the proportions to a hundredth of the least.)
    """
    total = sum(proportions)
    for dataset, part in enumerate(proportions):
        before = index * part // total
        after = (index + 1) * part // total
        if after > before:
            return dataset, before
        index -= before
        total -= part
    raise AssertionError("the last dataset takes all rows that are left")


def _numbered(data: PackedDataset) -> Any:
    """The rows as a Grain dataset of (row id, row)."""
    return grain.MapDataset.range(len(data)).map(lambda row: (f"{data.name}#{row}", data[row]))


def _shuffled(data: PackedDataset, seed: int, number: int) -> Any:
    """Endless passes over the rows, each in its own order; the datasets of a mixture are shuffled
    independently."""
    dataset_seed = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
    return _numbered(data).shuffle(seed=dataset_seed).repeat()


def _stack(
    rows: list[_NamedRow],
    *,
    length: int,
    loss_mask: LossMask,
    padding: Padding,
    own_tail: int | None,
) -> LocalBatch:
    fields = [row.fields(length, loss_mask, padding, own_tail) for _, row in rows]
    return LocalBatch(
        Batch(**{name: np.stack([field[name] for field in fields]) for name in fields[0]}),
        [name for name, _ in rows],
    )
