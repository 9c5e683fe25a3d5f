"""Whether students meet the bars, are better than the authors' recipe, or are refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from swiftkv_jax.train.loss.far_tokens import MAX_FAR_LOSS

from . import bootstrap

Row = dict[str, Any]
Outcome = Literal["met", "not met", "mixed", "undecided"]


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


_FIGURES = {
    "above": "perplexity above the teacher",
    "answers above": "perplexity above the teacher after the prompt",
    "far": "far tokens",
}


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
    return _described(row["share"], row["key_value_group_size"], start_of(row), row["steps"]) + (
        f", served with {row['mode']}"
    )


def _described(share: float, group: int, start: str, steps: int) -> str:
    return f"K {share:.1%}, g = {group}, {start}, {f'{steps} steps' if steps else 'untrained'}"


def start_of(row: Row) -> str:
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
        value = measured(bar, rows)
        if value is None:
            yield f"not measured: {bar_name(bar)}", True
            continue
        words = f"{bar_name(bar)} {shown(bar, value)} (bar {shown(bar, bar.limit)})"
        yield f"{'met' if is_met(bar, value) else 'not met'}: {words}", is_met(bar, value)


def measured(bar: Bar, rows: Sequence[Row]) -> float | None:
    """The figure that a bar limits, if it was measured."""
    row = bar.row(rows)
    return None if row is None else _figure(row, bar.figure)


def is_met(bar: Bar, value: float) -> bool:
    """On far tokens a gain is a deviation from the teacher too."""
    return (abs(value) if bar.figure == "far" else value) <= bar.limit


def shown(bar: Bar, value: float) -> str:
    return f"{value:+.3f} nats" if bar.figure == "far" else f"{value:+.2%}"


def bar_name(bar: Bar) -> str:
    start = "closed-form" if bar.mode == "boundary" else "closed-form, own"
    student = _described(bar.share, bar.key_value_group_size, start, bar.steps)
    return f"{student}, served with {bar.mode}: {_FIGURES[bar.figure]}"


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
    """At equal tokens the closed form must be better than the authors' recipe at its best rate, in
    every mode."""
    for ours, authors, outcome in comparisons(rows):
        own, theirs = (row["all"] or row["answers"] for row in (ours, authors))
        yield (
            f"{outcome}: {name(ours)}: perplexity {own['perplexity']:.3f}, authors' recipe at "
            f"its best rate ({_rate(authors)}) {theirs['perplexity']:.3f}"
            + "; far tokens {}, theirs {}".format(*map(_far_loss, (ours, authors))),
            outcome in ("met", "undecided"),
        )


def comparisons(rows: Sequence[Row]) -> Iterator[tuple[Row, Row, Outcome]]:
    """Each student that is distilled from the closed form, the authors' of the same cut, steps and
    mode, where it has been measured, and how the first compares with the second."""
    noise = spread_over_seeds(rows)
    trained = {key(row): row for row in rows if row["steps"]}
    for (lower, group, start, steps, mode, _, loss), ours in trained.items():
        authors = trained.get((lower, group, "authors", steps, mode, "boundary", "distillation"))
        if (start, loss) == ("closed-form", "distillation") and authors is not None:
            yield ours, authors, against(ours, authors, noise)


def spread_over_seeds(rows: Sequence[Row]) -> float | None:
    """The median, over trained students with several seeds, of the standard deviation of perplexity
    relative to it; None if there is none."""
    found = [row["all"] or row["answers"] for row in rows if len(row["seeds"]) > 1]
    if not found:
        return None
    return statistics.median(each["perplexity_std"] / each["perplexity"] for each in found)


def against(ours: Row, authors: Row, noise: float | None = None) -> Outcome:
    """How a student compares with the authors' by perplexity and by the loss on far tokens.

    A figure of ours is lower if it is so by seeds and by files, and higher if it is so by one of
    them. By seeds: by more than two standard errors. A perplexity of one seed has the relative
    spread `noise`, if that is known. By files: the interval of the difference over them does not
    include 0; of rows without sums of files, if no row has several seeds, their intervals do not
    overlap. A loss below 0 on far tokens is no gain and counts as 0. A lower figure of ours does
    not count where the authors' best rate is the smallest or the largest that was tried: another
    rate may be better.

    `met`: perplexity is lower and the far loss is not higher. `mixed`: one is lower, the other is
    higher. `not met`: one is higher and none is lower. Else `undecided`: a lower far loss alone is
    not enough.
    """
    both = ours, authors
    signs = [
        _sign(*(_perplexity(row, noise) for row in both)),
        _sign(*(_clipped_far_loss(row) for row in both)),
    ]
    if _at_edge(authors):
        signs = [max(sign, 0) for sign in signs]
    if 1 in signs:
        return "mixed" if -1 in signs else "not met"
    return "met" if signs[0] < 0 else "undecided"


class _Figure(NamedTuple):
    """A mean over seeds, its standard deviation over them if it is known, their number, its
    interval over the files in the unit of another figure of the same kind, and its sums over the
    files."""

    mean: float
    spread: float | None
    seeds: int
    low: float
    high: float
    files: Sequence[float]


def _perplexity(row: Row, noise: float | None) -> _Figure:
    found = row["all"] or row["answers"]
    above, mean, seeds = found["above"], found["perplexity"], len(row["seeds"])
    assumed = None if noise is None else noise * mean
    files = row.get("documents", {}).get("text", ())
    spread = found["perplexity_std"] if seeds > 1 else assumed
    return _Figure(mean, spread, seeds, above["low"], above["high"], files)


def _clipped_far_loss(row: Row) -> _Figure | None:
    if not row["far"]:
        return None
    lost, seeds = row["far"]["difference"], len(row["seeds"])
    mean, low, high = (max(lost[part], 0.0) for part in ("value", "low", "high"))
    files = row.get("documents", {}).get("far", ())
    return _Figure(mean, row["far"]["student_std"] if seeds > 1 else None, seeds, low, high, files)


def _sign(ours: _Figure | None, theirs: _Figure | None) -> int:
    """-1 where ours is lower, 1 where it is higher, else 0, also where one is unknown."""
    if ours is None or theirs is None or ours.mean == theirs.mean:
        return 0
    found = [
        sign for sign in (_by_seeds(ours, theirs), _by_files(ours, theirs)) if sign is not None
    ]
    return 1 if 1 in found else min(found, key=abs)


def _by_seeds(ours: _Figure, theirs: _Figure) -> int | None:
    """As `_sign`; None where no spread is known. One that is unknown is that of the other."""
    both = ours, theirs
    known = [each.spread for each in both if each.spread is not None]
    if not known:
        return None
    spreads = (known[0] if each.spread is None else each.spread for each in both)
    variances = (spread**2 / each.seeds for spread, each in zip(spreads, both, strict=True))
    gap = ours.mean - theirs.mean
    return int(math.copysign(abs(gap) > 2 * math.sqrt(sum(variances)), gap))


def _by_files(ours: _Figure, theirs: _Figure) -> int | None:
    """As `_sign`; None where sums of files are missing and there are several seeds instead."""
    lower, higher = sorted((ours, theirs), key=lambda each: each.mean)
    sign = 1 if higher is ours else -1
    if not (ours.files and theirs.files):
        return None if max(ours.seeds, theirs.seeds) > 1 else sign * (lower.high < higher.low)
    if lower.mean == 0:  # a loss of nothing, or a gain, which counts as nothing
        return sign * (higher.low > 0)
    return bootstrap.difference(ours.files, theirs.files)


def _at_edge(row: Row) -> bool:
    """Whether another learning rate may be better: one that was tried is, or the row's is the
    smallest or the largest of them."""
    tried = {float(rate): value for rate, value in row["perplexity_of_rates"].items()}
    known = {rate: value for rate, value in tried.items() if value is not None}
    best = min(known, key=known.__getitem__, default=None)
    return row["learning_rate"] in (min(tried), max(tried)) or row["learning_rate"] != best


def _rate(row: Row) -> str:
    edge = ", at the edge of those tried" if _at_edge(row) else ""
    return f"{row['learning_rate']:g}{edge}"


def _far_loss(row: Row) -> str:
    return f"{row['far']['difference']['value']:+.3f} nats" if row["far"] else "unknown"


def _refused(rows: Sequence[Row]) -> Iterator[str]:
    for row in filter(is_refused, rows):
        loss = row["far"]["difference"]
        kl = f" (KL {_far_kl(row):.2f})" if "kl" in row["far"] else ""
        yield (
            f"refused: {name(row)}: loses {loss['value']:.2f} nats [{loss['low']:.2f}, "
            f"{loss['high']:.2f}]{kl} on the {row['far']['tokens']:,} tokens that depend on the "
            f"far prompt, whatever its averages"
        )


def is_refused(row: Row) -> bool:
    """A student that loses much there, or is far from the teacher without a loss: nats and KL have
    one limit."""
    far = row["far"]
    return bool(far) and max(far["difference"]["value"], _far_kl(row)) > MAX_FAR_LOSS


def _far_kl(row: Row) -> float:
    """0 in results that do not have it."""
    return row["far"].get("kl", {}).get("value", 0.0)
