"""From sums over documents to the rows of a table, with intervals.

Intervals are of a paired bootstrap (`bootstrap`). They say how much a figure hangs on the choice of
documents; the spread over seeds is a standard deviation, and stands apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftkv_jax.model.config import GeneratedKV

from .bootstrap import interval
from .students import Arm

Cell = dict[str, Any]
"""A measured student, see `__main__`."""
_SCORED = {"boundary": "all", "own": "answers"}
"""Mode -> the predictions by which learning rates are compared."""


def loss(cell: Cell, mode: GeneratedKV = "boundary") -> float:
    """Summed cross-entropy served as `mode` says, on all predictions, or on those after the prompt
    with own keys and values; infinite for a student that diverged."""
    return _of(cell, mode, _SCORED[mode], "nll") if cell["modes"] else math.inf


def rows_of(
    arm: Arm, cells: Sequence[Cell], tried: Sequence[Cell], teacher: Cell, drawn: np.ndarray
) -> list[dict[str, Any]]:
    """A row for each mode: the means over the students of one arm, which differ in their seed.
    `tried` are those of all learning rates. No rows for no students."""
    if not cells:
        return []
    tokens = math.fsum(teacher["sums"][_SCORED[arm.generated_kv]]["count"])
    rates = {
        f"{cell['learning_rate']:g}": (
            math.exp(loss(cell, arm.generated_kv) / tokens) if cell["modes"] else None
        )
        for cell in tried
    }
    return [
        {
            "num_key_value_layers": arm.num_key_value_layers,
            "share": arm.num_key_value_layers / teacher["layers"],
            "key_value_group_size": arm.key_value_group_size,
            "start": arm.start,
            "generated_kv": arm.generated_kv,
            "trains_own": arm.trains_own,
            "steps": arm.steps,
            "loss": arm.loss,
            "learning_rate": cells[0]["learning_rate"] if arm.steps else None,
            "perplexity_of_rates": rates if arm.steps else None,
            "rates_mode": arm.generated_kv if arm.steps else None,
            "seeds": [cell["seed"] for cell in cells],
            "mode": mode,
            "all": _text("all", mode, cells, teacher, drawn),
            "answers": _text("answers", mode, cells, teacher, drawn),
            "far": _far(mode, cells, teacher, drawn),
            "others": _paired("others", "nll", mode, cells, teacher, drawn),
            "recall": _paired("recall", "first", mode, cells, teacher, drawn),
            "blocks": _blocks(mode, cells, teacher),
            "documents": _documents(mode, cells),
        }
        for mode in cells[0]["modes"]
    ]


def _text(
    name: str, mode: str, cells: Sequence[Cell], teacher: Cell, drawn: np.ndarray
) -> dict[str, Any] | None:
    """Perplexity, divergence and agreement on a set of predictions."""
    nll = _mean_sums(name, "nll", mode, cells)
    if nll is None:
        return None
    counts, reference = (np.array(teacher["sums"][name][score]) for score in ("count", "nll"))
    perplexities = [math.exp(_of(cell, mode, name, "nll") / counts.sum()) for cell in cells]
    above = interval(nll - reference, counts, drawn, transform=np.expm1)
    return {
        "tokens": int(counts.sum()),
        "teacher_perplexity": math.exp(reference.sum() / counts.sum()),
        "perplexity": math.exp(nll.sum() / counts.sum()),
        "perplexity_std": _spread(perplexities),
        "above": above,
        "kl": interval(_sums(name, "kl", mode, cells), counts, drawn),
        "agreement": interval(_sums(name, "agreement", mode, cells), counts, drawn),
    }


def _paired(
    name: str, score: str, mode: str, cells: Sequence[Cell], teacher: Cell, drawn: np.ndarray
) -> dict[str, Any] | None:
    """A mean score of student and teacher, and their difference."""
    student = _mean_sums(name, score, mode, cells)
    counts, reference = (np.array(teacher["sums"][name][part]) for part in ("count", score))
    if student is None or not counts.sum():
        return None
    means = [_of(cell, mode, name, score) / counts.sum() for cell in cells]
    return {
        "tokens": int(counts.sum()),
        "teacher": float(reference.sum() / counts.sum()),
        "student": float(student.sum() / counts.sum()),
        "student_std": _spread(means),
        "difference": interval(student - reference, counts, drawn),
    }


def _far(
    mode: str, cells: Sequence[Cell], teacher: Cell, drawn: np.ndarray
) -> dict[str, Any] | None:
    """Nats, and the divergence: a student may lose none and still answer otherwise."""
    found = _paired("far", "nll", mode, cells, teacher, drawn)
    if found is not None:
        found["kl"] = interval(
            _sums("far", "kl", mode, cells), teacher["sums"]["far"]["count"], drawn
        )
    return found


def _blocks(mode: str, cells: Sequence[Cell], teacher: Cell) -> dict[str, Any] | None:
    """Of the first seed: generation is not repeated for the others."""
    student, reference = cells[0]["blocks"].get(mode), teacher["blocks"]
    if student is None or reference is None:
        return None
    return {"prompts": len(reference), "teacher": sum(reference), "student": sum(student)}


def _documents(mode: str, cells: Sequence[Cell]) -> dict[str, list[float]]:
    """Summed cross-entropy in each document, to compare students with each other."""
    sets = {"text": "all" if "all" in cells[0]["modes"][mode] else "answers", "far": "far"}
    found = {name: _mean_sums(scored, "nll", mode, cells) for name, scored in sets.items()}
    return {name: sums.round(3).tolist() for name, sums in found.items() if sums is not None}


def _mean_sums(name: str, score: str, mode: str, cells: Sequence[Cell]) -> np.ndarray | None:
    """f64[documents]: means over the students; None if the mode has no such set."""
    return None if name not in cells[0]["modes"][mode] else _sums(name, score, mode, cells)


def _sums(name: str, score: str, mode: str, cells: Sequence[Cell]) -> np.ndarray:
    return np.mean([cell["modes"][mode][name][score] for cell in cells], axis=0)


def _of(cell: Cell, mode: str, name: str, score: str) -> float:
    return math.fsum(cell["modes"][mode][name][score])


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
