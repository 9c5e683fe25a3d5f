"""Options of other families cost a plain Llama nothing: its programs have the operations that they
had before there were any (the commit before the first option, and this one, lower alike)."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

import swiftkv_jax as skv
from swiftkv_jax.config import Config
from swiftkv_jax.infer.runner.lowering import GREEDY, lower_program
from swiftkv_jax.params import llama_shapes, swiftkv_shapes

CONFIG = Config(
    vocab_size=64,
    embed_dim=32,
    mlp_dim=48,
    num_layers=4,
    num_key_value_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
KEPT = "tanh sqrt rsqrt exponential logistic cosine sine dot_general multiply select".split()
"""Operations that scales, caps, norms, windows, activations and rotations are made of."""
EXPECTED = {
    "teacher": (0, 0, 5, 3, 0, 1, 1, 19, 33, 3),
    "student": (0, 0, 6, 3, 0, 1, 1, 19, 35, 3),
    "prefill": (0, 0, 5, 3, 0, 1, 1, 17, 37, 44),
    "decode": (0, 0, 10, 5, 0, 1, 1, 30, 75, 50),
}
"""How many of each a program has, as lowered by JAX 0.11.2."""


def operations(lowered) -> tuple[int, ...]:
    found = collections.Counter(re.findall(r"stablehlo\.(\w+)", lowered.as_text()))
    return tuple(found[name] for name in KEPT)


def whole_rows(swiftkv: bool):
    model = skv.Model(
        llama_shapes(CONFIG, jnp.bfloat16),
        swiftkv_shapes(CONFIG, jnp.bfloat16) if swiftkv else None,
        CONFIG,
    )
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    return jax.jit(lambda model, tokens: skv.logits(model, tokens)).lower(model, tokens)


PROGRAMS = {
    "teacher": lambda: whole_rows(False),
    "student": lambda: whole_rows(True),
    "prefill": lambda: lower_program(
        CONFIG, ("prefill", 32, 4, None), batch=2, max_model_len=64, page_size=16
    ),
    "decode": lambda: lower_program(
        CONFIG, (GREEDY, 2), batch=2, max_model_len=64, page_size=16, steps=2
    ),
}


@pytest.mark.skipif(jax.__version__ != "0.11.2", reason="counts are those of JAX 0.11.2")
@pytest.mark.parametrize("name", PROGRAMS)
def test_operations_of_a_plain_llama(name):
    assert operations(PROGRAMS[name]()) == EXPECTED[name]
