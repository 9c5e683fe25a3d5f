"""Heads that attend to the token before and to what followed the last occurrence of a token."""

import jax
import numpy as np
import pytest

from swiftkv_jax import demo
from swiftkv_jax.checkpoints import load
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.sharding import llama_shardings
from swiftkv_jax.train.analysis.heads import (
    LayerHeads,
    _shares,
    cut_off,
    describe_heads,
    head_scores,
)
from tests.train.test_analyze import CONFIG, random_llama


def test_the_demo_teacher():
    """What its cliff at K = 2 is from."""
    model = load(str(demo.LLAMA))
    config = model.config.cut(model.config.num_layers)
    heads = head_scores(config, load(str(demo.LLAMA), config=config).llama, Attention())
    assert [each.layer for each in heads if each.has_previous_token] == [1, 2]
    assert [each.layer for each in heads if each.has_induction] == [4, 5]
    assert int(np.argmax(heads[2].previous_token)) == 0
    assert [cut_off(heads, k) for k in (1, 2, 3)] == [([1, 2], [4, 5]), ([2], [4, 5]), ([], [])]
    first, second = describe_heads(heads).splitlines()
    assert first.startswith("previous-token heads (share above 0.5): layer 1 (head 3 0.5")
    assert "layer 2 (head 0 0.9" in first and "layer 4 (head 2 0.3" in second


@pytest.mark.parametrize("window", [None, 4])
def test_shares_are_those_of_softmax(window):
    period, heads, size = 5, 4, 8
    q = jax.random.normal(jax.random.key(0), (2, 2 * period, heads, size))
    k = jax.random.normal(jax.random.key(1), (2, 2 * period, 2, size))
    before, repeated = _shares(CONFIG, q, k, window, period)
    expected = np.zeros((2, heads))
    for row in range(2):
        for head in range(heads):
            for t in range(1, 2 * period):
                first = 0 if window is None else max(0, t - window + 1)
                scores = np.array(
                    [float(q[row, t, head] @ k[row, s, head // 2]) for s in range(first, t + 1)]
                )
                shares = np.exp(scores / size**0.5)
                shares /= shares.sum()
                expected[0, head] += shares[t - 1 - first] / (2 * (2 * period - 1))
                at = t - period + 1
                if t >= period and at >= first:
                    expected[1, head] += shares[at - first] / (2 * period)
    np.testing.assert_allclose([before, repeated], expected, rtol=1e-4)


@pytest.mark.long
def test_a_mesh_gives_the_same():
    mesh = make_mesh((2, 2))
    llama = jax.device_put(random_llama(), llama_shardings(CONFIG, mesh))
    ours = head_scores(CONFIG, llama, Attention(mesh))
    theirs = head_scores(CONFIG, random_llama(), Attention())
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.induction, other.induction, atol=1e-5)
        np.testing.assert_allclose(one.previous_token, other.previous_token, atol=1e-5)


def layers(previous: set[int], induction: set[int]) -> list[LayerHeads]:
    return [
        LayerHeads(i, [0.1, 0.9 * (i in previous)], [0.5 * (i in induction), 0.0]) for i in range(8)
    ]


@pytest.mark.parametrize(
    ("previous", "induction", "first", "expected"),
    [
        ({2}, {4, 5}, 2, ([2], [4, 5])),
        ({2}, {4, 5}, 3, ([], [])),
        ({2, 6}, {4, 5}, 1, ([2], [4, 5])),  # nothing needs layer 6's
        ({2, 4}, {4, 5}, 3, ([4], [5])),  # a layer's own heads come too late
        ({4}, {4}, 2, ([], [])),
        (set(), {4}, 0, ([], [])),
        ({3}, set(), 0, ([], [])),
    ],
)
def test_heads_that_are_cut_off(previous, induction, first, expected):
    assert cut_off(layers(previous, induction), first) == expected
