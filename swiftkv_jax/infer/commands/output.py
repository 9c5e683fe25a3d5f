"""Where rows go: text for people, JSON lines for programs. In the order of the input, whichever
ended first."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import jax
import numpy as np
from tqdm import tqdm

from ... import cli, demo
from ...errors import DataError, UsageError
from ...model import Model
from .batch import Row, Speed, Writer
from .flags import SWIFTKV, log, writes
from .resume import Output, checkpoint_digest

MAX_ERRORS_SHOWN = 10


def add_output_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Of every command that writes rows."""
    flag = parser.add_argument
    flag(
        "--output",
        "-o",
        type=Path,
        metavar="JSONL",
        help=f"a row per row of input, in its order (default: {default})",
    )
    flag(
        "--resume",
        action="store_true",
        help="go on with the --output of an interrupted run, if there is one",
    )


def open_output(args: argparse.Namespace) -> Output | None:
    """Raises `UsageError` if something is in the way of --output."""
    if args.resume and not args.output:
        raise UsageError("--resume goes with --output: there is nothing else to go on with")
    return Output(args.output, resume=args.resume) if args.output else None


def tell_complete(output: Output, settings: dict[str, Any]) -> int:
    """The exit code of the run that has written all of an output that is `complete`, told. Raises
    `UsageError` if it was another run."""
    rows, failed = output.count(settings)
    log(
        f"{output.path} is complete: {rows} rows"
        + (f", {failed} failed; their lines say why" if failed else "")
    )
    return cli.SOME_ROWS_FAILED if failed else cli.OK


def settings_json(
    args: argparse.Namespace, model: Model, digest: str, **more: Any
) -> dict[str, Any]:
    """Everything that decides what becomes of a row."""
    return {
        "command": args.command,
        "input": digest,
        "model": checkpoint_digest(args.model or demo.SWIFTKV),
        "swiftkv": model.uses_swiftkv(SWIFTKV[args.swiftkv]),
        "dtype": str(model.dtype),
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "max_model_len": args.max_model_len,
        **more,
    }


def json_line(value: dict[str, Any]) -> bytes:
    """One line of UTF-8, with its end."""
    return (
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
        + b"\n"
    )


class TextWriter:
    """Completions one after the other, each ended by a newline. With `live`, the first row as it
    grows."""

    def __init__(
        self, file: TextIO, texts: Callable[[Row], Iterable[str]], *, live: bool, prefix: str = ""
    ):
        """`texts` of a row; `prefix` goes before each."""
        self._file, self._texts, self._live, self._prefix = file, texts, live, prefix
        self._written = 0

    def show(self, row: Row) -> None:
        if self._live:
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


class JsonWriter:
    """A whole line per row, flushed."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def show(self, row: Row) -> None:
        pass

    def write(self, row: Row) -> None:
        self._file.write(json_line(row.to_json()))
        self._file.flush()


class Silent:
    """Of the processes that leave writing to another one."""

    def show(self, row: Row) -> None:
        pass

    def write(self, row: Row) -> None:
        pass


class Monitor:
    """Passes rows on to a writer, counts them, and shows how far it is."""

    def __init__(self, *, total: int, progress: bool, add: Callable[[dict[str, Any]], None]):
        """`add` is told each row of output, also those that an earlier run has written. `progress`:
        on a terminal, a bar."""
        self.writer: Writer = Silent()
        self.speed, self.done, self.failed = Speed(), 0, 0
        self._add, self._errors = add, list[str]()
        self._bar = tqdm(total=total, unit="row", disable=None if progress and writes() else True)
        self._tokens, self._start = 0, time.perf_counter()

    def old(self, row: dict[str, Any]) -> None:
        """A row that an earlier run has written: it took no time now."""
        self._count(row)
        if not self._bar.disable:
            self._bar.initial += 1
            self._bar.n += 1
            self._bar.last_print_n += 1

    def show(self, row: Row) -> None:
        self.writer.show(row)

    def write(self, row: Row) -> None:
        self.writer.write(row)
        if row.error is not None:
            self._errors += [row.error] if len(self._errors) < MAX_ERRORS_SHOWN else []
        elif row.result is not None:
            self.speed.add(row.result.timing)
            self._tokens += row.result.tokens
        self._count(row.to_json())
        self._bar.set_postfix_str(
            f"{self._tokens / (time.perf_counter() - self._start):.0f} tokens/s", refresh=False
        )
        self._bar.update()

    def _count(self, row: dict[str, Any]) -> None:
        self.done += 1
        self.failed += "error" in row
        self._add(row)

    def close(self) -> None:
        self._bar.close()

    def tell_errors(self) -> None:
        """The first few errors, a line each."""
        for error in self._errors:
            log(f"error: {error}")
        if (more := self.failed - len(self._errors)) > 0:
            log(f"error: {more} more rows failed; their lines say why")


@contextlib.contextmanager
def monitored(
    writer: Writer | None,
    output: Output | None,
    settings: dict[str, Any],
    *,
    total: int,
    progress: bool = True,
    add: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Iterator[Monitor]:
    """A monitor over `output`, or over `writer` where there is none; `Monitor.done` rows are there
    already.

    Interrupted, it says how to go on. Raises as `Output.open` does, in all processes if in one.
    """
    monitor = Monitor(total=total, progress=progress, add=add)
    with contextlib.ExitStack() as stack:
        stack.callback(monitor.close)
        if output is not None and writes():
            try:
                monitor.writer = JsonWriter(stack.enter_context(output.open(settings, monitor.old)))
            except (UsageError, DataError, OSError):
                _of_process_0(-1)
                raise
        elif writer is not None and writes():
            monitor.writer = writer
        monitor.done = _of_process_0(monitor.done)
        if monitor.done < 0:
            raise UsageError("process 0 cannot write --output: see what it says")
        try:
            yield monitor
        except KeyboardInterrupt:
            if output is not None:
                log(
                    f"{output.partial} has {monitor.done} of {total} rows; the same command with "
                    f"--resume goes on"
                )
            raise


def _of_process_0(count: int) -> int:
    """The number that process 0 has."""
    if jax.process_count() == 1:
        return count
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(count)))
