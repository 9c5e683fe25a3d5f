"""The table of a result, and its verdict."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from swiftkv_jax.train.far_tokens import FAR_NATS

from .. import markdown
from .students import PACKAGE_RATES

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
        "train-own" if row.get("trains_own") else row.get("generated_kv", "boundary"),
        row.get("loss", "distillation"),
    )


def name(row: Row) -> str:
    steps = f"{row['steps']} steps" if row["steps"] else "untrained"
    return (
        f"{row['share']:.1%}, g = {row['key_value_group_size']}, {_start(row)}, {steps}, "
        f"{row['mode']}"
    )


def _start(row: Row) -> str:
    """As the table has it."""
    fitted_to = {"boundary": "", "own": ", own", "train-own": ", own (trained for it)"}
    return row["start"] + fitted_to[key(row)[5]]


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
    start = "closed-form" if bar.mode == "boundary" else "closed-form, own"
    return (
        f"{bar.share:.1%}, g = {bar.key_value_group_size}, {start}, {steps}, "
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
    mode."""
    for ours, authors in of_authors(rows):
        own, theirs = (row["all"] or row["answers"] for row in (ours, authors))
        outcome = against(ours, authors)
        yield (
            f"{outcome}: {name(ours)}: perplexity {own['perplexity']:.3f}, authors' recipe at "
            f"its best rate ({_rate(authors)}) {theirs['perplexity']:.3f}"
            + "; far tokens {}, theirs {}".format(*map(_far_loss, (ours, authors))),
            outcome != "not met",
        )


