"""At 8k tokens no program holds anything of the size of queries x keys."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.infer.runner.lowering import PrefillProgram
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.params import llama_shapes
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.step import make_train_step, state_shapes
from tests import tiny
from tests.lowered import lower_program

LENGTH = 8192


def quadratic(lowered, present: str = str(LENGTH)) -> list[str]:
    """The shapes in the compiled program that have two axes of `LENGTH` or more, or one of its
    square. `present` must be in it."""
    text = lowered.compile().as_text()
    assert present in text
    shapes = set(re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text))
    return [
        shape
        for shape in shapes
        if sum(int(size) >= LENGTH for size in shape.split(",")) > 1 or f"{LENGTH**2}" in shape
    ]


def test_the_check_finds_one():
    scores = jax.jit(lambda q, k: jax.nn.softmax(q @ k.T) @ k)
    shape = jax.ShapeDtypeStruct((LENGTH, 8), jnp.float32)
    assert quadratic(scores.lower(shape, shape)) == ["8192,8192"]


@pytest.mark.parametrize("chunk", [512, LENGTH])
def test_prefill(chunk):
    config = config_from_hf(tiny.hf_config(max_position_embeddings=LENGTH))
    lowered = lower_program(
        config,
        PrefillProgram(chunk, chunk // 128, None),
        batch=1,
        max_model_len=LENGTH,
        dtype=jnp.float32,
    )
    assert not quadratic(lowered, present="[64,2,128,8]")  # the pool: 64 pages of 128 positions


@pytest.mark.parametrize("mesh", [pytest.param((1, 1), marks=pytest.mark.long), (1, 2)])
def test_train_step(mesh):
    config = config_from_hf(tiny.hf_config(max_position_embeddings=LENGTH))
    optimizer = optax.sgd(0.1)
    step = make_train_step(config, DEMO, optimizer, make_mesh(mesh))
    batch = jax.eval_shape(unpacked_batch, jax.ShapeDtypeStruct((1, LENGTH), jnp.int32))
    micro_batches = jax.tree.map(
        lambda field: jax.ShapeDtypeStruct((1, *field.shape), field.dtype), batch
    )
    assert not quadratic(
        step.lower(
            state_shapes(config, optimizer), llama_shapes(config, jnp.float32), micro_batches, True
        )
    )
