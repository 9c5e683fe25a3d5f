"""Min-p, top-k and top-p keep what a stable sort keeps."""

import jax
import numpy as np
import pytest

from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.sampling.sampler import filtered
from tests.infer.sampling.test_sampler import rows

jitted_filter = jax.jit(filtered)


@pytest.mark.short("1000")
@pytest.mark.parametrize("vocab_size", [1000, 128_256])
def test_filters_keep_what_a_stable_sort_keeps(vocab_size):
    """Random values, values with many ties, and all values equal."""
    rng = np.random.default_rng(vocab_size)
    x = rng.normal(size=(8, vocab_size)) * 3
    x[3:6] = np.round(x[3:6])
    x[6] = 0
    x[7, 5:] = -np.inf
    scaled = (x - x.max(axis=-1, keepdims=True)).astype(np.float32)
    for _ in range(6):
        keep, params = [], []
        for row, top_k in enumerate(rng.integers(0, 200, size=8)):
            order = np.argsort(-scaled[row], kind="stable")
            weights = np.exp(np.float64(scaled[row, order]))
            weights[top_k or vocab_size :] = 0
            weights /= weights.sum()
            size = rng.integers(1, 1 + min(np.sum(weights > 1e-6), 5000))
            # Midway between two tokens: no rounding decides which is the last.
            top_p = min(weights[:size].sum() - weights[size - 1] / 2, 1.0)
            params.append(SamplingParams(temperature=1.0, top_k=int(top_k), top_p=top_p))
            keep.append(np.isin(np.arange(vocab_size), order[:size]))
        kept = np.asarray(jitted_filter(np.exp(scaled), rows(*params))) > 0
        assert np.array_equal(kept, np.stack(keep)), (kept.sum(-1), np.stack(keep).sum(-1))


def test_top_p_is_reached_not_passed():
    """Sums of halves, quarters, ... are exact: 3/4 takes two tokens, and what is above it three."""
    weights = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    cases = {0.5: 1, 0.500001: 2, 0.75: 2, 0.750001: 3, 0.9375: 4, 0.94: 5, 1.0: 5}
    batch = rows(*[SamplingParams(temperature=1.0, top_p=p) for p in cases])
    weights = np.tile(weights / weights.max(), (len(cases), 1)).astype(np.float32)
    kept = np.asarray(jitted_filter(weights, batch)) > 0
    assert kept.sum(axis=-1).tolist() == list(cases.values())


def sorted_and_cut(weights: np.ndarray, params: SamplingParams) -> np.ndarray:
    """`filtered` of one row by a stable sort. Masses are those of the sampler: whole units."""
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order] * (weights[order] >= np.float32(params.min_p))
    if params.top_k > 0:
        ranked[params.top_k :] = 0
    if params.top_p < 1:
        share = ranked / ranked.sum(dtype=np.float32)
        mass = np.round(share * np.float32(2**30)).astype(np.int64)
        enough = np.ceil(np.float32(params.top_p) * np.float32(mass.sum()))
        ranked[np.cumsum(mass) - mass >= max(enough, 1)] = 0
    kept = np.zeros_like(weights)
    kept[order] = ranked
    return kept


SORTED = [
    {"top_k": k, "top_p": p, "min_p": m}
    for k in (0, 1, 3, 50, 1000, 5000)
    for p in (1.0, 1e-9, 0.25, 0.5, 0.9, 0.9999)
    for m in (0.0, 0.03125, 1.0)
]


def test_filters_are_those_of_a_sort_bit_for_bit():
    """Weights are powers of two, whose sums are exact, or none, as that of a logit of minus
    infinity; some are too small to count. Equals are many, and the last of them decided by its
    id."""
    rng = np.random.default_rng(5)
    powers = rng.choice([*range(12), *range(100, 126, 5)], size=(len(SORTED), 1000))
    weights = np.float32(2.0) ** -powers.astype(np.float32)
    weights[::2] *= rng.random(weights[::2].shape) < 0.3
    weights[::5] = 1
    weights[1::9] = 0
    weights[:, 7] = 1
    params = [SamplingParams(temperature=0.7, **fields) for fields in SORTED]
    kept = np.asarray(jitted_filter(weights, rows(*params)))
    for fields, row, found, each in zip(SORTED, weights, kept, params, strict=True):
        assert np.array_equal(found, sorted_and_cut(row, each)), fields
