"""Tables of the harness's reports, for one model or for teacher and student side by side."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

Report = Mapping[str, Any]
"""Report of `tasks.Tasks.run`."""


@dataclasses.dataclass(frozen=True)
class Score:
    """One metric of a task or a group."""

    task: str
    filter: str
    """Name of the filter that extracts answers from generated text; "none" for choices."""
    metric: str
    shots: Any
    value: float
    stderr: float | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """Score of the student minus that of the teacher."""

    value: float
    stderr: float | None
    """Standard error of the mean difference of the same documents, far smaller than those of the
    two scores; None for a metric that is no mean over documents."""


def scores(report: Report) -> Iterator[Score]:
    """Yield all scores of a report in its order, tasks before groups."""
    tables = report["results"] | report.get("groups", {})
    for task, table in tables.items():
        for name, value in table.items():
            metric, comma, filter = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                stderr = table.get(f"{metric}_stderr,{filter}")
                stderr = float(stderr) if isinstance(stderr, int | float) else None
                yield Score(
                    task,
                    filter,
                    metric,
                    report.get("n-shot", {}).get(task, ""),
                    float(value),
                    stderr,
                )


def difference(teacher: Report, student: Report, before: Score, after: Score) -> Difference:
    """Difference of `before` and `after`, the same metric of the same task in the two reports."""
    pairs = _paired(teacher, student, before)
    value = after.value - before.value
    if len(pairs) < 2 or not math.isclose(
        statistics.fmean(first for first, _ in pairs), before.value, abs_tol=1e-6
    ):
        return Difference(value, None)
    spread = statistics.stdev(second - first for first, second in pairs)
    return Difference(value, spread / math.sqrt(len(pairs)))


def _paired(teacher: Report, student: Report, score: Score) -> list[tuple[float, float]]:
    """Scores of each document by teacher and student, all tasks of a group together; empty if the
    documents differ or the metric is no number."""
    pairs = []
    for task in _tasks(teacher, score.task):
        first, second = (_by_document(report, task, score) for report in (teacher, student))
        if first.keys() != second.keys():
            return []
        pairs += [(first[document], second[document]) for document in first]
    return pairs


def _tasks(report: Report, name: str) -> list[str]:
    """Names of all tasks in a group and its groups; a task's own name."""
    inner = report.get("group_subtasks", {}).get(name) or []
    return [task for one in inner for task in _tasks(report, one)] or [name]


def _by_document(report: Report, task: str, score: Score) -> dict[Any, float]:
    samples = report.get("samples", {}).get(task, [])
    found = {
        sample["doc_id"]: sample.get(score.metric)
        for sample in samples
        if sample.get("filter") == score.filter
    }
    return {
        document: float(value)
        for document, value in found.items()
        if isinstance(value, int | float)
    }


def table(reports: Mapping[str, Report]) -> str:
    """A Markdown table with a column for each named report; with two, also the second minus the
    first."""
    names = list(reports)
    head = ["task", "shots", "filter", "metric", *names] + (
        ["difference"] if len(names) == 2 else []
    )
    columns = [
        {(score.task, score.filter, score.metric): score for score in scores(report)}
        for report in reports.values()
    ]
    lines = [head, ["---"] * len(head)]
    for key, score in columns[0].items():
        row = [column[key] for column in columns]
        cells = [
            score.task,
            str(score.shots),
            score.filter,
            score.metric,
            *(_with_error(one.value, one.stderr) for one in row),
        ]
        if len(row) == 2:
            gap = difference(reports[names[0]], reports[names[1]], *row)
            cells.append(_with_error(gap.value, gap.stderr, sign="+"))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _with_error(value: float, stderr: float | None, *, sign: str = "") -> str:
    return f"{value:{sign}.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")
