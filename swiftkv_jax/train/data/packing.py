"""Best-fit packing: documents of any length into rows of one length, each document in its own
segment."""

from __future__ import annotations

import bisect
import dataclasses
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from ..loss.objective import LossMask, Padding
from .tokenize import Example

WINDOW_TOKENS = 2**24


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """One row without its padding."""

    tokens: np.ndarray
    """i32[n], the documents one after another."""
    is_target: np.ndarray
    """bool[n]; True where the token is to be predicted."""
    lengths: np.ndarray
    """i32[documents], adding up to n."""

    def documents(self) -> Iterator[slice]:
        """The place of each document among the tokens."""
        stops = np.cumsum(self.lengths)
        return map(slice, stops - self.lengths, stops)

    def predicting(self) -> np.ndarray:
        """bool[n]: True where the next token belongs to the same document and is a target."""
        mask = np.append(self.is_target[1:], False)
        mask[np.cumsum(self.lengths) - 1] = False
        return mask

    def own(self, tail: int) -> tuple[np.ndarray, np.ndarray]:
        """(bool[n]: tokens that keep upper keys and values of their own; bool[n]: positions whose
        predictions a served model makes.)

        The targets are generated, and the `tail` tokens before each answer run through all layers
        too (`Config.exact_tail`). A document that is all targets, plain text, is cut at a place
        drawn from its tokens: what follows is generated.
        """
        own = self.is_target.copy()
        served = np.ones(len(self.tokens), bool)
        for document in self.documents():
            start, stop = document.start, document.stop
            if stop - start > 1 and self.is_target[start + 1 : stop].all():
                seed = zlib.crc32(np.ascontiguousarray(self.tokens[document]).tobytes())
                cut = start + int(np.random.default_rng(seed).integers(1, stop - start))
                own[start:stop] = np.arange(start, stop) >= cut
                served[start : cut - 1] = False
            starts = np.flatnonzero(own[start:stop] & ~np.append(False, own[start : stop - 1]))
            for answer in start + starts:
                own[max(start, answer - tail) : answer] = True
        return own, served

    def fields(
        self,
        length: int,
        loss_mask: LossMask = "shifted",
        padding: Padding = "separate",
        own_tail: int | None = None,
    ) -> dict[str, np.ndarray]:
        """The fields of `batch.Batch` for this row, each [length].

        row      a a a b b .        two documents and one position left over
        segment  1 1 1 2 2 0
        position 0 1 2 0 1 0
        mask     1 1 0 1 0 0        shifted: the last token of a document predicts nothing

        With `own_tail`, an `exact_tail`, also `own`, and only predictions that a served model
        makes count: see `own`.
        """
        starts = np.cumsum(self.lengths) - self.lengths
        mask = self.predicting() if loss_mask == "shifted" else self.is_target
        found = {
            "tokens": self.tokens,
            "positions": np.arange(len(self.tokens), dtype=np.int32)
            - np.repeat(starts, self.lengths).astype(np.int32),
            "segment_ids": np.repeat(
                np.arange(1, len(self.lengths) + 1, dtype=np.int32), self.lengths
            ),
            "loss_mask": mask.astype(np.float32),
        }
        if own_tail is not None:
            found["own"], served = self.own(own_tail)
            found["loss_mask"] = found["loss_mask"] * served
        padded = {name: np.pad(field, (0, length - len(field))) for name, field in found.items()}
        missing = length - len(self.tokens)
        if padding == "joined" and missing and len(self.lengths):
            padded["segment_ids"][-missing:] = len(self.lengths)
            padded["positions"][-missing:] = self.lengths[-1] + np.arange(missing)
        return padded


EMPTY_ROW = PackedRow(np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.int32))
"""A row of padding."""


def pack(
    examples: Iterable[Example], length: int, window_tokens: int = WINDOW_TOKENS
) -> Iterator[PackedRow]:
    """Cut examples into segments of at most `length`, and put each into the fullest row that still
    has room.

    Positions of a segment start from 0. Rows are formed within windows of about
    `window_tokens` tokens, so memory is bounded. Deterministic in the order of `examples`.
    """
    window = []
    size = 0
    for example in examples:
        window += [
            (example.tokens[at : at + length], example.is_target[at : at + length])
            for at in range(0, len(example.tokens), length)
        ]
        size += len(example.tokens)
        if size >= window_tokens:
            yield from _best_fit(window, length)
            window = []
            size = 0
    yield from _best_fit(window, length)


def _best_fit(segments: list[tuple[np.ndarray, np.ndarray]], length: int) -> Iterator[PackedRow]:
    rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
    space: list[tuple[int, int]] = []  # (free positions, row), sorted, rows with room only
    for segment in segments:
        size = len(segment[0])
        at = bisect.bisect_left(space, (size, -1))
        free, row = space.pop(at) if at < len(space) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(segment)
        if free > size:
            bisect.insort(space, (free - size, row))
    for row in rows:
        tokens, is_target = zip(*row, strict=True)
        yield PackedRow(
            np.concatenate(tokens),
            np.concatenate(is_target),
            np.array([len(part) for part in tokens], np.int32),
        )
