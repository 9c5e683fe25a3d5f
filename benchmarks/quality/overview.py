"""The short tables of a teacher's students, or of several teachers'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .. import markdown
from .table import VERDICT_NAMES, steps_of, verdicts
from .verdict import (
    BARS,
    Bar,
    Row,
    against,
    bar_name,
    is_met,
    is_refused,
    key,
    measured,
    of_authors,
    shown,
)

GROUPS = (1, 2, 4)
STEPS = (0, 64, 512)
LEAST_SHARE = 0.5
"""Of the layers, in the table of cuts."""
HALF_HEADER = (
    "g",
    "start",
    "steps",
    "above the teacher",
    "after the prompt",
    "KL",
    "far tokens, nats lost",
    "verdict",
    "`own+64`: after the prompt",
    "KL",
    "far tokens, nats lost",
    "verdict",
)
CUTS_HEADER = (
    "teacher",
    "K of layers",
    "g",
    *(f"`closed-form`, {steps or 'untrained'}" for steps in STEPS),
    *(f"`authors`, {steps}" for steps in STEPS[1:]),
)
COMPARISONS_HEADER = ("teacher", "served with", "trained for", *VERDICT_NAMES.values())


def half_table(rows: Sequence[Row]) -> str:
    """Students at half of the layers, one line for each group size, start and number of steps."""
    found, verdict = {key(row): row for row in rows if row["share"] == 0.5}, verdicts(rows)
    lines = []
    for group in GROUPS:
        for start in ("authors", "closed-form"):
            fitted = "own" if start == "closed-form" else "boundary"
            for steps in STEPS:
                boundary, own = (
                    next(
                        (
                            row
                            for each, row in found.items()
                            if each[1:] == (group, start, steps, mode, kv, "distillation")
                        ),
                        None,
                    )
                    for mode, kv in (("boundary", "boundary"), ("own+64", fitted))
                )
                if boundary or own:
                    lines.append(_half_line(boundary, own, verdict))
    return markdown.table(HALF_HEADER, lines)


def _half_line(boundary: Row | None, own: Row | None, verdict: dict) -> tuple[str, ...]:
    row = boundary or own
    assert row is not None
    whole = boundary and boundary["all"]
    return (
        str(row["key_value_group_size"]),
        f"`{row['start']}`",
        steps_of(row),
        f"{whole['above']['value']:+.2%}" if whole else "",
        *_half_cells(boundary, verdict),
        *_half_cells(own, verdict, beside=row),
    )


def _half_cells(
    row: Row | None, verdict: dict[tuple, str], beside: Row | None = None
) -> tuple[str, ...]:
    """After the prompt: perplexity above the teacher, KL, nats lost on far tokens; the verdict. The
    learning rate is named where it is not that of `beside`."""
    if row is None:
        return ("",) * 4
    answers, rate = row["answers"], row["learning_rate"]
    other = row["steps"] and beside is not None and rate != beside["learning_rate"]
    return (
        f"{answers['above']['value']:+.2%}" + (f" at {rate:g}" if other else ""),
        f"{answers['kl']['value']:.4f}",
        f"{row['far']['difference']['value']:+.3f}" if row["far"] else "",
        verdict[key(row)],
    )


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
    whole, far = row["all"]["above"]["value"], row["far"]["difference"]["value"]
    return f"{whole:+.1%}, {far:+.3f}{' *' if is_refused(row) else ''}"


def comparisons_table(teachers: Mapping[str, dict[str, Any]]) -> str:
    """How many of the package's trained students are better than those of the authors' recipe after
    the same steps."""
    lines = []
    for teacher, document in teachers.items():
        found = Counter[tuple[str, ...]]()
        kinds = dict[tuple[str, str], None]()
        for ours, authors in of_authors(document["rows"]):
            *_, mode, fitted, _ = key(ours)
            kind = mode.partition("+")[0], "boundary" if fitted == "boundary" else "own"
            kinds[kind] = None
            found[*kind, against(ours, authors)] += 1
        lines += [
            (teacher, *(f"`{part}`" for part in kind))
            + tuple(str(found[*kind, outcome]) for outcome in VERDICT_NAMES)
            for kind in sorted(kinds)
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
