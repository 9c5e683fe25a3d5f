"""Paired bootstrap over documents: they are drawn with replacement, and two models are compared on
the same draws (Koehn, "Statistical Significance Tests for Machine Translation Evaluation", 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

RESAMPLES = 2_000
CONFIDENCE = 0.95


@lru_cache(maxsize=8)
def draws(num_documents: int) -> np.ndarray:
    """f64[`RESAMPLES`, documents]: how often each document is drawn. The array is shared between
    calls and read-only; it holds floats because products with it would convert integers anew."""
    share = np.full(num_documents, 1 / num_documents)
    drawn = np.random.default_rng(0).multinomial(num_documents, share, size=RESAMPLES)
    drawn = drawn.astype(np.float64)
    drawn.setflags(write=False)
    return drawn


def interval(
    sums: Sequence[float] | np.ndarray,
    counts: Sequence[float] | np.ndarray,
    drawn: np.ndarray,
    transform: Callable[[Any], Any] = lambda mean: mean,
) -> dict[str, float] | None:
    """The mean sum(sums) / sum(counts), transformed, and the ends of its interval; None if nothing
    was counted. Draws without any count are left out."""
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if not counts.sum():
        return None
    totals = drawn @ counts
    means = (drawn @ sums)[totals > 0] / totals[totals > 0]
    tail = 50 * (1 - CONFIDENCE)
    low, high = transform(np.percentile(means, [tail, 100 - tail]))
    return {
        "value": float(transform(sums.sum() / counts.sum())),
        "low": float(low),
        "high": float(high),
    }


def difference(ours: Sequence[float], theirs: Sequence[float]) -> int:
    """-1 where the sums of `ours` over documents are lower than `theirs`, 1 where they are higher,
    0 where the interval of the difference includes 0."""
    sums = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    found = interval(sums, np.ones(len(sums)), draws(len(sums)))
    assert found is not None
    return int(found["low"] > 0) - int(found["high"] < 0)
