"""Many rows through one engine: read lazily, and written in the order of the input.

Memory holds the rows in flight, those that ended before an earlier row did, and the ids of all
rows, to refuse one that comes twice.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ...errors import DataError, UsageError, spelled
from ...process.jsonl import parse_object, read_lines
from ..engine.engine import Engine
from ..engine.requests import Request, RequestOutput, ScoreRequest, Timing
from ..runner.model_runner import ModelRunner

MAX_UNWRITTEN = 1024
"""Rows read and not written yet, or twice `in_flight` if that is more: so many short rows can
overtake a long one."""


class Result(Protocol):
    """The output of one row, as it grows."""

    @property
    def done(self) -> bool:
        """True if the result is complete."""
        ...

    @property
    def timing(self) -> Timing | None:
        """Timing of the latest output, None before the first."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens by which progress is measured: generated ones, or those that were scored."""
        ...

    def update(self, output: RequestOutput) -> bool:
        """Add an output of the engine.

        Returns False if the sample needs no more, though the engine may go on. Raises `DataError`
        if the row has failed.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Row of output, without its id."""
        ...


@dataclasses.dataclass
class Row:
    """A row of input with its result, or with the error that ended it."""

    id: Any
    where: str = ""
    """`FILE:LINE`; empty for a prompt of the command line."""
    request: Request | ScoreRequest | None = None
    result: Result | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or (self.result is not None and self.result.done)

    def fail(self, error: Exception) -> None:
        """Record why the row failed: in the words of rows, whose fields are not flags."""
        self.error = str(error)
        if self.where:
            self.error = f"{self.where}: {spelled(self.error, str)} (id {self.id!r})"

    def to_json(self) -> dict[str, Any]:
        if self.error is not None:
            return {"id": self.id, "error": self.error}
        assert self.result is not None
        return {"id": self.id} | self.result.to_json()


class RowWriter:
    """Destination of rows. This one drops them: in all processes but process 0."""

    def write_partial(self, row: Row) -> None:
        """Write what there is of the first unfinished row."""

    def write(self, row: Row) -> None:
        """Write the next row, which has ended."""


RequestBuilder = Callable[[int, dict[str, Any]], tuple[Request | ScoreRequest, Result]]
"""Makes a request and its empty result from the index and the fields of a row. Raises
`UsageError`."""


def read_rows(path: Path, build: RequestBuilder, *, skip: int = 0) -> Iterator[Row]:
    """Yield the rows of a file after the first `skip`.

    The id is `id` or `custom_id`, and the row's index if there is neither. A row that cannot be
    read, or that has the `id` of an earlier one, is yielded with its error.
    """
    ids = set[str | int]()
    for line in read_lines(path):
        row = Row(line.number, line.where)
        try:
            fields = parse_object(line.content)
            if (given := _pop_id(fields)) is not None:
                row.id = given
                if given in ids:
                    raise UsageError("an earlier row has the same id")
                ids.add(given)
            if line.number >= skip:
                row.request, row.result = build(line.number, fields)
        except (DataError, UsageError) as error:
            row.fail(error)
        if line.number >= skip:
            yield row


def _pop_id(fields: dict[str, Any]) -> str | int | None:
    ids = [fields.pop(name) for name in ("id", "custom_id") if name in fields]
    if len(ids) > 1 or not {str, int}.issuperset(map(type, ids)):
        raise UsageError("id, or custom_id, must be a string or a whole number")
    return next(iter(ids), None)


def run_rows(engine: Engine, rows: Iterable[Row], writer: RowWriter, *, in_flight: int) -> None:
    """Run all rows, at most `in_flight` at once, and write each as soon as all rows before it are
    written."""
    running = dict[int, Row]()
    unwritten = deque[Row]()
    max_unwritten = max(MAX_UNWRITTEN, 2 * in_flight)

    def write() -> None:
        while unwritten and unwritten[0].done:
            writer.write(unwritten.popleft())
        if unwritten:
            writer.write_partial(unwritten[0])

    def requests() -> Iterator[Request | ScoreRequest | None]:
        number = 0
        for row in rows:
            unwritten.append(row)
            if row.error is None:
                assert row.request is not None
                running[number] = row
                number += 1
                yield row.request
            while len(unwritten) >= max_unwritten:
                write()
                yield None

    def fail(number: int, error: UsageError) -> None:
        running.pop(number).fail(error)

    for number, output in engine.run(requests(), in_flight=in_flight, on_invalid=fail):
        if number in running:  # not another sample of a row that has failed
            _update(engine, running[number], output)
            if running[number].done:
                del running[number]
        write()
    write()


def _update(engine: Engine, row: Row, output: RequestOutput) -> None:
    assert row.result is not None
    try:
        if not row.result.update(output) and output.finish_reason is None:
            engine.abort_request(output.request_id, output.sample)
    except DataError as error:
        row.fail(error)
        engine.abort_request(output.request_id)


class Throughput:
    """Rates of a run. Prefill and decoding overlap: each is timed from its first beginning to its
    last end."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._ttfts: list[float] = []
        self._first_tokens = (float("inf"), 0.0)
        """Moments at which the first row and the last row had their first token."""

    def add(self, timing: Timing | None) -> None:
        """Count a row that has ended; `timing` is None for one that never ran."""
        if timing is not None and timing.first_token is not None:
            earliest, latest = self._first_tokens
            self._first_tokens = min(earliest, timing.first_token), max(latest, timing.first_token)
            self._ttfts.append(timing.first_token - timing.submitted)

    def summary(self, engine: Engine) -> str | None:
        """One line for people, None if nothing ran."""
        if not self._ttfts:
            return None
        stats, now, (earliest, latest) = engine.stats, time.perf_counter(), self._first_tokens
        prefix = engine.prefix_stats
        parts = [
            f"prompt: {stats.prompt_tokens} tokens, "
            f"{stats.prompt_tokens / (latest - self._start):.0f} tokens/s, "
            f"{prefix.hits / max(prefix.queries, 1):.0%} cached",
            f"first token after {statistics.median(self._ttfts):.3f} s"
            + (" (median)" if len(self._ttfts) > 1 else ""),
        ]
        if stats.new_tokens:
            parts.append(
                f"generated: {stats.new_tokens} tokens, {stats.new_tokens / (now - earliest):.1f} "
                f"tokens/s"
            )
        if isinstance(engine.model_runner, ModelRunner):
            runner = engine.model_runner
            size = runner.kv_bytes_per_token
            own = runner.shapes.pages_per_own_page
            more = f" of a prompt, {size * (1 + own)} of an answer" if own else ""
            parts.append(f"KV cache: {size} bytes/token{more}")
        if stats.compilations:
            parts.append(f"{stats.compilations} programs compiled while it ran")
        return "; ".join(parts)
