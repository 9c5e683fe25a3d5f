"""Counted operations against those XLA counts, where XLA's count is complete (it counts a loop's body once)."""

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.config import Config
from swiftkv_jax.cost import prefill_flops, train_flops_per_token
from swiftkv_jax.infer.shapes import lower_prefill
from swiftkv_jax.model import whole_rows
from swiftkv_jax.params import llama_shapes, swiftkv_shapes
from swiftkv_jax.train.distill import distill_loss
from tests import tiny

# Two layers are two loops of one step each; short rows keep attention, of which XLA computes both triangles, small.
CONFIG = Config(
    vocab_size=512, embed_dim=256, mlp_dim=768, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=32, num_key_value_layers=1
)
LENGTH = 16


def counted_flops(compiled) -> float:
    return compiled.cost_analysis()["flops"]


@pytest.mark.parametrize("swiftkv", [False, True])
def test_prefill(swiftkv):
    compiled = lower_prefill(CONFIG, batch=1, chunk=LENGTH, max_model_len=LENGTH, swiftkv=swiftkv, dtype=jnp.float32).compile()
    assert prefill_flops(CONFIG, LENGTH, swiftkv=swiftkv) == pytest.approx(counted_flops(compiled), rel=0.05)


@pytest.mark.parametrize("remat", [False, True])
def test_training(remat):
    def step(delta, llama, tokens):
        return jax.grad(lambda delta: distill_loss(CONFIG, delta, llama, whole_rows(tokens), remat=remat)[0])(delta)

    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    compiled = jax.jit(step).lower(swiftkv_shapes(CONFIG), llama_shapes(CONFIG), tokens).compile()
    assert train_flops_per_token(CONFIG, LENGTH, remat=remat) == pytest.approx(counted_flops(compiled) / LENGTH, rel=0.05)


def test_the_saving_at_8b():
    config = tiny.LLAMA_8B
    per_layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 2 * 4096 * 8193
    assert prefill_flops(config, 8192, swiftkv=False) / 8192 == pytest.approx(31 * per_layer + 2 * 2 * 4096 * 1024)
    assert prefill_flops(config, 8192, swiftkv=True) / 8192 == pytest.approx(16 * per_layer + 16 * 2 * 2 * 4096 * 1024)
    assert prefill_flops(config, 8192, swiftkv=True) / prefill_flops(config, 8192, swiftkv=False) < 0.55
