"""The short tables of a teacher's students, or of several teachers'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .. import markdown
from .table import VERDICT_NAMES
from .verdict import (
    BARS,
    Bar,
    Row,
    bar_name,
    comparisons,
    is_met,
    is_refused,
    key,
    measured,
    shown,
)

GROUPS = (1, 2, 4)
STEPS = (0, 64, 512)
SERVED = ("boundary", "own+64")
LEAST_SHARE = 0.5
"""Of the layers, in the table of cuts."""
CUTS_HEADER = (
    "teacher",
    "K of layers",
    "g",
    *(f"`closed-form`, {steps or 'untrained'}" for steps in STEPS),
    *(f"`authors`, {steps}" for steps in STEPS[1:]),
)
COMPARISONS_HEADER = ("teacher", "served with", "made for", *VERDICT_NAMES.values())


def cuts_table(teachers: Mapping[str, dict[str, Any]]) -> str:
    """Students with half of the layers or more as lower ones, served with `boundary`: perplexity
    above the teacher's, and nats lost on far tokens, with a star where they are refused."""
    return markdown.table(
        CUTS_HEADER,
        (
            (teacher, f"{lower} of {document['layers']}", str(group), *cells)
            for teacher, document in teachers.items()
            for lower, group, cells in _cuts(document["rows"])
        ),
    )


def _cuts(rows: Sequence[Row]):
    """(K, group size, cells) of each cut."""
    found = {key(row): row for row in rows}
    cuts = {row["num_key_value_layers"] for row in rows if row["share"] >= LEAST_SHARE}
    for lower in sorted(cuts, reverse=True):
        for group in GROUPS:
            students = [("closed-form", steps) for steps in STEPS]
            students += [("authors", steps) for steps in STEPS[1:]]
            cells = [
                _cut_cell(found.get((lower, group, *each, "boundary", "boundary", "distillation")))
                for each in students
            ]
            if any(cells):
                yield lower, group, cells


def _cut_cell(row: Row | None) -> str:
    if row is None:
        return ""
    above = f"{row['all']['above']['value']:+.1%}"
    if not row["far"]:
        return above
    return f"{above}, {row['far']['difference']['value']:+.3f}{' *' if is_refused(row) else ''}"


def comparisons_table(teachers: Mapping[str, dict[str, Any]]) -> str:
    """How many of the package's trained students are better than those of the authors' recipe after
    the same steps, by how they are served. Those with groups that are scaled first and then trained
    are left out."""
    lines = []
    for teacher, document in teachers.items():
        found = Counter[tuple[str, ...]]()
        for ours, _, outcome in comparisons(document["rows"]):
            *_, mode, made_for, _ = key(ours)
            if mode in SERVED and made_for != "train-own":
                found[mode, made_for, outcome] += 1
        lines += [
            (teacher, f"`{mode}`", f"`{made_for}`")
            + tuple(str(found[mode, made_for, outcome]) for outcome in VERDICT_NAMES)
            for mode, made_for in sorted({each[:2] for each in found})
        ]
    return markdown.table(COMPARISONS_HEADER, lines)


def bars_table(teachers: Mapping[str, dict[str, Any]]) -> str:
    """What is required of students, and their figures."""
    return markdown.table(
        ("required", "at most", *teachers),
        (
            (
                bar_name(bar),
                shown(bar, bar.limit),
                *(_bar_cell(bar, document["rows"]) for document in teachers.values()),
            )
            for bar in BARS
        ),
    )


def _bar_cell(bar: Bar, rows: Sequence[Row]) -> str:
    value = measured(bar, rows)
    if value is None:
        return ""
    return f"{shown(bar, value)}, {'met' if is_met(bar, value) else 'missed'}"
