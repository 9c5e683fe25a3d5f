"""The plan of a calibration: tokens, operations, memory per device and of the host, from
`config.json` alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...calibration import SLOPE_TOKENS
from ...calibration.attenuation import score_products
from ...calibration.maps import sum_shapes, sum_shardings
from ...calibration.moments import (
    add_batch,
    inputs_of_values,
    moment_shapes,
    moment_shardings,
    num_inputs,
)
from ...calibration.solve import share_bytes
from ...calibration.token_weights import PROBABILITIES_PER_CHUNK
from ...cli.exit import OK
from ...model.attention import Attention
from ...model.batch import Batch
from ...model.config import Config
from ...model.mesh import MODEL
from ...model.params import llama_shapes, swiftkv_shapes
from ...model.sharding import batch_sharding, llama_shardings, swiftkv_shardings
from ...plan.cost import calibration_flops_by_part, kv_width, query_scale_flops_by_part
from ...plan.hardware import Hardware
from ..calibrate_options import CalibrationOptions
from ..run.start import calibration_tokens
from .memory import sharded_bytes
from .plan import (
    ASSUMED_UTILISATION,
    boundary_words,
    compile_and_report,
    count_devices,
    machines_of,
    planned_model,
    table_of_bytes,
    table_of_flops,
    verdict,
)
from .serving_plan import serving_table

REGRESSION = 6
"""Float64 arrays of a layer's keys and values at the peak of `solve.ridge`."""
_ADVICE = "more devices along fsdp or model in `mesh`, or a smaller `batch_size`"


def main(options: CalibrationOptions, topology: str | None) -> int:
    """Print the plan on standard output. Returns the exit code; raises as `plan.main` does."""
    config, mesh, options, dtype = planned_model(options, topology)
    memory = memory_per_device(options, config, mesh, dtype)
    print(describe(options, config, dtype))
    print(f"\n{table_of_bytes('memory per device', memory)}")
    host = host_memory(config, dtype)
    print(f"\n{table_of_bytes('memory of the host', host)}")
    print(f"\n{table_of_flops(calibration_flops_by_part(config, options.max_length))}")
    print(f"\n{time_table(options, config, sum(memory.values()), machines_of(mesh))}")
    if config.has_two_caches:
        tokens = _in_whole_batches(options, SLOPE_TOKENS)
        print(f"\nthen a pass over {tokens:,} of these tokens for the scale of queries")
        print(table_of_flops(query_scale_flops_by_part(config, options.max_length)))
    print(f"\n{serving_table(config, dtype, options.max_length)}")
    if topology is not None:
        _compile(options, config, mesh, dtype, sum(memory.values()))
    return OK


def _compile(
    options: CalibrationOptions, config: Config, mesh: Any, dtype: jnp.dtype, planned: float
) -> None:
    """Print the compiler's figures. Raises `OutOfMemoryError` if a batch does not fit."""
    lowered = lower_batch(options, config, mesh, dtype)
    about = "weights and second moments"
    compile_and_report(lowered, mesh, "calibration", about, planned, _ADVICE)
    if config.has_two_caches:
        lowered = lower_query_scale(options, config, mesh, dtype)
        about = "weights and delta"
        compile_and_report(lowered, mesh, "scale of queries", about, planned, _ADVICE)


def describe(options: CalibrationOptions, config: Config, dtype: jnp.dtype) -> str:
    """Two lines: the cut and the tokens, the devices and what the host solves."""
    tokens = calibration_tokens(options, config)
    rows = options.micro_batch_size
    steps = math.ceil(tokens / (rows * options.max_length))
    return (
        f"calibration of {config.num_upper_layers} upper layers of {config.num_layers} in groups "
        f"of {config.key_value_group_size}{boundary_words(config)} on {tokens:,} tokens: "
        f"{steps} batches of {rows} rows of {options.max_length:,}, more where rows have padding\n"
        f"mesh {options.mesh} ({count_devices(options.mesh)}), {dtype}; then one factorisation "
        f"of {num_inputs(config):,} x {num_inputs(config):,} numbers per upper layer on the host"
    )


def time_table(
    options: CalibrationOptions, config: Config, memory: float, machines: Sequence[Hardware]
) -> str:
    """For each machine, the time of the passes at the assumed utilisation, and whether their
    `memory` fits; then the host's operations."""
    per_token = sum(calibration_flops_by_part(config, options.max_length).values())
    flops = per_token * _in_whole_batches(options, calibration_tokens(options, config))
    if config.has_two_caches:
        scale = query_scale_flops_by_part(config, options.max_length)
        flops += sum(scale.values()) * _in_whole_batches(options, SLOPE_TOKENS)
    devices = math.prod(options.mesh)
    lines = [f"time at an assumed {ASSUMED_UTILISATION:.0%} of the published bfloat16 peak"]
    for machine in machines:
        seconds = flops / (ASSUMED_UTILISATION * machine.flops * devices)
        lines.append(
            f"  {devices} x {machine.name:<19}{seconds:>10,.0f} s   {verdict(memory, machine)}"
        )
    fitted = config.num_layers - config.first_projected_layer
    factored = {num_inputs(config), len(inputs_of_values(config))}
    products = sum(4 * size**2 * kv_width(config) / len(factored) for size in factored)
    host = fitted * (sum(size**3 / 3 for size in factored) + products)
    size = config.embed_dim + config.prompt_mlp_neurons
    host += config.prompt_attention_layers * size**2 * (size / 3 + 2 * config.embed_dim)
    groups = ", and what layers share" if config.key_value_group_size > 1 else ""
    lines.append(f"then on the host: least squares, {host / 1e12:,.1f} TFLOP in float64{groups}")
    return "\n".join(lines)


