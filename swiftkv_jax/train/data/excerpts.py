"""The beginnings of documents, as packed rows: a varied sample of large data, read in order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import DataError, UsageError
from .dataset import PackedDataset, is_packed_dataset
from .documents import Unreadable
from .packing import PackedRow, pack
from .prepare import check_dataset, tokenizer_fingerprint
from .sources import STDLIB, find_files, parse_source, read_file
from .tokenize import Example, tokenize


class Excerpts(NamedTuple):
    """Rows of two purposes; no token is in both."""

    measured: list[PackedRow]
    calibration: list[PackedRow]


def read_excerpts(
    texts: tuple[str, ...], tokenizer: Any, length: int, rows: int, calibration_tokens: int
) -> Excerpts:
    """About `rows` packed rows of `length` to measure on, and others of `calibration_tokens` or
    fewer, as far as the text goes; unreadable documents are left out.

    The first documents of every source in turn are measured, the following ones are for
    calibration, each with `length` tokens at most, so that the text is varied. Where they are too
    few, what follows in them is for calibration too, and then what follows in those that are
    measured. Raises `DataError` if there is nothing to predict, `UsageError` without a tokenizer.
    """
    if tokenizer is None:
        raise UsageError("`model`: it has no tokenizer, so text cannot be read")
    sources = [_examples(text, tokenizer) for text in texts]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*sources))
    measured = []
    calibration = []
    rest: dict[bool, list[Example]] = {False: [], True: []}  # True: of documents that are measured
    missing = rows * length
    wanted = calibration_tokens
    for example in in_turn:
        if not isinstance(example, Example):
            continue
        first = _part(example, 0, length)
        following = _part(example, length, None)
        measures = missing > 0 and bool(first.is_target[1:].any())
        if measures:
            measured.append(first)
            missing -= len(first.tokens)
        elif wanted > 0:
            calibration.append(_part(first, 0, wanted))
            wanted -= len(first.tokens)
        rest[measures].append(following)
        if missing <= 0 and wanted <= 0:
            break
    if not measured:
        raise DataError(f"`data`={' '.join(texts)}: no token to predict in it")
    for following in rest[False] + rest[True]:
        if wanted > 0 and len(following.tokens):
            calibration.append(_part(following, 0, wanted))
            wanted -= len(following.tokens)
    return Excerpts(list(pack(measured, length)), list(pack(calibration, length)))


def _part(example: Example, start: int, stop: int | None) -> Example:
    return dataclasses.replace(
        example, tokens=example.tokens[start:stop], is_target=example.is_target[start:stop]
    )


def _examples(text: str, tokenizer: Any) -> Iterator[Example | Unreadable]:
    """The tokenised documents of a source: those of a prepared dataset in the order of its rows."""
    source = parse_source(text)
    if is_packed_dataset(Path(source.path)):
        return _prepared(PackedDataset(Path(source.path)), tokenizer)
    files = find_files(source, held_out=source.path == STDLIB)
    return tokenize(itertools.chain.from_iterable(map(read_file, files)), tokenizer)


def _prepared(dataset: PackedDataset, tokenizer: Any) -> Iterator[Example]:
    check_dataset(dataset, dataset.manifest.length, tokenizer_fingerprint(tokenizer))
    for number in range(len(dataset)):
        row = dataset[number]
        for document in row.documents():
            tokens, is_target = row.tokens[document], row.is_target[document]
            yield Example(f"{dataset.name}#{number}", tokens, is_target)
