"""File formats: a function for each yields the documents of one file in order. None of them holds
the whole file in memory, those of text and of JSON aside."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ...errors import DataError, UsageError
from .documents import COLUMNS, FORMS, FURTHER_COLUMNS, Document, Unreadable, parse_json, parse_row

Documents = Iterator[Document | Unreadable]
"""The documents of one file in order, and the rows that are none."""

_TEXT_SUFFIXES = tuple(
    ".c .cc .cpp .cu .go .h .hpp .java .js .md .py .rs .rst .sh .toml .ts .txt .yaml .yml".split()
)
_JSON_SUFFIXES = (".json", ".json.gz")
_UNREAD_SUFFIXES = tuple(
    ".7z .arrow .avro .bz2 .csv .db .feather .gz .h5 .hdf5 .lance .ndjson .npy .npz .orc .pickle "
    ".pkl .sqlite .sqlite3 .tar .tfrecord .tgz .tsv .xls .xlsx .xz .zip .zst".split()
)
_BOM = codecs.BOM_UTF8
"""Some editors write it at the beginning of a file; it is no text."""
_RECORDS_PER_READ = 256


def reader_for(file: Path) -> Callable[[Path], Documents] | None:
    """The function that reads a file of this name, or None if the format is not known."""
    name = file.name.lower()
    return next((read for suffixes, read in _READERS.items() if name.endswith(suffixes)), None)


def known_suffixes() -> str:
    return " ".join(suffix for suffixes in _READERS for suffix in suffixes)


def read_text(file: Path) -> Documents:
    """The whole file as one document; nothing if it is blank."""
    try:
        text = file.read_bytes().removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        yield Unreadable(str(file), f"not UTF-8 text ({error.reason} at byte {error.start})")
        return
    if text.strip():
        yield Document(str(file), text=text)


def is_text(file: Path) -> bool:
    """Return whether a file of this name is read as one text."""
    return file.name.lower().endswith(_TEXT_SUFFIXES)


def is_unread_data(file: Path) -> bool:
    """Return whether a file of this name holds data in a format that is not read."""
    return file.name.lower().endswith(_UNREAD_SUFFIXES) and reader_for(file) is None


def is_json(file: Path) -> bool:
    """Return whether a file of this name is JSON as a whole: rows, or settings of a program."""
    return file.name.lower().endswith(_JSON_SUFFIXES)


def _read_jsonl(file: Path) -> Documents:
    with _opened(file) as lines:
        yield from _json_lines(file, lines)


def _read_json(file: Path) -> Documents:
    """A list of rows, or one row on each line as in JSONL: both are published under this name."""
    with _opened(file) as lines:
        content = lines.read().removeprefix(_BOM)
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        if content.lstrip().startswith(b"["):
            raise DataError(f"{file}: not valid JSON ({_first_line(error)})") from None
        yield from _json_lines(file, content.splitlines())
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        yield parse_row(row, f"{file}:row {number}")


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """The file, unpacked if its name ends in .gz. Raises `DataError` if that fails."""
    try:
        is_packed = file.name.lower().endswith(".gz")
        with gzip.open(file, "rb") if is_packed else file.open("rb") as opened:
            yield opened  # pyright: ignore[reportReturnType]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file}: damaged gzip file ({error})") from None


def _json_lines(file: Path, lines: Iterable[bytes]) -> Documents:
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            yield parse_json(line, f"{file}:{number}")


def _read_array_record(file: Path) -> Documents:
    """Every record is one row of JSON."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        records = ArrayRecordReader(str(file))
        count = records.num_records()
        for start in range(0, count, _RECORDS_PER_READ):
            lines = records.read(start, min(start + _RECORDS_PER_READ, count))
            for number, line in enumerate(lines, start=start):
                yield parse_json(line, f"{file}:row {number}")
        records.close()
    except RuntimeError as error:
        raise DataError(f"{file}: damaged ArrayRecord file ({error})") from None


def _read_parquet(file: Path) -> Documents:
    _require_pyarrow(file)
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            columns = _known_columns(file, table.schema_arrow.names)
            yield from _record_batches(
                file, table.iter_batches(_RECORDS_PER_READ, columns=columns), columns
            )
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file ({_first_line(error)})") from None


def read_arrow_stream(file: Path) -> Documents:
    """An Arrow stream file, as `datasets.save_to_disk` writes them."""
    _require_pyarrow(file)
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as stream, pyarrow.ipc.open_stream(stream) as batches:
            yield from _record_batches(file, batches, _known_columns(file, batches.schema.names))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not a readable Arrow stream file ({_first_line(error)})"
        ) from None


def _record_batches(file: Path, batches: Iterable[Any], columns: list[str]) -> Documents:
    number = 0
    for batch in batches:
        for start in range(
            0, batch.num_rows, _RECORDS_PER_READ
        ):  # a batch may hold thousands of long rows
            for row in batch.select(columns).slice(start, _RECORDS_PER_READ).to_pylist():
                yield parse_row(_without_nulls(row), f"{file}:row {number}")
                number += 1


def _without_nulls(value: Any) -> Any:
    """`value` without the fields that are null: a struct of Arrow has the fields of all rows in
    each. Of two calls with the arguments `city` and `ticker` both would have both."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _known_columns(file: Path, names: list[str]) -> list[str]:
    columns = [name for name in (*COLUMNS, *FURTHER_COLUMNS) if name in names]
    if not set(columns).intersection(COLUMNS):
        raise DataError(f"{file}: its columns are {', '.join(names)}; accepted: {FORMS}")
    return columns


def _require_pyarrow(file: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{file}: reading it needs pyarrow: pip install 'swiftkv-jax[arrow]'"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


_READERS: dict[tuple[str, ...], Callable[[Path], Documents]] = {
    (".jsonl", ".jsonl.gz"): _read_jsonl,
    _JSON_SUFFIXES: _read_json,
    (".parquet",): _read_parquet,
    (".arrayrecord", ".array_record"): _read_array_record,
    _TEXT_SUFFIXES: read_text,
}
