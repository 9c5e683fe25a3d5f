"""The model as data: every parameter is a field here, with its shape beside it.

Letters: V vocabulary, D model width, F MLP width, N query heads, K key/value heads, H head dim, L
lower layers, U upper layers, J key/value groups of the upper layers (J = U / key_value_group_size).

Matrices keep the checkpoints' orientation (output features first), so import and export only split
or merge the head axis. The same dataclasses hold arrays, `ShapeDtypeStruct`s, `PartitionSpec`s,
shardings and gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from .config import Config

# A leaf is whatever the tree holds at the moment: an array, its abstract value, its sharding, its
# gradient. After `unstack` a stacked leaf has become one tuple entry per layer.
Leaf = Any


@struct.dataclass
class Block:
    """What every layer has besides its query, key and value projections. `?` is L or U."""

    attn_norm: Leaf  # ? D
    o: Leaf  # ? D N H
    mlp_norm: Leaf  # ? D
    gate: Leaf  # ? F D
    up: Leaf  # ? F D
    down: Leaf  # ? D F
    o_bias: Leaf = None  # ? D, with `attention_bias` only


@struct.dataclass
class QKV:
    """Projections of a layer that owns its keys and values. `?` is L or U."""

    q: Leaf  # ? N H D
    k: Leaf  # ? K H D
    v: Leaf  # ? K H D
    q_bias: Leaf = None  # ? N H, with `attention_bias` only
    k_bias: Leaf = None  # ? K H
    v_bias: Leaf = None  # ? K H


@struct.dataclass
class Llama:
    """The frozen weights, shared by teacher and student."""

    embed: Leaf  # V D
    lower: Block  # L
    lower_qkv: QKV  # L
    upper: Block  # U
    upper_qkv: QKV | None  # U; the teacher's only, dropped when serving a student
    final_norm: Leaf  # D
    lm_head: Leaf = None  # V D; None when tied to `embed`


@struct.dataclass
class SwiftKV:
    """The delta: all that distillation trains, saves and optimises."""

    norm: Leaf  # D
    q: Leaf  # U N H D
    k: Leaf  # J K H D
    v: Leaf  # J K H D
    q_bias: Leaf = None  # U N H, with `attention_bias` only
    k_bias: Leaf = None  # J K H
    v_bias: Leaf = None  # J K H


def llama_shapes(config: Config, dtype=jnp.float32) -> Llama:
    """The `ShapeDtypeStruct` of every weight of the plain Llama, split at
    `num_key_value_layers`."""
    c = config

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def block(layers):
        return Block(
            attn_norm=array(layers, c.embed_dim),
            o=array(layers, c.embed_dim, c.num_heads, c.head_dim),
            mlp_norm=array(layers, c.embed_dim),
            gate=array(layers, c.mlp_dim, c.embed_dim),
            up=array(layers, c.mlp_dim, c.embed_dim),
            down=array(layers, c.embed_dim, c.mlp_dim),
            o_bias=array(layers, c.embed_dim) if c.attention_bias else None,
        )

    def qkv(layers):
        return QKV(
            q=array(layers, c.num_heads, c.head_dim, c.embed_dim),
            k=array(layers, c.num_kv_heads, c.head_dim, c.embed_dim),
            v=array(layers, c.num_kv_heads, c.head_dim, c.embed_dim),
            q_bias=array(layers, c.num_heads, c.head_dim) if c.attention_bias else None,
            k_bias=array(layers, c.num_kv_heads, c.head_dim) if c.attention_bias else None,
            v_bias=array(layers, c.num_kv_heads, c.head_dim) if c.attention_bias else None,
        )

    return Llama(
        embed=array(c.vocab_size, c.embed_dim),
        lower=block(c.num_lower_layers),
        lower_qkv=qkv(c.num_lower_layers),
        upper=block(c.num_upper_layers),
        upper_qkv=qkv(c.num_upper_layers),
        final_norm=array(c.embed_dim),
        lm_head=None if c.tie_word_embeddings else array(c.vocab_size, c.embed_dim),
    )


def swiftkv_shapes(config: Config, dtype=jnp.float32) -> SwiftKV:
    """The `ShapeDtypeStruct` of every tensor of the delta."""
    upper = llama_shapes(config, dtype).upper_qkv
    assert upper is not None

    def groups(leaf):
        return (
            None
            if leaf is None
            else jax.ShapeDtypeStruct((config.num_kv_groups, *leaf.shape[1:]), dtype)
        )

    return SwiftKV(
        norm=jax.ShapeDtypeStruct((config.embed_dim,), dtype),
        q=upper.q,
        k=groups(upper.k),
        v=groups(upper.v),
        q_bias=upper.q_bias,
        k_bias=groups(upper.k_bias),
        v_bias=groups(upper.v_bias),
    )


def init_llama(config: Config, key: jax.Array, dtype=jnp.float32, *, scale: float = 0.02) -> Llama:
    """Random weights: norms at one, biases at zero, matrices normal with standard deviation
    `scale`."""
    shapes = llama_shapes(config, dtype)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

    def draw(path, leaf, key):
        name = path[-1].name
        if name.endswith("norm"):
            return jnp.ones(leaf.shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(leaf.shape, dtype)
        return (scale * jax.random.normal(key, leaf.shape)).astype(dtype)

    keys = jax.random.split(key, len(leaves))
    return jax.tree_util.tree_unflatten(
        tree, [draw(path, leaf, k) for (path, leaf), k in zip(leaves, keys, strict=True)]
    )


def init_swiftkv(config: Config, llama: Llama, dtype=None) -> SwiftKV:
    """The delta's starting point (ArcticTraining `projects/swiftkv/train.py`).

    The norm is that of the first upper layer, queries are the teacher's, keys and values are the
    mean over each group of layers, taken in float32. Every leaf is a new buffer: nothing aliases
    the teacher, so the delta can be donated. `dtype` None keeps the teacher's. Raises `ValueError`
    if the teacher's upper projections were dropped.
    """
    if llama.upper_qkv is None:
        raise ValueError(
            "the teacher's upper q, k, v were dropped: load the model with them to start a delta"
        )
    if config.num_upper_layers == 0:
        raise ValueError(
            f"num_key_value_layers={config.num_key_value_layers} leaves no upper layer, so there "
            f"is no delta"
        )
    dtype = dtype or llama.embed.dtype
    upper = llama.upper_qkv

    def copy(leaf):
        return None if leaf is None else jnp.array(leaf, dtype, copy=True)

    def group_mean(leaf):
        if leaf is None:
            return None
        grouped = leaf.reshape(config.num_kv_groups, config.key_value_group_size, *leaf.shape[1:])
        return grouped.astype(jnp.float32).mean(axis=1).astype(dtype)

    return SwiftKV(
        norm=copy(llama.upper.attn_norm[0]),
        q=copy(upper.q),
        k=group_mean(upper.k),
        v=group_mean(upper.v),
        q_bias=copy(upper.q_bias),
        k_bias=group_mean(upper.k_bias),
        v_bias=group_mean(upper.v_bias),
    )


def split_layers(config: Config, llama: Llama) -> Llama:
    """Move the boundary between the two stacks to `config.num_key_value_layers`. Copies the stacks
    that change."""
    if llama.upper_qkv is None:
        raise ValueError(
            "the teacher's upper q, k, v were dropped: load the model with them to move the "
            "boundary"
        )
    if llama.lower.attn_norm.shape[0] == config.num_lower_layers:
        return llama
    cut = config.num_lower_layers

    def join(lower, upper):
        return jnp.concatenate([lower, upper])

    block = jax.tree.map(join, llama.lower, llama.upper)
    qkv = jax.tree.map(join, llama.lower_qkv, llama.upper_qkv)
    return dataclasses.replace(
        llama,
        lower=jax.tree.map(lambda leaf: leaf[:cut], block),
        lower_qkv=jax.tree.map(lambda leaf: leaf[:cut], qkv),
        upper=jax.tree.map(lambda leaf: leaf[cut:], block),
        upper_qkv=jax.tree.map(lambda leaf: leaf[cut:], qkv),
    )


def unstack[Tree](stack: Tree, *, donate: bool = False) -> tuple[Tree, ...]:
    """A stack of layers as a tuple of layers, for serving (a scan would copy each layer's weights
    at every step).

    Each stays on the devices it is split over: `tuple(array)` would take it through the host to the
    first one. With `donate` each array of the stack is deleted once it is apart: there is one more
    copy of one of them, not of all.
    """
    leaves, tree = jax.tree.flatten(stack)

    def layers(leaf):
        parts = jnp.unstack(leaf)
        if donate:
            leaf.delete()
        return parts

    return tuple(
        jax.tree.unflatten(tree, layer) for layer in zip(*map(layers, leaves), strict=True)
    )


def cast[Tree](tree: Tree, dtype) -> Tree:
    """Every leaf in `dtype`; leaves that already are stay the same buffers."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
