"""Held-out text in rows, each of one document, and the tokens that repeat a distant identifier.

The first tokens of every document count, up to a limit: without one, a single long file would be
most of the text.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import keyword
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from swiftkv_jax.model.batch import Batch

LENGTH, PROMPT = 512, 256
"""Tokens of a row, and how many of them are the prompt where a prompt is meant."""
DOCUMENT_TOKENS = 8 * LENGTH
"""Most tokens of a document."""
MIN_DISTANCE = 256
"""Tokens between the two occurrences of an identifier that is recalled."""
MIN_CHARACTERS = 4
"""Characters of such an identifier."""

_WORD = re.compile(r"[^\W\d]\w*")


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Rows of text; those that reach beyond `PROMPT` come first. Their number is a multiple of the
    batch size: rows of length 0 fill the last batch."""

    names: list[str]
    """One for each document."""
    tokens: np.ndarray
    """i32[R, T]"""
    lengths: np.ndarray
    """i32[R]"""
    document: np.ndarray
    """i32[R]: number of the row's document."""
    recalled: np.ndarray
    """bool[R, T]: True where the next token is one of a recalled identifier, its first excepted."""

    @property
    def predicted(self) -> np.ndarray:
        """bool[R, T]: True where the next token belongs to the row."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None] - 1

    @property
    def answers(self) -> np.ndarray:
        """bool[R, T]: those of `predicted` whose next token comes after the prompt."""
        return self.predicted & (np.arange(self.tokens.shape[1]) >= PROMPT - 1)

    @property
    def num_long_rows(self) -> int:
        """Rows with tokens after the prompt."""
        return int((self.lengths > PROMPT).sum())

    def batch(self, rows: slice) -> Batch:
        at = np.arange(self.tokens.shape[1], dtype=np.int32)
        real = at < self.lengths[rows, None]
        return Batch(
            tokens=self.tokens[rows],
            positions=np.where(real, at, 0),
            segment_ids=real.astype(np.int32),
            loss_mask=self.predicted[rows].astype(np.float32),
        )

    def per_document(self, values: np.ndarray, mask: np.ndarray) -> list[float]:
        """Sums of f[R, T] over the positions of a mask."""
        sums = np.where(mask, values, 0).sum(1, dtype=np.float64)
        return np.bincount(self.document, sums, len(self.names)).tolist()


def held_out_rows(
    texts: Iterable[tuple[str, str]],
    tokenizer: Any,
    *,
    batch_size: int,
    limit: int | None = None,
    document_tokens: int = DOCUMENT_TOKENS,
) -> HeldOut:
    """Rows of `LENGTH` tokens, the last of a document shorter; at most `limit` of them, one of
    each document before the next of any."""
    names, rows = [], list[_Row]()
    for name, text in texts:
        ids, offsets = encode(text, tokenizer)
        words = list(find_words(text, offsets))
        kept = min(len(ids), document_tokens)
        for number, at in enumerate(range(0, kept, LENGTH)):
            part = ids[at : min(at + LENGTH, kept)]
            if len(part) > 1:
                recalled = recalled_tokens(words, at, at + len(part))
                rows.append(_Row(number, len(names), part, recalled - at - 1))
        names.append(name)
    if limit is not None:
        rows = sorted(rows, key=lambda row: row.number)[:limit]
    rows.sort(key=lambda row: len(row.tokens) <= PROMPT)
    count = -(-len(rows) // batch_size) * batch_size
    result = HeldOut(
        names,
        np.zeros((count, LENGTH), np.int32),
        np.zeros(count, np.int32),
        np.zeros(count, np.int32),
        np.zeros((count, LENGTH), bool),
    )
    for number, row in enumerate(rows):
        result.tokens[number, : len(row.tokens)] = row.tokens
        result.lengths[number], result.document[number] = len(row.tokens), row.document
        result.recalled[number, row.recalled] = True
    return result


class _Row(NamedTuple):
    number: int
    document: int
    tokens: Sequence[int]
    recalled: np.ndarray


def encode(text: str, tokenizer: Any) -> tuple[list[int], np.ndarray]:
    """Tokens of a document, with an end token as in training, and i64[n, 2]: their (start, stop)
    characters."""
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    end = [(len(text), len(text))]
    offsets = np.array([*encoded["offset_mapping"], *end], np.int64)
    return [*encoded["input_ids"], tokenizer.eos_token_id], offsets


class Word(NamedTuple):
    text: str
    first: int
    """Token that holds its first character."""
    last: int
    """Token that holds its last character."""
    is_identifier: bool
    """Whether it is a name in the code; False for keywords and in comments and strings."""


def find_words(text: str, offsets: np.ndarray) -> Iterator[Word]:
    """All words of Python source, in order."""
    identifiers = _identifiers(text)
    matches = list(_WORD.finditer(text))
    stops = offsets[:, 1]
    firsts = np.searchsorted(stops, [match.start() for match in matches], side="right")
    lasts = np.searchsorted(stops, [match.end() - 1 for match in matches], side="right")
    for match, first, last in zip(matches, firsts.tolist(), lasts.tolist(), strict=True):
        yield Word(match[0], first, last, match.start() in identifiers)


def _identifiers(text: str) -> set[int]:
    """First characters of the names in Python source."""
    lines = io.StringIO(text, newline="").readlines()
    starts = [0, *itertools.accumulate(map(len, lines))]
    tokens = tokenize.generate_tokens(iter([*lines, ""]).__next__)
    return {
        starts[token.start[0] - 1] + token.start[1]
        for token in tokens
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string)
    }


def recalled_tokens(words: Sequence[Word], start: int, stop: int) -> np.ndarray:
    """The recalled tokens among tokens `start` to `stop - 1`, which is all that the model sees.

    An identifier is recalled where it occurred once before, `MIN_DISTANCE` tokens back or more;
    occurrences in comments and strings count as such. Its first token is not a recalled one: it
    does not follow from the other occurrence.
    """
    earlier, found = dict[str, list[int]](), list[int]()
    for word in words:
        if word.first < start or word.last >= stop:
            continue
        before = earlier.setdefault(word.text, [])
        if (
            word.is_identifier
            and len(word.text) >= MIN_CHARACTERS
            and len(before) == 1
            and word.first - before[0] >= MIN_DISTANCE
        ):
            found += range(word.first + 1, word.last + 1)
        before.append(word.first)
    return np.array(found, np.int64)
