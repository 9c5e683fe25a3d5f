"""Programs that decode several tokens of a sequence in a step, for machines that are not here: the
kernels take the blocks, and the memory is that of a few more rows."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from swiftkv_jax.infer.runner.lowering import DecodeProgram
from swiftkv_jax.plan.presets import LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B
from swiftkv_jax.plan.topology import topology_mesh
from tests.compile.compiled import with_kernels
from tests.lowered import lower_program

MIB = 2**20
H200, H200_8 = ("h200:1", (1, 1)), ("h200:8", (1, 8))
V6E, V6E_8 = ("v6e:2x2", (1, 1)), ("v6e:2x4", (1, 8))
TWO_CACHES = dataclasses.replace(
    LLAMA_8B,
    key_value_group_size=4,
    shared_kv_heads=(tuple(range(LLAMA_8B.num_kv_heads)),) * LLAMA_8B.num_upper_layers,
    generated_kv="own",
    exact_tail=64,
)
FP8 = {"cache_dtype": jnp.float8_e4m3fn}
CASES: dict[str, Any] = {  # model, (topology, mesh), rows, width, more
    "8B on an H200, 1 of 16": (LLAMA_8B, H200, 1, 16, {}),
    "8B on an H200, 8 of 8": (LLAMA_8B, H200, 8, 8, {}),
    "8B on an H200, 64 of 4": (LLAMA_8B, H200, 64, 4, {}),
    "8B on an H200, fp8 cache": (LLAMA_8B, H200, 8, 8, FP8),
    "8B on an H200, two caches": (TWO_CACHES, H200, 8, 8, {}),
    "70B on 8 H200": (LLAMA_70B, H200_8, 8, 8, {}),
    "Qwen3-30B-A3B on an H200": (QWEN3_30B_A3B, H200, 8, 8, {}),
    "8B on a v6e, 1 of 16": (LLAMA_8B, V6E, 1, 16, {}),
    # A quarter of what 64 prompts can fill: all of it would be more than the memory.
    "8B on a v6e, 64 of 4": (LLAMA_8B, V6E, 64, 4, {"num_pages": 512}),  # see MOST
    "8B on a v6e, two caches": (TWO_CACHES, V6E, 8, 8, {}),
    "70B on 8 v6e": (LLAMA_70B, V6E_8, 8, 8, {}),
}
MOST = {"8B on a v6e, 64 of 4": 1152}
"""MiB of temporaries, where not 512. With one token for each of these 64 rows it is 256, and the
logits of four, in float32, are 125."""


@pytest.mark.parametrize("name", CASES)
def test_blocks(name):
    config, (topology, mesh), rows, width, more = CASES[name]
    lowered = lower_program(
        config,
        DecodeProgram(rows, width=width),
        batch=rows,
        max_model_len=4096,
        mesh=topology_mesh(topology, mesh),
        **more,
    )
    compiled, kernels = with_kernels(lowered)
    text = str(compiled.as_text())
    target = "mosaic_gpu" if topology.startswith("h200") else "tpu_custom_call"
    assert text.count(target) >= config.num_layers, "each layer attends with a kernel"
    assert all(kernel.spilled == 0 for kernel in kernels)
    assert "callback" not in text
    memory: Any = compiled.memory_analysis()
    temporaries = memory.temp_size_in_bytes
    print(f"{name}: temporaries {temporaries / MIB:.1f} MiB")
    assert temporaries <= MOST.get(name, 512) * MIB
