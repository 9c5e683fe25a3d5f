"""Plans of training and of calibration, from `config.json` alone: memory by kind, operations, time.

The options' `model` may also be one of `presets.PRESETS`. With a `topology` the programs are also
compiled, for machines that need not exist, which gives their compiler's own figures.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ..calibration import SLOPE_TOKENS
from ..calibration.attenuation import score_products
from ..calibration.moments import (
    add_batch,
    inputs_of_values,
    moment_shapes,
    moment_shardings,
    num_inputs,
)
from ..checkpoints import auxiliary_files_of
from ..checkpoints.foreign import missing
from ..errors import CheckpointError, OutOfMemoryError
from ..model.attention import Attention
from ..model.batch import Batch
from ..model.config import Config
from ..model.cut import describe_cut, ungrouped
from ..model.mesh import MeshShape, make_mesh
from ..model.params import llama_shapes, swiftkv_shapes
from ..model.sharding import batch_sharding, llama_shardings, swiftkv_shardings
from ..plan.cost import (
    calibration_flops_by_part,
    kv_width,
    query_scale_flops_by_part,
    stored_layer_weights,
    train_flops_by_part,
)
from ..plan.hardware import GIB, hardware_of
from ..plan.memory import calibration_host_memory, calibration_memory, fits, training_memory
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
from .calibrate_options import CalibrationOptions
from .recipe import Recipe
from .run.setup import check_loss, check_trainable, cut_model
from .run.start import calibration_tokens
from .run.step import make_optimizer, make_train_step, state_shapes
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
    frozen, trained = (
        sum(leaf.size for leaf in jax.tree.leaves(shapes))
        for shapes in (llama_shapes(config), swiftkv_shapes(config))
    )
    rows = recipe.micro_batch_size // recipe.mesh.rows
    return (
        f"{frozen:,} frozen and {trained:,} trained parameters; "
        f"{describe_cut(config, config.num_layers)}\n"
        f"mesh {recipe.mesh} ({count_devices(mesh)}), {dtype}, remat {recipe.remat}; a step is "
        f"{recipe.batch_size} rows of {recipe.max_length:,} tokens in "
        f"{recipe.gradient_accumulation_steps} micro-batches, {rows} rows to a device"
    )


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


# Calibration ------------------------------------------------------------------


def plan_calibration(options: CalibrationOptions, topology: str | None) -> None:
    """Print the plan of a calibration. Raises as `plan_training`."""
    config, mesh, options, dtype = planned_model(options, topology)
    rows = options.micro_batch_size
    length = options.max_length
    batch = rows * length

    def in_batches(tokens: int) -> int:
        return math.ceil(tokens / batch) * batch

    memory = calibration_memory(config, mesh, dtype, rows=rows, length=length)
    total = sum(memory.values())
    flops = calibration_flops_by_part(config, length)
    tokens = calibration_tokens(options, config)
    whole = sum(flops.values()) * in_batches(tokens)
    scale = query_scale_flops_by_part(config, length) if config.has_two_caches else {}
    whole += sum(scale.values()) * in_batches(SLOPE_TOKENS)
    times = table_of_times(mesh, total, lambda speed: f"{whole / speed:>10,.0f} s")
    groups = ", and what layers share" if config.key_value_group_size > 1 else ""
    host = f"{host_flops(config) / 1e12:,.1f} TFLOP in float64{groups}"
    size = num_inputs(config)
    parts = [
        f"calibration of {describe_cut(config, config.num_layers)} on {tokens:,} tokens: "
        f"{math.ceil(tokens / batch)} batches of {rows} rows of {length:,}, more where rows have "
        f"padding\nmesh {options.mesh} ({count_devices(mesh)}), {dtype}; then one factorisation of "
        f"{size:,} x {size:,} numbers per upper layer on the host",
        table_of_bytes("memory per device", memory),
        table_of_bytes("memory of the host", calibration_host_memory(config, dtype)),
        table_of_flops(flops),
        "\n".join([*times, f"then on the host: least squares, {host}"]),
    ]
    if scale:
        parts.append(
            f"then a pass over {in_batches(SLOPE_TOKENS):,} of these tokens for the scale of "
            f"queries\n{table_of_flops(scale)}"
        )
    print("\n\n".join([*parts, serving_table(config, dtype, length)]))
    if topology is None:
        return
    advice = "more devices along fsdp or model in `mesh`, or a smaller `batch_size`"
    lowered = lower_batch(options, config, mesh, dtype)
    held = "weights and second moments"
    compile_and_report(lowered, mesh, "calibration", held, total, advice)
    if scale:
        lowered = lower_query_scale(options, config, mesh, dtype)
        compile_and_report(lowered, mesh, "scale of queries", "weights and delta", total, advice)


def host_flops(config: Config) -> float:
    """Operations of the least squares of all fitted layers and maps."""
    fitted = config.num_layers - config.first_projected_layer
    factored = {num_inputs(config), len(inputs_of_values(config))}
    products = sum(4 * size**2 * kv_width(config) / len(factored) for size in factored)
    layers = fitted * (sum(size**3 / 3 for size in factored) + products)
    size = config.embed_dim + config.prompt_mlp_neurons
    return layers + config.prompt_attention_layers * size**2 * (size / 3 + 2 * config.embed_dim)


# The compiler's figures -------------------------------------------------------


def lower_step(recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype) -> jax.stages.Lowered:
    """The train step for these shapes, not yet compiled. The devices of `mesh` need not exist."""
    optimizer = make_optimizer(recipe, _STEPS)
    step = make_train_step(config, recipe, optimizer, mesh)
    shape = (recipe.gradient_accumulation_steps, recipe.micro_batch_size, recipe.max_length)
    batch = _batch_shapes(shape, own=config.generated_kv != "boundary")
    return step.lower(state_shapes(config, optimizer), llama_shapes(config, dtype), batch, True)


def lower_batch(
    options: CalibrationOptions, config: Config, mesh: Any, dtype: jnp.dtype
) -> jax.stages.Lowered:
    """The pass over one batch, as `lower_step`."""
    delta = swiftkv_shapes(config, dtype)
    where = swiftkv_shardings(config, mesh)
    return add_batch.lower(
        ungrouped(config),
        Attention(mesh, options.attention),
        _on_mesh(moment_shapes(config), moment_shardings(config, mesh)),
        _on_mesh(llama_shapes(config, dtype), llama_shardings(config, mesh)),
        _batch_on_mesh(options, mesh),
        None if delta.prompt_mlp is None else _on_mesh(delta.prompt_mlp, where.prompt_mlp),
    )


def lower_query_scale(
    options: CalibrationOptions, config: Config, mesh: Any, dtype: jnp.dtype
) -> jax.stages.Lowered:
    """The second pass over one batch, as `lower_step`."""
    return score_products.lower(
        config,
        Attention(mesh, options.attention),
        _on_mesh(llama_shapes(config, dtype), llama_shardings(config, mesh)),
        _on_mesh(swiftkv_shapes(config, dtype), swiftkv_shardings(config, mesh)),
        _batch_on_mesh(options, mesh),
    )


def _batch_shapes(shape: tuple[int, ...], *, own: bool = False) -> Batch:
    integers, floats, bools = (
        jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32, jnp.bool_)
    )
    return Batch(integers, integers, integers, floats, bools if own else None)


def _batch_on_mesh(options: CalibrationOptions, mesh: Mesh) -> Batch:
    batch = _batch_shapes((options.micro_batch_size, options.max_length))
    return _on_mesh(batch, jax.tree.map(lambda _: batch_sharding(mesh), batch))


def _on_mesh(shapes: Any, shardings: Any) -> Any:
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
