"""Tables of the harness's reports, for one model or for teacher and student side by side."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

Report = Mapping[str, Any]
"""Report of `tasks.run_tasks`."""
Estimate = tuple[float, float | None]
"""A value and its standard error, None where that is unknown."""


@dataclasses.dataclass(frozen=True)
class Score:
    """One metric of a task or a group, in each report."""

    task: str
    filter: str
    """Name of the filter that extracts answers from generated text; "none" for choices."""
    metric: str
    shots: Any
    values: tuple[Estimate, ...]
    """One for each report."""
    difference: Estimate | None
    """Score of the second of two reports minus that of the first. Its error is that of the mean
    difference of the same documents, far smaller than those of the two scores; None for a metric
    that is no mean over documents."""


def scores(reports: Mapping[str, Report]) -> Iterator[Score]:
    """Yield all scores in the order of the first report, tasks before groups."""
    first, *_ = every = list(reports.values())
    for task, table in _tables(first).items():
        for name in table:
            metric, comma, filter = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(table[name], int | float):
                values = tuple(_estimate(_tables(one)[task], metric, filter) for one in every)
                gap = None
                if len(every) == 2:
                    pairs = _paired(every[0], every[1], task, metric, filter)
                    gap = _difference(values[0][0], values[1][0], pairs)
                shots = first.get("n-shot", {}).get(task, "")
                yield Score(task, filter, metric, shots, values, gap)


def _tables(report: Report) -> dict[str, dict[str, Any]]:
    return report["results"] | report.get("groups", {})


def _estimate(table: Mapping[str, Any], metric: str, filter: str) -> Estimate:
    value = float(table[f"{metric},{filter}"])
    error = table.get(f"{metric}_stderr,{filter}")
    if isinstance(error, int | float):  # it is a text where it is unknown
        return value, float(error)
    return value, None


def _difference(before: float, after: float, pairs: list[tuple[float, float]]) -> Estimate:
    mean = math.nan if len(pairs) < 2 else statistics.fmean(first for first, _ in pairs)
    if not math.isclose(mean, before, abs_tol=1e-6):
        return after - before, None
    spread = statistics.stdev(second - first for first, second in pairs)
    return after - before, spread / math.sqrt(len(pairs))


def _paired(
    teacher: Report, student: Report, name: str, metric: str, filter: str
) -> list[tuple[float, float]]:
    """Scores of each document by teacher and student, all tasks of a group together; empty if the
    documents differ or the metric is no number."""
    pairs = []
    for task in _tasks(teacher, name):
        first, second = (_by_document(one, task, metric, filter) for one in (teacher, student))
        if first.keys() != second.keys():
            return []
        pairs += [(first[document], second[document]) for document in first]
    return pairs


def _tasks(report: Report, name: str) -> list[str]:
    """Names of all tasks in a group and its groups; a task's own name."""
    inner = report.get("group_subtasks", {}).get(name) or []
    return [task for one in inner for task in _tasks(report, one)] or [name]


def _by_document(report: Report, task: str, metric: str, filter: str) -> dict[Any, float]:
    return {
        sample["doc_id"]: float(sample[metric])
        for sample in report.get("samples", {}).get(task, [])
        if sample.get("filter") == filter and isinstance(sample.get(metric), int | float)
    }


def table(reports: Mapping[str, Report]) -> str:
    """A Markdown table with a column for each named report; with two, also the second minus the
    first."""
    head = ["task", "shots", "filter", "metric", *reports]
    if len(reports) == 2:
        head.append("difference")
    lines = [head, ["---"] * len(head)]
    for score in scores(reports):
        cells = [score.task, str(score.shots), score.filter, score.metric]
        cells += [_with_error(value) for value in score.values]
        if score.difference is not None:
            cells.append(_with_error(score.difference, sign="+"))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _with_error(estimate: Estimate, *, sign: str = "") -> str:
    value, stderr = estimate
    return f"{value:{sign}.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")
