"""Rotary embeddings: frequencies, tables of cosines and sines for each kind of layer, and the
rotation of heads.

Letters as in `params`; B batch, T positions, F the rotated pairs of a head. Angles are float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .config import Config, LayerKind
from .rope_config import Rope, RopeScaling

Tables = tuple[Float[Array, "2 B T F"], ...]
"""One table of cosines and sines for each of `Config.ropes`."""


def rope_frequencies(rope: Rope, head_dim: int) -> Float[Array, " F"]:
    """Radians per position of each rotated pair, after scaling (`RopeScaling` says by which
    rule)."""
    size = rope.rotated(head_dim)
    exponent = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    frequency = rope.theta**-exponent
    scaling = rope.scaling
    if scaling is None:
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    if scaling.rope_type == "longrope":
        factors = scaling.long_factor if scaling.long else scaling.short_factor
        return frequency / jnp.asarray(factors, jnp.float32)
    if scaling.rope_type == "yarn":
        keep = jnp.asarray(_yarn_share(rope, scaling, size), jnp.float32)
    else:
        # llama3: share of the stretched frequency falls from 1 to 0 as the turns made within the
        # pretraining length rise from low_freq_factor to high_freq_factor.
        turns = scaling.original_max_position_embeddings * frequency / (2 * jnp.pi)
        keep = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        keep = jnp.clip(keep, 0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def _yarn_share(rope: Rope, scaling: RopeScaling, size: int) -> np.ndarray:
    """The share of each pair's own frequency: 1 up to the pair that makes `beta_fast` turns within
    the pretraining length, 0 from the one that makes `beta_slow` (arXiv:2309.00071, 3.2)."""

    def pair(turns: float) -> float:
        length = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return size * math.log(length) / (2 * math.log(rope.theta))

    low = pair(scaling.beta_fast)
    high = pair(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    if low == high:
        high += 0.001
    return 1 - np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)


def rope_tables(config: Config, positions: Int[Array, "B T"]) -> Tables:
    """Cosines and sines of every position. Made once per forward pass and shared by all layers."""
    return tuple(_table(rope, config.head_dim, positions) for rope in config.ropes)


def _table(rope: Rope, head_dim: int, positions: Int[Array, "B T"]) -> Float[Array, "2 B T F"]:
    angle = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    table = jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    if rope.scaling is None or rope.scaling.attention_factor == 1.0:
        return table
    return table * rope.scaling.attention_factor


def table_of(config: Config, tables: Tables, kind: LayerKind) -> Float[Array, "2 B T F"] | None:
    """The table of a kind of layer; None if it rotates nothing."""
    return None if kind.rope is None else tables[config.ropes.index(kind.rope)]


def stack_tables(
    config: Config, tables: Tables, kinds: tuple[LayerKind, ...]
) -> Float[Array, "kinds 2 B T F"]:
    """The tables of several kinds in one array; of one that rotates nothing, a rotation by zero."""
    still = jnp.zeros_like(tables[0]).at[0].set(1.0)
    found = (table_of(config, tables, kind) for kind in kinds)
    return jnp.stack([still if table is None else table for table in found])


def group_table(config: Config, tables: Tables) -> Array | None:
    """The rotary table of the projected groups' keys: one of 2 B T F for all, 2 B T P F where they
    rotate differently, None where none rotates."""
    groups = config.kv_groups[config.prompt_attention_layers :]
    kinds = tuple(config.kind(group[0]) for group in groups)
    if len({kind.rope for kind in kinds}) == 1:
        return table_of(config, tables, kinds[0])
    return jnp.moveaxis(stack_tables(config, tables, kinds), 0, 3)


NO_WINDOW = 2**31 - 1
"""A window that hides nothing, where another layer of the same scan has one."""
KindOf = Callable[[Any], tuple[Array | None, Any]]


def scanned_kinds(config: Config, tables: Tables, layers: range) -> tuple[Array | None, KindOf]:
    """(what to scan over with `layers`, function from its entry to the layer's rotary table and
    window). Nothing is scanned where the layers are of one kind."""
    kinds = tuple(dict.fromkeys(map(config.kind, layers))) or config.kinds[:1]
    if len(kinds) == 1:
        only = table_of(config, tables, kinds[0]), kinds[0].window
        return None, lambda _: only
    table = stack_tables(config, tables, kinds)
    window = None
    if any(kind.window is not None for kind in kinds):
        window = jnp.array([kind.window or NO_WINDOW for kind in kinds])

    def kind_of(index):
        return jax.tree.map(lambda of_kinds: of_kinds[index], (table, window))

    return jnp.array([kinds.index(config.kind(layer)) for layer in layers]), kind_of


def paired_dims(config: Config) -> Int[np.ndarray, "2 H_half"]:
    """A head's dimensions in pairs, column by column, such that a complex factor of each pair
    commutes with the rotation: (f, f + R/2) of the R that rotate, then the others, of which any two
    would do."""
    rotating, still = np.split(np.arange(config.head_dim), [config.rotated_dims])
    return np.concatenate([rotating.reshape(2, -1), still.reshape(2, -1)], axis=1)


def apply_rope(
    x: Float[Array, "B T *J N H"], rope: Float[Array, "2 B T *J F"] | None, scale: float = 1.0
) -> Float[Array, "B T *J N H"]:
    """Rotate each head and multiply it by `scale`. Of the dimensions that rotate the first half
    pairs with the second, as in Hugging Face checkpoints; a table without J is that of each, and
    None rotates nothing."""
    return x if rope is None and scale == 1.0 else _rotate(x, rope, scale)


# The backward pass computes this again from its inputs, instead of keeping what is float32.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _rotate(x, rope, scale: float):
    if rope is None:
        return (x.astype(jnp.float32) * scale).astype(x.dtype)
    cos, sin = rope.reshape(*rope.shape[:-1], *(1,) * (x.ndim - rope.ndim + 1), rope.shape[-1])
    wide = x.astype(jnp.float32)
    if scale != 1.0:
        wide = wide * scale
    rotated = 2 * rope.shape[-1]
    a, b = jnp.split(wide[..., :rotated] if rotated < x.shape[-1] else wide, 2, axis=-1)
    parts = [a * cos - b * sin, b * cos + a * sin]
    if rotated < x.shape[-1]:
        parts.append(wide[..., rotated:])
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)
