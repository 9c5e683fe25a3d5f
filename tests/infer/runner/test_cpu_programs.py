"""Compiled programs read weights in place, and those of the same rows are traced together."""

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp
import pytest

from swiftkv_jax import Config
from swiftkv_jax.infer.runner import decode_programs
from swiftkv_jax.infer.runner.lowering import DecodeProgram, PrefillProgram
from swiftkv_jax.model.mesh import make_mesh, parse_mesh
from tests.lowered import lower_program

WIDE = Config(
    vocab_size=64,
    embed_dim=256,
    mlp_dim=1024,
    num_layers=4,
    num_key_value_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
)


@pytest.mark.parametrize(
    "program", [DecodeProgram(2), PrefillProgram(32, 2, None)], ids=["decode", "prefill"]
)
def test_a_cpu_does_not_transpose_weights(program):
    """It would take the time of reading them three times, in every call."""
    lowered = lower_program(
        WIDE, program, batch=2, max_model_len=64, page_size=16, dtype=jnp.float32
    )
    memory: Any = lowered.compile().memory_analysis()
    gate_and_up = 4 * 2 * WIDE.mlp_dim * WIDE.embed_dim
    assert memory.temp_size_in_bytes < gate_and_up / 4


@pytest.mark.short("fsdp=2,model=2")
@pytest.mark.parametrize("mesh", ["fsdp=4", "1x4", "fsdp=2,model=2"])
def test_a_mesh_gathers_no_gate_and_up(mesh):
    """Decoding moves activations instead, which are smaller."""
    lowered = lower_program(
        WIDE,
        DecodeProgram(4),
        batch=4,
        max_model_len=64,
        page_size=16,
        dtype=jnp.float32,
        mesh=make_mesh(parse_mesh(mesh)),
    )
    text = str(lowered.compile().as_text())
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    sizes = [math.prod(map(int, shape.split(","))) for shape in gathered]
    assert max(sizes, default=0) < WIDE.mlp_dim * WIDE.embed_dim


def test_programs_of_the_same_rows_are_traced_together(monkeypatch):
    """One traces the layers and the sampler, and the next ones use that."""
    calls = []

    def counted(name):
        function = getattr(decode_programs, name)

        def call(*args, **options):
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(decode_programs, name, call)

    counted("run_lower_layers")
    counted("sample")
    config = dataclasses.replace(WIDE, vocab_size=53)
    for rows, steps in ((2, 1), (2, 3), (4, 1), (4, 3)):
        program = DecodeProgram(rows)
        lower_program(config, program, batch=rows, max_model_len=32, page_size=4, steps=steps)
    assert sorted(calls) == ["run_lower_layers"] * 2 + ["sample"] * 2
