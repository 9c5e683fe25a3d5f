"""Preparation of a packed dataset from a source: read, tokenise and pack once, and use the result
in every run with the same data and tokenizer."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from ...errors import DataError
from ...process.distributed import run_on_process_0
from ...process.files import new_directory
from .dataset import (
    ROWS,
    UNREADABLE,
    Manifest,
    PackedDataset,
    is_packed_dataset,
    write_manifest,
    write_rows,
)
from .documents import Unreadable
from .packing import pack
from .sources import DataSource, find_files, read_file
from .tokenize import VERSION, Example, tokenize

logger = logging.getLogger(__name__)

MAX_UNREADABLE_SHARE = 0.01
_REPORTED_AT_ONCE = 10
_ROWS_BEFORE_STOP = 1000


def prepare(
    source: DataSource,
    tokenizer: Any,
    length: int,
    cache: Path,
    *,
    held_out: bool = False,
    max_unreadable_share: float = MAX_UNREADABLE_SHARE,
) -> PackedDataset:
    """The source as packed rows of `length` tokens: itself if it is a packed dataset, else one in
    the folder `cache`, built if it is not there.

    A dataset in the cache is used again while the source's files (path, size, time of change), the
    tokenizer and the length are the same. With several processes all of them call this, and `cache`
    is a folder they share: process 0 builds. Raises `DataError`, or `UsageError` if the source does
    not exist.
    """
    tokenizer_id = tokenizer_fingerprint(tokenizer)
    if is_packed_dataset(Path(source.path)):
        return check_dataset(PackedDataset(Path(source.path)), length, tokenizer_id)

    def look_up() -> np.ndarray:
        key = _key(find_files(source, held_out=held_out), tokenizer_id, length)
        return np.array(
            [*np.frombuffer(key, np.uint32), is_packed_dataset(cache / _folder(source, key))],
            np.uint32,
        )

    *words, found = run_on_process_0(look_up, np.zeros(5, np.uint32))
    path = cache / _folder(source, np.array(words, np.uint32).tobytes())
    if not found:
        return build(
            source,
            tokenizer,
            length,
            path,
            held_out=held_out,
            max_unreadable_share=max_unreadable_share,
        )
    dataset = check_dataset(PackedDataset(path), length, tokenizer_id)
    _check_share(source, dataset, max_unreadable_share)
    logger.info("%s%s; prepared before", "held-out " * held_out, describe_dataset(dataset))
    return dataset


def build(
    source: DataSource,
    tokenizer: Any,
    length: int,
    path: Path,
    *,
    held_out: bool = False,
    max_unreadable_share: float = MAX_UNREADABLE_SHARE,
) -> PackedDataset:
    """Prepare `source` as a new packed dataset at `path`, which appears complete or not at all.
    Arguments as for `prepare`.

    Raises `DataError`, or `UsageError` if `path` exists or the source does not.
    """
    with new_directory(path) as partial:

        def write() -> None:
            files = find_files(source, held_out=held_out)
            write_manifest(
                partial, _write(partial, source, files, tokenizer, length, max_unreadable_share)
            )

        run_on_process_0(write, None)
    dataset = PackedDataset(path)
    logger.info("%s%s", "held-out " * held_out, describe_dataset(dataset))
    return dataset


def check_dataset(dataset: PackedDataset, length: int, tokenizer_id: str) -> PackedDataset:
    """The dataset, if it fits the run. Raises `DataError`."""
    manifest = dataset.manifest
    if manifest.length != length:
        raise DataError(
            f"{dataset.path}: prepared with `max_length`={manifest.length}, but the run has "
            f"`max_length`={length}"
        )
    if manifest.tokenizer != tokenizer_id:
        raise DataError(
            f"{dataset.path}: prepared with another tokenizer or chat template than this model's; "
            f"prepare the data again"
        )
    if manifest.tokenization != VERSION:
        logger.warning(
            "%s: prepared with another version of swiftkv-jax, whose tokens and targets differ "
            "from this one's; prepare the data again to have these",
            dataset.path,
        )
    return dataset


def describe_dataset(dataset: PackedDataset) -> str:
    """One line about a packed dataset."""
    found = dataset.manifest
    line = (
        f"{dataset.name}: {found.tokens:,} tokens ({found.targets:,} to predict) of "
        f"{found.documents:,} documents "
        f"in {found.rows:,} rows of {found.length:,}, {found.fill:.1%} full"
    )
    return line + (
        f"; {found.unreadable:,} unreadable, listed in {dataset.path / UNREADABLE}"
        if found.unreadable
        else ""
    )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of all that decides which tokens a document becomes.

    A file may ask for truncation or padding. Documents are encoded without, which switches them off
    in the tokenizer; here it is done first, so that the hash is the same before and after.
    """
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _key(files: list[Path], tokenizer_id: str, length: int) -> bytes:
    """16 bytes that name the dataset of these files in a cache."""
    return hashlib.sha256(
        json.dumps([_describe_files(files), tokenizer_id, length, VERSION]).encode()
    ).digest()[:16]


