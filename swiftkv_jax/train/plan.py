"""What a run takes, before it is started: memory per device by kind, time, and the reasons, from `config.json` alone.

`--model` may also be one of `presets.PRESETS`. `--topology` also compiles the train step for machines that are not here, and
gives their compiler's own figures.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ..checkpoints.side_files import read_side_files
from ..cli import OK, OUT_OF_MEMORY, log
from ..config import Config
from ..cost import train_flops_by_part, train_flops_per_token
from ..hardware import GIB, HARDWARE, Hardware, hardware_of
from ..model import Batch
from ..params import llama_shapes, swiftkv_shapes
from ..presets import PRESETS
from ..sharding import MODEL, MeshShape, llama_shardings, make_mesh, swiftkv_shardings
from ..topology import ENVIRONMENT, topology_mesh
from .recipe import Recipe
from .start import choose_cut
from .step import make_optimizer, make_train_step, state_shapes

ASSUMED_MFU = 0.4
"""Of the published peak; what large dense models reach in training on these devices. An assumption, not a measurement."""
_STEPS = 1000  # any number: the schedule's length does not change the program


def main(recipe: Recipe, topology: str | None) -> int:
    """Print the plan on stdout; the exit code says whether the compiler found that it fits, if it was asked."""
    config = choose_cut(recipe, PRESETS[recipe.model] if recipe.model in PRESETS else read_side_files(Path(recipe.model))[0])
    if topology is not None:
        os.environ.update(ENVIRONMENT)
        jax.config.update("jax_platforms", "cpu")
    mesh = _mesh(recipe, topology)
    recipe = dataclasses.replace(recipe, mesh=MeshShape(*mesh.axis_sizes))  # -1 has become a number
    dtype = jnp.dtype(recipe.dtype or jnp.bfloat16)
    memory = memory_per_device(recipe, config, mesh, dtype)
    total = sum(memory.values())
    machine = hardware_of(mesh.devices.flat[0].device_kind) if isinstance(mesh, Mesh) else None
    print(describe(recipe, config, dtype))
    print(f"\n{_memory_table(memory)}\n\n{_flops_table(recipe, config)}\n")
    print(_time_table(recipe, config, total, HARDWARE if machine is None else (machine,)))
    return OK if topology is None else _compile(recipe, config, mesh, dtype, total)


def _mesh(recipe: Recipe, topology: str | None) -> Mesh | AbstractMesh:
    """The mesh, over the devices of `topology`, or over devices that need not exist."""
    if topology is not None:
        return topology_mesh(topology, recipe.mesh)
    if -1 in recipe.mesh:
        return make_mesh(recipe.mesh)
    return AbstractMesh(tuple(recipe.mesh), MeshShape._fields)


# Memory -----------------------------------------------------------------------------------------------------------


def memory_per_device(recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype) -> dict[str, float]:
    """Bytes of one device at the peak of a step, by kind.

    The peak is the backward pass through the upper layers: by then the logits are gone, and what the forward pass kept is
    still there.
    """
    size, tp = dtype.itemsize, mesh.shape[MODEL]
    rows, positions = recipe.micro_batch_size // recipe.mesh.rows, recipe.max_length
    upper, groups = config.num_upper_layers, config.num_kv_groups
    kv_heads = config.num_kv_heads // tp if config.num_kv_heads % tp == 0 else config.num_kv_heads
    heads = config.num_heads // tp if config.num_heads % tp == 0 else config.num_heads
    token = rows * positions * size  # bytes of one number per token
    width, queries, mlp = config.embed_dim, heads * config.head_dim, config.mlp_dim // tp
    delta = _bytes(swiftkv_shapes(config, jnp.float32), swiftkv_shardings(config, mesh))
    llama = llama_shardings(config, mesh)
    inputs = width // tp if recipe.shard_sequence else width
    kept = upper * token * (inputs if recipe.remat == "layer" else inputs + 2 * width + 2 * queries + 2 * mlp)
    shared = 2 * token * kv_heads * config.head_dim * (groups if config.key_value_group_size == 1 else groups + upper)
    memory = {
        f"frozen weights, {dtype}": _bytes(llama_shapes(config, dtype), llama),
        "delta, float32 master copy": delta,
        "AdamW moments, float32": 2 * delta,
        f"delta in {dtype}, and its gradient": delta * size / 4 + delta,
        f"kept by the forward pass ({'layer inputs' if recipe.remat == 'layer' else 'activations'})": kept,
        "the student's shared keys and values": shared,
        "one layer's backward pass": token * (6 * mlp + 5 * width),
    }
    if recipe.mesh.fsdp > 1:
        memory["weights put together (two layers, keys and values, output matrix)"] = _whole_weights(config, tp, size)
    if recipe.gradient_accumulation_steps > 1:
        memory["sum of the micro-batches' gradients, float32"] = delta
    return memory


def _bytes(shapes: Any, shardings: Any) -> float:
    parts = jax.tree.map(lambda leaf, place: math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize, shapes, shardings)
    return float(sum(jax.tree.leaves(parts)))


def _whole_weights(config: Config, tp: int, size: int) -> float:
    layer = config.embed_dim * (3 * config.mlp_dim + 2 * (config.num_heads + config.num_kv_heads) * config.head_dim)
    kv = config.num_kv_groups * 2 * config.num_kv_heads * config.head_dim * config.embed_dim
    return (2 * layer + kv + config.vocab_size * config.embed_dim) * size / tp


def _memory_table(memory: dict[str, float]) -> str:
    rows = [*memory.items(), ("total", sum(memory.values()))]
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"{'memory per device':<{width}}      GiB", *(f"{name:<{width}}  {value / GIB:7.2f}" for name, value in rows)])


def fits(memory: float, hardware: Hardware) -> bool:
    """Whether so many bytes fit, with a tenth left for the runtime and for what the plan does not know."""
    return memory <= 0.9 * hardware.memory_bytes


# Time -------------------------------------------------------------------------------------------------------------


def describe(recipe: Recipe, config: Config, dtype: jnp.dtype) -> str:
    frozen, trained = (sum(leaf.size for leaf in jax.tree.leaves(shapes)) for shapes in (llama_shapes(config), swiftkv_shapes(config)))
    rows = recipe.micro_batch_size // recipe.mesh.rows
    return (
        f"{frozen:,} frozen and {trained:,} trained parameters, {config.num_key_value_layers} of {config.num_layers} layers own their keys "
        f"and values, groups of {config.key_value_group_size}\n"
        f"mesh {recipe.mesh} ({math.prod(recipe.mesh)} devices), {dtype}, remat {recipe.remat}; a step is {recipe.batch_size} rows of "
        f"{recipe.max_length:,} tokens in {recipe.gradient_accumulation_steps} micro-batches, {rows} rows to a device"
    )


def _flops_table(recipe: Recipe, config: Config) -> str:
    parts = train_flops_by_part(config, recipe.max_length, remat=recipe.remat)
    total, width = sum(parts.values()), max(map(len, parts))
    rows = [f"{name:<{width}}  {flops / 1e9:7.1f}  {flops / total:4.0%}" for name, flops in [*parts.items(), ("total", total)]]
    return "\n".join([f"{'operations per token':<{width}}    GFLOP", *rows])


def _time_table(recipe: Recipe, config: Config, memory: float, machines: Sequence[Hardware]) -> str:
    """What a step takes at the assumed utilisation on each machine, and whether it fits."""
    per_token, devices = train_flops_per_token(config, recipe.max_length, remat=recipe.remat), math.prod(recipe.mesh)
    tokens = recipe.batch_size * recipe.max_length
    lines = [f"time at an assumed {ASSUMED_MFU:.0%} of the published bfloat16 peak"]
    for machine in machines:
        speed = ASSUMED_MFU * machine.flops * devices / per_token
        verdict = "fits" if fits(memory, machine) else f"does not fit in {machine.memory_bytes / GIB:.0f} GiB"
        lines.append(f"  {devices} x {machine.name:<19}{speed:>12,.0f} tokens/s {tokens / speed:9.2f} s a step   {verdict}")
    if gathered := _fsdp_bytes(recipe, config):
        lines.append(f"  over fsdp each device receives {gathered / GIB:.0f} GiB of weights in a step")
    if not all(fits(memory, machine) for machine in machines):
        lines.append(f"to make it fit: {_advice(recipe)}")
    return "\n".join(lines)


def _fsdp_bytes(recipe: Recipe, config: Config) -> float:
    """Bytes that reach a device: every layer once forward (the upper ones for teacher and student), the upper ones again backward."""
    if recipe.mesh.fsdp == 1:
        return 0.0
    layer = config.embed_dim * (3 * config.mlp_dim + 2 * (config.num_heads + config.num_kv_heads) * config.head_dim)
    layers = config.num_lower_layers + 3 * config.num_upper_layers
    whole = (layers * layer + 2 * config.vocab_size * config.embed_dim) * 2 / recipe.mesh.model
    return recipe.gradient_accumulation_steps * whole * (recipe.mesh.fsdp - 1) / recipe.mesh.fsdp


def _advice(recipe: Recipe) -> str:
    """The flag to change first."""
    if recipe.micro_batch_size // recipe.mesh.rows > 1:
        return "more --gradient-accumulation-steps"
    if recipe.remat == "none":
        return "--remat layer"
    if recipe.mesh.model > 1 and not recipe.shard_sequence:
        return "--shard-sequence"
    return "more devices along fsdp or model in --mesh, or a shorter --max-length"


# The compiler's figures --------------------------------------------------------------------------------------------


def lower_step(recipe: Recipe, config: Config, mesh: Mesh, dtype: jnp.dtype) -> jax.stages.Lowered:
    """The train step for these shapes, not yet compiled. The devices of `mesh` need not exist."""
    optimizer = make_optimizer(recipe, _STEPS)
    step = make_train_step(config, recipe, optimizer, mesh)
    shape = (recipe.gradient_accumulation_steps, recipe.micro_batch_size, recipe.max_length)
    integers, floats = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
    return step.lower(state_shapes(config, optimizer), llama_shapes(config, dtype), Batch(integers, integers, integers, floats))


def _compile(recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype, planned: float) -> int:
    device = mesh.devices.flat[0]
    log(f"compiling the train step for {math.prod(recipe.mesh)} x {device.device_kind}")
    start = time.perf_counter()
    memory: Any = lower_step(recipe, config, mesh, dtype).compile().memory_analysis()
    seconds = time.perf_counter() - start
    peak, hardware = memory.peak_memory_in_bytes, hardware_of(device.device_kind)
    print(f"\n{device.device_kind}: compiled in {seconds:.0f} s; its compiler's figures per device, in GiB")
    figures = {
        "weights, delta and moments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak": peak,
        "planned above": planned,
    }
    print("\n".join(f"  {name:<28} {value / GIB:7.2f}" for name, value in figures.items()))
    if hardware is None or fits(peak, hardware):
        return OK
    log(f"error: the peak is over 90 % of the device's {hardware.memory_bytes / GIB:.0f} GiB: {_advice(recipe)}")
    return OUT_OF_MEMORY
