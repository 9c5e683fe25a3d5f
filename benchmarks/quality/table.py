"""The table of a result, its verdict, and its section of the page of measurements."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from .. import markdown

Row = dict[str, Any]

MAX_FAR_LOSS = 0.15
"""Nats lost on far-dependent tokens above which a student is refused, whatever its averages."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A figure of one row that must not exceed a limit."""

    share: float
    """Of the layers that are lower ones."""
    key_value_group_size: int
    steps: int
    mode: str
    figure: str
    """`above` on whole rows, `answers above` after the prompt, `far` nats."""
    limit: float

    def row(self, rows: Sequence[Row]) -> Row | None:
        """The closed-form student that the bar is about, if it has been measured: one fitted to
        what it is served with."""
        wanted = (
            self.share,
            self.key_value_group_size,
            "closed-form",
            self.steps,
            self.mode,
            "boundary" if self.mode == "boundary" else "own",
            "distillation",
        )
        return next((row for row in rows if (row["share"], *key(row)[1:]) == wanted), None)


BARS = (
    Bar(0.5, 1, 0, "boundary", "above", 0.007),
    Bar(0.5, 1, 0, "own", "answers above", 0.001),
    Bar(0.5, 1, 0, "own", "far", 0.03),
    Bar(0.5, 2, 64, "boundary", "above", 0.035),
    Bar(0.5, 4, 64, "boundary", "above", 0.075),
    Bar(0.375, 1, 0, "own+64", "answers above", 0.01),
    Bar(0.375, 1, 0, "own+64", "far", MAX_FAR_LOSS),
)


def key(row: Row) -> tuple[int, int, str, int, str, str, str]:
    return (
        row["num_key_value_layers"],
        row["key_value_group_size"],
        row["start"],
        row["steps"],
        row["mode"],
        row.get("generated_kv", "boundary"),
        row.get("loss", "distillation"),
    )


def name(row: Row) -> str:
    steps = f"{row['steps']} steps" if row["steps"] else "untrained"
    return (
        f"{row['share']:.1%}, g = {row['key_value_group_size']}, {row['start']}, {steps}, "
        f"{row['mode']}"
    )


