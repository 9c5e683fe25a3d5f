"""The plan of a training, from `config.json` alone: memory by kind, operations, time.

The options' `model` may also be one of `presets.PRESETS`. With a `topology` the programs are also
compiled, for machines that need not exist, which gives their compiler's own figures.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ..checkpoints import auxiliary_files_of
from ..checkpoints.foreign import missing
from ..errors import CheckpointError, OutOfMemoryError
from ..model.batch import Batch
from ..model.config import Config
from ..model.cut import describe_cut
from ..model.mesh import MeshShape, make_mesh
from ..model.params import llama_shapes, swiftkv_shapes
from ..model.sharding import llama_shardings, replicated, swiftkv_shardings
from ..model.speculator import Speculator, speculator_shapes
from ..plan.cost import (
    speculator_flops_by_part,
    stored_layer_weights,
    train_flops_by_part,
)
from ..plan.hardware import GIB, hardware_of
from ..plan.memory import (
    fits,
    speculator_memory,
    training_memory,
)
from ..plan.presets import PRESETS
from ..plan.tables import (
    count_devices,
    machines_of,
    serving_table,
    table_of_bytes,
    table_of_flops,
    table_of_times,
)
from ..plan.topology import ENVIRONMENT, topology_mesh
from .analysis.given_analysis import with_analysis
from .recipe import Recipe
from .run.setup import check_loss, check_trainable, cut_model
from .run.speculator import make_speculator_optimizer, make_speculator_step, trained_speculator
from .run.start import calibration_tokens
from .run.step import make_optimizer, make_train_step, micro_batch_sharding, state_shapes
from .run_options import RunOptions

logger = logging.getLogger(__name__)

_STEPS = 1000  # any number: the schedule's length does not change the program


def planned_model[T: RunOptions](
    options: T, topology: str | None
) -> tuple[Config, Mesh | AbstractMesh, T, jnp.dtype]:
    """The model at its cut, the mesh over the devices of `topology` or over devices that need not
    exist, the options with the size of that mesh, and the dtype of the weights. Raises `UsageError`
    and `CheckpointError`."""
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
        mesh = topology_mesh(topology, options.mesh)
    elif -1 in options.mesh:
        mesh = make_mesh(options.mesh)
    else:
        mesh = AbstractMesh(tuple(options.mesh), MeshShape._fields)
    shape = MeshShape(*mesh.axis_sizes)  # -1 has become a number
    options = dataclasses.replace(options, mesh=shape)
    return config, mesh, options, jnp.dtype(options.dtype or jnp.bfloat16)


# Training ---------------------------------------------------------------------


def plan_training(recipe: Recipe, topology: str | None) -> None:
    """Print the plan of a run. Raises `OutOfMemoryError` if the step compiled for `topology` does
    not fit, and as `planned_model`."""
    config, mesh, recipe, dtype = planned_model(recipe, topology)
    check_loss(recipe, config)
    check_trainable(config)
    memory = memory_of_a_step(recipe, config, mesh, dtype)
    total = sum(memory.values())
    flops = train_flops_by_part(config, recipe.max_length, remat=recipe.remat)
    per_token = sum(flops.values())
    tokens = recipe.batch_size * recipe.max_length
    times = table_of_times(
        mesh,
        total,
        lambda speed: (
            f"{speed / per_token:>12,.0f} tokens/s {tokens * per_token / speed:9.2f} s a step"
        ),
    )
    if gathered := _fsdp_bytes(recipe, config):
        times.append(
            f"  over fsdp each device receives {gathered / GIB:.0f} GiB of weights in a step"
        )
    if not all(fits(total, machine) for machine in machines_of(mesh)):
        times.append(f"to make it fit: {_advice(recipe)}")
    parts = [
        describe_training(recipe, config, mesh, dtype),
        table_of_bytes("memory per device", memory),
        table_of_flops(flops),
        "\n".join(times),
        serving_table(config, dtype, recipe.max_length),
    ]
    if recipe.speculator:
        parts.append(describe_speculator(recipe, config, mesh, dtype))
    if recipe.init == "closed-form":
        count = calibration_tokens(recipe, config)
        parts.append(
            f"before training, a calibration on {count:,} tokens: `train calibrate --dry-run`"
        )
    print("\n\n".join(parts))
    if topology is not None:
        lowered = lower_step(recipe, config, mesh, dtype)
        held = "weights, delta and moments"
        compile_and_report(lowered, mesh, "train step", held, total, _advice(recipe))
        if recipe.speculator:
            lowered = lower_speculator_step(recipe, config, mesh, dtype)
            held = "weights, delta, speculator and moments"
            total = sum(_speculator_memory(recipe, config, mesh, dtype).values())
            advice = "fewer `gradient_accumulation_steps`, or devices with more memory"
            compile_and_report(lowered, mesh, "speculator's step", held, total, advice)


def memory_of_a_step(
    recipe: Recipe, config: Config, mesh: Mesh | AbstractMesh, dtype: jnp.dtype
) -> dict[str, float]:
    """`training_memory` of the recipe's micro-batches."""
    return training_memory(
        config,
        mesh,
        dtype,
        rows=recipe.micro_batch_size,
        length=recipe.max_length,
        remat=recipe.remat,
        shard_sequence=recipe.shard_sequence,
        micro_batches=recipe.gradient_accumulation_steps,
    )


