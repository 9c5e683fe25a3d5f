"""A small architecture, an engine for it, and one cell."""

import jax.numpy as jnp
import pytest

from swiftkv_jax.infer import Engine, EngineOptions
from swiftkv_jax.infer.bench.cells import Cell
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.model.config import Config
from swiftkv_jax.plan.roofline import Roofline

CONFIG = Config(
    vocab_size=64,
    embed_dim=32,
    mlp_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_key_value_layers=1,
    max_position_embeddings=256,
)
ROOFLINE = Roofline(flops=1e12, bandwidth=1e9, devices=1, dtype="float32", tried={}, published=None)
CELL = Cell(input_len=21, output_len=8, prompts=2)


@pytest.fixture(scope="session")
def bench_engine() -> Engine[ModelRunner]:
    """An engine of `CONFIG` with random weights, for rows of up to 32 tokens."""
    model = dummy_model(CONFIG, jnp.float32, teacher=False)
    options = EngineOptions(
        max_model_len=32,
        max_num_seqs=2,
        decode_steps=2,
        page_size=8,
        chunks=(16,),
        decode_rows=(2,),
    )
    return Engine.from_model(model, options)