def merged(document: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """`document` after a later run on the same text: its rows of the same students count instead.
    Of one at other learning rates the better row counts, with the rates of both."""
    found = {key(row): row for row in document["rows"]}
    for row in later["rows"]:
        before = found.get(key(row))
        if before is None:
            continue
        if row["learning_rate"] != before["learning_rate"]:
            rates = before["perplexity_of_rates"] | row["perplexity_of_rates"]
            best = min(before, row, key=lambda each: rates[f"{each['learning_rate']:g}"])
            row = best | {"perplexity_of_rates": rates}
        found[key(row)] = row
    return document | {"rows": list(found.values())}


# Verdict ----------------------------------------------------------------------


def verdict(rows: Sequence[Row]) -> tuple[list[str], bool]:
    """(a line for each bar and each refused student, whether no measured bar is missed)."""
    lines, kept = [], True
    for line, met in itertools.chain(_bars(rows), _against_authors(rows)):
        lines.append(line)
        kept &= met
    return lines + list(_refused(rows)), kept


def _bars(rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    for bar in BARS:
        row = bar.row(rows)
        value = None if row is None else _figure(row, bar.figure)
        if row is None or value is None:
            yield f"not measured: {_bar_name(bar)}", True
            continue
        met = value <= bar.limit
        shown, limit = (
            (f"{value:+.3f} nats", f"{bar.limit:+.3f}")
            if bar.figure == "far"
            else (f"{value:+.2%}", f"{bar.limit:+.2%}")
        )
        yield f"{'met' if met else 'not met'}: {name(row)}: {bar.figure} {shown} (bar {limit})", met


def _bar_name(bar: Bar) -> str:
    steps = f"{bar.steps} steps" if bar.steps else "untrained"
    return (
        f"{bar.share:.1%}, g = {bar.key_value_group_size}, closed-form, {steps}, "
        f"{bar.mode}: {bar.figure}"
    )


def _figure(row: Row, figure: str) -> float | None:
    match figure:
        case "above" if row["all"]:
            return row["all"]["above"]["value"]
        case "answers above":
            return row["answers"]["above"]["value"]
        case "far" if row["far"]:
            return row["far"]["difference"]["value"]
    return None


def _against_authors(rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """At equal tokens the closed form must end below the authors' recipe at its best rate, in every
    mode. Undecided where the difference is less than two standard errors over seeds, or the best
    rate is the smallest or largest that was tried."""
    trained = {key(row): row for row in rows if row["steps"]}
    for (lower, group, start, steps, mode, _, loss), ours in trained.items():
        authors = trained.get((lower, group, "authors", steps, mode, "boundary", "distillation"))
        if (start, loss) == ("closed-form", "distillation") and authors is not None:
            own, theirs = (row["all"] or row["answers"] for row in (ours, authors))
            gap = theirs["perplexity"] - own["perplexity"]
            outcome = "met" if gap > 0 else "not met"
            if abs(gap) < 2 * _standard_error(ours, authors) or (gap > 0 and _at_edge(authors)):
                outcome = "undecided"
            yield (
                f"{outcome}: {name(ours)}: perplexity {own['perplexity']:.3f}, authors' recipe at "
                f"its best rate ({_rate(authors)}) {theirs['perplexity']:.3f}"
                + "; far tokens {}, theirs {}".format(*map(_far_loss, (ours, authors))),
                outcome != "not met",
            )


def _standard_error(*rows: Row) -> float:
    """Of a difference of mean perplexities, by the spread over seeds; a row of one seed counts as
    spread like the others."""
    spreads = [(row["all"] or row["answers"])["perplexity_std"] for row in rows]
    known = [spread for row, spread in zip(rows, spreads, strict=True) if len(row["seeds"]) > 1]
    spread = max(known, default=0.0)
    return math.sqrt(
        sum(
            (own if len(row["seeds"]) > 1 else spread) ** 2 / len(row["seeds"])
            for row, own in zip(rows, spreads, strict=True)
        )
    )


def _at_edge(row: Row) -> bool:
    """Whether the best learning rate is the smallest or the largest that was tried."""
    rates = sorted(map(float, row["perplexity_of_rates"]))
    return row["learning_rate"] in (rates[0], rates[-1])


def _rate(row: Row) -> str:
    edge = ", the last one tried" if _at_edge(row) else ""
    return f"{row['learning_rate']:g}{edge}"


def _far_loss(row: Row) -> str:
    return f"{row['far']['difference']['value']:+.3f} nats" if row["far"] else "unknown"


def _refused(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        far = row["far"]
        if far and far["difference"]["value"] > MAX_FAR_LOSS:
            loss = far["difference"]
            yield (
                f"refused: {name(row)}: loses {loss['value']:.2f} nats "
                f"[{loss['low']:.2f}, {loss['high']:.2f}] on the {far['tokens']:,} tokens that "
                f"depend on the far prompt, whatever its averages"
            )


# Table ------------------------------------------------------------------------

HEADER = (
    "K of layers",
    "g",
    "start",
    "steps",
    "serving",
    "perplexity",
    "above the teacher",
    "KL",
    "agreement",
    "after the prompt",
    "KL",
    "far tokens, nats",
    "others, nats",
    "recall",
    "blocks",
)


def table(document: dict[str, Any]) -> str:
    """Markdown, with what the columns are above it."""
    return f"{describe(document)}\n\n{markdown.table(HEADER, map(_line, document['rows']))}"


def section(document: dict[str, Any]) -> str:
    """The section of the page of measurements."""
    lines, _ = verdict(document["rows"])
    return markdown.section(
        "What each cut costs in quality",
        describe(document) + " `python -m benchmarks.quality`.",
        rows_table(document["rows"]),
        "The authors' recipe is at the best of its learning rates, which were tried upwards until "
        "one was worse. "
        f"A student that loses more than {MAX_FAR_LOSS:g} nats on the far tokens is refused: it no "
        "longer reads the distant prompt, however close its averages are to the teacher's.",
        "\n".join(f"- {line}" for line in lines if not line.startswith("not measured")),
    )


def rows_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each student."""
    return markdown.table(HEADER, map(_line, rows))


def describe(document: dict[str, Any]) -> str:
    """What was measured, in a paragraph."""
    first = document["rows"][0]
    whole, answers, far, recall = (first[name] for name in ("all", "answers", "far", "recall"))
    sentences = [
        f"{_teacher(document)} on {document['documents']} held-out files, "
        f"{whole['tokens']:,} tokens, where the teacher's perplexity is "
        f"{whole['teacher_perplexity']:.3f}.",
        "K layers keep their keys and values, g upper layers share a cache; an optimiser step has "
        f"{document['tokens_per_step']:,} tokens.",
        "Brackets are 95 % intervals over the files, ± is the standard deviation over seeds.",
        f"From `after the prompt` on, figures are of the {answers['tokens']:,} tokens after a "
        f"prompt of {document['prompt']}: serving `own` keeps their own keys and values, `own+64` "
        "also those of the last 64 prompt tokens.",
    ]
    if far:
        sentences.append(
            f"Far tokens are the {far['tokens']:,} on which the teacher loses more than 1 nat "
            f"without the prompt but its last 64 tokens; with it, it is at {far['teacher']:.3f} "
            f"nats there and at {first['others']['teacher']:.3f} on the others."
        )
    if recall:
        sentences.append(
            f"Recall: {recall['tokens']:,} tokens of identifiers used once before, 256 tokens back "
            f"or more, that are ranked first (teacher {recall['teacher']:.1%})."
        )
    if blocks := first["blocks"]:
        sentences.append(
            f"Blocks: of {blocks['prompts']} functions written greedily from their header, those "
            f"that parse (teacher {blocks['teacher']})."
        )
    return " ".join(sentences)


def _teacher(document: dict[str, Any]) -> str:
    """The subject of a sentence."""
    layers, teacher = document["layers"], document.get("teacher", {"name": "demo"})
    if "tokens" not in teacher:
        return f"The demo model ({layers} layers)"
    parameters, tokens = (teacher[name] / 1e6 for name in ("parameters", "tokens"))
    return (
        f"The teacher `{teacher['name']}` ({layers} layers, {parameters:.1f}M parameters, trained "
        f"on {tokens:.1f}M tokens)"
    )


def _line(row: Row) -> tuple[str, ...]:
    whole, answers, blocks = row["all"], row["answers"], row["blocks"]
    rate = f" at {row['learning_rate']:g}" if row["start"] == "authors" and row["steps"] else ""
    return (
        f"{row['num_key_value_layers']} ({row['share']:.1%})",
        str(row["key_value_group_size"]),
        row["start"],
        f"{row['steps']}{rate}",
        row["mode"],
        *(
            (
                f"{whole['perplexity']:.3f}" + _seeds(row, whole["perplexity_std"]),
                _interval(whole["above"], "+.2%"),
                f"{whole['kl']['value']:.4f}",
                f"{whole['agreement']['value']:.1%}",
            )
            if whole
            else ("", "", "", "")
        ),
        _interval(answers["above"], "+.2%"),
        f"{answers['kl']['value']:.4f}",
        _beside_teacher(row, "far", ".3f"),
        _beside_teacher(row, "others", ".3f"),
        _beside_teacher(row, "recall", ".1%"),
        "" if blocks is None else str(blocks["student"]),
    )


def _seeds(row: Row, spread: float) -> str:
    return f" ± {spread:.3f}" if len(row["seeds"]) > 1 else ""


def _interval(figure: dict[str, float], form: str) -> str:
    value, low, high = (format(figure[part], form) for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _beside_teacher(row: Row, part: str, form: str) -> str:
    """The student's figure, and its difference from the teacher's."""
    if row[part] is None:
        return ""
    return f"{row[part]['student']:{form}} ({_interval(row[part]['difference'], f'+{form}')})"
