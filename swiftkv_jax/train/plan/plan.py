"""The plan of a run, from `config.json` alone: memory per device by kind, time, and how they are
made up.

The recipe's `model` may also be one of `presets.PRESETS`. With a `topology` the train step is also
compiled, for machines that need not exist, which gives their compiler's own figures.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ...checkpoints import auxiliary_files_of
from ...checkpoints.foreign import missing
from ...cli.exit import OK
from ...errors import CheckpointError, OutOfMemoryError
from ...model.batch import Batch
from ...model.config import Config
from ...model.mesh import MeshShape, make_mesh
from ...model.params import llama_shapes, swiftkv_shapes
from ...plan.cost import stored_layer_weights, train_flops_by_part, train_flops_per_token
from ...plan.hardware import GIB, HARDWARE, Hardware, hardware_of
from ...plan.presets import PRESETS
from ...plan.topology import ENVIRONMENT, topology_mesh
from ..analysis.given_analysis import with_analysis
from ..recipe import Recipe
from ..run.setup import check_loss, check_trainable, cut_model
from ..run.start import calibration_tokens
from ..run.step import make_optimizer, make_train_step, state_shapes
from ..run_options import RunOptions
from .memory import fits, memory_per_device
from .serving_plan import serving_table

logger = logging.getLogger(__name__)

ASSUMED_UTILISATION = 0.4
"""Share of the published peak, recomputation included, that large dense models reach in training.
An assumption, not a measurement."""
_STEPS = 1000  # any number: the schedule's length does not change the program


def main(recipe: Recipe, topology: str | None) -> int:
    """Print the plan on standard output. Returns the exit code.

    Raises `OutOfMemoryError` if the step compiled for `topology` does not fit, `UsageError` and
    `CheckpointError`.
    """
    config, mesh, recipe, dtype = planned_model(recipe, topology)
    check_loss(recipe, config)
    check_trainable(config)
    memory = memory_per_device(recipe, config, mesh, dtype)
    total = sum(memory.values())
    flops = train_flops_by_part(config, recipe.max_length, remat=recipe.remat)
    print(describe_plan(recipe, config, dtype))
    print(f"\n{table_of_bytes('memory per device', memory)}\n\n{table_of_flops(flops)}\n")
    print(_time_table(recipe, config, total, machines_of(mesh)))
    print(f"\n{serving_table(config, dtype, recipe.max_length)}")
    if recipe.init == "closed-form":
        tokens = calibration_tokens(recipe, config)
        print(f"\nbefore training, a calibration on {tokens:,} tokens: `train calibrate --dry-run`")
    if topology is not None:
        _compile(recipe, config, mesh, dtype, total)
    return OK


def planned_model[T: RunOptions](
    options: T, topology: str | None
) -> tuple[Config, Mesh | AbstractMesh, T, jnp.dtype]:
    """The model at its cut, the mesh over the devices of `topology` or over devices that need not
    exist, the options with the size of that mesh, and the dtype of the weights."""
    preset = PRESETS.get(options.model)
    if preset is None and not Path(options.model).exists():
        raise CheckpointError(
            f"{options.model}: {missing(options.model)}; shapes that are known by name: "
            f"{', '.join(PRESETS)}"
        )
    teacher = preset or auxiliary_files_of(Path(options.model))[0]
    options = with_analysis(options, teacher)
    config = cut_model(options, teacher)
    if options.num_key_value_layers is None and not teacher.num_upper_layers:
        logger.info(
            "half of the layers keep their own keys and values in this plan; a run takes what an "
            "analysis recommends: name `num_key_value_layers`, or an `analysis` that was made"
        )
    if topology is not None:
        os.environ.update(ENVIRONMENT)
        jax.config.update("jax_platforms", "cpu")
    mesh = _mesh(options, topology)
    options = dataclasses.replace(
        options, mesh=MeshShape(*mesh.axis_sizes)
    )  # -1 has become a number
    return config, mesh, options, jnp.dtype(options.dtype or jnp.bfloat16)


def _mesh(options: RunOptions, topology: str | None) -> Mesh | AbstractMesh:
    """The mesh, over the devices of `topology`, or over devices that need not exist."""
    if topology is not None:
        return topology_mesh(topology, options.mesh)
    if -1 in options.mesh:
        return make_mesh(options.mesh)
    return AbstractMesh(tuple(options.mesh), MeshShape._fields)


def machines_of(mesh: Mesh | AbstractMesh) -> Sequence[Hardware]:
    """The machine that the devices of `mesh` are; all known ones if they need not exist, or are of
    no known kind."""
    machine = hardware_of(mesh.devices.flat[0].device_kind) if isinstance(mesh, Mesh) else None
    return HARDWARE if machine is None else (machine,)


# Tables -----------------------------------------------------------------------


def table_of_bytes(title: str, memory: dict[str, float]) -> str:
    """Format a table in GiB, or in MiB where the total is less than a quarter of one GiB."""
    rows = [*memory.items(), ("total", total := sum(memory.values()))]
    unit, size = ("GiB", GIB) if total >= GIB / 4 else ("MiB", GIB / 1024)
    width = max(len(title), *(len(name) for name, _ in rows))
    return "\n".join(
        [
            f"{title:<{width}}      {unit}",
            *(f"{name:<{width}}  {b / size:7.2f}" for name, b in rows),
        ]
    )


def boundary_words(config: Config) -> str:
    """Describe the prompt attention layers, taps and exact head, to end a list; empty without
    any."""
    alone = config.prompt_attention_layers
    taps = config.boundary_taps
    words = f", {alone} prompt attention layers" * (alone > 0)
    if neurons := config.prompt_mlp_neurons:
        words += f" with {neurons:,} neurons each"
    words += ", with a tap" * taps
    return words + ", with an exact head" * config.exact_head


def describe_plan(recipe: Recipe, config: Config, dtype: jnp.dtype) -> str:
    """Two lines: the model and its cut, and the batch on the devices."""
    frozen, trained = (
        sum(leaf.size for leaf in jax.tree.leaves(shapes))
        for shapes in (llama_shapes(config), swiftkv_shapes(config))
    )
    rows = recipe.micro_batch_size // recipe.mesh.rows
    return (
        f"{frozen:,} frozen and {trained:,} trained parameters, {config.num_key_value_layers} of "
        f"{config.num_layers} layers own their keys "
        f"and values, groups of {config.key_value_group_size}{boundary_words(config)}\n"
        f"mesh {recipe.mesh} ({count_devices(recipe.mesh)}), {dtype}, remat {recipe.remat}; a "
        f"step is {recipe.batch_size} rows of "
        f"{recipe.max_length:,} tokens in {recipe.gradient_accumulation_steps} micro-batches, "
        f"{rows} rows to a device"
    )


def table_of_flops(parts: dict[str, float]) -> str:
    """Format a table in GFLOP, or in MFLOP where the total is less than one GFLOP."""
    total = sum(parts.values())
    width = max(map(len, parts))
    unit, size = ("GFLOP", 1e9) if total >= 1e9 else ("MFLOP", 1e6)
    rows = [
        f"{name:<{width}}  {flops / size:7.1f}  {flops / total:4.0%}"
        for name, flops in [*parts.items(), ("total", total)]
    ]
    return "\n".join([f"{'operations per token':<{width}}    {unit}", *rows])


def count_devices(mesh: MeshShape) -> str:
    count = math.prod(mesh)
    return f"{count} device{'s' * (count > 1)}"


def _time_table(recipe: Recipe, config: Config, memory: float, machines: Sequence[Hardware]) -> str:
    """For each machine, the time of a step at the assumed utilisation, and whether it fits."""
    per_token = train_flops_per_token(config, recipe.max_length, remat=recipe.remat)
    devices = math.prod(recipe.mesh)
    tokens = recipe.batch_size * recipe.max_length
    lines = [f"time at an assumed {ASSUMED_UTILISATION:.0%} of the published bfloat16 peak"]
    for machine in machines:
        speed = ASSUMED_UTILISATION * machine.flops * devices / per_token
        lines.append(
            f"  {devices} x {machine.name:<19}{speed:>12,.0f} tokens/s {tokens / speed:9.2f} s a "
            f"step   {verdict(memory, machine)}"
        )
    if gathered := _fsdp_bytes(recipe, config):
        lines.append(
            f"  over fsdp each device receives {gathered / GIB:.0f} GiB of weights in a step"
        )
    if not all(fits(memory, machine) for machine in machines):
        lines.append(f"to make it fit: {_advice(recipe)}")
    return "\n".join(lines)


def verdict(memory: float, machine: Hardware) -> str:
    """Whether these bytes fit each of its devices, in words."""
    if fits(memory, machine):
        return "fits"
    return f"does not fit in {machine.memory_bytes / GIB:.0f} GiB"


def _fsdp_bytes(recipe: Recipe, config: Config) -> float:
    """Bytes that reach a device: every layer once forward (the upper ones for teacher and student),
    the upper ones again backward."""
    if recipe.mesh.fsdp == 1:
        return 0.0
    layers = config.num_lower_layers + 3 * config.num_upper_layers
    whole = (
        (layers * stored_layer_weights(config) + 2 * config.vocab_size * config.embed_dim)
        * 2
        / recipe.mesh.model
    )
    return recipe.gradient_accumulation_steps * whole * (recipe.mesh.fsdp - 1) / recipe.mesh.fsdp


def _advice(recipe: Recipe) -> str:
    """The setting to change first, in backticks as in an error."""
    if recipe.micro_batch_size // recipe.mesh.rows > 1:
        return "more `gradient_accumulation_steps`"
    if recipe.remat != "layer":
        return "`remat`=layer"
    if recipe.mesh.model > 1 and not recipe.shard_sequence:
        return "`shard_sequence`"
    return "more devices along fsdp or model in `mesh`, or a shorter `max_length`"


# The compiler's figures -------------------------------------------------------


def lower_step(recipe: Recipe, config: Config, mesh: Mesh, dtype: jnp.dtype) -> jax.stages.Lowered:
    """The train step for these shapes, not yet compiled. The devices of `mesh` need not exist."""
    optimizer = make_optimizer(recipe, _STEPS)
    step = make_train_step(config, recipe, optimizer, mesh)
    shape = (recipe.gradient_accumulation_steps, recipe.micro_batch_size, recipe.max_length)
    integers, floats = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
    return step.lower(
        state_shapes(config, optimizer),
        llama_shapes(config, dtype),
        Batch(
            integers,
            integers,
            integers,
            floats,
            None if config.generated_kv == "boundary" else jax.ShapeDtypeStruct(shape, jnp.bool_),
        ),
    )


def _compile(recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype, planned: float) -> None:
    """Print the compiler's figures. Raises `OutOfMemoryError` if the step does not fit."""
    lowered = lower_step(recipe, config, mesh, dtype)
    held = "weights, delta and moments"
    compile_and_report(lowered, mesh, "train step", held, planned, _advice(recipe))


def compile_and_report(
    lowered: jax.stages.Lowered, mesh: Mesh, what: str, arguments: str, planned: float, advice: str
) -> None:
    """Compile `lowered` and print the compiler's figures beside the `planned` bytes. `what` names
    the program and `arguments` its arguments in the text. Raises `OutOfMemoryError`, with the
    `advice`, if it does not fit."""
    device = mesh.devices.flat[0]
    logger.info("compiling the %s for %d x %s", what, mesh.devices.size, device.device_kind)
    start = time.perf_counter()
    memory: Any = lowered.compile().memory_analysis()
    seconds = time.perf_counter() - start
    peak = memory.peak_memory_in_bytes
    hardware = hardware_of(device.device_kind)
    print(
        f"\n{device.device_kind}: compiled in {seconds:.0f} s; its compiler's figures per device, "
        f"in GiB"
    )
    figures = {
        arguments: memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak": peak,
        "planned above": planned,
    }
    print("\n".join(f"  {name:<28} {value / GIB:7.2f}" for name, value in figures.items()))
    if hardware is not None and not fits(peak, hardware):
        raise OutOfMemoryError(
            f"the peak is over 90 % of the device's {hardware.memory_bytes / GIB:.0f} GiB: {advice}"
        )
