"""The measured students of all teachers: a section of `docs/measurements.md`, and a page in
`docs/results` for each teacher."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .. import markdown
from ..teachers.__main__ import TEACHERS
from .overview import STEPS, bars_table, comparisons_table, cuts_table
from .plot import STEPS as PLOTTED
from .students import STARTS
from .table import LEGEND, TERMS, describe, describe_answers, rows_table
from .verdict import Row, key

TITLE = "What each cut costs in quality"
PICTURE = "quality"
CAUSES = (
    "Why bars are missed. An untrained student has keys and values that are a linear function of "
    "one hidden state, and [the rest of what upper layers compute is lost]"
    "(#what-limits-the-closed-form): in t2 mostly with the keys, in t1 with keys and values alike. "
    "More calibration tokens change little for the demo model. Training wins a part of it back. "
    "For t1 and t2 half of the layers, and more so 37.5 % of them, is too early a cut: later ones "
    "lose little ([choosing the cut](training.md#choosing-the-cut)).\n\n"
    "Why students are mixed or worse. Without groups, served with `own`: ours lose more nats on "
    "far tokens. Those of t2 are nearer to the teacher by KL all the same, on far tokens too; why "
    "they lose more nats is not known. With groups, those made for `own` lose less on far tokens "
    "and have a higher perplexity, which their scaled queries do, and the others the opposite. "
    "Served with `boundary`: after 512 steps at half of t2's layers or fewer the authors' recipe "
    "has the lower perplexity at the best of four learning rates, 0.004. At 0.002, the only one of "
    "ours, it has the higher one."
)
GAPS = (
    "Not measured: t1 after 512 steps but for two students, with `leader`, with more than four "
    "layers in a group, and its functions; t2 by the authors' recipe with 25 % of the layers after "
    "512 steps, with more than four layers in a group and trained, but for six at 62.5 % and for "
    "the authors' eight at 50 %, after 64 steps; its functions after training. Trained students of "
    "t1 but for one, and most of t2, have one seed."
)


def section(documents: Iterable[dict[str, Any]]) -> str:
    """The section of all teachers, the demo model first."""
    teachers = by_teacher(documents)
    return markdown.section(
        TITLE,
        "A student is compared with its teacher on held-out text; `python -m benchmarks.quality`.",
        TERMS,
        "\n".join(f"- {_about(document)}" for document in teachers.values()),
        f"Students without training, and after {_listed(STEPS[1:])} steps, served with `boundary`: "
        f"how far their perplexity is above the teacher's on all tokens, and the nats lost on far "
        f"tokens. Stars mark those that are refused. Cuts below half of the layers are on the "
        f"teachers' pages. Empty cells were not measured.",
        cuts_table(teachers),
        f"![Perplexity above the teacher and nats lost on far tokens over K, of all teachers]"
        f"(img/{PICTURE}-teachers.png)",
        f"All teachers' students from the closed form without groups, and the demo model's with "
        f"groups after {PLOTTED} steps, all served with `boundary`. With `g = all` all upper "
        f"layers share one cache.",
        f"![The same of the demo model with groups and by both recipes](img/{PICTURE}.png)",
        f"Trained students from the closed form beside those of the authors' recipe of the same "
        f"cut, groups and steps. Better: perplexity is lower, and the loss on far tokens is not "
        f"higher; mixed: one is lower, the other is higher; worse: one is higher, none is lower; "
        f"undecided: the rest ([how figures are compared](results/{page_name('demo')}), where "
        f"serving with `own` without a tail is compared too). Those made for `own` with groups "
        f"were trained for `boundary` and then scaled; the authors' are always trained for "
        f"`boundary`.",
        comparisons_table(teachers),
        "Required of students, which are named by the share of their lower layers, what they are "
        "made for (`boundary`, or `own` where it is named after the start), and how they are "
        "served:",
        bars_table(teachers),
        CAUSES,
        GAPS,
    )


def _about(document: dict[str, Any]) -> str:
    teacher = _teacher(document)["name"]
    made = "" if teacher == "demo" else f"{made_by(document)} "
    page = f"[All students](results/{page_name(teacher)}) are on another page, with intervals."
    return f"{describe(document)} {made}{page}"


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, numbers))


def title(teacher: str) -> str:
    return TITLE if teacher == "demo" else f"{TITLE}: the teacher {teacher}"


def page_name(teacher: str) -> str:
    return f"quality-{teacher}.md"


def pages(documents: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(file name, title and text) of the page of each teacher's students."""
    for teacher, document in by_teacher(documents).items():
        command = "`python -m benchmarks.quality`."
        if teacher != "demo":
            command = f"`python -m benchmarks.quality --teacher FOLDER`. {made_by(document)}"
        merging = (
            "The table joins all runs, whose commands, with their cuts, steps and learning rates, "
            "are in [the result files](files.md). If a student was measured more than once, it "
            "shows the best learning rate, then the row of more seeds, then the newest. Students "
            "without a row were not measured."
        )
        about = f"{describe(document)} {describe_answers(document)}"
        command += f" {_measured_on(document['devices'])}"
        parts = [f"# {title(teacher)}: all students", about, f"Made by {command}", merging, LEGEND]
        yield page_name(teacher), "\n\n".join([*parts, rows_table(document["rows"])])


def is_under_trained(teacher: Mapping[str, Any]) -> bool:
    """Whether a teacher had fewer steps than `benchmarks.teachers` gives it."""
    default = _default_steps(teacher)
    return teacher.get("steps", default) < default


def _default_steps(teacher: Mapping[str, Any]) -> int:
    """Those of `benchmarks.teachers`, or of the teacher where it has none of that name."""
    name = teacher["name"]
    return TEACHERS[name].steps if name in TEACHERS else teacher.get("steps", 0)


def _measured_on(devices: Sequence[str]) -> str:
    """Where the students were trained and measured, and the precision there."""
    named = " and ".join("a CPU" if kind == "cpu" else f"an {kind}" for kind in devices)
    gpu = any(kind != "cpu" for kind in devices)
    return f"Measured on {named}, in float32" + (
        " (on the GPU with products in TF32, XLA's default)." if gpu else "."
    )


def made_by(document: dict[str, Any]) -> str:
    """How the teacher that was measured is made."""
    teacher = document["teacher"]
    name, steps = teacher["name"], teacher.get("steps")
    command, note = f"python -m benchmarks.teachers {name} FOLDER", ""
    default = _default_steps(teacher)
    if steps is not None and steps != default:
        command += f" --steps {steps}"
    if is_under_trained(teacher):
        note = (
            f" It is under-trained: it had {steps:,} steps ({teacher['tokens'] / 1e6:.1f}M tokens) "
            f"and the command's default is {default:,}."
        )
    return (
        f"`{command}` trains this teacher on the source of installed packages. The held-out text "
        f"comes from other packages.{note}"
    )


def by_teacher(documents: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name of each teacher, the demo model's first -> its results, merged."""
    groups = itertools.groupby(sorted(documents, key=_order), key=_teacher_name)
    return {teacher: merged(list(of_teacher)) for teacher, of_teacher in groups}


def _teacher(document: dict[str, Any]) -> dict[str, Any]:
    return document.get("teacher", {"name": "demo"})


def _teacher_name(document: dict[str, Any]) -> str:
    return _teacher(document)["name"]


def _order(document: dict[str, Any]) -> tuple[bool, str, str]:
    teacher = _teacher_name(document)
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
    rows = _with_all_rates(list(found.values()))
    devices = sorted({one["device"]["kind"] for one in documents})
    return first | {"devices": devices, "rows": sorted(rows, key=_row_order)}


def _with_all_rates(rows: list[Row]) -> list[Row]:
    """The rows, each with the learning rates that were tried for its student, however it was served
    when they were: rates are compared in one mode."""
    tried: dict[tuple, dict[str, float]] = {}
    for row in rows:
        tried.setdefault(_trained(row), {}).update(row["perplexity_of_rates"] or {})
    return [row | {"perplexity_of_rates": tried[_trained(row)] or None} for row in rows]


def _trained(row: Row) -> tuple:
    """Which student it is, however it is served, and where its learning rates were compared."""
    lower, group, start, steps, _, fitted, loss = key(row)
    return lower, group, start, steps, fitted, loss, row.get("rates_mode", "boundary")


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
