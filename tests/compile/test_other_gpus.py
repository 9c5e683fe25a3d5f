"""Attention on NVIDIA GPUs that have no kernels of their own, compiled for GPUs that are not here:
kernels of a step, what they write, temporaries.

cuDNN makes its kernels on the device, by its own compiler, which is not here: of its calls these
programs have the operands, and all kernels around them.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from swiftkv_jax.infer.runner.choose_shapes import FEW_TILES
from swiftkv_jax.infer.runner.lowering import DecodeProgram, PrefillProgram
from swiftkv_jax.model.config import Config
from swiftkv_jax.pallas_kernels import (
    AttentionOperands,
    choice,
    cudnn,
    decode_attention,
    prefill_attention,
)
from swiftkv_jax.plan.presets import LLAMA_8B, LLAMA_70B
from swiftkv_jax.plan.topology import topology_mesh
from tests.compile.compiled import compile_for
from tests.lowered import lower_program

MIB = 2**20
GPUS = ["a100:1", "l4:1", "h100:1", "b200:1"]
N, K, H, PAGE = 32, 8, 128, 128  # Llama-3.1-8B, the engine's page
# With the engine's default options: pages of the longest sequence, tiles of a chunk of 2048 tokens.
TABLE, TILES = 131_072 // PAGE, 2048 // PAGE + 32
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
CALL = "__cudnn$fmhaSoftmax"


class Step(NamedTuple):
    """A computation whose operations are launched one by one: the entry, or a body of a loop."""

    kernels: int
    cudnn: int
    """Those that are cuDNN's."""
    written: int
    """Bytes of the results of all, but for updates in place."""


def steps(compiled) -> list[Step]:
    """The bodies of loops, inner ones first, and the entry."""
    text, found = str(compiled.as_text()), []
    fused = set(re.findall(r"(?:calls|to_apply|condition)=%?([\w.-]+)", text))
    for name, body in re.findall(
        r"^(?:ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S
    ):
        operation = r"^ +(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)"
        launched = [one for one in re.findall(operation, body, re.M) if one[2] not in FREE]
        results = [one[1] for one in launched if "dynamic_update_slice" not in one[0]]
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", " ".join(results))
        written = sum(BYTES[dtype] * elements(sizes) for dtype, sizes in arrays)
        calls = sum(CALL in rest for *_, rest in launched)
        if name not in fused:
            found.append(Step(len(launched), calls, written))
    return found


def elements(sizes: str) -> int:
    return functools.reduce(lambda a, b: a * int(b), filter(None, sizes.split(",")), 1)


def temporaries(compiled) -> int:
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes


def like(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def ints(*sizes):
    return like(*sizes, dtype=jnp.int32)


POOL = like(4096, K, PAGE, H)
CHUNK = like(TILES, 128, N, H), POOL, POOL, ints(TILES), ints(TILES), ints(TILES, TABLE)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("rows", "keys"), [(64, 512), (1, 16384)])
def test_decode(gpu, rows, keys):
    """A step reads `keys` positions of all rows (128 with the blocks of a CPU): 11 to 13 kernels,
    of which one gathers keys and values and the others write little."""

    def op(q, k, v, length, table):
        return decode_attention(q, k, v, length, page_table=table, implementation="xla")

    operands = like(rows, 1, N, H), POOL, POOL, ints(rows), ints(rows, TABLE)
    compiled, _ = compile_for(gpu, op, *operands)
    print(gpu, body := steps(compiled)[0], temporaries(compiled) / MIB)
    gathered = 2 * rows * keys * K * H * 2
    assert body.kernels <= 13
    assert gathered <= body.written < 1.2 * gathered
    assert temporaries(compiled) < 1.1 * gathered


@pytest.mark.parametrize("gpu", GPUS)
def test_prefill_by_xla(gpu):
    """A tile's step reads 2048 positions (256 with the blocks of a CPU): 11 or 12 kernels, which
    write scores once or twice and weights of half their size."""

    def op(q, k, v, offset, lengths, table):
        return prefill_attention(
            q, k, v, q_offset=offset, lengths=lengths, page_table=table, implementation="xla"
        )

    compiled, _ = compile_for(gpu, op, *CHUNK)
    print(gpu, body := steps(compiled)[0], temporaries(compiled) / MIB)
    scores = 128 * N * 2048 * 4
    assert body.kernels <= 12
    assert body.written < 3.2 * scores
    assert temporaries(compiled) < 2 * scores


@pytest.fixture
def installed(monkeypatch):
    """JAX asks for cuDNN's version before it lowers a call."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 92000)
    monkeypatch.setattr(choice, "cudnn_version", lambda: 92000)


@pytest.mark.parametrize("gpu", GPUS)
def test_prefill_by_cudnn(gpu, installed):
    """A block of 8192 positions before a call's queries, and the call itself: one kernel of
    cuDNN's in each, and 7 to 9 others, of which one gathers keys and values."""

    def op(q, k, v, offset, lengths, table):
        limits = {"q_offset": offset, "lengths": lengths, "page_table": table}
        return cudnn.chunk(AttentionOperands(q, k, v, **limits))

    compiled, _ = compile_for(gpu, op, *CHUNK)
    found = steps(compiled)
    print(gpu, *found, temporaries(compiled) / MIB, sep="\n")
    context = 2 * cudnn.CONTEXT * K * H * 2
    calls = sorted((step for step in found if step.cudnn), key=lambda step: step.written)
    short, short_block, call, block = calls
    for step, queries in ((short_block, cudnn.FEW_QUERIES), (block, cudnn.QUERIES)):
        assert step.cudnn == 1 and step.kernels <= 9
        assert context <= step.written < context + 8 * queries * N * H
    for step, queries in ((short, cudnn.FEW_QUERIES), (call, cudnn.QUERIES)):
        assert step.cudnn == 1 and step.kernels <= 10
        assert step.written < 10 * queries * N * H
    assert temporaries(compiled) < 160 * MIB


def few_layers(config: Config) -> Config:
    return dataclasses.replace(config, num_layers=4, num_key_value_layers=2)


@pytest.mark.parametrize(
    ("config", "machine", "mesh"),
    [(LLAMA_8B, "a100:1", (1, 1)), (LLAMA_8B, "b200:1", (1, 1)), (LLAMA_70B, "a100:8", (1, 8))],
)
def test_the_prefill_program_calls_cudnn(config, machine, mesh, installed):
    """On one device and on eight, each with a key/value head: in each of two lower layers, one call
    for own keys and one for those before them, of either size."""
    lowered = lower_program(
        few_layers(config),
        PrefillProgram(2048, 2048 // 128 + FEW_TILES, None),
        batch=64,
        max_model_len=131_072,
        mesh=topology_mesh(machine, mesh),
    )
    compiled = lowered.compile()
    assert sum(step.cudnn for step in steps(compiled)) == 8
    assert temporaries(compiled) < 256 * MIB


def test_without_cudnn_the_programs_attend_through_xla():
    """As here, where JAX finds none."""
    for program in (PrefillProgram(2048, 2048 // 128 + FEW_TILES, None), DecodeProgram(64)):
        lowered = lower_program(
            few_layers(LLAMA_8B),
            program,
            batch=64,
            max_model_len=131_072,
            mesh=topology_mesh("l4:1", (1, 1)),
        )
        text = lowered.as_text()
        assert CALL not in text and "mosaic_gpu" not in text
