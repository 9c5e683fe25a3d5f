"""Teacher and student side by side, from the files of the harness."""

from __future__ import annotations

import collections
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Report = dict[str, dict[str, Any]]
"""Tables of the harness, each with a row for every task or group, and of each task its `samples`:
filter -> document -> metrics."""
TABLES = "results groups group_subtasks n-shot".split()


def read_report(folder: Path) -> Report:
    """Read what the runs of the harness have written to `folder`, with `--log_samples`."""
    report: Report = collections.defaultdict(dict)
    for path in folder.rglob("results_*.json"):
        tables = json.loads(path.read_text())
        for name in TABLES:
            report[name] |= tables.get(name, {})
    for path in folder.rglob("samples_*.jsonl"):
        task = path.stem.removeprefix("samples_").rpartition("_")[0]  # the date follows
        filters: dict[str, dict[Any, Any]] = collections.defaultdict(dict)
        with path.open() as lines:
            for sample in map(json.loads, lines):
                kept = {name: sample.get(name) for name in sample["metrics"]}
                filters[sample["filter"]][sample["doc_id"]] = kept
        report["samples"][task] = filters
    return report


def scores(teacher: Report, student: Report) -> Iterator[dict[str, Any]]:
    """Yield the columns of `table` for every metric of a task or a group, in the teacher's order,
    and `stderr`: the standard error of the mean difference of the same documents, far smaller than
    those of the two scores; None for a metric that is no mean over documents."""
    first, second = (one["results"] | one["groups"] for one in (teacher, student))
    for task, row in first.items():
        for name, before in row.items():
            metric, comma, filter = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(before, int | float):
                pairs = list(_paired(teacher, student, task, filter, metric))
                yield {
                    "task": task,
                    "shots": teacher["n-shot"].get(task, ""),
                    "filter": filter,
                    "metric": metric,
                    "teacher": before,
                    "student": second[task][name],
                    "difference": second[task][name] - before,
                    "stderr": _stderr(before, pairs),
                }


def _paired(
    teacher: Report, student: Report, name: str, filter: str, metric: str
) -> Iterator[tuple[Any, Any]]:
    """Yield a metric of each document by teacher and student, all tasks of a group together; None
    for a document that only one of them has."""
    inner = teacher["group_subtasks"].get(name) or ()
    for task in inner:
        yield from _paired(teacher, student, task, filter, metric)
    if not inner:
        first, second = (one["samples"].get(name, {}).get(filter, {}) for one in (teacher, student))
        for document in first | second:
            yield first.get(document, {}).get(metric), second.get(document, {}).get(metric)


def _stderr(before: float, pairs: list[tuple[Any, Any]]) -> float | None:
    numbers = all(isinstance(one, int | float) for pair in pairs for one in pair)
    if len(pairs) < 2 or not numbers:
        return None
    if not math.isclose(statistics.fmean(first for first, _ in pairs), before, abs_tol=1e-6):
        return None
    return statistics.stdev(second - first for first, second in pairs) / math.sqrt(len(pairs))


def table(found: list[dict[str, Any]]) -> str:
    """A Markdown table of `scores`."""
    head = "task shots filter metric teacher student difference".split()
    lines = [head, ["---"] * len(head)]
    for one in found:
        numbers = [f"{one['teacher']:.4f}", f"{one['student']:.4f}", f"{one['difference']:+.4f}"]
        if one["stderr"] is not None:
            numbers[-1] += f" ± {one['stderr']:.4f}"
        lines.append([*(str(one[name]) for name in head[:4]), *numbers])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
