"""Batches of packed rows from texts or tokens in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import UsageError
from ...model.batch import Batch
from .documents import Document
from .packing import EMPTY_ROW, PackedRow, pack
from .tokenize import Example, tokenize


def calibration_batches(
    data: Any, tokenizer: Any, vocab_size: int, length: int, size: int, *, dp_size: int = 1
) -> Iterator[Batch]:
    """Texts or rows of token ids as batches of `size` rows of `length` tokens. Rows of padding fill
    the last one, and every one up to a multiple of `dp_size`.

    Raises `UsageError` if `data` are neither, for ids outside the vocabulary, for texts without a
    tokenizer, if there is nothing in them and for a `length` or `size` below 1.
    """
    for name, value in (("max_length", length), ("batch_size", size)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise UsageError(f"`{name}`={value!r} must be a whole number from 1")
    if isinstance(data, str):
        raise UsageError("`data` must be several texts, or rows of token ids; got one text")
    rows = list(data)
    if rows and all(isinstance(row, str) for row in rows):
        examples = _texts(rows, tokenizer)
    else:
        examples = [_tokens(i, row, vocab_size) for i, row in enumerate(rows)]
    packed = list(pack((example for example in examples if len(example.tokens)), length))
    if not packed:
        raise UsageError("`data`: there is no token in them")
    return iter(batches_of(packed, size, length, dp_size=dp_size))


def _texts(texts: list[str], tokenizer: Any) -> list[Example]:
    if tokenizer is None:
        raise UsageError("`data`: texts need a model with a tokenizer; give rows of token ids")
    documents = (Document(f"text {i}", text=text) for i, text in enumerate(texts) if text)
    return [found for found in tokenize(documents, tokenizer) if isinstance(found, Example)]


def _tokens(index: int, row: Any, vocab_size: int) -> Example:
    try:
        tokens = np.asarray(row)
    except ValueError:
        tokens = np.asarray(None)
    if tokens.ndim != 1 or not (tokens.size == 0 or np.issubdtype(tokens.dtype, np.integer)):
        raise UsageError(f"`data`: row {index} is neither a text nor a list of token ids")
    if outside := tokens[(tokens < 0) | (tokens >= vocab_size)].tolist():
        raise UsageError(
            f"`data`: token id {outside[0]} in row {index} is outside the vocabulary of "
            f"{vocab_size}"
        )
    return Example(f"row {index}", tokens.astype(np.int32), np.ones(len(tokens), bool))


def batches_of(rows: list[PackedRow], size: int, length: int, *, dp_size: int = 1) -> list[Batch]:
    """Batches of `size` rows. Rows of padding fill the last one, and every one up to a multiple of
    `dp_size`."""
    batches = []
    padded = -(-size // dp_size) * dp_size
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        fields = [row.fields(length) for row in chosen + [EMPTY_ROW] * (padded - len(chosen))]
        batches.append(
            Batch(**{name: np.stack([row[name] for row in fields]) for name in fields[0]})
        )
    return batches