def _in_whole_batches(options: CalibrationOptions, tokens: int) -> int:
    batch = options.micro_batch_size * options.max_length
    return math.ceil(tokens / batch) * batch


def memory_per_device(
    options: CalibrationOptions, config: Config, mesh: Any, dtype: jnp.dtype
) -> dict[str, float]:
    """Bytes of one device at the peak of a batch's pass, by kind."""
    llama = llama_shardings(config, mesh)
    shards = moment_shardings(config, mesh)
    moments = sharded_bytes(moment_shapes(config), shards)
    rows = options.micro_batch_size // options.mesh.rows
    tp = mesh.shape[MODEL]
    token = rows * options.max_length
    heads = config.num_heads // tp if config.num_heads % tp == 0 else config.num_heads
    probabilities = min(PROBABILITIES_PER_CHUNK, rows * heads * options.max_length**2)
    maps = {}
    if config.prompt_attention_layers:
        where = swiftkv_shardings(config, mesh).prompt_mlp
        neurons = config.prompt_mlp_neurons
        maps["maps"] = sharded_bytes(swiftkv_shapes(config, dtype).prompt_mlp, where)
        sums = sharded_bytes(sum_shapes(config, neurons), sum_shardings(config, neurons, mesh))
        moments = max(moments, sums)  # those of a map are gathered before
    return maps | {
        f"teacher's weights, {dtype}": sharded_bytes(llama_shapes(config, dtype), llama),
        "second moments, float32": moments,
        "of one layer, before they are added": 4.0
        * num_inputs(config)
        * (num_inputs(config) + kv_width(config)),
        "attention probabilities, float32": 4.0 * 3 * probabilities,
        "activations": token * (4 * config.embed_dim * dtype.itemsize + 4 * config.embed_dim),
    }


def host_memory(config: Config, dtype: jnp.dtype) -> dict[str, float]:
    """Bytes of the host while the delta is solved, by kind, at the larger of two peaks: the
    regression of a group's last layer, and sharing among the group's layers."""
    size = num_inputs(config)
    group = config.key_value_group_size
    layer = 8.0 * size * kv_width(config)
    fitting = (group - 1 + REGRESSION) * layer
    sharing = 0.0
    if group > 1:
        sharing = group * layer
        sharing += share_bytes(group, config.num_kv_heads, size, config.head_dim)
    inputs = 8.0 * size**2
    if config.prompt_attention_layers:  # a map's sums, and the map
        read = config.embed_dim + config.prompt_mlp_neurons
        inputs = max(inputs, 8.0 * read * (read + 2 * config.embed_dim) - fitting)
    return {
        "second moments of one layer's inputs, float64": inputs,
        "keys and values of a group's layers, float64": max(fitting, sharing),
        f"keys and values of all layers, {dtype}": config.num_kv_groups
        * layer
        / 8
        * dtype.itemsize,
    }


def lower_batch(
    options: CalibrationOptions, config: Config, mesh: Mesh, dtype: jnp.dtype
) -> jax.stages.Lowered:
    """The pass over one batch, not yet compiled. The devices of `mesh` need not exist."""
    delta = swiftkv_shapes(config, dtype)
    where = swiftkv_shardings(config, mesh)
    return add_batch.lower(
        config,
        Attention(mesh, options.attention),
        _on_mesh(moment_shapes(config), moment_shardings(config, mesh)),
        _on_mesh(llama_shapes(config, dtype), llama_shardings(config, mesh)),
        _batch(options, mesh),
        None if delta.prompt_mlp is None else _on_mesh(delta.prompt_mlp, where.prompt_mlp),
    )


def lower_query_scale(
    options: CalibrationOptions, config: Config, mesh: Mesh, dtype: jnp.dtype
) -> jax.stages.Lowered:
    """The second pass over one batch, as `lower_batch`."""
    return score_products.lower(
        config,
        Attention(mesh, options.attention),
        _on_mesh(llama_shapes(config, dtype), llama_shardings(config, mesh)),
        _on_mesh(swiftkv_shapes(config, dtype), swiftkv_shardings(config, mesh)),
        _batch(options, mesh),
    )


def _batch(options: CalibrationOptions, mesh: Mesh) -> Batch:
    row = (options.micro_batch_size, options.max_length)
    integers, floats = (jax.ShapeDtypeStruct(row, dtype) for dtype in (jnp.int32, jnp.float32))
    batch = Batch(integers, integers, integers, floats)
    return _on_mesh(batch, jax.tree.map(lambda _: batch_sharding(mesh), batch))


def _on_mesh(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )
