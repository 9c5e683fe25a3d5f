"""Which predictions depend on the far prompt, against the teacher on rows that are really cut."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.sharding import batch_sharding
from swiftkv_jax.train.loss import far_tokens
from swiftkv_jax.train.loss.far_tokens import only_far
from tests import tiny

LENGTH, DOCUMENT = 24, 14
TOKENS = np.random.default_rng(1).integers(0, 61, (2, LENGTH))


def packed() -> Batch:
    """A row of one document, and one of two and padding."""
    segments = np.ones((2, LENGTH), np.int32)
    segments[1, DOCUMENT:] = 2
    segments[1, -2:] = 0
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    positions[1, DOCUMENT:] -= DOCUMENT
    mask = (segments > 0).astype(np.float32)
    mask[:, -1] = mask[1, DOCUMENT - 1] = mask[1, -3] = 0
    mask[0, 20] = 0
    return Batch(TOKENS.astype(np.int32), positions, segments, mask)


def nll(model: Model, row: int, start: int, stop: int) -> np.ndarray:
    """Of tokens `start + 1 .. stop - 1`, from those before in the same slice."""
    tokens = TOKENS[row : row + 1, start:stop]
    log_p = np.asarray(jax.nn.log_softmax(skv.logits(model, tokens, swiftkv=False)))[0]
    return -log_p[np.arange(stop - start - 1), tokens[0, 1:]]


@pytest.mark.short("2x2-7", "None-24")
@pytest.mark.parametrize("chunk", [LENGTH, 7])
@pytest.mark.parametrize("mesh", [None, "2x2"])
def test_far_predictions(chunk, mesh, monkeypatch):
    """Rows of 24: the first half ends in 6 tokens that are not far."""
    monkeypatch.setattr(far_tokens, "FAR_NATS", 0.01)
    monkeypatch.setattr(far_tokens, "chunk_length", lambda *_: chunk)
    program: Any = only_far
    program.clear_cache()
    hf = tiny.hf_config()
    model = dataclasses.replace(tiny.model_of(hf, tiny.tensors_for(hf)), swiftkv=None)
    batch, expected = packed(), np.zeros((2, LENGTH), bool)
    for row, stop in (0, LENGTH), (1, DOCUMENT):
        gap = nll(model, row, 6, stop) - nll(model, row, 0, stop)[6:]
        expected[row, 6 : stop - 1] = gap > 0.01
    expected[:, :11] = False
    expected &= batch.loss_mask > 0
    assert 3 < expected.sum() < (batch.loss_mask[:, 11:] > 0).sum() - 8
    attention = Attention(None)
    if mesh is not None:
        grid = make_mesh(mesh)
        attention = Attention(grid)
        batch = jax.device_put(batch, batch_sharding(grid))
    found = only_far(model.config, attention, model.llama, batch)
    np.testing.assert_array_equal(found.loss_mask, expected)
    np.testing.assert_array_equal(found.tokens, batch.tokens)
    assert found.own is None


@pytest.mark.parametrize("tail", [0, 3])
def test_the_first_half_is_the_prompt_of_own_tokens(tail):
    """Whichever tokens the batch has as its own: far prompts that were own would cost nothing."""
    hf = tiny.hf_config(generated_kv="own", exact_tail=tail)
    model = tiny.model_of(hf, tiny.tensors_for(hf))
    batch = dataclasses.replace(packed(), own=np.ones((2, LENGTH), bool))
    found = only_far(model.config, Attention(None), model.llama, batch)
    expected = np.tile(np.arange(LENGTH) >= LENGTH // 2 - tail, (2, 1))
    expected[1, -2:] = False
    np.testing.assert_array_equal(found.own, expected)
