"""Every transformation is NumPy's, and a row depends on nothing but itself: no other row, no mesh,
no program of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from swiftkv_jax.infer.engine.sampler_output import NON_FINITE
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.sampling.logprobs import gather_logprobs
from swiftkv_jax.infer.sampling.metadata import SamplingMetadata, empty_sampling, sampling_row
from swiftkv_jax.infer.sampling.penalties import IN_PROMPT, apply_penalties
from swiftkv_jax.infer.sampling.sampler import gumbel_noise, sample

V = 16
PROMPT_LENGTH = 3


@jax.jit
def jitted_sample(logits, sampling, token_counts, position):
    return sample(logits, sampling, lambda: token_counts, position)


jitted_penalties = jax.jit(apply_penalties)


def rows(
    *params: SamplingParams, streams=None, eos_token_ids=(), prompt_length=PROMPT_LENGTH
) -> SamplingMetadata:
    streams = streams or [(i, 0) for i in range(len(params))]
    made = [
        sampling_row(p, rng_stream=s, eos_token_ids=eos_token_ids, prompt_length=prompt_length)
        for p, s in zip(params, streams, strict=True)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *made)


def positions(batch: int, position: int = PROMPT_LENGTH) -> np.ndarray:
    return np.full(batch, position, np.int32)


def test_edits_are_those_of_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 500)).astype(np.float32) * 5
    token_counts = (
        rng.integers(0, 5, size=(3, 500)) + IN_PROMPT * rng.integers(0, 2, size=(3, 500))
    ).astype(np.uint16)
    params = [
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.2),
        SamplingParams(
            logit_bias={
                int(i): float(b)
                for i, b in zip(rng.permutation(500)[:300], rng.normal(size=300), strict=True)
            }
        ),
        SamplingParams(),
    ]
    edited = np.asarray(jitted_penalties(logits, rows(*params), token_counts, positions(3)))
    times, repetition = (
        (token_counts % IN_PROMPT).astype(np.float32),
        np.where(logits[0] > 0, 1 / 1.3, 1.3),
    )
    expected = (
        np.where(token_counts[0] > 0, logits[0] * repetition, logits[0])
        - 0.7 * (times[0] > 0)
        + 0.2 * times[0]
    )
    np.testing.assert_allclose(edited[0], expected, rtol=1e-5, atol=1e-5)
    expected = logits[1].copy()
    expected[list(params[1].logit_bias)] += np.array(list(params[1].logit_bias.values()))
    np.testing.assert_allclose(edited[1], expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(edited[2], logits[2])


def test_log_probabilities_are_the_models_own():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 64)).astype(np.float32) * 4
    logits[0, 32:] = logits[0, :32]
    asked = [20, 3, 1, 0, *[None] * 4]
    loud = {"temperature": 3.0, "top_k": 40, "logit_bias": {5: 9.0}, "presence_penalty": 2.0}
    found = jitted_sample(
        logits,
        rows(*[SamplingParams(logprobs=k, **loud) for k in asked]),
        np.ones((8, 64), np.uint16),
        positions(8),
    )
    log_probs = logits - np.log(np.exp(np.float64(logits)).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(
        found.logprob, [*log_probs[np.arange(4), np.asarray(found.token)[:4]], *[0] * 4], atol=1e-5
    )
    for row, k in enumerate(asked):
        order = np.argsort(-logits[row], kind="stable")[: k or 0]
        rest = 20 - len(order)
        assert np.asarray(found.top_ids)[row].tolist() == [*order, *[-1] * rest]
        np.testing.assert_allclose(
            found.top_logprobs[row], [*log_probs[row, order], *[-np.inf] * rest], atol=1e-5
        )


@pytest.mark.parametrize("vocab_size", [5, 33, 1000])
def test_the_likeliest_are_those_of_a_stable_sort(vocab_size):
    """Few values, so that most are equal; and one row with no more than three that are possible."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(0, 1 + np.arange(64)[:, None] * 4, size=(64, vocab_size)).astype(
        np.float32
    )
    logits[0, 3:] = -np.inf
    token, asked = logits.argmax(axis=-1), np.full(64, 20)
    _, ids, values = jax.jit(gather_logprobs)(logits, token, asked)
    size = min(20, vocab_size)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :size]
    assert np.array_equal(np.asarray(ids)[:, :size], order)
    assert np.all(np.asarray(ids)[:, size:] == -1)
    expected = np.take_along_axis(logits, order, axis=-1) - np.log(
        np.exp(np.float64(logits)).sum(axis=-1, keepdims=True)
    )
    np.testing.assert_allclose(np.asarray(values)[:, :size], expected, atol=1e-4)


def mixture() -> list[SamplingParams]:
    """One row of each kind, and one of all together."""
    fields = [
        {},
        {"temperature": 1.5},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.5, "top_p": 0.9, "logprobs": 0},
        {"temperature": 1.5, "min_p": 0.1},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {3: 5.0}, "logprobs": 4},
        {
            "temperature": 1.0,
            "top_k": 9,
            "top_p": 0.8,
            "presence_penalty": 1.0,
            "logprobs": 20,
            "min_tokens": 9,
            "seed": 2**40,
        },
    ]
    return [SamplingParams(**{"seed": 5, **each}) for each in fields]


