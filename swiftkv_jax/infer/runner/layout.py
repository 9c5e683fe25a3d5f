"""Shapes and shardings of what serving keeps on the devices, said once for the programs that are
lowered, the memory plan and the arrays themselves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from ...model.attention import Attention
from ...model.cache import KVCache, cache_shapes, cache_sharding, map_cache, row_sharding
from ...model.config import Config
from ...model.mesh import MODEL, dp_size
from ...model.sharding import replicated
from ..engine.shapes import Shapes
from .decode_state import DecodeBatch, DecodeState, empty_batch
from .memory import bytes_per_device


@dataclasses.dataclass(frozen=True)
class Layout:
    """Places of the serving state of a model on a mesh, or on one device."""

    config: Config
    """The served architecture (`serving_form.served_config`)."""
    cache_dtype: jnp.dtype
    mesh: Mesh | None
    device: Sharding | None = None
    """Sharding of all arrays without a mesh; None leaves it to JAX."""
    boundary: bool = False
    """True if the cache has `KVCache.boundary`, from which pages of the host are completed."""

    @property
    def cache_sharding(self) -> Sharding | None:
        return self._on_mesh(functools.partial(cache_sharding, self.config))

    @property
    def row_sharding(self) -> Sharding | None:
        """Sharding of arrays with an axis of data-parallel shards or sequences."""
        return self._on_mesh(row_sharding)

    @property
    def replicated(self) -> Sharding | None:
        """Sharding of what the host reads or writes."""
        return self._on_mesh(replicated)

    def split(self, units: int, axis: int) -> Sharding | None:
        """Sharding of an array of which tensor parallelism splits an axis of so many `units`, where
        it divides them."""
        if self.mesh is None or units % self.mesh.shape[MODEL]:
            return self.replicated
        return NamedSharding(self.mesh, P(*[None] * axis, MODEL))

    def _on_mesh(self, sharding: Callable[[Mesh], Sharding]) -> Sharding | None:
        return self.device if self.mesh is None else sharding(self.mesh)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page in all layers, on one device."""
        return bytes_per_device(self._cache(dp_size(self.mesh), page_size))

    def cache(self, shapes: Shapes) -> KVCache:
        """The `ShapeDtypeStruct` of every array of the cache."""
        return self._cache(shapes.dp_size * shapes.num_pages, shapes.page_size)

    def batch(self, count: int, shapes: Shapes) -> DecodeBatch:
        """The `ShapeDtypeStruct` of every array of a batch of `count` sequences."""
        batch = empty_batch(count, shapes)
        return jax.tree.map(lambda leaf: self.array(leaf.shape, leaf.dtype), batch)

    def state(self, shapes: Shapes) -> DecodeState:
        """The `ShapeDtypeStruct` of every array of the decode state."""
        slots = shapes.dp_size * shapes.slots
        counts = self.array((slots, self.config.vocab_size), jnp.uint16)
        history = None
        if size := shapes.history_size:
            history = self.array((slots, size), jnp.int32)
        return DecodeState(self.cache(shapes), self.batch(slots, shapes), counts, history)

    def init_state(self, shapes: Shapes) -> DecodeState:
        """The decode state of an engine without requests."""
        state = self.state(shapes)
        cache, counts = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
            (state.cache, state.token_counts),
        )
        slots = shapes.dp_size * shapes.slots
        batch = jax.device_put(empty_batch(slots, shapes), self.replicated)
        history = None
        if size := shapes.history_size:
            history = jnp.full((slots, size), -1, jnp.int32, device=self.replicated)
        return DecodeState(cache, batch, counts, history)

    def array(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        """An array that the host reads or writes."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def rows(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Integers whose first axis is split over the data-parallel shards."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.row_sharding)

    def _cache(self, pages: int, page_size: int) -> KVCache:
        def placed(sharding):
            return lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        shapes = cache_shapes(
            self.config, pages, page_size, self.cache_dtype, boundary=self.boundary
        )
        return map_cache(shapes, placed(self.cache_sharding), placed(self.row_sharding))


# Constraints in compiled programs ------------------------------------------------


def pool_sharding(config: Config, attention: Attention) -> NamedSharding | None:
    """Sharding of the cache's pools; None without a mesh."""
    return None if attention.mesh is None else cache_sharding(config, attention.mesh)


def state_sharding(attention: Attention) -> NamedSharding | None:
    """Sharding of the cache's boundary states (`KVCache.tap`); None without a mesh."""
    return None if attention.mesh is None else row_sharding(attention.mesh)


def keep_cache_sharding(config: Config, cache: KVCache, attention: Attention) -> KVCache:
    """Give the cache the sharding that it had before the call: only then are donated buffers
    reused, and the compiled program fits the next call."""
    if attention.mesh is None:
        return cache
    pages = cache_sharding(config, attention.mesh)
    rows = row_sharding(attention.mesh)
    return jax.lax.with_sharding_constraint(
        cache, map_cache(cache, lambda _: pages, lambda _: rows)
    )


def split_rows(batch: DecodeBatch, attention: Attention) -> DecodeBatch:
    """Split the rows of a batch over the devices that decode them."""
    if attention.mesh is None:
        return batch
    return jax.lax.with_sharding_constraint(batch, row_sharding(attention.mesh))


def replicate[Tree](tree: Tree, attention: Attention) -> Tree:
    """Put what the host reads or writes on every device, so that each process can."""
    if attention.mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(attention.mesh))
