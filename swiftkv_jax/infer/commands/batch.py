"""Many rows through one engine: read as room appears, written in their order, and as many in memory
as that takes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ...errors import DataError, UsageError
from ...io.jsonl import lines_of, parse
from ..engine.engine import Engine
from ..engine.requests import Request, RequestOutput, ScoreRequest, Timing
from ..runner.model_runner import ModelRunner

WINDOW = 1024
"""Rows read and not written yet, if more than may run: so many short ones can overtake a long
one."""
READ_AT_ONCE = 32
"""Rows read and tokenised between two steps, during which the device may run out of work."""


class Result(Protocol):
    """What becomes of a row."""

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        ...

    @property
    def timing(self) -> Timing | None:
        """Of its latest event."""
        ...

    @property
    def tokens(self) -> int:
        """Of the row, by which progress is told: generated, or read to be scored."""
        ...

    def take(self, event: RequestOutput) -> bool:
        """Take the news. False if the sample needs no more, whatever the engine thinks. Raises
        `DataError` for a row that is lost."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The row of output, without its id."""
        ...


@dataclasses.dataclass
class Row:
    """A request on its way, or why it cannot run."""

    id: Any
    where: str = ""
    """`FILE:LINE`; empty for what the command line gave."""
    request: Request | ScoreRequest | None = None
    result: Result | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or (self.result is not None and self.result.done)

    def fail(self, error: Exception) -> None:
        self.error = f"{self.where}: {error} (id {self.id!r})" if self.where else str(error)

    def to_json(self) -> dict[str, Any]:
        if self.error is not None:
            return {"id": self.id, "error": self.error}
        assert self.result is not None
        return {"id": self.id} | self.result.to_json()


class Writer(Protocol):
    """Where rows go."""

    def show(self, row: Row) -> None:
        """The first row that has not ended has news, perhaps."""
        ...

    def write(self, row: Row) -> None:
        """The next row has ended."""
        ...


Make = Callable[[int, dict[str, Any]], tuple[Request | ScoreRequest, Result]]
"""From the number of a row and what it says. Raises `UsageError`."""


def read_rows(path: Path, make: Make, *, skip: int = 0) -> Iterator[Row]:
    """The rows of a file after the first `skip`, made when they are asked for. `id` or `custom_id`
    defaults to the row's number."""
    for line in lines_of(path, skip=skip):
        row = Row(line.number, line.where)
        try:
            fields = parse(line.content)
            row.id = _id(fields, line.number)
            row.request, row.result = make(line.number, fields)
        except (DataError, UsageError) as error:
            row.fail(error)
        yield row


def _id(fields: dict[str, Any], number: int) -> str | int:
    ids = [fields.pop(name) for name in ("id", "custom_id") if name in fields] or [number]
    if len(ids) > 1 or type(ids[0]) not in (str, int):
        raise UsageError("id, or custom_id, must be a string or a whole number")
    return ids[0]


def run_rows(engine: Engine, rows: Iterable[Row], writer: Writer, *, in_flight: int) -> None:
    """Run all rows, at most `in_flight` of them known to the engine, and write each when it and all
    before it have ended."""
    source, unwritten, running = iter(rows), deque[Row](), dict[int, Row]()
    window = max(WINDOW, 2 * in_flight)
    more = True
    while more or unwritten:
        for _ in range(READ_AT_ONCE):
            if not more or len(running) >= in_flight or len(unwritten) >= window:
                break
            if more := (row := next(source, None)) is not None:
                unwritten.append(row)
                _submit(engine, row, running)
        for event in engine.step() if running else ():
            _take(engine, event, running)
        while unwritten and unwritten[0].done:
            writer.write(unwritten.popleft())
        if unwritten:
            writer.show(unwritten[0])


def _submit(engine: Engine, row: Row, running: dict[int, Row]) -> None:
    if row.error is None:
        assert row.request is not None
        try:
            running[engine.add_request(row.request)] = row
        except UsageError as error:
            row.fail(error)


def _take(engine: Engine, event: RequestOutput, running: dict[int, Row]) -> None:
    if event.request not in running:
        return  # of the other samples of a row that is lost
    row = running[event.request]
    assert row.result is not None
    try:
        if not row.result.take(event) and event.finish_reason is None:
            engine.abort_request(event.request, event.sample)
    except DataError as error:
        row.fail(error)
        engine.abort_request(event.request)
    if row.done:
        del running[event.request]


class Speed:
    """The rates of a run. Prefill and decoding overlap: each is timed from its first beginning to
    its last end."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._waits: list[float] = []
        self._first_tokens = (float("inf"), 0.0)
        """When the first row had its first token, and when the last one had."""

    def add(self, timing: Timing | None) -> None:
        """A row has ended; None for one that never ran."""
        if timing is not None and timing.first_token is not None:
            earliest, latest = self._first_tokens
            self._first_tokens = min(earliest, timing.first_token), max(latest, timing.first_token)
            self._waits.append(timing.first_token - timing.submitted)

    def summary(self, engine: Engine) -> str | None:
        """One line; None if nothing ran."""
        if not self._waits:
            return None
        stats, now, (earliest, latest) = engine.stats, time.perf_counter(), self._first_tokens
        prefix = engine.prefix_stats
        parts = [
            f"prompt: {stats.prompt_tokens} tokens, "
            f"{stats.prompt_tokens / (latest - self._start):.0f} tokens/s, "
            f"{prefix.hits / max(prefix.queries, 1):.0%} cached",
            f"first token after {statistics.median(self._waits):.3f} s"
            + (" (median)" if len(self._waits) > 1 else ""),
        ]
        if stats.new_tokens:
            parts.append(
                f"generated: {stats.new_tokens} tokens, {stats.new_tokens / (now - earliest):.1f} "
                f"tokens/s"
            )
        if isinstance(engine.model_runner, ModelRunner):
            parts.append(f"KV cache: {engine.model_runner.kv_bytes_per_token} bytes/token")
        if stats.compilations:
            parts.append(f"{stats.compilations} programs compiled while it ran")
        return "; ".join(parts)
