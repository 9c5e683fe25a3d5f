"""Rows of two documents, made without measuring."""

from typing import Any

from benchmarks.quality import bootstrap, students, summary
from benchmarks.quality.held_out import PROMPT
from benchmarks.quality.verdict import Row
from swiftkv_jax.train.recipe import Init


def sums(nll: float, first: float = 0.5) -> dict[str, list[float]]:
    """Of two documents of 10 tokens."""
    return {
        "nll": [10 * nll] * 2,
        "kl": [1.0] * 2,
        "agreement": [8.0] * 2,
        "first": [10 * first] * 2,
    }


TEACHER: dict[str, Any] = {
    "layers": 8,
    "blocks": [True, True],
    "sums": {
        name: sums(2.0) | {"count": [10, 10]}
        for name in ("all", "answers", "far", "others", "recall")
    },
}


def cell(
    nll: float, *, far: float = 2.0, modes: tuple[str, ...] = ("boundary",), rate=2e-3, seed=0
):
    parts = {name: sums(nll) for name in ("all", "answers", "others")}
    parts |= {"far": sums(far), "recall": sums(nll, first=0.4)}
    return {
        "learning_rate": rate,
        "seed": seed,
        "modes": {
            mode: {
                name: part for name, part in parts.items() if name != "all" or mode == "boundary"
            }
            for mode in modes
        },
        "blocks": {"boundary": [True, False]},
    }


HALF = students.Arm(4, 1, "closed-form", 0)


def rows(arm: students.Arm, *cells) -> list[Row]:
    return summary.rows_of(arm, cells, cells, TEACHER, bootstrap.draws(2))


def trained(start: Init, *rates_and_losses: tuple[float, float], seeds: int = 1) -> Row:
    """The row of a student of several learning rates, of which the first counts."""
    arm = students.Arm(4, 2, start, 32)
    tried = [cell(loss, rate=rate) for rate, loss in rates_and_losses]
    first = [
        dict(tried[0], seed=seed) | {"modes": cell(rates_and_losses[0][1] + seed / 100)["modes"]}
        for seed in range(seeds)
    ]
    (row,) = summary.rows_of(arm, first, tried, TEACHER, bootstrap.draws(2))
    return row


def document(*found: Row, **facts) -> dict[str, Any]:
    return {
        "command": "quality",
        "date": "2026-01-01",
        "device": {"kind": "cpu"},
        "layers": 8,
        "documents": 2,
        "prompt": PROMPT,
        "tokens_per_step": 4096,
        "rows": list(found),
    } | facts
