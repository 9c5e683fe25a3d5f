"""Draws follow the distribution asked for: every parameter against NumPy, over 20,000 rows of one
call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.sampling.metadata import sampling_row
from swiftkv_jax.infer.sampling.penalties import IN_PROMPT, token_counts_of
from swiftkv_jax.infer.sampling.sampler import gumbel_noise, sample

DRAWS = 20_000
V = 16
PROMPT_LENGTH = 3
WEIGHTS = np.array([5, 40, 10, 25, 15, 5, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9.0])
LOGITS = np.log(WEIGHTS) - 1.5
SEEN = token_counts_of([1, 2, 15], 0, V)
SEEN[[2, 3, 4]] += np.array([2, 1, 3], np.uint16)


@jax.jit
def jitted_sample(logits, sampling, token_counts, position):
    return sample(logits, sampling, lambda: jnp.broadcast_to(token_counts, logits.shape), position)


def in_numpy(
    logits, token_counts, params: SamplingParams, ends=(), *, new_tokens: int = 0
) -> np.ndarray:
    """The distribution of a draw, in float64 and by a stable sort."""
    logits = np.array(logits, np.float64)
    if new_tokens < params.min_tokens:
        logits[[*ends, *params.stop_token_ids]] = -np.inf
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    times = token_counts % IN_PROMPT
    scale = np.where(logits > 0, 1 / params.repetition_penalty, params.repetition_penalty)
    logits = np.where(token_counts > 0, logits * scale, logits)
    logits -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / params.temperature)
    weights[weights < params.min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0
    ranked = weights[order] / weights.sum()
    weights[order[np.cumsum(ranked) - ranked >= max(params.top_p, 1e-9) - 1e-12]] = 0
    return weights / weights.sum()


def check_frequencies(found: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-square at 5 standard deviations; what has no probability never comes."""
    possible = expected > 0
    assert found[~possible].sum() == 0
    freedom = max(possible.sum() - 1, 1)
    chi_square = np.sum((found - DRAWS * expected)[possible] ** 2 / (DRAWS * expected[possible]))
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), (chi_square, found / DRAWS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 3, "top_p": 0.5},
        {"repetition_penalty": 3.0},
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 10},  # of three tokens equally likely, two
        {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "top_k": 100},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 0.91},
        {"temperature": 1.0, "top_p": 0.9999},
        {"temperature": 1.0, "top_k": 2, "top_p": 0.6},  # 40 of 65: the first of the two is enough
        {"temperature": 1.0, "min_p": 0.19},
        {"temperature": 2.0, "min_p": 0.19},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "min_p": 0.11, "top_k": 6, "top_p": 0.8},
        {"temperature": 1.0, "repetition_penalty": 1.7},
        {"temperature": 1.0, "repetition_penalty": 0.6},
        {"temperature": 1.0, "presence_penalty": 1.2},
        {"temperature": 1.0, "presence_penalty": -0.7},
        {"temperature": 1.0, "frequency_penalty": 0.6},
        {"temperature": 1.0, "frequency_penalty": -0.4},
        {
            "temperature": 0.8,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "top_k": 9,
        },
        {"temperature": 1.0, "logit_bias": {0: 2.0, 15: -100.0, 6: 1.5}},
        {"temperature": 1.0, "logit_bias": {15: 1.0}, "repetition_penalty": 2.0},
        {"temperature": 1.0, "min_tokens": 2, "stop_token_ids": (1, 4)},
        {"temperature": 1.0, "min_tokens": 1, "stop_token_ids": (1, 4)},
        {"temperature": 1.0, "min_tokens": 2, "ignore_eos": True},
    ],
    ids=str,
)
def test_frequencies_of_draws(fields):
    params = SamplingParams(**fields)
    one = sampling_row(params, eos_token_ids=(3, 0), prompt_length=PROMPT_LENGTH)
    batch = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (DRAWS, *leaf.shape)), one)
    # The row's position stands still, where it has one new token, and its stream moves.
    batch = batch.replace(
        rng_stream=np.stack([np.arange(DRAWS), np.zeros(DRAWS)], axis=1).astype(np.uint32)
    )
    logits = np.broadcast_to(np.float32(LOGITS), (DRAWS, V))
    token = jitted_sample(logits, batch, SEEN, np.full(DRAWS, PROMPT_LENGTH, np.int32)).token
    expected = in_numpy(LOGITS, SEEN, params, () if params.ignore_eos else (3, 0), new_tokens=1)
    check_frequencies(np.bincount(np.asarray(token), minlength=V), expected)


def test_noise_is_fine_where_it_is_large():
    batch = jax.tree.map(
        lambda leaf: leaf[None],
        sampling_row(SamplingParams(seed=1), eos_token_ids=(), prompt_length=1),
    )
    noise = np.sort(np.asarray(gumbel_noise(batch, jnp.zeros(1, jnp.int32), 1_000_000)[0]))
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.006 and abs(noise.var() - np.pi**2 / 6) < 0.02
    assert len(np.unique(noise[-10_000:])) > 9_900  # 23 bits leave 9,400