def mixture_inputs(batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(batch, 64)) * 2, 1).astype(np.float32)
    return (
        logits,
        rng.integers(0, 3, size=(batch, 64)).astype(np.uint16),
        np.arange(batch, dtype=np.int32) % 3 + PROMPT_LENGTH,
    )


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_rows_are_independent():
    batch = rows(*mixture(), eos_token_ids=(1,))
    logits, token_counts, position = mixture_inputs(8)
    together = jitted_sample(logits, batch, token_counts, position)
    for i in range(8):
        alone = [
            jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], tree)
            for tree in (logits, batch, token_counts, position)
        ]
        found = jitted_sample(*alone)
        assert_equal(
            (found.token, found.top_ids), (together.token[i : i + 1], together.top_ids[i : i + 1])
        )
        np.testing.assert_allclose(found.logprob, together.logprob[i : i + 1], atol=1e-5)
    order = np.random.default_rng(1).permutation(8)
    moved = jitted_sample(
        *jax.tree.map(lambda leaf: leaf[order], (logits, batch, token_counts, position))
    )
    assert_equal(moved, jax.tree.map(lambda leaf: leaf[order], together))


@pytest.mark.long
def test_the_mesh_changes_nothing():
    """Rows over `data`, the vocabulary over `model`, as XLA leaves the logits of a sharded head."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    by_row, by_both = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ("data", "model"))
    )
    batch = rows(*mixture(), eos_token_ids=(1,))
    logits, token_counts, position = mixture_inputs(8)
    expected = jitted_sample(logits, batch, token_counts, position)
    found = jitted_sample(
        *jax.device_put((logits, batch, token_counts, position), (by_both, by_row, by_both, by_row))
    )
    assert_equal((found.token, found.top_ids), (expected.token, expected.top_ids))
    np.testing.assert_allclose(found.logprob, expected.logprob, atol=1e-5)


def test_a_draw_is_the_documented_function_of_seed_stream_and_position():
    seeds = [0, 1, -1, 2**32 - 1, 2**32, 2**32 + 7, 2**40, 2**63 - 1]
    batch = rows(
        *[SamplingParams(temperature=1.0, seed=seed) for seed in seeds],
        streams=[(i, i + 1) for i in range(8)],
    )
    noise = np.asarray(gumbel_noise(batch, jnp.arange(8), 64))
    for i, seed in enumerate(seeds):
        key = jax.random.wrap_key_data(
            jnp.array([(seed >> 32) % 2**32, seed % 2**32], jnp.uint32), impl="threefry2x32"
        )
        if 0 <= seed < 2**32:
            assert key == jax.random.key(seed)
        for word in (i, i + 1, i):
            key = jax.random.fold_in(key, word)
        uniform = (np.asarray(jax.random.bits(key, (64,), np.uint32), np.float64) + 0.5) / 2**32
        np.testing.assert_allclose(noise[i], -np.log(-np.log1p(-uniform)), rtol=1e-4, atol=1e-5)
    token = jitted_sample(
        np.zeros((8, 64), np.float32),
        batch,
        np.zeros((8, 64), np.uint16),
        np.arange(8, dtype=np.int32),
    ).token
    assert_equal(token, noise.argmax(axis=-1))


def test_seeds_streams_and_positions_draw_apart():
    def draw(seed=0, rng_stream=(0, 0), position=0):
        batch = rows(*[SamplingParams(temperature=1.0, seed=seed)] * 8, streams=[rng_stream] * 8)
        position = np.arange(position, position + 8, dtype=np.int32)
        return tuple(
            jitted_sample(
                np.zeros((8, 64), np.float32), batch, np.zeros((8, 64), np.uint16), position
            ).token.tolist()
        )

    assert draw() == draw()
    others = [
        draw(seed=1),
        draw(seed=2**32),
        draw(seed=2**62),
        draw(rng_stream=(1, 0)),
        draw(rng_stream=(0, 1)),
        draw(position=8),
    ]
    assert len({draw(), *others}) == 7
    assert draw(position=1)[:7] == draw()[1:]


def test_one_program_for_every_mixture(compilations):
    logits, token_counts, position = mixture_inputs(8)
    batches = [
        empty_sampling(8),
        rows(*mixture(), eos_token_ids=(1,)),
        *[rows(*[params] * 8, eos_token_ids=(1,)) for params in mixture()],
    ]
    jitted_sample(logits, batches[0], token_counts, position)
    compilations.clear()
    for batch in batches:
        jitted_sample(logits, batch, token_counts, position)
    assert not compilations


def test_rows_that_ask_for_nothing_take_the_largest_logit():
    logits, token_counts, position = mixture_inputs(8)
    found = jitted_sample(logits, empty_sampling(8), token_counts, position)
    assert_equal(found.token, logits.argmax(axis=-1))
    assert not np.asarray(found.logprob).any() and np.all(np.asarray(found.top_ids) == -1)


EVERY_WAY = [
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"presence_penalty": 1.0, "logprobs": 2},
    {"min_tokens": 5},
]


@pytest.mark.parametrize("params", EVERY_WAY, ids=str)
def test_logits_that_are_no_numbers_give_no_token(params):
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(5, V)).astype(np.float32)
    logits[1, 3], logits[2, 3], logits[3], logits[4, 3] = np.nan, np.inf, -np.inf, -np.inf
    found = jitted_sample(
        logits, rows(*[SamplingParams(**params)] * 5), np.zeros((5, V), np.uint16), positions(5)
    )
    assert np.flatnonzero(np.asarray(found.token) == NON_FINITE).tolist() == [1, 2, 3]
