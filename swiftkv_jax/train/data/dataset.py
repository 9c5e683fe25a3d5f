"""Packed rows in a folder that is read in any order.

rows.arrayrecord   one record a row, each with a checksum: its number of documents, their lengths,
                   the tokens, a bit per target
manifest.json      what is in it and what it was made from; written last
unreadable.txt     rows of the source that were left out, and why
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...process.files import write_json
from .packing import PackedRow

ROWS = "rows.arrayrecord"
MANIFEST = "manifest.json"
UNREADABLE = "unreadable.txt"
_FORMAT = "swiftkv-jax packed rows"
_VERSION = 1
_INT = np.dtype("<i4")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`, besides format and version."""

    source: str
    files: list[dict[str, Any]]
    """path, size and mtime_ns of every file of the source."""
    tokenizer: str
    """Fingerprint of the tokenizer and its chat template."""
    length: int
    """Tokens in a full row."""
    rows: int
    documents: int
    unreadable: int
    tokens: int
    """Tokens without padding."""
    targets: int
    """Positions that predict a target."""
    fill: float
    """Share of the positions that hold a token."""
    fingerprint: str
    """Hash of the rows in order and their length; the same on every machine."""
    tokenization: int = 1
    """`tokenize.VERSION` when it was made. The first version did not record it."""


@dataclasses.dataclass(frozen=True)
class DatasetTotals:
    """Counts of what `write_rows` has written; the fields are those of `Manifest`."""

    rows: int
    tokens: int
    targets: int
    fingerprint: str


class PackedDataset:
    """Packed rows in a folder, by number. Safe to read from several threads; pickles as its path.

    Raises `DataError` if the folder is not a complete dataset of this version.
    """

    def __init__(self, path: Path):
        import grain

        self.path, self.manifest = path, _read_manifest(path)
        try:
            self._records: Any = grain.sources.ArrayRecordDataSource(
                str(path / ROWS), reader_options={"max_parallelism": "0"}
            )
        except RuntimeError as error:
            raise _damaged(path / ROWS, error) from None
        if len(self._records) != self.manifest.rows:
            raise _damaged(path / ROWS, f"{len(self._records)} rows of {self.manifest.rows}")

    def __reduce__(self):
        return PackedDataset, (self.path,)

    @property
    def name(self) -> str:
        """Last part of the source's path, for messages."""
        return Path(self.manifest.source).name

    def __len__(self) -> int:
        return self.manifest.rows

    def __getitem__(self, row: int) -> PackedRow:
        """Raises `DataError` if the row is damaged on disk."""
        try:
            return _decode(self._records[row])
        except RuntimeError as error:
            raise _damaged(self.path / ROWS, f"row {row}: {error}") from None


def is_packed_dataset(path: Path) -> bool:
    return (path / MANIFEST).is_file() and (path / ROWS).is_file()


def write_rows(file: Path, rows: Iterable[PackedRow], length: int) -> DatasetTotals:
    """Write all rows of a dataset. Raises `OSError` if that fails."""
    from array_record.python.array_record_module import ArrayRecordWriter

    content = hashlib.sha256(f"{_FORMAT} {length}".encode())
    count = tokens = targets = 0
    try:
        writer = ArrayRecordWriter(str(file), "group_size:1")  # reading one row unpacks no other
        for row in rows:
            record = _encode(row)
            writer.write(record)
            # A record begins with its size: no two sequences of rows have the same bytes.
            content.update(record)
            count += 1
            tokens += len(row.tokens)
            targets += int(row.predicting().sum())
        writer.close()
    except RuntimeError as error:
        raise OSError(f"{file}: cannot be written ({_first_line(error)})") from None
    return DatasetTotals(count, tokens, targets, content.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    fields = {"format": _FORMAT, "version": _VERSION} | dataclasses.asdict(manifest)
    write_json(folder / MANIFEST, fields)


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    if not file.is_file():
        raise DataError(f"{path}: not a prepared dataset: it has no {MANIFEST}")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        kind = fields.pop("format")
        version = fields.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            f"{file}: damaged, or not the manifest of a prepared dataset; remove the folder and "
            f"prepare the data again"
        ) from None
    if (kind, version) != (_FORMAT, _VERSION):
        raise DataError(
            f"{file}: {kind!r} version {version}, but this release reads version {_VERSION}; "
            f"prepare the data again"
        )
    try:
        return Manifest(**fields)
    except TypeError as error:
        raise _damaged(file, error) from None


def _encode(row: PackedRow) -> bytes:
    header = np.array([len(row.lengths), *row.lengths], _INT)
    return (
        header.tobytes() + row.tokens.astype(_INT).tobytes() + np.packbits(row.is_target).tobytes()
    )


def _decode(record: bytes) -> PackedRow:
    documents = int(np.frombuffer(record, _INT, 1)[0])
    lengths = np.frombuffer(record, _INT, documents, _INT.itemsize)
    count = int(lengths.sum())
    start = _INT.itemsize * (1 + documents)
    tokens = np.frombuffer(record, _INT, count, start)
    bits = np.frombuffer(record, np.uint8, offset=start + tokens.nbytes)
    return PackedRow(tokens, np.unpackbits(bits, count=count).astype(bool), lengths)


def _damaged(file: Path, reason: object) -> DataError:
    return DataError(
        f"{file}: damaged ({_first_line(reason)}); remove the folder and prepare the data again"
    )


def _first_line(reason: object) -> str:
    return str(reason).partition("\n")[0]
