"""The plan of a calibration: memory by kind, operations, time, as `dry_run` plans training."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..calibration import SLOPE_TOKENS
from ..calibration.attenuation import score_products
from ..calibration.moments import (
    add_batch,
    inputs_of_values,
    moment_shapes,
    moment_shardings,
    num_inputs,
)
from ..model.attention import Attention
from ..model.batch import Batch
from ..model.config import Config
from ..model.cut import describe_cut, ungrouped
from ..model.params import llama_shapes, swiftkv_shapes
from ..model.sharding import batch_sharding, llama_shardings, swiftkv_shardings
from ..plan.cost import calibration_flops_by_part, kv_width, query_scale_flops_by_part
from ..plan.memory import calibration_host_memory, calibration_memory
from ..plan.tables import (
    count_devices,
    serving_table,
    table_of_bytes,
    table_of_flops,
    table_of_times,
)
from .calibrate_options import CalibrationOptions
from .dry_run import batch_shapes, compile_and_report, on_mesh, planned_model
from .run.start import calibration_tokens


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


def lower_batch(
    options: CalibrationOptions, config: Config, mesh: Any, dtype: jnp.dtype
) -> jax.stages.Lowered:
    """The pass over one batch, as `lower_step`."""
    delta = swiftkv_shapes(config, dtype)
    where = swiftkv_shardings(config, mesh)
    return add_batch.lower(
        ungrouped(config),
        Attention(mesh, options.attention),
        on_mesh(moment_shapes(config), moment_shardings(config, mesh)),
        on_mesh(llama_shapes(config, dtype), llama_shardings(config, mesh)),
        _batch_on_mesh(options, mesh),
        None if delta.prompt_mlp is None else on_mesh(delta.prompt_mlp, where.prompt_mlp),
    )


def lower_query_scale(
    options: CalibrationOptions, config: Config, mesh: Any, dtype: jnp.dtype
) -> jax.stages.Lowered:
    """The second pass over one batch, as `lower_step`."""
    return score_products.lower(
        config,
        Attention(mesh, options.attention),
        on_mesh(llama_shapes(config, dtype), llama_shardings(config, mesh)),
        on_mesh(swiftkv_shapes(config, dtype), swiftkv_shardings(config, mesh)),
        _batch_on_mesh(options, mesh),
    )


def _batch_on_mesh(options: CalibrationOptions, mesh: Mesh) -> Batch:
    batch = batch_shapes((options.micro_batch_size, options.max_length))
    return on_mesh(batch, jax.tree.map(lambda _: batch_sharding(mesh), batch))
