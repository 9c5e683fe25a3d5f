"""Counts of tokens, and the end tokens of a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax import UsageError
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.sampling.metadata import sampling_row
from swiftkv_jax.infer.sampling.penalties import (
    IN_PROMPT,
    token_counts_of,
    update_token_counts,
    update_token_counts_of_blocks,
)

V = 16


def test_tokens_are_counted():
    """In the rows named, of which one is past the last: nothing is written for it, nor for one that
    is not active."""
    token_counts = np.stack([token_counts_of([3, 3, 5], 0, V)] * 3 + [np.zeros(V, np.uint16)])
    assert np.flatnonzero(token_counts[0] == IN_PROMPT).tolist() == [3, 5]
    expected = token_counts.copy()
    counted = jax.jit(update_token_counts, donate_argnums=0)
    token_counts = jnp.asarray(token_counts)
    for slots, token, active in (
        ([3, 1, 0, 4], [3, 4, 5, 0], [1, 1, 0, 1]),
        ([1, 0, 2, 4], [4, 5, -1, 15], [1, 1, 0, 0]),
    ):
        token_counts = counted(
            token_counts, jnp.array(slots), jnp.array(token), jnp.array(active, bool)
        )
        for row in np.flatnonzero(active):
            if slots[row] < 4:
                expected[slots[row], token[row]] += 1
    assert np.array_equal(token_counts, expected)
    full = jnp.full((1, V), IN_PROMPT - 1, jnp.uint16)
    assert np.array_equal(
        counted(full, jnp.array([0]), jnp.array([2]), jnp.array([True])),
        np.full((1, V), IN_PROMPT - 1),
    )


def test_tokens_of_blocks_are_counted_as_one_after_the_other():
    """One token several times in a block, also where its count is nearly full."""
    token_counts = np.zeros((3, V), np.uint16)
    token_counts[1, 5] = IN_PROMPT - 3
    rows, token = jnp.array([2, 1, 3]), jnp.array([[4, 4, -1, 4], [5, 5, 5, 6], [1, 1, 1, 1]])
    active = jnp.array([[1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]], bool)
    expected = jnp.asarray(token_counts)
    for column in range(token.shape[1]):
        expected = update_token_counts(expected, rows, token[:, column], active[:, column])
    counted = update_token_counts_of_blocks(jnp.asarray(token_counts), rows, token, active)
    assert np.array_equal(counted, expected) and counted[1, 5] == IN_PROMPT - 1


def test_end_tokens_of_a_row():
    def ends(eos_token_ids, **fields):
        return [
            i
            for i in sampling_row(
                SamplingParams(**fields), eos_token_ids=eos_token_ids, prompt_length=1
            ).stop_token_ids.tolist()
            if i >= 0
        ]

    assert ends((5, 6), stop_token_ids=(6, 7)) == [5, 6, 7]
    assert ends((5, 6), stop_token_ids=(6, 7), ignore_eos=True) == [6, 7]
    assert len(ends(range(100, 108), stop_token_ids=tuple(range(16)))) == 24
    with pytest.raises(
        UsageError,
        match="^`stop_token_ids` and the model's end tokens are 25 together; at most 24 are "
        "possible$",
    ):
        ends(range(100, 109), stop_token_ids=tuple(range(16)))
