"""The scale of queries for shared keys that stand beside keys of tokens' own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.calibration import attenuation, token_weights
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.model import Model
from tests import tiny

ATTENTION = Attention()
TOKENS = np.random.default_rng(7).integers(0, 61, (12, 40)).astype(np.int32)


@pytest.mark.parametrize("chunk", [2**26, 60])
@pytest.mark.parametrize("window", [None, 3])
def test_the_sums(chunk, window, monkeypatch):
    """One query and head at a time, in float64; padding counts for nothing."""
    monkeypatch.setattr(token_weights, "PROBABILITIES_PER_CHUNK", chunk)
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 2, 7, heads, 4)).astype(np.float32) for heads in (4, 2))
    segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]])
    queries, keys = ((jnp.array(x[0]), jnp.array(x[1])) for x in (q, k))
    found = attenuation.layer_products(queries, keys, jnp.array(segments), window=window)
    expected = np.zeros((2, 2))
    for row, head, query in np.ndindex(2, 4, 7):
        if segments[row, query] == 0:
            continue
        first = 0 if window is None else max(query - window + 1, 0)
        seen = [n for n in range(first, query + 1) if segments[row, n] == segments[row, query]]
        student, teacher = (
            np.float64(k[kind, row, seen, head // 2]) @ q[kind, row, query, head] / 2
            for kind in range(2)
        )
        weights = np.exp(teacher) / np.exp(teacher).sum()
        centred = weights * (teacher - weights @ teacher)
        expected[:, head // 2] += centred @ student, centred @ teacher
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@functools.cache
def teacher(**fields) -> Model:
    hf = tiny.hf_config(num_key_value_layers=6, **fields)
    return tiny.model_of(hf, tiny.tensors_for(hf))


def slopes(model: Model) -> np.ndarray:
    batch, delta = unpacked_batch(jnp.asarray(TOKENS)), model.swiftkv
    assert delta is not None
    sums = attenuation.score_products(model.config, ATTENTION, model.llama, delta, batch)
    return np.asarray(sums[:, 0] / sums[:, 1])


@pytest.mark.short("True")
@pytest.mark.parametrize("bias", [False, True])
def test_scores_of_shared_keys_have_the_teachers_slope(bias):
    """Of a student with groups that is calibrated for own keys; else they are smaller."""
    given = teacher(attention_bias=bias), TOKENS, 2, 2
    plain = skv.calibrate(*given, max_length=40, batch_size=12).model
    own = skv.calibrate(*given, generated_kv="own", max_length=40, batch_size=12).model
    found, before = slopes(own), slopes(plain)
    assert own.config.has_two_caches and not plain.config.has_two_caches
    assert (before < 0.95).any() and (before[before < 1] > 0.2).all()
    kept = (before >= attenuation.MIN_SLOPE) & (before <= 1)
    assert kept.any()
    np.testing.assert_allclose(found[kept], 1, rtol=1e-3)
    np.testing.assert_allclose(found[before > 1], before[before > 1], rtol=1e-3)
    limited = before < attenuation.MIN_SLOPE
    np.testing.assert_allclose(found[limited], before[limited] / attenuation.MIN_SLOPE, rtol=1e-3)
    assert plain.swiftkv is not None and own.swiftkv is not None
    for name in ("norm", "k", "v", "mix", "k_bias", "v_bias"):
        ours, theirs = (getattr(model.swiftkv, name) for model in (own, plain))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_layer_k_stays():
    """Without groups its keys are the teacher's, whose slope is one; queries that were made smaller
    become what they were."""
    model = skv.calibrate(teacher(), TOKENS, 2).model
    delta, batch = model.swiftkv, unpacked_batch(jnp.asarray(TOKENS))
    assert delta is not None
    smaller = dataclasses.replace(delta, q=0.6 * delta.q)
    for given in (delta, smaller):
        found = attenuation.scale_delta_queries(
            model.config, model.llama, given, [batch, batch], attention=ATTENTION
        )
        np.testing.assert_allclose(found.q[0], delta.q[0], rtol=1e-4)
        scale = np.asarray(found.q / given.q)
        assert (scale >= 1 - 1e-4).all() and (scale <= 1 / attenuation.MIN_SLOPE + 1e-4).all()
