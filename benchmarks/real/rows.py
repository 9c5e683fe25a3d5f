"""Rows of tokens, and which of their predictions are scored: the second half of held-out text, or
the answers to questions about a document."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.batch import Batch

from . import corpus
from .documents import Quiz

LENGTH = 512
PROMPT = 256
"""Tokens of a row of text, and how many of them are the prompt."""
UNSCORED = -1


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one length."""

    tokens: np.ndarray
    """i32[R, T]"""
    lengths: np.ndarray
    """i32[R]"""
    prompts: np.ndarray
    """i32[R]: tokens of the prompt; those after it may keep their own keys and values."""
    item: np.ndarray
    """i32[R, T]: number of the item that the prediction made here belongs to, or `UNSCORED`. An
    item is a row of text, or a question."""

    def batches(self, tokens: int) -> Iterator[tuple[slice, Batch]]:
        """(rows, batch) of about `tokens` tokens each; rows of padding fill the last."""
        rows, length = self.tokens.shape
        size = min(rows, max(1, tokens // length))
        for start in range(0, rows, size):
            chosen = slice(start, min(start + size, rows))
            yield chosen, self._batch(chosen, size)

    def _batch(self, rows: slice, size: int) -> Batch:
        tokens = self.tokens[rows]
        lengths = self.lengths[rows]
        missing = ((0, size - len(tokens)), (0, 0))
        at = np.arange(tokens.shape[1], dtype=np.int32)
        real = np.pad(at < lengths[:, None], missing)
        return Batch(
            tokens=np.pad(tokens, missing),
            positions=np.where(real, at, 0).astype(np.int32),
            segment_ids=real.astype(np.int32),
            loss_mask=real.astype(np.float32),
        )

    @property
    def scored(self) -> np.ndarray:
        """bool[R, T]"""
        return self.item != UNSCORED

    @property
    def items(self) -> np.ndarray:
        """i32[N]: those of the scored predictions, in order."""
        return self.item[self.scored]


def text_rows(documents: Iterable[corpus.Document], tokenizer: Any, count: int) -> Rows:
    """The first `LENGTH` tokens of the first `count` documents that are so long; what comes after
    `PROMPT` is scored. Raises `UsageError` if there are fewer."""
    rows = list[list[int]]()
    for _, _, text in documents:
        ids, _ = encode(text[: 16 * LENGTH], tokenizer)
        if len(ids) > LENGTH:
            rows.append(ids[:LENGTH])
        if len(rows) == count:
            break
    else:
        raise UsageError(f"`rows`={count}: only {len(rows)} held-out documents are long enough")
    item = np.full((count, LENGTH), UNSCORED, np.int32)
    item[:, PROMPT - 1 : LENGTH - 1] = np.arange(count)[:, None]
    lengths = np.full(count, LENGTH, np.int32)
    return Rows(np.array(rows, np.int32), lengths, np.full(count, PROMPT, np.int32), item)


def quiz_rows(quizzes: Sequence[Quiz], tokenizer: Any, length: int) -> Rows:
    """Each quiz in a row of `length` tokens: its document is the prompt, its answers are scored.
    Raises `UsageError` if one does not fit."""
    tokens = np.zeros((len(quizzes), length), np.int32)
    lengths, prompts = (np.zeros(len(quizzes), np.int32) for _ in range(2))
    item = np.full((len(quizzes), length), UNSCORED, np.int32)
    count = 0
    for row, quiz in enumerate(quizzes):
        ids, offsets = encode(quiz.text, tokenizer)
        ids, offsets = ids[:-1], offsets[:-1]  # the end token
        if len(ids) > length:
            raise UsageError(f"a document of {len(ids)} tokens is longer than {length}")
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        prompts[row] = np.searchsorted(offsets[:, 1], quiz.document, side="right")
        for start, stop in quiz.answers:
            first, last = np.searchsorted(offsets[:, 1], [start, stop - 1], side="right")
            item[row, first - 1 : last] = count
            count += 1
    return Rows(tokens, lengths, prompts, item)


def encode(text: str, tokenizer: Any) -> tuple[list[int], np.ndarray]:
    """Tokens of a document, with an end token as in training, and i64[n, 2]: their (start, stop)
    characters."""
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    end = [(len(text), len(text))]
    offsets = np.array([*encoded["offset_mapping"], *end], np.int64)
    return [*encoded["input_ids"], tokenizer.eos_token_id], offsets