def _folder(source: DataSource, key: bytes) -> str:
    return f"{re.sub(r'[*?[\]]', '_', source.name)}-{key.hex()}"


def _describe_files(files: list[Path]) -> list[dict[str, Any]]:
    found = [(file, file.stat()) for file in files]
    return [
        {"path": str(file.absolute()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        for file, stat in found
    ]


def _write(
    folder: Path,
    source: DataSource,
    files: list[Path],
    tokenizer: Any,
    length: int,
    max_share: float,
) -> Manifest:
    """All of a dataset but its manifest, which is returned."""
    # Before reading: a file that changes meanwhile must not pass for what was read.
    described = _describe_files(files)
    rows = itertools.chain.from_iterable(map(read_file, files))
    examples = tqdm(
        tokenize(rows, tokenizer),
        desc=f"preparing {source.name}",
        unit=" rows",
        leave=False,
        disable=None,
    )
    with (folder / UNREADABLE).open("w", encoding="utf-8", errors="backslashreplace") as report:
        filtered = _ReadableRows(source, max_share, report)
        totals = write_rows(folder / ROWS, pack(filtered.readable(examples), length), length)
    filtered.check()
    if not totals.targets:
        raise DataError(
            f"{source.path}: it holds no token to predict: it is empty, or every row is blank"
        )
    return Manifest(
        source=source.path,
        files=described,
        tokenizer=tokenizer_fingerprint(tokenizer),
        length=length,
        rows=totals.rows,
        documents=filtered.read - filtered.unreadable,
        unreadable=filtered.unreadable,
        tokens=totals.tokens,
        targets=totals.targets,
        fill=totals.tokens / (totals.rows * length),
        fingerprint=totals.fingerprint,
        tokenization=VERSION,
    )


class _ReadableRows:
    """Filter that counts and reports unreadable rows, and raises `DataError` when they are too
    many."""

    def __init__(self, source: DataSource, max_share: float, report: TextIO):
        self._source = source
        self._max_share = max_share
        self._report = report
        self._first = ""
        self.read = self.unreadable = 0

    def readable(self, rows: Iterable[Example | Unreadable]) -> Iterator[Example]:
        for row in rows:
            self.read += 1
            if isinstance(row, Unreadable):
                self._note(f"{row.origin}: {row.reason}".replace("\n", " "))
            else:
                yield row
            if self.unreadable > self._max_share * max(self.read, _ROWS_BEFORE_STOP):
                self.check()

    def check(self) -> None:
        """Raise `DataError` if more than the allowed share of the rows so far are unreadable."""
        _check_unreadable(self._source, self.unreadable, self.read, self._max_share, self._first)

    def _note(self, line: str) -> None:
        self.unreadable += 1
        self._first = self._first or line
        self._report.write(line + "\n")
        if self.unreadable <= _REPORTED_AT_ONCE:
            logger.warning("left out: %s", line)


def _check_unreadable(
    source: DataSource, unreadable: int, read: int, max_share: float, first: str
) -> None:
    """Raise `DataError` if more than `max_share` of the rows read are unreadable."""
    if unreadable > max_share * read:
        raise DataError(
            f"{source.path}: {unreadable:,} of {read:,} rows cannot be read "
            f"({unreadable / read:.2%}); "
            f"`max_unreadable_share`={max_share:g} allows fewer; the first: {first}"
        )


def _check_share(source: DataSource, dataset: PackedDataset, max_share: float) -> None:
    """The same check on a dataset that an earlier run built, perhaps with a wider limit."""
    found = dataset.manifest
    first = (dataset.path / UNREADABLE).read_text(encoding="utf-8").partition("\n")[0]
    _check_unreadable(
        source, found.unreadable, found.documents + found.unreadable, max_share, first
    )
