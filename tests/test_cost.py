"""Counted operations against those XLA counts, where XLA's count is complete (it counts a loop's
body once)."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.config import Config
from swiftkv_jax.cost import prefill_flops, train_flops_per_token
from swiftkv_jax.infer.runner.lowering import lower_program
from swiftkv_jax.params import llama_shapes, swiftkv_shapes
from swiftkv_jax.train.distill import mean_loss
from swiftkv_jax.transformer import unpacked_batch

# Two layers are two loops of one step each; short rows keep attention, of which XLA computes both
# triangles, small.
CONFIG = Config(
    vocab_size=512,
    embed_dim=256,
    mlp_dim=768,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    num_key_value_layers=1,
)
LENGTH = 16


def counted_flops(compiled) -> float:
    return compiled.cost_analysis()["flops"]


@pytest.mark.parametrize("swiftkv", [False, True])
def test_prefill(swiftkv):
    key = "prefill", LENGTH, 1, None
    lowered = lower_program(
        CONFIG,
        key,
        batch=1,
        max_model_len=LENGTH,
        page_size=LENGTH,
        swiftkv=swiftkv,
        dtype=jnp.float32,
    )
    compiled = lowered.compile()
    assert prefill_flops(CONFIG, LENGTH, swiftkv=swiftkv) == pytest.approx(
        counted_flops(compiled), rel=0.05
    )


def train_count(config, remat) -> float:
    def step(delta, llama, tokens):
        return jax.grad(
            lambda delta: mean_loss(config, delta, llama, unpacked_batch(tokens), remat=remat)[0]
        )(delta)

    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    return (
        counted_flops(
            jax.jit(step).lower(swiftkv_shapes(config), llama_shapes(config), tokens).compile()
        )
        / LENGTH
    )


def test_training():
    assert train_flops_per_token(CONFIG, LENGTH) == pytest.approx(
        train_count(CONFIG, "none"), rel=0.05
    )


def test_recomputation_of_a_layer():
    """In a loop of two steps, because XLA would take a single step out of its loop and find the
    forward pass in it again."""
    deep = dataclasses.replace(CONFIG, num_layers=4, num_key_value_layers=2)
    counted = train_count(deep, "layer") - train_count(deep, "none")
    assert one_layer("layer") - one_layer("none") == pytest.approx(counted, rel=0.05)


def one_layer(remat):
    return train_flops_per_token(CONFIG, LENGTH, remat=remat)