def describe_training(recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype) -> str:
    """Two lines: the model and its cut, and the batch on the devices."""
    frozen, trained = (_size(shapes) for shapes in (llama_shapes(config), swiftkv_shapes(config)))
    rows = recipe.micro_batch_size // recipe.mesh.rows
    return (
        f"{frozen:,} frozen and {trained:,} trained parameters; "
        f"{describe_cut(config, config.num_layers)}\n"
        f"mesh {recipe.mesh} ({count_devices(mesh)}), {dtype}, remat {recipe.remat}; a step is "
        f"{recipe.batch_size} rows of {recipe.max_length:,} tokens in "
        f"{recipe.gradient_accumulation_steps} micro-batches, {rows} rows to a device"
    )


def describe_speculator(recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype) -> str:
    """Memory, operations and time of the speculator's training after the distillation."""
    drafts, shapes = recipe.speculator or 0, _speculator_shapes(recipe, config)
    memory = _speculator_memory(recipe, config, mesh, dtype)
    used = shapes.proj[-1].size + shapes.head[-1].size
    flops = speculator_flops_by_part(config, recipe.max_length, drafts=drafts, weights=used)
    tokens = recipe.batch_size * recipe.max_length
    times = table_of_times(
        mesh,
        sum(memory.values()),
        lambda speed: f"{tokens * sum(flops.values()) / speed:9.2f} s a step",
    )
    return "\n".join(
        [
            f"then a speculator of {drafts} drafts, {_size(shapes):,} weights, in "
            f"{recipe.speculator_steps:,} steps of as many rows\n",
            table_of_bytes("memory per device", memory) + "\n",
            table_of_flops(flops) + "\n",
            *times,
        ]
    )


def _speculator_memory(
    recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype
) -> dict[str, float]:
    return speculator_memory(
        config,
        mesh,
        dtype,
        weights=_size(_speculator_shapes(recipe, config)),
        micro_batches=recipe.gradient_accumulation_steps,
    )


def _speculator_shapes(recipe: Recipe, config: Config) -> Speculator:
    assert recipe.speculator is not None
    return speculator_shapes(trained_speculator(recipe.speculator, config), jnp.float32)


def _size(shapes: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _fsdp_bytes(recipe: Recipe, config: Config) -> float:
    """Bytes that reach a device: every layer once forward (the upper ones for teacher and student),
    the upper ones again backward."""
    layers = config.num_lower_layers + 3 * config.num_upper_layers
    weights = layers * stored_layer_weights(config) + 2 * config.vocab_size * config.embed_dim
    whole = recipe.gradient_accumulation_steps * weights * 2 / recipe.mesh.model
    return whole * (recipe.mesh.fsdp - 1) / recipe.mesh.fsdp


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


def lower_step(recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype) -> jax.stages.Lowered:
    """The train step for these shapes, not yet compiled. The devices of `mesh` need not exist."""
    optimizer = make_optimizer(recipe, _STEPS)
    step = make_train_step(config, recipe, optimizer, mesh)
    shape = (recipe.gradient_accumulation_steps, recipe.micro_batch_size, recipe.max_length)
    batch = batch_shapes(shape, own=config.generated_kv != "boundary")
    return step.lower(state_shapes(config, optimizer), llama_shapes(config, dtype), batch, True)


def lower_speculator_step(
    recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype
) -> jax.stages.Lowered:
    """The step that trains the speculator, as `lower_step`."""
    optimizer = make_speculator_optimizer(recipe)
    step = make_speculator_step(recipe, config, optimizer, mesh)
    speculator = _speculator_shapes(recipe, config)
    shape = (recipe.gradient_accumulation_steps, recipe.micro_batch_size, recipe.max_length)
    batch = batch_shapes(shape, own=config.generated_kv != "boundary")
    trained = speculator, jax.eval_shape(optimizer.init, speculator)
    trained = on_mesh(trained, jax.tree.map(lambda _: replicated(mesh), trained))
    return step.lower(
        *trained,
        on_mesh(llama_shapes(config, dtype), llama_shardings(config, mesh)),
        on_mesh(swiftkv_shapes(config, dtype), swiftkv_shardings(config, mesh)),
        on_mesh(batch, jax.tree.map(lambda _: micro_batch_sharding(mesh), batch)),
    )


def batch_shapes(shape: tuple[int, ...], *, own: bool = False) -> Batch:
    integers, floats, bools = (
        jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32, jnp.bool_)
    )
    return Batch(integers, integers, integers, floats, bools if own else None)


def on_mesh(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def compile_and_report(
    lowered: jax.stages.Lowered, mesh: Any, what: str, arguments: str, planned: float, advice: str
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
