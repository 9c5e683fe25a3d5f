"""Initial parameters: random weights, and a delta copied from its teacher."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from .config import Config
from .params import Llama, Param, SwiftKV, llama_params, require_teacher, swiftkv_params


def init_llama(config: Config, key: jax.Array, dtype=jnp.float32, *, scale: float = 0.02) -> Llama:
    """Random weights: norms that scale by one, biases at zero, matrices normal with standard
    deviation `scale`."""
    rows, tree = jax.tree.flatten(llama_params(config))

    def draw(row: Param, key: jax.Array) -> jax.Array:
        shape = row.shape(config)
        if row.init == "normal":
            return (scale * jax.random.normal(key, shape)).astype(dtype)
        one = row.init == "one" and not config.norm_offset
        return jnp.ones(shape, dtype) if one else jnp.zeros(shape, dtype)

    keys = jax.random.split(key, len(rows))
    return jax.tree.unflatten(tree, [draw(row, k) for row, k in zip(rows, keys, strict=True)])


Start = Literal["authors", "leader"]
"""How `init_swiftkv` makes a group's keys and values from those of its layers: `authors` the mean
over them (ArcticTraining `projects/swiftkv/train.py`), `leader` those of the first. Without groups
both are the layer's own."""


def init_swiftkv(config: Config, llama: Llama, *, start: Start = "authors") -> SwiftKV:
    """A delta copied from the teacher; `calibration` fits a better one to data.

    The norm is that of the first layer that is projected for, queries and their norms are the
    teacher's, keys, their norms and values as `start` says, in float32; layers take the shared
    values as they are. Taps and maps are zero; neurons beside maps are the MLP's first ones, with
    zeros for what they add.
    Every leaf is a new buffer: nothing aliases the teacher, so the delta can be donated. Raises
    `ValueError` if the teacher's upper projections were dropped.
    """
    upper = require_teacher(llama, "start a delta")
    if config.num_upper_layers == 0:
        raise ValueError(
            f"num_key_value_layers={config.num_key_value_layers} leaves no upper layer, so there "
            f"is no delta"
        )
    dtype = llama.embed.dtype

    def copy(leaf):
        return jax.tree.map(lambda array: jnp.array(array, dtype, copy=True), leaf)

    def shared(leaf):
        if leaf is None:
            return None
        grouped = leaf[first:].reshape(-1, config.key_value_group_size, *leaf.shape[1:])
        if start == "leader":
            groups = jnp.array(grouped[:, 0], dtype, copy=True)
        else:
            groups = grouped.astype(jnp.float32).mean(axis=1).astype(dtype)
        return jnp.concatenate([leaf[:first].astype(dtype), groups]) if first else groups

    def zeros(row):
        return None if row is None else jnp.zeros(row.shape(config), dtype)

    def neurons(leaf):
        count = config.prompt_mlp_neurons
        return copy(leaf[:first, :count]) if count else None

    first = config.prompt_attention_layers
    rows = swiftkv_params(config)
    mix = None
    if rows.mix is not None:
        mix = jnp.broadcast_to(jnp.eye(config.head_dim, dtype=dtype), rows.mix.shape(config))
    return SwiftKV(
        norm=copy(jax.tree.map(lambda scales: scales[first], llama.upper.attn_norm)),
        q=copy(upper.q),
        k=shared(upper.k),
        v=shared(upper.v),
        q_bias=copy(upper.q_bias),
        k_bias=shared(upper.k_bias),
        v_bias=shared(upper.v_bias),
        q_norm=copy(upper.q_norm),
        k_norm=shared(upper.k_norm),
        mix=mix,
        k_tap=zeros(rows.k_tap),
        mlp_map=zeros(rows.mlp_map),
        mlp_gate=neurons(llama.upper.gate),
        mlp_up=neurons(llama.upper.up),
        mlp_down=zeros(rows.mlp_down),
    )
