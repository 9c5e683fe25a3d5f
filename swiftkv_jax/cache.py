"""The static key/value cache: one buffer of keys and one of values per cache layer, head-major.

The student has a buffer per lower layer and one per *group* of upper layers: AcrossKV shares memory, not only work.
Rows are left-aligned. The cache does not know how much of a row is valid; whoever holds it does (`DecodeState.length`).
Serving an unmodified teacher is serving the cut at `num_layers`: a buffer per layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from .config import Config
from .params import Leaf
from .sharding import DATA, MODEL


@struct.dataclass
class KVCache:
    """Rotated keys, and values: lower layers first, then one entry per group of upper layers."""

    k: tuple[Leaf, ...]  # each B K S H
    v: tuple[Leaf, ...]  # each B K S H


def cache_shapes(config: Config, batch: int, length: int, dtype) -> KVCache:
    """The `ShapeDtypeStruct` of every buffer of a cache of `length` positions per row."""
    buffer = jax.ShapeDtypeStruct((batch, config.num_kv_heads, length, config.head_dim), dtype)
    return KVCache((buffer,) * config.num_cache_layers, (buffer,) * config.num_cache_layers)


def init_cache(config: Config, batch: int, length: int, dtype, sharding: Sharding | None = None) -> KVCache:
    """A cache of zeros, each buffer made where `sharding` puts it."""
    shapes = cache_shapes(config, batch, length, dtype)
    return jax.tree.map(lambda buffer: jnp.zeros(buffer.shape, buffer.dtype, device=sharding), shapes)


def cache_sharding(config: Config, mesh: Mesh) -> NamedSharding:
    """Rows over `data`, heads over `model` where it divides them. Names no axis of size one: XLA would drop the name."""
    rows = DATA if mesh.shape[DATA] > 1 else None
    if mesh.shape[MODEL] > 1 and config.num_kv_heads % mesh.shape[MODEL] == 0:
        return NamedSharding(mesh, PartitionSpec(rows, MODEL))
    return row_sharding(mesh)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data`, for the vectors that stand beside a cache."""
    return NamedSharding(mesh, PartitionSpec(DATA) if mesh.shape[DATA] > 1 else PartitionSpec())


def bytes_per_token(config: Config, dtype, *, swiftkv: bool = True) -> int:
    """What one token occupies: keys and values of every cache layer, with SwiftKV or without."""
    layers = config.num_cache_layers if swiftkv else config.num_layers
    return 2 * layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def write_chunk(
    buffer: Float[Array, "B K S H"], new: Float[Array, "B K T H"], offset: Int[Array, ""]
) -> Float[Array, "B K S H"]:
    """Every row's positions `offset .. offset+T-1`. They must be inside the buffer: XLA would move them, silently."""
    zero = jnp.zeros_like(offset)
    return jax.lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), (zero, zero, offset, zero))


def write_token(
    buffer: Float[Array, "B K S H"],
    new: Float[Array, "B K 1 H"],
    position: Int[Array, " B"],
    sharding: NamedSharding | None = None,
) -> Float[Array, "B K S H"]:
    """One position of each row, each row its own. A position outside the buffer is not written.

    `sharding` is that of the buffer where it is spread over a mesh: each device writes its own part.
    """
    if sharding is None:
        return _write_token(buffer, new, position)
    spec = sharding.spec
    in_specs = (spec, spec, PartitionSpec(*spec[:1]))
    return jax.shard_map(_write_token, mesh=sharding.mesh, in_specs=in_specs, out_specs=spec)(buffer, new, position)


def _write_token(buffer, new, position):
    # As lines of H: a scatter into B K S H would make XLA lay the cache out as B S K H and, on TPUs, turn all of it around
    # for attention in every step.
    batch, heads, length, head_dim = buffer.shape
    position = jnp.repeat(position, heads)
    head = jnp.arange(batch * heads)
    line = jnp.where(position < length, head * length + position, batch * heads * length + head)  # past the end, each apart
    lines = buffer.reshape(-1, head_dim)
    lines = lines.at[line].set(new.reshape(-1, head_dim).astype(buffer.dtype), mode="drop", unique_indices=True)
    return lines.reshape(buffer.shape)
