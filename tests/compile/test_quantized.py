"""Products with 8-bit matrices at Llama-3.1-8B's shapes, for machines that are not here: the matrix
units that run them, and no copies."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.infer.runner.lowering import DecodeProgram, PrefillProgram
from swiftkv_jax.infer.runner.serving_form import weight_shapes
from swiftkv_jax.model import layers
from swiftkv_jax.model.boundary import project_fused_kv
from swiftkv_jax.model.layers import output_and_mlp, project_heads
from swiftkv_jax.model.quantization import Scheme, merge_outputs, product, scheme_for
from swiftkv_jax.plan.presets import LLAMA_8B
from swiftkv_jax.plan.topology import topology_mesh
from tests.compile import hlo
from tests.compile.compiled import compile_for
from tests.lowered import lower_program

MIB = 2**20
CONFIG = LLAMA_8B.cut(16, 8)
CASES = {
    "H200 fp8": ("h200:1", Scheme("fp8", "auto")),
    "H200 fp8 kernels": ("h200:1", Scheme("fp8", "auto", "hopper")),
    "H200 fp8 widened": ("h200:1", Scheme("fp8")),
    "H200 int8": ("h200:1", Scheme("int8")),
    "v6e fp8": ("v6e:2x2", Scheme("fp8")),
    "v6e int8": ("v6e:2x2", Scheme("int8")),
    "TPU7x fp8": ("tpu7x:2x2x1", Scheme("fp8", "native")),
}
# Each of them in any form that has its number of elements.
MATRICES = {48 * 128 * 4096, 14336 * 4096, 2 * 14336 * 4096, 2 * 2 * 8 * 128 * 4096}
SHAPE = re.compile(r"(\w+)\[([\d,]+)\]")


def layer(block, qkv, norm, kv, x, rope):
    """What a token goes through at the boundary, but for attention: a layer, and the keys and
    values of two groups."""
    queries = project_heads(x, qkv.heads, None)[..., :-2, :]
    x = output_and_mlp(CONFIG, block, x, queries.reshape(*x.shape[:2], 32, 128))
    s = layers.norm(CONFIG, x, norm)
    return x, project_fused_kv(CONFIG, kv, None, None, s, rope)


def elements(dimensions: str) -> int:
    return math.prod(int(size) for size in dimensions.split(","))


DECODE, PREFILL = (
    (64, 1, 32),
    (20, 128, 256),
)  # rows, tokens of each, and MiB of temporaries; `gate` alone is 112 in bfloat16


@pytest.mark.parametrize(
    ("name", "program"),
    [
        *((name, DECODE) for name in CASES),
        ("H200 fp8", PREFILL),
        ("H200 fp8 kernels", PREFILL),
        ("H200 int8", PREFILL),
        ("v6e int8", PREFILL),
    ],
)
def test_no_matrix_is_dequantised_in_memory(name, program):
    (topology, scheme), (rows, length, temporaries) = CASES[name], program
    weights = weight_shapes(CONFIG, True, jnp.bfloat16, scheme)
    x = jax.ShapeDtypeStruct((rows, length, CONFIG.embed_dim), jnp.bfloat16)
    rope = jax.ShapeDtypeStruct((2, rows, length, CONFIG.head_dim // 2), jnp.float32)
    compiled, kernels = compile_for(
        topology,
        layer,
        weights.lower[0],
        weights.lower_qkv[0],
        weights.norm_swiftkv,
        weights.kv,
        x,
        rope,
    )
    text, memory = str(compiled.as_text()), compiled.memory_analysis()

    assert memory is not None
    entry = text[text.index("\nENTRY") :]
    held = [
        SHAPE.match(made)
        for made in re.findall(r"^ +(?:ROOT )?%\S+ = \(?(\w+\[[\d,]+\])", entry, re.MULTILINE)
    ]
    wide = {
        found[0]
        for found in held
        if found and found[1] in ("bf16", "f32", "f16") and elements(found[2]) in MATRICES
    }
    assert any(
        found and found[1] in ("f8e4m3fn", "s8") and elements(found[2]) in MATRICES
        for found in held
    )
    assert not wide, f"dequantised copies: {wide}"
    print(f"{name}: temporaries {memory.temp_size_in_bytes / MIB:.1f} MiB")
    assert memory.temp_size_in_bytes <= temporaries * MIB

    operands = [
        re.findall(r"%(\S+?)[,)]", dot)
        for dot in re.findall(r" (?:dot|convolution)\((%[^)]*\))", text)
    ]
    dtypes = dict(re.findall(r"%(\S+) = (\w+)\[", text))
    multiplied = [{dtypes[operand] for operand in pair} for pair in operands]
    by_kernels = bool(scheme.kernels) and program is PREFILL
    assert len(kernels) == (6 if by_kernels else 0)  # four products, two kinds of rows
    assert not any(kernel.spilled or kernel.warned for kernel in kernels)
    assert len(multiplied) >= 4 or "__cublas" in text or by_kernels
    if scheme.arithmetic != "widen":  # float8 by float8
        assert all(pair == {"f8e4m3fn"} for pair in multiplied), multiplied


def test_passes_of_a_layer_beside_fp8_products():
    """What a lower layer reads and writes between products and attention, as XLA counts it; without
    kernels for rows it is 578 MB."""
    scheme = dataclasses.replace(scheme_for("fp8", "NVIDIA H100 80GB HBM3"), kernels="hopper")
    config = dataclasses.replace(LLAMA_8B, num_layers=4, num_key_value_layers=3)
    lowered = lower_program(
        config,
        PrefillProgram(2048, 2048 // 128, None),
        batch=16,
        max_model_len=4096,
        quantization=scheme,
        mesh=topology_mesh("h100:1", (1, 1)),
    )
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
    text = str(lowered.compile(compiler_options=options).as_text())
    found = hlo.passes(text, "fp8_rows", 120 * 10**6)
    sums = [at for at, one in enumerate(found) if one.name.startswith("wrapped_add")]
    layer = found[sums[0] + 1 : sums[1] + 1]
    print(", ".join(f"{one.name} {one.bytes / 1e6:.1f}" for one in layer))
    assert 390e6 < sum(one.bytes for one in layer) <= 420e6


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_int8_products_of_a_chunk_take_fewer_cycles(topology):
    """By the compiler's estimates, quantising the activations included."""
    cycles = []
    for scheme in (None, Scheme("int8", "native")):
        gate_up = weight_shapes(CONFIG, True, jnp.bfloat16, scheme).lower[0].gate_up
        x = jax.ShapeDtypeStruct((1, 2048, CONFIG.embed_dim), jnp.bfloat16)

        def multiply(x, weight):
            return product("BTD,MD->BTM", x, merge_outputs(weight))

        compiled, _ = compile_for(topology, multiply, x, gate_up)
        estimates = re.findall(r'"estimated_cycles":"(\d+)"', str(compiled.as_text()))
        cycles.append(sum(map(int, estimates)))
    print(f"{topology}: {cycles[1] / cycles[0]:.2f} of the cycles in bfloat16")
    assert 0 < cycles[1] <= 0.62 * cycles[0]


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_decode_program_never_holds_widened_weights(rows, triton):
    """Gate and up of one layer are 224 MiB in 16 bits. cuBLASLt has 32 MiB of its own. The
    vocabulary is small: without Triton the head, which is not quantised, is widened to float32 for
    one row."""
    config = dataclasses.replace(LLAMA_8B, num_layers=2, num_key_value_layers=1, vocab_size=1024)
    options = {} if triton else {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
    lowered = lower_program(
        config,
        DecodeProgram(rows),
        batch=rows,
        max_model_len=1024,
        steps=8,
        quantization=scheme_for("fp8", "NVIDIA H100 80GB HBM3"),
        mesh=topology_mesh("h100:1", (1, 1)),
    )
    memory = lowered.compile(compiler_options=options).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= 48 * MIB
