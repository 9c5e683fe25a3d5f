"""Preparation of a packed dataset from a source: read, tokenise and pack once, and use the result
in every run with the same data and tokenizer."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Makes packed rows of `length` tokens from a source. With several processes all of them call
    its methods, and folders are ones that they share: process 0 builds."""

    source: DataSource
    tokenizer: Any
    length: int
    held_out: bool = False
    max_unreadable_share: float = MAX_UNREADABLE_SHARE

    def prepare(self, cache: Path) -> PackedDataset:
        """The source itself if it is a packed dataset, else one in the folder `cache`, built if it
        is not there.

        A dataset in the cache is used again while the source's files (path, size, time of change),
        the tokenizer and the length are the same. Raises `DataError`, or `UsageError` if the source
        does not exist.
        """
        tokenizer_id = tokenizer_fingerprint(self.tokenizer)
        given = Path(self.source.path)
        if is_packed_dataset(given):
            return check_dataset(PackedDataset(given), self.length, tokenizer_id)

        def look_up() -> np.ndarray:
            key = _key(self._files(), tokenizer_id, self.length)
            found = is_packed_dataset(cache / _folder(self.source, key))
            return np.array([*np.frombuffer(key, np.uint32), found], np.uint32)

        *words, found = run_on_process_0(look_up, np.zeros(5, np.uint32))
        path = cache / _folder(self.source, np.array(words, np.uint32).tobytes())
        if not found:
            return self.build(path)
        dataset = check_dataset(PackedDataset(path), self.length, tokenizer_id)
        manifest = dataset.manifest
        first = (path / UNREADABLE).read_text(encoding="utf-8").partition("\n")[0]
        read = manifest.documents + manifest.unreadable
        self._check_unreadable(manifest.unreadable, read, first)  # the limit may be another now
        logger.info("%s%s; prepared before", "held-out " * self.held_out, describe_dataset(dataset))
        return dataset

    def build(self, path: Path) -> PackedDataset:
        """A new packed dataset at `path`, which appears complete or not at all. Raises `DataError`,
        or `UsageError` if `path` exists or the source does not."""
        with new_directory(path) as partial:
            run_on_process_0(lambda: write_manifest(partial, self._write(partial)), None)
        dataset = PackedDataset(path)
        logger.info("%s%s", "held-out " * self.held_out, describe_dataset(dataset))
        return dataset

    def _files(self) -> list[Path]:
        return find_files(self.source, held_out=self.held_out)

    def _write(self, folder: Path) -> Manifest:
        """All of a dataset but its manifest, which is returned."""
        files = self._files()
        # Before reading: a file that changes meanwhile must not pass for what was read.
        described = _describe_files(files)
        rows = itertools.chain.from_iterable(map(read_file, files))
        examples = tqdm(
            tokenize(rows, self.tokenizer),
            desc=f"preparing {self.source.name}",
            unit=" rows",
            leave=False,
            disable=None,
        )
        with (folder / UNREADABLE).open("w", encoding="utf-8", errors="backslashreplace") as report:
            counts = _Counts()
            readable = self._readable(examples, counts, report)
            totals = write_rows(folder / ROWS, pack(readable, self.length), self.length)
        self._check_unreadable(counts.unreadable, counts.read, counts.first)
        if not totals.targets:
            raise DataError(
                f"{self.source.path}: it holds no token to predict: it is empty, or every row is "
                f"blank"
            )
        return Manifest(
            source=self.source.path,
            files=described,
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            length=self.length,
            documents=counts.read - counts.unreadable,
            unreadable=counts.unreadable,
            fill=totals.tokens / (totals.rows * self.length),
            tokenization=VERSION,
            **dataclasses.asdict(totals),
        )

    def _readable(
        self, rows: Iterable[Example | Unreadable], counts: _Counts, report: TextIO
    ) -> Iterator[Example]:
        """The examples among the rows; the others are counted and reported. Raises `DataError` when
        they are too many."""
        for row in rows:
            counts.read += 1
            if isinstance(row, Example):
                yield row
                continue
            counts.unreadable += 1
            line = f"{row.origin}: {row.reason}".replace("\n", " ")
            counts.first = counts.first or line
            report.write(line + "\n")
            if counts.unreadable <= _REPORTED_AT_ONCE:
                logger.warning("left out: %s", line)
            if counts.unreadable > self.max_unreadable_share * max(counts.read, _ROWS_BEFORE_STOP):
                self._check_unreadable(counts.unreadable, counts.read, counts.first)

    def _check_unreadable(self, unreadable: int, read: int, first: str) -> None:
        """Raise `DataError` if more than the allowed share of the rows read are unreadable."""
        if unreadable > self.max_unreadable_share * read:
            raise DataError(
                f"{self.source.path}: {unreadable:,} of {read:,} rows cannot be read "
                f"({unreadable / read:.2%}); `max_unreadable_share`={self.max_unreadable_share:g} "
                f"allows fewer; the first: {first}"
            )


@dataclasses.dataclass
class _Counts:
    """Rows read so far, and those of them that are unreadable."""

    read: int = 0
    unreadable: int = 0
    first: str = ""
    """The first of these, and why."""


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
