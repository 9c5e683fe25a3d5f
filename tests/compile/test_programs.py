"""The whole prefill and decode programs of Llama-3.1-8B and 70B, for machines that are not here:
kernels, and memory."""

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp
import pytest

from swiftkv_jax.infer.runner.host_pages import SIZES, MoveProgram
from swiftkv_jax.infer.runner.lowering import (
    DecodeKind,
    DecodeProgram,
    PrefillProgram,
    UpperProgram,
    compiler_defaults,
)
from swiftkv_jax.model.cache import bytes_per_token
from swiftkv_jax.plan.presets import (
    GEMMA3_12B,
    LLAMA_8B,
    LLAMA_70B,
    PHI_4,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN25_32B,
)
from swiftkv_jax.plan.topology import topology_mesh
from tests.compile import hlo
from tests.compile.compiled import with_kernels
from tests.lowered import lower_program

GIB, MIB = 2**30, 2**20
MACHINES = {  # model, topology, mesh, memory of a device in GiB (the vendors' figures)
    "8B on an H200": (LLAMA_8B, "h200:1", (1, 1), 140),
    "70B on 8 H200": (LLAMA_70B, "h200:8", (1, 8), 140),
    "8B on a v6e": (LLAMA_8B, "v6e:2x2", (1, 1), 32),
    "70B on 8 v6e": (LLAMA_70B, "v6e:2x4", (1, 8), 32),
    "8B on a v5p": (LLAMA_8B, "v5p:2x2x1", (1, 1), 95),
    "70B on 4 v5p": (LLAMA_70B, "v5p:2x2x1", (1, 4), 95),
}
SLOTS, CHUNK = 16, 2048
PREFILL, DECODE = PrefillProgram(CHUNK, CHUNK // 128 + 16, None), DecodeProgram(SLOTS)
SHAPE: dict[str, Any] = {"batch": SLOTS, "max_model_len": 4096}


def check(name, lowered, config, swiftkv: bool, kernels_on_gpu: int = 1):
    """Kernels are there, the cache is updated in place, all fits: memory figures."""
    _, topology, mesh, available = MACHINES[name]
    compiled, kernels = with_kernels(lowered)
    on_gpu = topology.startswith("h200")
    assert len(kernels) == on_gpu * kernels_on_gpu, "compiled once for all layers"
    assert all(kernel.spilled == 0 for kernel in kernels)
    target = "mosaic_gpu" if on_gpu else "tpu_custom_call"
    assert str(compiled.as_text()).count(target) >= config.num_lower_layers
    memory = compiled.memory_analysis()
    cache = (
        SLOTS
        * SHAPE["max_model_len"]
        * bytes_per_token(config, jnp.bfloat16, swiftkv=swiftkv)
        / math.prod(mesh)
    )
    print(
        f"{name}: peak {memory.peak_memory_in_bytes / GIB:.2f} GiB, temporaries "
        f"{memory.temp_size_in_bytes / MIB:.1f} MiB"
    )
    assert memory.alias_size_in_bytes >= cache
    assert memory.peak_memory_in_bytes < 0.9 * available * GIB
    return memory


@pytest.mark.parametrize("name", MACHINES)
def test_decode(name):
    config, topology, mesh, _ = MACHINES[name]
    lowered = lower_program(
        config, DecodeProgram(SLOTS), **SHAPE, steps=8, mesh=topology_mesh(topology, mesh)
    )
    # With one key/value head to a device a TPU turns the boundary projection around, once in a
    # call.
    bound = 64 if config is LLAMA_8B or topology.startswith("h200") else 320
    memory = check(name, lowered, config, True, kernels_on_gpu=2)
    assert memory.temp_size_in_bytes <= bound * MIB


@pytest.mark.parametrize("name", ["8B on an H200", "8B on a v6e"])
def test_adapters(name):
    """Four of rank 16 beside eight layers of the model: no array of a size near that of a weight is
    made of them in decoding, and in prefill no more than the activations of a layer."""
    config, topology, mesh, _ = MACHINES[name]
    config = dataclasses.replace(config, num_layers=8, num_key_value_layers=4)
    mesh = topology_mesh(topology, mesh)
    temporaries = {}
    for program, adapters in ((DECODE, 4), (PREFILL, 4), (PREFILL, 0)):
        lowered = lower_program(config, program, **SHAPE, adapters=adapters, mesh=mesh)
        kernels = 2 if program is DECODE else 1
        memory = check(name, lowered, config, True, kernels_on_gpu=kernels)
        temporaries[program, adapters] = memory.temp_size_in_bytes
    assert temporaries[DECODE, 4] <= 64 * MIB
    activations = 2 * CHUNK * config.mlp_dim * 2
    assert temporaries[PREFILL, 4] <= temporaries[PREFILL, 0] + 2 * activations


@pytest.mark.parametrize(
    ("name", "boundary"),
    [
        ("8B on an H200", False),
        ("70B on 8 H200", False),
        ("8B on a v6e", False),
        ("70B on 4 v5p", False),
        ("70B on 8 H200", True),
        ("70B on 4 v5p", True),
    ],
)
def test_moves_of_pages_to_the_host_and_back(name, boundary):
    """They return and take arrays in host memory, and update the cache in place. Temporaries are
    the pages themselves, two or three times. A described GPU does not say where operands are."""
    config, topology, mesh, _ = MACHINES[name]
    on_gpu = topology.startswith("h200")
    token = bytes_per_token(config, jnp.bfloat16) / math.prod(mesh)
    state = boundary * 2 * config.embed_dim / math.prod(mesh)
    pages = SIZES[0] * 128 * (token / (1 + boundary) + state)
    token += state
    for saves in (True, False):
        program = MoveProgram(saves, SIZES[0])
        lowered = lower_program(
            config, program, **SHAPE, boundary=boundary, mesh=topology_mesh(topology, mesh)
        )
        memory: Any = lowered.compile().memory_analysis()
        on_host = memory.host_output_size_in_bytes if saves else memory.host_argument_size_in_bytes
        temporaries = memory.temp_size_in_bytes / pages
        print(f"{name}, {program}: {on_host / MIB:.0f} MiB on the host, {temporaries=:.2f}")
        assert on_host == pages or (on_gpu and not saves)
        assert temporaries < (2.1 if on_gpu else 3.1)
        assert saves or memory.alias_size_in_bytes >= SLOTS * SHAPE["max_model_len"] * token


# On TPUs 1.4 MiB of temporaries a layer are no arrays of the program: with 8 layers Qwen3-8B has 25
# MiB, with 36 of them 64 to 67.
FAMILIES = {  # model, topology, mesh, memory of a device in GiB, temporaries of decoding in MiB
    "Qwen3-8B on an H200": (QWEN3_8B, "h200:1", (1, 1), 140, 64),
    "Qwen3-8B on a v6e": (QWEN3_8B, "v6e:2x2", (1, 1), 32, 68),
    "Qwen2.5-32B on an H200": (QWEN25_32B, "h200:1", (1, 1), 140, 128),
    "Qwen2.5-32B on 4 v6e": (QWEN25_32B, "v6e:2x2", (1, 4), 32, 136),
    "Gemma3-12B on an H200": (GEMMA3_12B, "h200:1", (1, 1), 140, 128),
    "Gemma3-12B on 4 v6e": (GEMMA3_12B, "v6e:2x2", (1, 4), 32, 136),
    "Phi-4 on an H200": (PHI_4, "h200:1", (1, 1), 140, 64),
    "Phi-4 on 4 v6e": (PHI_4, "v6e:2x2", (2, 2), 32, 84),
    "Qwen3-30B-A3B on an H200": (QWEN3_30B_A3B, "h200:1", (1, 1), 140, 128),
    "Qwen3-30B-A3B on 4 v6e": (QWEN3_30B_A3B, "v6e:2x2", (1, 4), 32, 128),
}


@pytest.mark.parametrize("tail", [0, 64])
@pytest.mark.parametrize("name", ["8B on an H200", "8B on a v6e", "70B on 4 v5p"])
def test_two_caches(name, tail):
    """Layers in groups of four whose tokens keep their own keys and values too: decoding, and a
    prompt's tail, attend to both with kernels, and hold one cache."""
    config, topology, mesh, available = MACHINES[name]
    upper = config.num_upper_layers
    # Of 70B as in `test_decode`; a tail has the chunk's hidden states besides, of one layer.
    bound = 320 if tail or config is LLAMA_70B else 96
    heads = (tuple(range(config.num_kv_heads)),) * upper
    config = dataclasses.replace(
        config, key_value_group_size=4, shared_kv_heads=heads, generated_kv="own", exact_tail=tail
    )
    program = UpperProgram(CHUNK, tail, None, scores=False) if tail else DecodeProgram(SLOTS)
    static: dict[str, Any] = {} if tail else {"steps": 8}
    mesh = topology_mesh(topology, mesh)
    lowered = lower_program(config, program, **SHAPE, mesh=mesh, **static)
    compiled, kernels = with_kernels(lowered)
    assert all(kernel.spilled == 0 for kernel in kernels)
    memory: Any = compiled.memory_analysis()
    print(
        f"{name}, two caches, {program}: peak {memory.peak_memory_in_bytes / GIB:.2f} GiB, "
        f"temporaries {memory.temp_size_in_bytes / MIB:.1f} MiB"
    )
    target = "mosaic_gpu" if topology.startswith("h200") else "tpu_custom_call"
    attended = config.num_lower_layers + 2 * upper - bool(tail)
    assert str(compiled.as_text()).count(target) >= attended - bool(tail)
    assert memory.peak_memory_in_bytes < 0.9 * available * GIB
    assert memory.temp_size_in_bytes <= bound * MIB


TAIL = UpperProgram(CHUNK, 64, None, scores=False)


@pytest.mark.parametrize(
    ("name", "program", "attentions"),
    [
        ("8B on an H200", PREFILL, 2 + 2),  # lower layers, prompt attention
        ("8B on an H200", TAIL, 2 + 2 + 3),  # of the last layer only keys and values are needed
        ("8B on an H200", "first_token", 4 * 2),  # of the upper layers, as in a decode step
        ("8B on an H200", DECODE, 2 + 4 + 1),  # in the second prompt attention layer twice
        ("8B on a v6e", PREFILL, 2 + 2),
        ("8B on a v6e", "first_token", 4),
        ("8B on a v6e", DECODE, 2 + 4 + 1),
    ],
)
def test_prompt_attention_a_tap_and_an_exact_head(name, program, attentions):
    """Of six layers two are lower ones, and prompts run the attention of two more. The first
    tokens of texts attend to themselves alone, without a kernel."""
    config, topology, mesh, _ = MACHINES[name]
    tail = 64 if isinstance(program, UpperProgram) else 0
    config = dataclasses.replace(
        config,
        num_layers=6,
        num_key_value_layers=2,
        prompt_attention_layers=2,
        boundary_taps=1,
        exact_head=1,
        generated_kv="own" if tail else "boundary",
        exact_tail=tail,
    )
    static: dict[str, Any] = {"steps": 8} if isinstance(program, DecodeProgram) else {}
    lowered = lower_program(config, program, **SHAPE, mesh=topology_mesh(topology, mesh), **static)
    compiled, kernels = with_kernels(lowered)
    assert all(kernel.spilled == 0 for kernel in kernels)
    memory: Any = compiled.memory_analysis()
    targets = re.findall(r'custom_call_target="(mosaic_gpu|tpu_custom)', str(compiled.as_text()))
    print(
        f"{name}, {program}: {len(targets)} calls, temporaries "
        f"{memory.temp_size_in_bytes / MIB:.1f} MiB"
    )
    # On GPUs a decode step's attention is two kernels: blocks of keys, and their combination.
    on_gpu = topology.startswith("h200")
    assert len(targets) == attentions * (2 if on_gpu and static else 1)
    cache = SLOTS * SHAPE["max_model_len"] * bytes_per_token(config, jnp.bfloat16)
    assert memory.alias_size_in_bytes >= cache / math.prod(mesh)


@pytest.mark.parametrize(
    "program",
    [PrefillProgram(CHUNK, CHUNK // 128 + 16, None), DecodeProgram(SLOTS)],
    ids=["prefill", "decode"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, program):
    config, topology, mesh, available, bound = FAMILIES[name]
    decodes = isinstance(program, DecodeProgram)
    static: dict[str, Any] = {"steps": 8} if decodes else {}
    devices = topology_mesh(topology, mesh)
    lowered = lower_program(config, program, **SHAPE, mesh=devices, **static)
    compiled, kernels = with_kernels(lowered)
    assert all(kernel.spilled == 0 for kernel in kernels)
    memory: Any = compiled.memory_analysis()
    print(
        f"{name}, {program}: peak {memory.peak_memory_in_bytes / GIB:.2f} GiB, temporaries "
        f"{memory.temp_size_in_bytes / MIB:.1f} MiB"
    )
    target = "mosaic_gpu" if topology.startswith("h200") else "tpu_custom_call"
    products = 3 if config.num_experts else 0
    assert str(compiled.as_text()).count(target) >= (1 + products) * config.num_lower_layers
    assert memory.peak_memory_in_bytes < 0.9 * available * GIB
    if decodes:
        assert memory.temp_size_in_bytes <= bound * MIB


@pytest.mark.parametrize("name", ["Qwen3-8B on an H200", "Qwen3-8B on a v6e"])
def test_greedy_decode_of_a_family(name):
    """Without the sampler's arrays, which on a v6e take it over 64 MiB."""
    config, topology, mesh, _, _ = FAMILIES[name]
    mesh = topology_mesh(topology, mesh)
    lowered = lower_program(config, DecodeProgram(SLOTS, "greedy"), **SHAPE, mesh=mesh, steps=8)
    memory: Any = with_kernels(lowered)[0].memory_analysis()
    print(f"{name}, greedy: temporaries {memory.temp_size_in_bytes / MIB:.1f} MiB")
    assert memory.temp_size_in_bytes <= 64 * MIB


def lower_decode(name: str, kind: DecodeKind, num_layers: int | None = None, **static):
    """A decode program with the default options of an engine: 64 rows with room for 131,072
    positions, in a pool of 2,048 for each."""
    config, topology, mesh, _ = MACHINES[name]
    if num_layers is not None:
        config = dataclasses.replace(
            config, num_layers=num_layers, num_key_value_layers=num_layers // 2
        )
    shape: dict[str, Any] = {"batch": 64, "max_model_len": 131_072, "num_pages": 64 * 16}
    mesh = topology_mesh(topology, mesh)
    return lower_program(config, DecodeProgram(64, kind), **shape, mesh=mesh, **static)


@pytest.mark.parametrize(("kind", "bound"), [("greedy", 33), ("sampling", 64)])
def test_decode_in_long_tables(kind, bound):
    """No temporary array has room for all positions. A greedy step has the logits, of 31.3 MiB;
    the sampler as much again, a weight for each row and token of the vocabulary."""
    name = "8B on an H200"
    compiled, kernels = with_kernels(lower_decode(name, kind, steps=8))
    assert len(kernels) == 2
    memory: Any = compiled.memory_analysis()
    print(f"{name}, {kind}: temporaries {memory.temp_size_in_bytes / MIB:.1f} MiB")
    assert memory.temp_size_in_bytes <= bound * MIB


def test_kernels_of_a_decode_step():
    """A greedy step has no branch, at which a host waits. Of its kernels a lower layer has 15: four
    products, two of attention, and nine for norms, rotary embedding, check, scatters, activation
    and sums; an upper one 12, and 3 for its group; the step 27 besides."""
    counts = []
    for num_layers in (2, 4):
        compiled = lower_decode("8B on an H200", "greedy", num_layers=num_layers, steps=1).compile()
        found = hlo.kernels(str(compiled.as_text()))
        assert not {"conditional", "while"} & {kernel.op for kernel in found}
        counts.append(len(found))
    print(f"kernels of a step with 2 and with 4 layers: {counts}")
    layers = 15 + 12 + 3
    assert counts == [layers + 27, 2 * layers + 27]


@pytest.mark.parametrize(
    ("kind", "with_loops", "branches", "loops"),
    [
        ("greedy", False, 0, 1),  # the loop over the steps of a call
        ("greedy", True, 0, 0),
        ("sampling", False, 9, 5),  # and the sampler's, of which most lie in branches
        ("sampling", True, 0, 1),
    ],
)
def test_branches_and_loops_outside_command_buffers(kind, with_loops, branches, loops):
    """By XLA's defaults a greedy step, attention included, is one command buffer, and the sampler
    is not in any; with loops in them a call is one."""
    lowered = lower_decode("8B on an H200", kind, num_layers=2, steps=8)
    found = hlo.thunks(lowered, hlo.WITH_LOOPS if with_loops else {})
    print(f"{kind}, with loops {with_loops}: {found}")
    assert (found.branches_outside, found.loops_outside) == (branches, loops)
    if kind == "greedy":
        assert found.command_buffers == (1 if with_loops else 3)
        assert found.outside <= 1


FEW_LAYERS = dataclasses.replace(LLAMA_8B, num_layers=4, num_key_value_layers=2)


@pytest.mark.parametrize(("tokens", "expected"), [(256, True), (CHUNK, False)])
def test_large_chunks_have_no_command_buffer(tokens, expected):
    program = PrefillProgram(tokens, tokens // 128 + 4, None)
    lowered = lower_program(FEW_LAYERS, program, **SHAPE, mesh=topology_mesh("h200:1", (1, 1)))
    found = hlo.thunks(lowered, compiler_defaults(program, "gpu"))
    assert (found.command_buffers > 0) == expected, found


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("swiftkv", [True, False])
def test_prefill_joins_no_weights(swiftkv, triton):
    """XLA makes one product of several of the same input, and joins their weights in every call."""
    program = PrefillProgram(CHUNK, CHUNK // 128 + 4, None)
    mesh = topology_mesh("h200:1", (1, 1))
    lowered = lower_program(FEW_LAYERS, program, **SHAPE, swiftkv=swiftkv, mesh=mesh)
    options = {"xla_gpu_enable_triton_gemm": triton}
    text = str(lowered.compile(compiler_options=options).as_text())
    assert len(re.findall(r"dot\(|cublas", text)) > 4
    assert not re.findall(rf"= \w+\[\d+,{LLAMA_8B.embed_dim}\]\S* concatenate\(.*", text)


@pytest.mark.parametrize("name", MACHINES)
def test_prefill(name):
    """With the most tiles that a chunk of an engine has."""
    config, topology, mesh, _ = MACHINES[name]
    program = PrefillProgram(CHUNK, CHUNK // 128 + 32, None)
    lowered = lower_program(config, program, **SHAPE, mesh=topology_mesh(topology, mesh))
    memory = check(name, lowered, config, True)
    assert memory.temp_size_in_bytes < 2 * GIB


def test_decode_of_layers_with_and_without_a_window():
    """Two work lists a step, and a kernel for each."""
    kinds = LLAMA_8B.layer_kinds[0], dataclasses.replace(LLAMA_8B.layer_kinds[0], window=1000)
    config = dataclasses.replace(LLAMA_8B, layer_kinds=kinds * (LLAMA_8B.num_layers // 2))
    lowered = lower_program(
        config, DecodeProgram(SLOTS), **SHAPE, mesh=topology_mesh("h200:1", (1, 1))
    )
    _, kernels = with_kernels(lowered)
    names = sorted(kernel.name.rsplit("_", 1)[0] for kernel in kernels)
    assert names == ["hopper_decode"] * 2 + ["hopper_decode_combine"] * 2
    assert all(kernel.spilled == 0 for kernel in kernels)
