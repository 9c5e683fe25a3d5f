"""What the cost of HTTP may be, and whether a result keeps to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..markdown import table
from .spread import Spread, added, served, share

Result = dict[str, Any]
"""A cell, or a document of cells, as in the JSON."""

SHIPPED_STEPS = 4
"""Calls of fewer steps are measured to show the host's limit, and are not what a server does under
load: they have no bar."""


class Bar(NamedTuple):
    """A bound, in the unit that it is printed in."""

    what: str
    limit: float
    is_least: bool
    unit: str
    figure: Callable[[Result], Spread | None]
    """Of a cell; None if the bound is not for it, or the cell does not have the figure."""

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.is_least else value <= self.limit

    def verdict(self, spread: Spread) -> str:
        """By the median, unless the repetitions show no cost and are on both sides of the bound."""
        straddles = spread.low < self.limit < spread.high
        if straddles and not spread.is_resolved:
            return "not resolved"
        return "met" if self.is_met(spread.median) else "missed"


def _share(steps: int, rows: int) -> Callable[[Result], Spread | None]:
    def figure(cell: Result) -> Spread | None:
        is_for = cell["steps"] == steps and cell["rows"] == rows
        return share(cell) if is_for else None

    return figure


def _served(name: str, scale: float, *, steps: int = SHIPPED_STEPS) -> Callable[..., Spread | None]:
    return lambda cell: served(cell, name, scale) if cell["steps"] >= steps else None


def _added(name: str) -> Callable[[Result], Spread | None]:
    return lambda cell: added(cell, name) if cell["steps"] >= SHIPPED_STEPS else None


TIMED = (
    Bar("throughput, 8 steps a call, 256 slots", 97, True, "%", _share(8, 256)),
    Bar("throughput, 4 steps a call, 256 slots", 90, True, "%", _share(4, 256)),
    Bar("device idle", 3, False, "%", _served("idle_share", 100)),
    Bar("loop for a chunk of 8", 45, False, "us", _served("loop_seconds_per_chunk", 1e6, steps=8)),
    Bar("first token alone, p50", 1, False, "ms", _added("ttft_alone_p50")),
    Bar("first token at half load, p50", 1, False, "ms", _added("ttft_half_p50")),
    Bar("first token at half load, p99", 5, False, "ms", _added("ttft_half_p99")),
)
MEDIUM = (Bar("throughput of the model, 8 slots", 97, True, "%", share),)


def verdicts(document: Result) -> Iterator[tuple[Bar, Spread | None, str]]:
    """(bar, the figure of the cell that is worst by it, verdict) for each bar of a result."""
    for bar in MEDIUM if document["engine"] == "medium" else TIMED:
        figures = [figure for cell in document["cells"] if (figure := bar.figure(cell))]
        if not figures:
            yield bar, None, "not measured"
            continue
        medians = [figure.median for figure in figures]
        worst = figures[medians.index((min if bar.is_least else max)(medians))]
        yield bar, worst, bar.verdict(worst)


def table_of_bars(*documents: Result) -> str:
    """A row for each bar, with the cell that is worst by it."""
    rows = [
        (
            bar.what,
            f"{'at least' if bar.is_least else 'at most'} {bar.limit:g} {bar.unit}",
            "" if spread is None else spread.text(bar.unit),
            verdict,
        )
        for document in documents
        for bar, spread, verdict in verdicts(document)
    ]
    return table(("bar", "required", "measured, worst cell", ""), rows)
