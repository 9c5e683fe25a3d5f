"""Compiled programs on a CPU read weights in place."""

from typing import Any

import jax.numpy as jnp
import pytest

from swiftkv_jax import Config
from swiftkv_jax.infer.runner.lowering import DecodeProgram, PrefillProgram, lower_program


@pytest.mark.parametrize(
    "program", [DecodeProgram(2), PrefillProgram(32, 2, None)], ids=["decode", "prefill"]
)
def test_a_cpu_does_not_transpose_weights(program):
    """It would take the time of reading them three times, in every call."""
    wide = Config(
        vocab_size=64,
        embed_dim=256,
        mlp_dim=1024,
        num_layers=4,
        num_key_value_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
    )
    lowered = lower_program(
        wide, program, batch=2, max_model_len=64, page_size=16, dtype=jnp.float32
    )
    memory: Any = lowered.compile().memory_analysis()
    gate_and_up = 4 * 2 * wide.mlp_dim * wide.embed_dim
    assert memory.temp_size_in_bytes < gate_and_up / 4
