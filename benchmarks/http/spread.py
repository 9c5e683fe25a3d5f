"""A figure with the spread of its repetitions."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Median, least and most of the repetitions."""

    median: float
    low: float
    high: float
    is_resolved: bool
    """Whether HTTP costs something in all repetitions: a gain is noise."""

    def text(self, unit: str) -> str:
        """The median, with the least and the most where there are several."""
        digits = 0 if unit == "us" else 2 if unit == "ms" else 1
        sign = "+" if unit == "ms" else ""
        if self.low == self.high:
            return f"{self.median:{sign}.{digits}f} {unit}"
        spread = f"{self.low:{sign}.{digits}f} to {self.high:{sign}.{digits}f} {unit}"
        return f"{self.median:{sign}.{digits}f} {unit} ({spread})"


def share(cell: dict[str, Any]) -> Spread:
    """Throughput over HTTP in percent of the bare engine's, by repetition."""
    values = [
        100 * served["tokens_per_s"] / bare["tokens_per_s"]
        for bare, served in zip(cell["runs"]["bare"], cell["runs"]["served"], strict=True)
    ]
    return Spread(statistics.median(values), min(values), max(values), max(values) < 100)


def added(cell: dict[str, Any], name: str) -> Spread | None:
    """Milliseconds that HTTP adds to a time: to the medians, and by repetition; None if it was not
    measured."""
    if name not in cell["bare"]:
        return None
    pairs = zip(cell["runs"]["bare"], cell["runs"]["served"], strict=True)
    values = [1e3 * (served[name] - bare[name]) for bare, served in pairs]
    return Spread(1e3 * cell[f"added_{name}"], min(values), max(values), min(values) > 0)


def served(cell: dict[str, Any], name: str, scale: float) -> Spread | None:
    """A figure of the server, by repetition; None if it was not measured."""
    if name not in cell["served"]:
        return None
    values = [scale * run[name] for run in cell["runs"]["served"]]
    return Spread(statistics.median(values), min(values), max(values), True)
