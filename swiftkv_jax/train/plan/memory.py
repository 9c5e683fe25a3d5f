"""The memory of one device at the peak of a train step, by kind, from shapes alone."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...model.config import Config
from ...model.mesh import MODEL
from ...model.params import llama_shapes, swiftkv_shapes
from ...model.sharding import llama_shardings, swiftkv_shardings
from ...plan.cost import boundary_kv_weights, mlp_width, stored_layer_weights
from ...plan.hardware import Hardware
from ..recipe import Recipe


def memory_per_device(
    recipe: Recipe, config: Config, mesh: Any, dtype: jnp.dtype
) -> dict[str, float]:
    """Bytes of one device at the peak of a step, by kind.

    The peak is in the backward pass through the upper layers, when the logits have been freed but
    the activations of the forward pass have not.
    """
    size = dtype.itemsize
    tp = mesh.shape[MODEL]
    rows = recipe.micro_batch_size // recipe.mesh.rows
    positions = recipe.max_length
    upper = config.num_upper_layers
    groups = config.num_kv_groups
    kv_heads = config.num_kv_heads // tp if config.num_kv_heads % tp == 0 else config.num_kv_heads
    heads = config.num_heads // tp if config.num_heads % tp == 0 else config.num_heads
    token = rows * positions * size  # bytes of one number per token
    width = config.embed_dim
    queries = heads * config.head_dim
    mlp = config.mlp_dim // tp
    if config.num_experts:
        # A device has room for all of its tokens' experts; of six arrays three are as wide as their
        # inputs and outputs (as compiled for an H200 and v5p).
        mlp = mlp_width(config) + config.num_experts_per_token * width // 2
    delta = sharded_bytes(swiftkv_shapes(config, jnp.float32), swiftkv_shardings(config, mesh))
    llama = llama_shardings(config, mesh)
    inputs = width // tp if recipe.shard_sequence else width
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
    kept = upper * token * layer[recipe.remat]
    shared = (
        2
        * token
        * kv_heads
        * config.head_dim
        * (groups if config.key_value_group_size == 1 else groups + upper)
    )
    prompt = {}
    if alone := config.prompt_attention_layers:  # nothing of them is recomputed
        neurons = 3 * config.prompt_mlp_neurons // tp
        kept_of_each = 5 * width + 2 * queries + neurons
        prompt["kept of the prompt attention layers"] = alone * token * kept_of_each
    memory = {
        f"frozen weights, {dtype}": sharded_bytes(llama_shapes(config, dtype), llama),
        "delta, float32 master copy": delta,
        "AdamW moments, float32": 2 * delta,
        f"delta in {dtype}, and its gradient": delta * size / 4 + delta,
        f"kept by the forward pass, remat {recipe.remat}": kept,
        "the student's shared keys and values": shared,
        # Two of the MLP's six arrays are kept where nothing is recomputed.
        "one layer's backward pass": token
        * ((4 if recipe.remat == "none" else 6) * mlp + 5 * width),
    } | prompt
    if recipe.mesh.fsdp > 1:
        memory["weights put together (two layers, keys and values, output matrix)"] = (
            _whole_weights(config, tp, size)
        )
    if recipe.gradient_accumulation_steps > 1:
        memory["sum of the micro-batches' gradients, float32"] = delta
    return memory


def sharded_bytes(shapes: Any, shardings: Any) -> float:
    """Bytes of one device's part of a tree."""
    parts = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        shapes,
        shardings,
    )
    return float(sum(jax.tree.leaves(parts)))


def _whole_weights(config: Config, tp: int, size: int) -> float:
    layers = 2 * stored_layer_weights(config)
    kv = boundary_kv_weights(config)
    return (layers + kv + config.vocab_size * config.embed_dim) * size / tp


def fits(memory: float, hardware: Hardware) -> bool:
    """Whether so many bytes fit. A tenth is left for the runtime and for what is not in the
    plan."""
    return memory <= 0.9 * hardware.memory_bytes
