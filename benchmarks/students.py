"""The measured students of small teachers: the demo model, t1 and t2. Their result files are
joined, and make a section of the page of measurements. The program that measured them is in the
history of the repository; `benchmarks.real` measures students of other models."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from swiftkv_jax.train.loss.far_tokens import FAR_NATS
from swiftkv_jax.train.loss.quality import MAX_FAR_LOSS

from .markdown import section, table

Row = dict[str, Any]
"""One student, served in one mode, with the mean figures over its seeds."""
LEAST_SHARE = 0.5
"""Smallest share of lower layers in the table of cuts."""
GROUPS = (1, 2)
SHOWN = ("demo", "t2")
"""Teachers in that table; t1 is like t2."""
CUTS = (
    ("closed-form", 0),
    ("closed-form", 64),
    ("closed-form", 512),
    ("authors", 512),
)
"""(start, steps) of the columns of that table."""


def key(row: Row) -> tuple[int, int, str, int, str, str, str]:
    """What tells students apart: K, layers that share a cache, start, steps, how it is served, what
    it is made for, and its loss."""
    made_for = "train-own" if row.get("trains_own") else row.get("generated_kv", "boundary")
    return (
        row["num_key_value_layers"],
        row["key_value_group_size"],
        row["start"],
        row["steps"],
        row["mode"],
        made_for,
        row.get("loss", "distillation"),
    )


# Joining ----------------------------------------------------------------------


def by_teacher(documents: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name of each teacher, the demo model's first -> its results, joined."""
    groups = itertools.groupby(sorted(documents, key=_order), key=_name)
    return {teacher: joined(list(of_teacher)) for teacher, of_teacher in groups}


def _name(document: dict[str, Any]) -> str:
    return document.get("teacher", {"name": "demo"})["name"]


def _order(document: dict[str, Any]) -> tuple[bool, str, str]:
    return _name(document) != "demo", _name(document), document["date"]


def joined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of one teacher, oldest first, as one. Of a student that was measured more than
    once the best learning rate counts, at the same rate the row of more seeds, then the newest.

    Rows of students that are fitted to own keys and values but served without are left out. Raises
    `ValueError` if the results are of different texts.
    """
    first = documents[0]
    found = dict[tuple, Row]()
    for document in documents:
        if _text(document) != _text(first):
            raise ValueError(f"{document['command']}: not the text of {first['command']}")
        for row in document["rows"]:
            if row["mode"] == "boundary" and row.get("generated_kv") == "own":
                continue
            before = found.get(key(row))
            found[key(row)] = row if before is None else _better(before, row)
    return first | {"rows": list(found.values())}


def _text(document: dict[str, Any]) -> tuple[int, ...]:
    tokens = document["rows"][0]["answers"]["tokens"]
    return document["documents"], document["prompt"], document["tokens_per_step"], tokens


def _better(before: Row, later: Row) -> Row:
    """The row that counts, with the learning rates of both; generated blocks of either. The later
    one counts where their rates were compared in different modes."""
    mode = later.get("rates_mode", "boundary")
    comparable = before.get("rates_mode", "boundary") == mode
    rates = dict(later["perplexity_of_rates"] or {})
    if comparable:
        rates = (before["perplexity_of_rates"] or {}) | rates
    if before["learning_rate"] == later["learning_rate"]:
        row = max(later, before, key=lambda each: len(each["seeds"]))
    elif comparable:
        row = min(before, later, key=lambda each: rates[f"{each['learning_rate']:g}"])
    else:
        row = later
    blocks = later["blocks"] or before["blocks"]
    return row | {"perplexity_of_rates": rates or None, "blocks": blocks, "rates_mode": mode}


# The section of the page --------------------------------------------------------


def cuts(documents: Iterable[dict[str, Any]]) -> str:
    teachers = by_teacher(documents)
    return section(
        "What each cut costs in quality",
        "Students of three small teachers, compared with them on held-out Python source.",
        "\n".join(_about(document) for document in teachers.values()),
        "`closed-form` starts from a least-squares fit and is trained with this package's recipe, "
        "`authors` from the teacher's projections (their mean in a group) with the authors' recipe "
        "at the best of several learning rates; columns name the steps. g layers share a cache. "
        "All upper keys and values come from the hidden state that enters layer K. Each cell has "
        "the perplexity above the teacher's and the nats lost on far tokens, on which the teacher "
        f"loses more than {FAR_NATS:g} nat if it sees only the last 64 tokens of the prompt. A "
        f"star marks more than {MAX_FAR_LOSS:g} nats: such a student no longer reads the distant "
        "prompt as the teacher does. The students of t1 are like those of t2.",
        table(
            ("teacher", "K of layers", "g", *(_column(start, steps) for start, steps in CUTS)),
            [
                (teacher, f"{lower} of {document['layers']}", str(group), *cells)
                for teacher, document in teachers.items()
                if teacher in SHOWN
                for lower, group, cells in _cuts(document["rows"])
            ],
        ),
        "[Generated tokens](generated-kv.md) has the same students where answers keep their own "
        "keys and values, [training](training.md#choosing-the-cut) how to choose a cut and what "
        "the authors' recipe gives, and [calibration](calibration.md#limits) what limits the "
        "closed form.",
    )


def _column(start: str, steps: int) -> str:
    return f"`{start}`, {steps or 'untrained'}"


def _about(document: dict[str, Any]) -> str:
    """A line of a list about one teacher and its text."""
    first = next(row for row in document["rows"] if row["all"])
    whole = first["all"]
    far = first["far"]
    teacher = document.get("teacher", {})
    made = "the embedded demo model"
    if "tokens" in teacher:
        parameters = teacher["parameters"] / 1e6
        tokens = teacher["tokens"] / 1e6
        made = f"{parameters:.1f}M parameters, trained on {tokens:.1f}M tokens"
    return (
        f"- `{_name(document)}`: {document['layers']} layers, {made}. Its perplexity is "
        f"{whole['teacher_perplexity']:.3f} on {whole['tokens']:,} tokens of "
        f"{document['documents']} files; {far['tokens']:,} tokens after prompts of "
        f"{document['prompt']} are far ones."
    )


def _cuts(rows: Sequence[Row]) -> Iterator[tuple[int, int, list[str]]]:
    """(K, group size, cells) of each cut that has a student."""
    found = {key(row): row for row in rows}
    layers = {row["num_key_value_layers"] for row in rows if row["share"] >= LEAST_SHARE}
    for lower in sorted(layers, reverse=True):
        for group in GROUPS:
            students = [
                found.get((lower, group, *start, "boundary", "boundary", "distillation"))
                for start in CUTS
            ]
            if any(students):
                yield lower, group, [_cell(student) for student in students]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    lost = row["far"]["difference"]["value"]
    star = " *" if lost > MAX_FAR_LOSS else ""
    return f"{row['all']['above']['value']:+.1%}, {lost:+.3f}{star}"
