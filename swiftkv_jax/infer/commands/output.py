"""Output of rows: text for people, JSON lines for programs, in the order of the input whichever row
ended first."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from tqdm import tqdm

from ... import cli
from ...errors import DataError, UsageError
from ...process.distributed import from_process_0, is_main_process
from ..engine.engine import Engine
from .batch import Row, RowWriter, Throughput, run_rows
from .resume import OutputFile

logger = logging.getLogger(__name__)

MAX_ERRORS_SHOWN = 10


def open_output(path: Path | None, *, resume: bool) -> OutputFile | None:
    """The output file, which continues that of an interrupted run with `resume`; None for standard
    output. Raises `UsageError` if something is in its way."""
    if resume and path is None:
        raise UsageError("`resume` goes with `output`: there is nothing else to go on with")
    return None if path is None else OutputFile(path, resume=resume)


def log_complete(file: OutputFile, settings: dict[str, Any]) -> int:
    """Say that an earlier run has written all of `file`, and return the exit code of that run.

    Raises `UsageError` if it ran with other settings.
    """
    rows, failed = file.count(settings)
    more = f", {failed} failed; their lines say why" if failed else ""
    logger.info(f"{file.path} is complete: {rows} rows{more}")
    return exit_code(failed)


def exit_code(failed: int) -> int:
    """The exit code of a command of which so many rows failed."""
    return cli.SOME_ROWS_FAILED if failed else cli.OK


def json_line(value: dict[str, Any]) -> bytes:
    """One line of UTF-8, with its line break."""
    return (
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
        + b"\n"
    )


class TextWriter(RowWriter):
    """Completions as text, each ended by a line break; with `stream`, the first row as it grows."""

    def __init__(
        self, file: TextIO, texts: Callable[[Row], Iterable[str]], *, stream: bool, prefix: str = ""
    ):
        """`texts` returns the texts of a row; `prefix` goes before each."""
        self._file = file
        self._texts = texts
        self._stream = stream
        self._prefix = prefix
        self._written = 0
        """Characters written of the text that is growing."""

    def write_partial(self, row: Row) -> None:
        if self._stream:
            (text,) = self._texts(row)
            text = (self._prefix + text)[self._written :]
            self._file.write(text)
            self._file.flush()
            self._written += len(text)

    def write(self, row: Row) -> None:
        if row.error is None:
            for text in self._texts(row):
                self._file.write((self._prefix + text)[self._written :] + "\n")
                self._written = 0
            self._file.flush()


class JsonLinesWriter(RowWriter):
    """One line of JSON for each row, flushed."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def write(self, row: Row) -> None:
        self._file.write(json_line(row.to_json()))
        self._file.flush()


class ProgressWriter(RowWriter):
    """Writes rows through another writer, counts them, and shows a progress bar."""

    def __init__(
        self, *, total: int, progress: bool, on_row: Callable[[dict[str, Any]], None] | None = None
    ):
        """`on_row` is called with each row of output, those of an earlier run included. `progress`
        shows a bar on a terminal."""
        self.writer = RowWriter()
        self.throughput = Throughput()
        self.done = 0
        """Rows written, those of an earlier run included."""
        self.failed = 0
        self._on_row = on_row
        self._errors: list[str] = []
        self._bar = tqdm(
            total=total, unit="row", disable=not (progress and is_main_process()) or None
        )
        self._tokens = 0
        self._start = time.perf_counter()

    def count_existing(self, row: dict[str, Any]) -> None:
        """Count a row that an earlier run has written, which is not part of the rates."""
        self._count(row)
        if not self._bar.disable:
            self._bar.initial += 1
            self._bar.n += 1
            self._bar.last_print_n += 1

    def write_partial(self, row: Row) -> None:
        self.writer.write_partial(row)

    def write(self, row: Row) -> None:
        self.writer.write(row)
        if row.error is not None:
            if len(self._errors) < MAX_ERRORS_SHOWN:
                self._errors.append(row.error)
        elif row.result is not None:
            self.throughput.add(row.result.timing)
            self._tokens += row.result.tokens
        self._count(row.to_json())
        self._bar.set_postfix_str(
            f"{self._tokens / (time.perf_counter() - self._start):.0f} tokens/s", refresh=False
        )
        self._bar.update()

    def _count(self, row: dict[str, Any]) -> None:
        self.done += 1
        self.failed += "error" in row
        if self._on_row is not None:
            self._on_row(row)

    def close(self) -> None:
        self._bar.close()

    def end(self) -> int:
        """Log the first few errors, a line each, and return the exit code."""
        for error in self._errors:
            logger.error("%s", error)
        if (more := self.failed - len(self._errors)) > 0:
            logger.error(f"{more} more rows failed; their lines say why")
        return exit_code(self.failed)


def write_rows(
    engine: Engine,
    rows: Callable[[int], Iterator[Row]],
    writer: RowWriter,
    file: OutputFile | None,
    settings: dict[str, Any],
    *,
    total: int,
    in_flight: int,
    progress: bool = True,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> ProgressWriter:
    """Run rows and write them to `file`, or by `writer` if that is None, in process 0.

    `rows` makes those after the first so many, which the file has already; `in_flight` is that of
    `run_rows`, the rest those of `ProgressWriter`. Logs how to continue after an interruption, and
    the rates. Raises as `OutputFile.open` does, in all processes if it does in one.
    """
    result = ProgressWriter(total=total, progress=progress, on_row=on_row)
    with contextlib.ExitStack() as stack:
        stack.callback(result.close)
        if is_main_process():
            result.writer = writer
            if file is not None:
                try:
                    lines = stack.enter_context(file.open(settings, result.count_existing))
                except (UsageError, DataError, OSError):
                    from_process_0(-1)
                    raise
                result.writer = JsonLinesWriter(lines)
        result.done = from_process_0(result.done)
        if result.done < 0:
            raise UsageError("process 0 cannot write `output`: see what it says")
        try:
            run_rows(engine, rows(result.done), result, in_flight=in_flight)
        except KeyboardInterrupt:
            if file is not None:
                logger.warning(
                    f"{file.partial} has {result.done} of {total} rows; the same command with "
                    f"`resume` goes on"
                )
            raise
    if summary := result.throughput.summary(engine):
        logger.info(summary)
    return result