def of_authors(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Each student that is distilled from the closed form, and the authors' of the same cut, steps
    and mode, where it has been measured."""
    trained = {key(row): row for row in rows if row["steps"]}
    for (lower, group, start, steps, mode, _, loss), ours in trained.items():
        authors = trained.get((lower, group, "authors", steps, mode, "boundary", "distillation"))
        if (start, loss) == ("closed-form", "distillation") and authors is not None:
            yield ours, authors


def against(ours: Row, authors: Row) -> str:
    """Whether the student's perplexity is below the authors': undecided where the difference is
    less than two standard errors over seeds, or, with one seed each, the intervals over the files
    overlap, or theirs may be better at a rate not tried yet, their best one being the smallest or
    largest."""
    own, theirs = (row["all"] or row["answers"] for row in (ours, authors))
    gap = theirs["perplexity"] - own["perplexity"]
    if len(ours["seeds"]) == len(authors["seeds"]) == 1:
        lower, upper = (own, theirs) if gap > 0 else (theirs, own)
        is_close = lower["above"]["high"] > upper["above"]["low"]
    else:
        is_close = abs(gap) < 2 * _standard_error(ours, authors)
    if is_close or (gap > 0 and _at_edge(authors)):
        return "undecided"
    return "met" if gap > 0 else "not met"


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
    for row in filter(is_refused, rows):
        loss = row["far"]["difference"]
        yield (
            f"refused: {name(row)}: loses {loss['value']:.2f} nats [{loss['low']:.2f}, "
            f"{loss['high']:.2f}] on the {row['far']['tokens']:,} tokens that depend on the far "
            f"prompt, whatever its averages"
        )


def is_refused(row: Row) -> bool:
    return bool(row["far"]) and row["far"]["difference"]["value"] > MAX_FAR_LOSS


# Table ------------------------------------------------------------------------

HEADER = (
    "K of layers",
    "g",
    "start",
    "steps",
    "serving",
    "perplexity",
    "above the teacher",
    "after the prompt",
    "KL",
    "agreement",
    "far tokens, nats lost",
    "recall",
    "blocks",
    "verdict",
)
_VERDICTS = {"met": "better", "not met": "worse", "undecided": "undecided"}


def table(document: dict[str, Any]) -> str:
    """Markdown, with what the columns are above it."""
    return "\n\n".join([describe(document), LEGEND, rows_table(document["rows"])])


def rows_table(rows: Sequence[Row]) -> str:
    """A line for each student."""
    beside = {key(ours): _VERDICTS[against(ours, authors)] for ours, authors in of_authors(rows)}
    return markdown.table(HEADER, (_line(row, beside.get(key(row), "")) for row in rows))


LEGEND = (
    "K layers keep their keys and values, g upper layers share a cache. Starts are the teacher's "
    "projections (`authors`: their mean in a group; `leader`: those of its first layer) or least "
    "squares (`closed-form`; with `own`, fitted to and trained for own keys and values, with "
    "groups trained for the boundary and then scaled for them). The first "
    "is trained by the authors' recipe at the best of its learning rates, the others by this "
    "package's, or with the text alone, as a control. From `after the prompt` on, figures are of "
    "the tokens after a prompt: serving `own` keeps their own keys and values, `own+64` also those "
    "of the prompt's last 64. "
    "Nats lost below 0 are no gain: the student answers otherwise than the teacher, and happens to "
    "be right more often. Brackets are 95 % intervals over the files, ± is the standard "
    "deviation over seeds; without it there is one. On far tokens the teacher loses more than "
    f"{FAR_NATS:g} nat without the prompt but its last 64 tokens. A student that loses more than "
    f"{MAX_FAR_LOSS:g} there is refused: it no longer reads the distant prompt, however close its "
    "averages are to the teacher's. The verdict also says whether perplexity is better than with "
    "the authors' recipe after as many steps: undecided within two standard errors over seeds, "
    "with one seed each where the intervals overlap, or where its best rate is the last one tried."
)


def describe(document: dict[str, Any]) -> str:
    """What was measured, in a paragraph."""
    rows = document["rows"]
    first = next(row for row in rows if row["all"])
    whole, answers, far, recall = (first[name] for name in ("all", "answers", "far", "recall"))
    sentences = [
        f"{_teacher(document)} on {document['documents']} held-out files, "
        f"{whole['tokens']:,} tokens, where the teacher's perplexity is "
        f"{whole['teacher_perplexity']:.3f}; {answers['tokens']:,} come after a prompt of "
        f"{document['prompt']}. An optimiser step has {document['tokens_per_step']:,} tokens.",
    ]
    if far:
        sentences.append(
            f"{far['tokens']:,} tokens are far, on which the teacher is at {far['teacher']:.3f} "
            f"nats; on the others it is at {first['others']['teacher']:.3f}."
        )
    if recall:
        sentences.append(
            f"Recall: {recall['tokens']:,} tokens of identifiers used once before, 256 tokens back "
            f"or more, that are ranked first, beside the teacher's {recall['teacher']:.1%}."
        )
    if blocks := next((row["blocks"] for row in rows if row["blocks"]), None):
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


def _line(row: Row, verdict: str) -> tuple[str, ...]:
    whole, answers, blocks = row["all"], row["answers"], row["blocks"]
    *_, loss = key(row)
    rate = f" at {row['learning_rate']:g}" if _has_other_rate(row) else ""
    return (
        f"{row['num_key_value_layers']} ({row['share']:.1%})",
        str(row["key_value_group_size"]),
        _start(row),
        f"{row['steps']}{rate}" + (", text alone" if loss == "cross-entropy" else ""),
        row["mode"],
        f"{whole['perplexity']:.3f}" + _seeds(row, whole["perplexity_std"]) if whole else "",
        _interval(whole["above"], "+.2%") if whole else "",
        _interval(answers["above"], "+.2%"),
        f"{answers['kl']['value']:.4f}",
        f"{answers['agreement']['value']:.1%}",
        _beside_teacher(row, "far", "+.3f"),
        _beside_teacher(row, "recall", "+.1%"),
        "" if blocks is None else str(blocks["student"]),
        ", ".join(filter(None, [verdict, "refused" if is_refused(row) else ""])),
    )


def _has_other_rate(row: Row) -> bool:
    """Whether its learning rate is to be named: always with the authors' recipe, with this
    package's where it is not the default."""
    default = () if row["start"] == "authors" else PACKAGE_RATES
    return bool(row["steps"]) and row["learning_rate"] not in default


def _seeds(row: Row, spread: float) -> str:
    return f" ± {spread:.3f}" if len(row["seeds"]) > 1 else ""


def _interval(figure: dict[str, float], form: str) -> str:
    value, low, high = (format(figure[part], form) for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _beside_teacher(row: Row, part: str, form: str) -> str:
    """The difference of the student's figure from the teacher's."""
    return _interval(row[part]["difference"], form) if row[part] else ""
