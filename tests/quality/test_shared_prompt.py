"""Own keys and values beside shared caches: equal to the package where that computes the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.quality import shared_prompt
from swiftkv_jax import Model, calibrate
from swiftkv_jax.attention import Attention
from swiftkv_jax.transformer import (
    Batch,
    run_lower_layers,
    run_upper_layers_student,
    run_upper_layers_teacher,
)
from tests import tiny

ROWS, T, PROMPT = 2, 24, 10
ATTENTION = Attention()


def student(group: int) -> Model:
    """In closed form; with groups it has mixes, and layers that read heads in other orders."""
    hf = tiny.hf_config(num_key_value_layers=6)
    plain = tiny.model_of(hf, tiny.tensors_for(hf))
    text = tiny.tokens_for(hf, 8, 32).tolist()
    return calibrate(plain, text, num_key_value_layers=2, key_value_group_size=group).model


@pytest.fixture(scope="module")
def batch() -> Batch:
    """The second row ends early."""
    tokens = tiny.tokens_for(tiny.hf_config(), ROWS, T)
    real = np.arange(T) < np.array([[T], [T - 5]])
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape)
    fields = tokens, np.where(real, positions, 0), real.astype(np.int32), real.astype(np.float32)
    return Batch(*map(jnp.asarray, fields))


def outputs(model: Model, batch: Batch, own):
    """Of the last layer by `shared_prompt`, and of the package's student (`own` as it takes it) and
    teacher."""
    config, llama, delta = model.config, model.llama, model.swiftkv
    assert delta is not None
    x, tables = run_lower_layers(config, llama, batch, attention=ATTENTION)
    mask = jnp.zeros((ROWS, T), bool) | jnp.asarray(own)
    found = shared_prompt.run_upper_layers(config, ATTENTION, llama, delta, batch, x, mask)
    kept = mask if config.key_value_group_size == 1 and mask.any() else None
    ours, _ = run_upper_layers_student(
        config, llama, delta, x, tables, batch.segment_ids, attention=ATTENTION, own=kept
    )
    teacher, _ = run_upper_layers_teacher(
        config, llama, x, tables, batch.segment_ids, attention=ATTENTION
    )
    real = np.asarray(batch.segment_ids) > 0
    return [np.asarray(array)[real] for array in (found, ours, teacher)]


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * np.abs(b).max())


@pytest.mark.parametrize("group", [1, 2, 4])
def test_without_own_tokens_it_is_the_student(group, batch):
    found, ours, teacher = outputs(student(group), batch, own=False)
    assert_close(found, ours)
    assert np.abs(found - teacher).max() > 0.01 * np.abs(teacher).max()


@pytest.mark.parametrize("group", [1, 4])
def test_with_own_tokens_alone_it_is_the_teacher(group, batch):
    found, _, teacher = outputs(student(group), batch, own=True)
    assert_close(found, teacher)


def test_without_groups_it_is_the_student_with_own_tokens(batch):
    """In closed form without groups the student's queries are the teacher's."""
    found, ours, teacher = outputs(student(1), batch, own=np.arange(T) >= PROMPT)
    assert_close(found, ours)
    assert np.abs(found - teacher).max() > 0.01 * np.abs(teacher).max()


@pytest.mark.parametrize("group", [1, 2])
def test_the_prompt_counts_with_groups(group, batch):
    """Tokens after the prompt depend on its shared entries, and its tokens not on theirs."""
    model = student(group)
    found, _, _ = outputs(model, batch, own=np.arange(T) >= PROMPT)
    _, boundary, teacher = outputs(model, batch, own=False)
    assert_close(found[:PROMPT], boundary[:PROMPT])
    errors = [np.abs(x[PROMPT:T] - teacher[PROMPT:T]).mean() for x in (found, boundary)]
    assert 0 < errors[0] < errors[1]


def test_shrunken_scores_are_found(batch):
    """Layer K's keys are the teacher's: its queries stay. Smaller ones become what they were."""
    model = student(1)
    delta = model.swiftkv
    assert delta is not None
    found = shared_prompt.unattenuated(model, ATTENTION, [batch, batch]).swiftkv
    assert found is not None
    np.testing.assert_allclose(found.q[0], delta.q[0], rtol=1e-4)
    factors = np.asarray(found.q / delta.q)
    assert (factors >= 1 - 1e-4).all() and (factors[1:] > 1.01).any()
    assert (factors <= shared_prompt.MOST + 1e-4).all()
    others = jax.tree.leaves(dataclasses.replace(found, q=None))
    for ours, theirs in zip(
        others, jax.tree.leaves(dataclasses.replace(delta, q=None)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    smaller = dataclasses.replace(model, swiftkv=dataclasses.replace(delta, q=0.6 * delta.q))
    again = shared_prompt.unattenuated(smaller, ATTENTION, [batch]).swiftkv
    assert again is not None
    np.testing.assert_allclose(again.q[0], delta.q[0], rtol=1e-4)
