"""Options of other families, and generated tokens with keys and values of their own, cost a plain
Llama nothing: its programs have the operations that they would have without any."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer.runner.lowering import (
    DecodeProgram,
    PrefillProgram,
    Program,
    UpperProgram,
)
from swiftkv_jax.infer.runner.serving_form import serving_weights
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.params import QKV, llama_shapes, swiftkv_shapes
from tests import tiny
from tests.lowered import lower_program

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
    "prefill": (0, 0, 3, 2, 0, 1, 1, 7, 23, 32),
    "decode": (0, 0, 6, 3, 0, 1, 1, 14, 47, 40),
}
"""How many of each a program has, as lowered by JAX 0.11.2; those of an engine have each kind of
layer once."""


def operations(lowered) -> tuple[int, ...]:
    found = collections.Counter(re.findall(r"stablehlo\.(\w+)", lowered.as_text()))
    return tuple(found[name] for name in KEPT)


def whole_rows(swiftkv: bool, config: Config = CONFIG):
    model = skv.Model(
        llama_shapes(config, jnp.bfloat16),
        swiftkv_shapes(config, jnp.bfloat16) if swiftkv else None,
        config,
    )
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    return jax.jit(lambda model, tokens: skv.logits(model, tokens)).lower(model, tokens)


def served(config: Config, program: Program):
    return lower_program(config, program, batch=2, max_model_len=64, page_size=16, steps=2)


PROGRAMS = {
    "teacher": lambda config: whole_rows(False, config),
    "student": lambda config: whole_rows(True, config),
    "prefill": lambda config: served(config, PrefillProgram(32, 4, None)),
    "score": lambda config: served(config, UpperProgram(32, 32, None, scores=True)),
    "decode": lambda config: served(config, DecodeProgram(2, "greedy")),
}
recorded = pytest.mark.skipif(jax.__version__ != "0.11.2", reason="counts are those of JAX 0.11.2")


@recorded
@pytest.mark.parametrize("name", EXPECTED)
def test_operations_of_a_plain_llama(name):
    assert operations(PROGRAMS[name](CONFIG)) == EXPECTED[name]


# Keys and values of generated tokens ------------------------------------------

BOUNDARY = {
    "student": (506, 19, 0, 26, 1),
    "prefill": (732, 7, 12, 38, 9),
    "score": (1243, 14, 12, 38, 12),
    "decode": (1086, 14, 18, 57, 31),
}
"""Operations, matrix products, scatters, arrays in and arrays out of each program, as lowered by
JAX 0.11.2; those of an engine have each kind of layer once."""


def sizes(lowered) -> tuple[int, ...]:
    found = collections.Counter(re.findall(r"stablehlo\.(\w+)", lowered.as_text()))
    arrays = (len(jax.tree.leaves(part)) for part in (lowered.in_avals, lowered.out_info))
    return found.total(), found["dot_general"], found["scatter"], *arrays


@recorded
@pytest.mark.parametrize("name", BOUNDARY)
def test_boundary_programs_have_nothing_of_own_keys_and_values(name):
    """No operation, product, write, argument or array of the cache more than without that option.
    The control: the programs of a model whose tokens keep their own have more, but for prefill."""
    assert sizes(PROGRAMS[name](CONFIG)) == BOUNDARY[name]
    own = dataclasses.replace(CONFIG, generated_kv="own")
    assert (sizes(PROGRAMS[name](own)) > BOUNDARY[name]) == (name != "prefill")


@pytest.mark.short("score-fields1", "decode-fields0", "prefill-fields1")
@pytest.mark.parametrize("fields", [{}, {"generated_kv": "own"}, {"key_value_group_size": 2}])
@pytest.mark.parametrize("name", ["prefill", "score", "decode"])
def test_layers_of_a_kind_are_lowered_once(name, fields):
    """Three times as many layers have as many products in the text, and three times the calls."""
    config = dataclasses.replace(CONFIG, num_layers=6, num_key_value_layers=2, **fields)
    deeper = dataclasses.replace(config, num_layers=18, num_key_value_layers=6)
    less, more = (PROGRAMS[name](one).as_text() for one in (config, deeper))
    assert more.count("dot_general") == less.count("dot_general")
    assert more.count("call @layer") == 3 * less.count("call @layer") > 0


@recorded
@pytest.mark.parametrize("name", PROGRAMS)
def test_only_programs_of_generated_tokens_depend_on_their_keys_and_values(name):
    """A prompt and a teacher are computed by the same program in both modes; whole rows, scores and
    decoding, where tokens may keep their own, are not."""
    own = dataclasses.replace(CONFIG, generated_kv="own")
    same = PROGRAMS[name](CONFIG).as_text() == PROGRAMS[name](own).as_text()
    assert same == (name in ("teacher", "prefill"))


def test_boundary_reads_no_upper_keys_and_values_of_the_teacher():
    """Logits are the same bit for bit, and what an engine is given holds no NaN, where those are
    NaN; where tokens keep their own, both have them."""
    hf = tiny.hf_config()
    clean = tiny.model_of(hf, tiny.tensors_for(hf))
    upper = clean.llama.upper_qkv
    assert isinstance(upper, QKV)
    upper = dataclasses.replace(
        upper, k=jnp.full_like(upper.k, jnp.nan), v=jnp.full_like(upper.v, jnp.nan)
    )
    model = dataclasses.replace(clean, llama=dataclasses.replace(clean.llama, upper_qkv=upper))
    tokens = tiny.tokens_for(hf, 2, 9)
    np.testing.assert_array_equal(skv.logits(model, tokens), skv.logits(clean, tokens))
    config = dataclasses.replace(model.config, generated_kv="own")
    own = skv.logits(dataclasses.replace(model, config=config), tokens, prompt_lengths=[5, 5])
    assert np.isnan(own).any()

    def finite(served: Config) -> bool:
        weights = serving_weights(model.llama, model.swiftkv, served)
        return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(weights))

    assert finite(model.config) and not finite(config)
