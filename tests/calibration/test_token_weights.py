"""The weights of calibration tokens, against their definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.calibration import token_weights

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("distance", [None, [2, 3]])
@pytest.mark.parametrize("chunk", [2**26, 96, 17])
def test_received_attention(chunk, distance, monkeypatch):
    monkeypatch.setattr(token_weights, "PROBABILITIES_PER_CHUNK", chunk)
    q, k = (RNG.normal(size=(2, 7, heads, 4)).astype(np.float32) for heads in (4, 2))
    segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]])
    found = token_weights.received_attention(
        jnp.array(q),
        jnp.array(k),
        jnp.array(segments),
        distances=[None if distance is None else jnp.array(distance)],
    )[0]
    expected = np.zeros((2, 7))
    for row in range(2):
        for head in range(4):
            for query in range(7):
                seen = [n for n in range(query + 1) if segments[row, n] == segments[row, query]]
                if segments[row, query] == 0:
                    continue
                scores = k[row, seen, head // 2] @ q[row, query, head] / 2
                weights = np.exp(scores - scores.max())
                counted = [query - n >= (0 if distance is None else distance[row]) for n in seen]
                expected[row, seen] += np.square(weights / weights.sum()) * counted
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_no_token_outweighs_all_others():
    received = jnp.array([[1e9, 4.0, 1.0, 2.0], [3.0, 7.0, 7.0, 7.0]])
    real = jnp.array([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    found = np.asarray(token_weights.token_weights(received, real))
    limited = np.array([3000.0, 4, 1, 2])  # the median is 3
    expected = [limited * 4 / limited.sum(), [1, 0, 0, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not np.asarray(token_weights.token_weights(received, 0 * real)).any()


def test_with_a_tail_queries_count_that_read_fitted_tokens():
    """Of texts of five and two, of one text of six, and of texts of at most three tokens."""
    segments = jnp.array(
        [[1, 1, 1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 2, 2, 3, 0, 0]]
    )
    real = np.asarray(segments) > 0
    none, every = token_weights.counted_queries(0, segments, None)
    assert none is None
    np.testing.assert_array_equal(every, real)
    seen = np.array([[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0], real[2]], bool)
    for window in (None, 4, jnp.array(4)):
        distance, found = token_weights.counted_queries(3, segments, window)
        assert distance is not None and distance.tolist() == [3, 3, 0]
        np.testing.assert_array_equal(found, seen)
    # As before where nothing is read from so far: in layers whose windows end before, and with
    # tails that are as long as rows.
    for tail, window in ((3, 3), (3, jnp.array(2)), (6, None), (8, None), (20, None)):
        distance, found = token_weights.counted_queries(tail, segments, window)
        assert distance is not None and not distance.any()
        np.testing.assert_array_equal(found, real)
