"""Sections of `docs/measurements.md`: a table of all measured students of each teacher."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .. import markdown
from .students import STARTS
from .table import LEGEND, describe, rows_table
from .verdict import Row, key, verdict

TITLE = "What each cut costs in quality"


def sections(documents: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A section for each teacher, the demo model first."""
    for teacher, document in by_teacher(documents).items():
        about = [
            f"{describe(document)} `python -m benchmarks.quality`, all runs together: where a "
            "student was measured more than once, the row at the best learning rate, then that of "
            "more seeds, then the newest.",
            LEGEND,
        ]
        if teacher != "demo":
            about = [
                f"{describe(document)} It learned from installed packages, and other packages are "
                "held out (`python -m benchmarks.teachers`); `python -m benchmarks.quality "
                f"--teacher FOLDER`. Columns as [above](#{markdown.anchor(TITLE)})."
            ]
        bars = [f"- {line}" for line in verdict(document["rows"])[0] if " (bar " in line]
        title = TITLE if teacher == "demo" else f"{TITLE}: the teacher {teacher}"
        yield markdown.section(title, *about, rows_table(document["rows"]), "\n".join(bars))


def by_teacher(documents: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name of each teacher, the demo model's first -> its results, merged."""
    groups = itertools.groupby(sorted(documents, key=_order), key=_teacher)
    return {teacher: merged(list(of_teacher)) for teacher, of_teacher in groups}


def _teacher(document: dict[str, Any]) -> str:
    return document.get("teacher", {"name": "demo"})["name"]


def _order(document: dict[str, Any]) -> tuple[bool, str, str]:
    teacher = _teacher(document)
    return teacher != "demo", teacher, document["date"]


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of one teacher, oldest first, as one. Of a student that was measured more than
    once the best learning rate counts, at the same rate the row of more seeds, then the newest.

    What is fitted to own keys and values but served without is left out. Raises `ValueError` if
    they were not measured on the same text.
    """
    first, found = documents[0], dict[tuple, Row]()
    for document in documents:
        if _text(document) != _text(first):
            raise ValueError(f"{document['command']}: not the text of {first['command']}")
        for row in document["rows"]:
            if row["mode"] != "boundary" or row.get("generated_kv") != "own":
                before = found.get(key(row))
                found[key(row)] = row if before is None else _better(before, row)
    return first | {"rows": sorted(found.values(), key=_row_order)}


def _text(document: dict[str, Any]) -> tuple[int, ...]:
    tokens = document["rows"][0]["answers"]["tokens"]
    return document["documents"], document["prompt"], document["tokens_per_step"], tokens


def _better(before: Row, later: Row) -> Row:
    """The row that counts, with the learning rates of both; generated blocks of either. The later
    one counts where their rates were compared in different modes."""
    comparable = before.get("rates_mode", "boundary") == later.get("rates_mode", "boundary")
    earlier = before["perplexity_of_rates"] if comparable else None
    rates = (earlier or {}) | (later["perplexity_of_rates"] or {})
    if before["learning_rate"] == later["learning_rate"]:
        row = max(later, before, key=lambda each: len(each["seeds"]))
    elif not comparable:
        row = later
    else:
        row = min(before, later, key=lambda each: rates[f"{each['learning_rate']:g}"])
    blocks = later["blocks"] or before["blocks"]
    chosen = {"perplexity_of_rates": rates or None, "blocks": blocks}
    return row | chosen | {"rates_mode": later.get("rates_mode", "boundary")}


def _row_order(row: Row) -> tuple:
    lower, group, start, steps, mode, generated_kv, loss = key(row)
    alone = loss == "cross-entropy"
    return -lower, group, STARTS.index(start), generated_kv, steps, alone, mode
