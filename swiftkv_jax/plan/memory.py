"""Bytes of memory at the peak of training and of calibration, by kind, from shapes alone."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ..calibration.maps import sum_shapes, sum_shardings
from ..calibration.moments import moment_shapes, moment_shardings, num_inputs
from ..calibration.solve import share_bytes
from ..calibration.token_weights import PROBABILITIES_PER_CHUNK
from ..model.config import Config, Remat
from ..model.mesh import FSDP, MODEL, dp_size
from ..model.params import llama_shapes, swiftkv_shapes
from ..model.sharding import llama_shardings, swiftkv_shardings
from .cost import boundary_kv_weights, kv_width, mlp_width, stored_layer_weights
from .hardware import Hardware

REGRESSION = 6
"""Float64 arrays of a layer's keys and values at the peak of `solve.ridge`."""


def training_memory(
    config: Config,
    mesh: Mesh | AbstractMesh,
    dtype: jnp.dtype,
    *,
    rows: int,
    length: int,
    remat: Remat,
    shard_sequence: bool = False,
    micro_batches: int = 1,
) -> dict[str, float]:
    """Bytes of one device at the peak of a train step on micro-batches of `rows` rows of `length`
    tokens over all devices, by kind.

    The peak is in the backward pass through the upper layers, when the logits have been freed but
    the activations of the forward pass have not.
    """
    where: Any = mesh
    size = dtype.itemsize
    tp = mesh.shape[MODEL]
    upper = config.num_upper_layers
    groups = config.num_kv_groups
    kv_heads = _split(config.num_kv_heads, tp)
    token = rows // dp_size(where) * length * size  # bytes of one number per token
    width = config.embed_dim
    queries = _split(config.num_heads, tp) * config.head_dim
    mlp = config.mlp_dim // tp
    if config.num_experts:
        # A device has room for all of its tokens' experts; of six arrays three are as wide as their
        # inputs and outputs (as compiled for an H200 and v5p).
        mlp = mlp_width(config) + config.num_experts_per_token * width // 2
    delta = sharded_bytes(swiftkv_shapes(config, jnp.float32), swiftkv_shardings(config, where))
    inputs = width // tp if shard_sequence else width
    layer = {
        "layer": inputs,
        "mlp": inputs + 2 * queries,
        "none": inputs + 4 * width + 2 * queries + 2 * mlp,
    }
    if config.keeps_own:  # of each layer the keys and values that its tokens attend to
        layer["none"] += 2 * kv_heads * config.head_dim
    if config.has_two_caches:  # heads of twice the size: queries, keys and values, and the output
        layer["none"] += 2 * (queries + kv_heads * config.head_dim)
        layer["mlp"] += 2 * queries
    caches = groups if config.key_value_group_size == 1 else groups + upper
    memory = {
        f"frozen weights, {dtype}": _weights(config, where, dtype),
        "delta, float32 master copy": delta,
        "AdamW moments, float32": 2 * delta,
        f"delta in {dtype}, and its gradient": delta * size / 4 + delta,
        f"kept by the forward pass, remat {remat}": upper * token * layer[remat],
        "the student's shared keys and values": 2 * token * kv_heads * config.head_dim * caches,
        # Two of the MLP's six arrays are kept where nothing is recomputed.
        "one layer's backward pass": token * ((4 if remat == "none" else 6) * mlp + 5 * width),
    }
    if alone := config.prompt_attention_layers:  # nothing of them is recomputed
        kept = 5 * width + 2 * queries + 3 * config.prompt_mlp_neurons // tp
        memory["kept of the prompt attention layers"] = alone * token * kept
    if mesh.shape[FSDP] > 1:
        whole = 2 * stored_layer_weights(config) + boundary_kv_weights(config)
        whole += config.vocab_size * width
        name = "weights put together (two layers, keys and values, output matrix)"
        memory[name] = whole * size / tp
    if micro_batches > 1:
        memory["sum of the micro-batches' gradients, float32"] = delta
    return memory


def speculator_memory(
    config: Config,
    mesh: Mesh | AbstractMesh,
    dtype: jnp.dtype,
    *,
    weights: int,
    micro_batches: int = 1,
) -> dict[str, float]:
    """Bytes of one device at the peak of a step that trains a speculator of so many weights on a
    student, by kind. Each device holds all of them. Activations are small beside these and not
    counted."""
    where: Any = mesh
    delta = sharded_bytes(swiftkv_shapes(config, jnp.float32), swiftkv_shardings(config, where))
    memory = {
        f"the student's weights, {dtype}": _weights(config, where, dtype),
        "delta, float32, and its moments": 3 * delta,
        f"delta in {dtype}": delta * dtype.itemsize / 4,
        "speculator, float32, and its moments": 12.0 * weights,
        f"speculator in {dtype}, and its gradient": (2.0 * dtype.itemsize + 4) * weights,
    }
    if micro_batches > 1:
        memory["sum of the micro-batches' gradients, float32"] = 4.0 * weights
    return memory


def calibration_memory(
    config: Config, mesh: Mesh | AbstractMesh, dtype: jnp.dtype, *, rows: int, length: int
) -> dict[str, float]:
    """Bytes of one device at the peak of a calibration's pass over `rows` rows of `length` tokens
    over all devices, by kind."""
    where: Any = mesh
    moments = sharded_bytes(moment_shapes(config), moment_shardings(config, where))
    rows //= dp_size(where)
    heads = _split(config.num_heads, mesh.shape[MODEL])
    probabilities = min(PROBABILITIES_PER_CHUNK, rows * heads * length**2)
    size = num_inputs(config)
    memory = {}
    if config.prompt_attention_layers:
        maps = swiftkv_shapes(config, dtype).prompt_mlp
        memory["maps"] = sharded_bytes(maps, swiftkv_shardings(config, where).prompt_mlp)
        neurons = config.prompt_mlp_neurons
        sums = sharded_bytes(sum_shapes(config, neurons), sum_shardings(config, neurons, where))
        moments = max(moments, sums)  # those of a map are gathered before
    return memory | {
        f"teacher's weights, {dtype}": _weights(config, where, dtype),
        "second moments, float32": moments,
        "of one layer, before they are added": 4.0 * size * (size + kv_width(config)),
        "attention probabilities, float32": 4.0 * 3 * probabilities,
        "activations": 4 * rows * length * config.embed_dim * (dtype.itemsize + 1),
    }


def calibration_host_memory(config: Config, dtype: jnp.dtype) -> dict[str, float]:
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
    every = config.num_kv_groups * layer / 8 * dtype.itemsize
    return {
        "second moments of one layer's inputs, float64": inputs,
        "keys and values of a group's layers, float64": max(fitting, sharing),
        f"keys and values of all layers, {dtype}": every,
    }


def fits(memory: float, hardware: Hardware) -> bool:
    """True if so many bytes fit. A tenth is left for the runtime and for what is not in the
    plan."""
    return memory <= 0.9 * hardware.memory_bytes


def sharded_bytes(shapes: Any, shardings: Any) -> float:
    """Bytes of one device's part of a tree."""
    parts = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        shapes,
        shardings,
    )
    return float(sum(jax.tree.leaves(parts)))


def _weights(config: Config, mesh: Any, dtype: jnp.dtype) -> float:
    return sharded_bytes(llama_shapes(config, dtype), llama_shardings(config, mesh))


def _split(heads: int, tp: int) -> int:
    """Heads on one device: all of them where the devices do not divide them."""
    return heads if heads % tp else heads // tp
