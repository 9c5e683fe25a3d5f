"""The tables of real models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .. import markdown
from . import documents
from .cells import Program
from .rows import LENGTH, PROMPT

Cell = dict[str, Any]
_COLUMNS = (
    "K",
    "program",
    "served",
    "trained on",
    "prefill",
    "English",
    "code",
    "KL",
    "agreement",
    "far",
    "asked",
    *(task.name for task in documents.TASKS),
    "HumanEval",
)
_TITLES = {"english": "English", "code": "code"}

_ON_THE_PAGE = _COLUMNS.index("HumanEval")
"""Number of columns on the page of measurements: all that every cell has."""

LEGEND = (
    f"`prefill` is the share of the teacher's operations for a prompt of 2,048 tokens. `English` "
    f"and `code` are the perplexity above the teacher's after a prompt of {PROMPT}, in rows of "
    f"{LENGTH} tokens of held-out packages; `far` the nats lost on far tokens of both. The last "
    f"columns are points of questions answered right in every token, student minus teacher, of so "
    f"many as were `asked`: `recall` of values in a register, `questions` about people, and "
    f"`identifiers` to complete, over documents of 512 to 4,096 tokens. ± is one standard error of "
    f"the paired difference; of 44 questions, about one document of each length, it takes those "
    f"about the same document for independent. `own`, 64: answers and the prompt's last 64 tokens "
    f"keep their own keys and values. `restated` is the share of the rows whose answers [repeat "
    f"parts of their prompts](training.md#data)."
)


def summary(cell: Cell) -> str:
    """A line about one cell."""
    parts = [f"{kind} {_percent(text['above'])}" for kind, text in cell["texts"].items()]
    parts.append(f"far {_far(cell)}")
    parts += [f"{name} {_points(found)}" for name, found in cell["tasks"].items()]
    return ", ".join(parts)


def table(found: Sequence[dict[str, Any]]) -> str:
    """All cells of one model's documents."""
    return markdown.table(_COLUMNS, _lines(found))


def section(found: Sequence[dict[str, Any]]) -> str:
    """The section of the page of measurements: models in the order of their names."""
    models = dict[str, list[dict[str, Any]]]()
    for document in found:
        if document["cells"]:
            models.setdefault(document["model"]["name"], []).append(document)
    parts = ["\n\n".join(_parts(each)) for _, each in sorted(models.items())]
    return markdown.section("Students of real models", _INTRODUCTION, LEGEND, *parts)


def _parts(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the page says of one model."""
    yield _describe(found)
    yield _short_table(found)
    yield from _notes(found)
    yield from _human_eval(found)


def _short_table(found: Sequence[dict[str, Any]]) -> str:
    """All cells, without the nats that they lose on answers, and what not every cell has."""
    lines = [
        [text.partition(", +")[0].partition(", -")[0] for text in line[:_ON_THE_PAGE]]
        for line in _lines(found)
    ]
    return markdown.table(_COLUMNS[:_ON_THE_PAGE], lines)


_INTRODUCTION = (
    "`python -m benchmarks.real` fits and measures students, `benchmarks.distill_real` trains them "
    "([how](../CONTRIBUTING.md#measurements)). A program is what the prompt computes above the "
    "cut: the closed form only, a tap on the token before, attention and neurons of upper layers, "
    "or an exact first token."
)


def _describe(found: Sequence[dict[str, Any]]) -> str:
    model = found[-1]["model"]
    settings = found[-1]["settings"]
    cell = found[-1]["cells"][0]
    texts = ", ".join(
        f"{text['teacher_perplexity']:.2f} on {text['tokens']:,} tokens of {_TITLES[kind]}"
        for kind, text in cell["texts"].items()
    )
    asked = {_asked(cell): cell for each in found for cell in each["cells"] if cell["tasks"]}
    answers = "".join(f" It answers {_of_teacher(cell)}." for _, cell in sorted(asked.items()))
    return (
        f"**{model['name']}** ({model['layers']} layers, {model['parameters'] / 1e6:.0f}M "
        f"parameters), closed form fitted to {settings['calibration_tokens']:,} tokens. The "
        f"teacher's perplexity is {texts}; {cell['far']['tokens']:,} are far tokens."
        f"{answers}"
    )


def _asked(cell: Cell) -> str:
    """The number of questions of a task."""
    return str(max((task["questions"] for task in cell["tasks"].values()), default=""))


def _of_teacher(cell: Cell) -> str:
    """Shares of the questions of each task."""
    return ", ".join(
        f"{task['teacher']:.0%} of {task['questions']} of `{name}`"
        for name, task in cell["tasks"].items()
    )


def _notes(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where the students of a model were trained."""
    students = dict[tuple[str, int], list[int]]()
    for cell in (cell for each in found for cell in each["cells"] if "training" in cell):
        run = cell["training"]
        start = run["device"], run["calibration_tokens"]
        students.setdefault(start, []).append(cell["trained_tokens"])
    for (device, tokens), trained in sorted(students.items()):
        amounts = " and ".join(f"{amount / 1e6:.2g}M" for amount in sorted(set(trained)))
        yield f"Trained on {amounts}: {device}, from a start fitted to {tokens:,} tokens."


def _human_eval(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The problems that teacher and students solve, where they were tried."""
    cells = [cell for each in found for cell in each["cells"] if "human_eval" in cell]
    if cells:
        tried = cells[0]["human_eval"]
        points = ", ".join(
            f"{_points(cell['human_eval'])} with {cell['num_key_value_layers']} layers"
            for cell in sorted(cells, key=_order)
        )
        yield (
            f"HumanEval, {tried['problems']} problems: the teacher solves {tried['teacher']:.0%}; "
            f"{points}."
        )


def _trained_on(cell: Cell) -> str:
    tokens = cell["trained_tokens"]
    if not tokens:
        return ""
    share = cell.get("restated_share", 0)
    return f"{tokens / 1e6:.2g}M" + (f", {share:.0%} restated" if share else "")


def _lines(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A line for each cell: where it was measured twice, with more documents or later."""
    by_documents = sorted(found, key=lambda document: document["settings"]["documents"])
    cells = [cell for document in by_documents for cell in document["cells"]]
    newest = {_order(cell): cell for cell in cells}
    for _, cell in sorted(newest.items()):
        yield _line(cell, found[-1]["model"]["layers"])


def _order(cell: Cell) -> tuple[Any, ...]:
    program = cell["exact_head"], cell["prompt_attention_layers"], cell["boundary_taps"]
    program += cell.get("prompt_mlp_neurons", 0), cell.get("key_value_group_size", 0)
    served = cell["generated_kv"] == "boundary", cell["exact_tail"]
    trained = cell["trained_tokens"], cell.get("restated_share", 0)
    return -cell["num_key_value_layers"], program, served, trained


def _line(cell: Cell, layers: int) -> tuple[str, ...]:
    kept = cell["num_key_value_layers"]
    texts = cell["texts"]
    kl, agreement = (
        sum(text[name]["value"] for text in texts.values()) / len(texts)
        for name in ("kl", "agreement")
    )
    tail = cell["exact_tail"]
    return (
        f"{kept} ({kept / layers:.0%})",
        str(
            Program(
                **{field.name: cell.get(field.name, 0) for field in dataclasses.fields(Program)}
            )
        ),
        f"`own`, {tail}" if cell["generated_kv"] == "own" else "`boundary`",
        _trained_on(cell),
        f"{cell['prefill_share']:.1%}",
        *(_percent(texts[kind]["above"]) for kind in ("english", "code")),
        f"{kl:.3f}",
        f"{agreement:.1%}",
        _far(cell),
        _asked(cell),
        *(_answers(cell["tasks"].get(task.name)) for task in documents.TASKS),
        _points(cell.get("human_eval")),
    )


def _percent(figure: dict[str, float]) -> str:
    return f"{figure['value']:+.1%} ± {100 * figure['stderr']:.1f}"


def _far(cell: Cell) -> str:
    far = cell["far"]
    return _nats(far["lost"]) if far["tokens"] else "none"


def _answers(found: dict[str, Any] | None) -> str:
    """The difference of two shares, in points, and the nats lost on an answer."""
    if found is None:
        return ""
    return f"{_points(found)}, {_nats(found['lost'])}"


def _nats(figure: dict[str, float]) -> str:
    return f"{figure['value']:+.2f} ± {figure['stderr']:.2f}"


def _points(found: dict[str, Any] | None) -> str:
    """A difference of two shares, in points."""
    if found is None:
        return ""
    difference = found["difference"]
    return f"{100 * difference['value']:+.0f} ± {100 * difference['stderr']:.0f}"
