"""Draws follow the distribution asked for, row by row, and depend on nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax import UsageError
from swiftkv_jax.infer.sampling import SamplingParams, make_sampling, sample

PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.25, 0.15, 0.05])
DRAWS = 20_000

jitted_sample = jax.jit(sample)


def frequencies(**params) -> np.ndarray:
    sampling = make_sampling(SamplingParams(**params), range(DRAWS), ())
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)) + 7, (DRAWS, 6))
    tokens = jitted_sample(logits, sampling, jnp.full(DRAWS, 3))
    return np.bincount(np.asarray(tokens), minlength=6) / DRAWS


def normal(weights) -> np.ndarray:
    return np.asarray(weights) / np.sum(weights)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 1.0}, PROBABILITIES),
        ({"temperature": 0.5}, normal(PROBABILITIES**2)),
        ({"temperature": 2.0}, normal(PROBABILITIES**0.5)),
        ({"temperature": 1.0, "top_k": 1}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 3}, normal([0, 0.4, 0, 0.25, 0.15, 0])),
        ({"temperature": 1.0, "top_k": 100}, PROBABILITIES),
        ({"temperature": 1.0, "top_p": 0.01}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.5}, normal([0, 0.4, 0, 0.25, 0, 0])),
        ({"temperature": 1.0, "top_p": 0.75}, normal([0, 0.4, 0, 0.25, 0.15, 0])),
        # of equals the lower id ranks first: tokens 0 and 5 are both the fifth likeliest
        ({"temperature": 1.0, "top_k": 5}, normal([0.05, 0.4, 0.1, 0.25, 0.15, 0])),
        # top_p counts within what top_k left: 0.4 of 0.65 is 0.615
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 1e-30}, [0, 1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_frequencies(params, expected):
    found = frequencies(**params)
    deviation = np.sqrt(np.maximum(np.multiply(expected, 1 - np.asarray(expected)), 0) / DRAWS)
    assert np.all(np.abs(found - expected) <= 4.5 * deviation), found


def test_rows_do_not_see_each_other():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 50)), jnp.float32)
    position = jnp.array([3, 9, 3, 1])
    rows = [
        make_sampling(SamplingParams(temperature=t, top_k=k, top_p=p, seed=5), [row], ())
        for row, (t, k, p) in enumerate([(0.0, 0, 1.0), (1.5, 0, 1.0), (1.5, 7, 1.0), (1.5, 0, 0.9)])
    ]
    together = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)
    mixed = jitted_sample(logits, together, position).tolist()
    alone = [int(jitted_sample(logits[i : i + 1], rows[i], position[i : i + 1])[0]) for i in range(4)]
    assert mixed == alone
    assert mixed[0] == int(logits[0].argmax())


def test_draws_depend_on_seed_row_and_position():
    logits = jnp.zeros((64, 1000))

    def draw(seed=0, first=0, position=0):
        params = SamplingParams(temperature=1.0, seed=seed)
        return jitted_sample(logits, make_sampling(params, range(first, first + 64), ()), jnp.full(64, position)).tolist()

    assert draw() == draw()
    assert len({tuple(draw()), tuple(draw(seed=1)), tuple(draw(seed=2**32 - 1)), tuple(draw(first=64)), tuple(draw(position=1))}) == 5
    assert draw(first=1)[:63] == draw()[1:]


def test_one_program_for_all_mixtures():
    traced = []

    @jax.jit
    def program(logits, sampling, position):
        traced.append(logits)
        return sample(logits, sampling, position)

    for params in (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=4),
        SamplingParams(temperature=0.7, top_p=0.4, seed=9),
    ):
        program(jnp.zeros((2, 8)), make_sampling(params, [0, 1], ()), jnp.zeros(2, jnp.int32))
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5 must be"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"temperature": float("inf")}, "temperature=inf must be"),
        ({"top_k": -1}, "top_k=-1 must be 0 (off) or more"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.01}, "top_p=1.01 must be above 0"),
        ({"top_p": float("nan")}, "top_p=nan must be above 0"),
        ({"seed": -1}, "seed=-1 must be from 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296 must be from 0 to 4294967295"),
    ],
    ids=str,
)
def test_bad_parameters_are_named(params, message):
    with pytest.raises(UsageError) as error:
        SamplingParams(**params)
    assert str(error.value).startswith(message)


def test_ignore_eos_forgets_the_end_tokens():
    params = SamplingParams()
    assert make_sampling(params, [0, 1], (5, 6)).end_ids.tolist() == [[5, 6]] * 2
    assert make_sampling(dataclasses.replace(params, ignore_eos=True), [0, 1], (5, 6)).end_ids.tolist() == [[-1, -1]] * 2
