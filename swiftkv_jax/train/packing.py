"""Best-fit packing: documents of any length into rows of one length, each document in its own segment."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

import numpy as np

from ..errors import DataError
from .sources import Example


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Every row of a dataset, ready to be indexed. Fields as in `model.Batch`, R rows of T tokens."""

    tokens: np.ndarray  # i32[R, T]
    positions: np.ndarray  # i32[R, T]
    segment_ids: np.ndarray  # i32[R, T]; 1, 2, ... within a row, 0 is padding
    loss_mask: np.ndarray  # f32[R, T]; 1 where the next token belongs to the same document and is a target

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int | slice) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name)[row] for field in dataclasses.fields(self)}

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segment_ids > 0).sum())


def pack(examples: Iterable[Example], length: int) -> PackedRows:
    """Cut examples into pieces of at most `length`, and put each piece into the fullest row that still has room.

    A piece is one segment with positions from 0. Deterministic in the order of `examples`. Raises `DataError` when
    there is nothing to predict anywhere.

        row      a a a b b .        two documents and one place left over
        segment  1 1 1 2 2 0
        position 0 1 2 0 1 0
        mask     1 1 0 1 0 0        the last token of a document predicts nothing
    """
    rows: list[list[Example]] = []
    space: list[tuple[int, int]] = []  # (free places, row), sorted, rows with room only
    for example in examples:
        for start in range(0, len(example.tokens), length):
            piece = Example(example.tokens[start : start + length], example.is_target[start : start + length])
            size = len(piece.tokens)
            at = bisect.bisect_left(space, (size, -1))
            free, row = space.pop(at) if at < len(space) else (length, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(piece)
            if free > size:
                bisect.insort(space, (free - size, row))

    shape = (len(rows), length)
    packed = PackedRows(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32))
    for r, pieces in enumerate(rows):
        start = 0
        for segment, piece in enumerate(pieces, start=1):
            stop = start + len(piece.tokens)
            packed.tokens[r, start:stop] = piece.tokens
            packed.positions[r, start:stop] = np.arange(stop - start)
            packed.segment_ids[r, start:stop] = segment
            packed.loss_mask[r, start : stop - 1] = piece.is_target[1:]
            start = stop
    if not packed.loss_mask.any():
        raise DataError("the data holds no token to predict: it is empty, or every document is one token long")
    return packed
