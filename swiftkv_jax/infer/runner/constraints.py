"""Sharding constraints of arrays in compiled serving programs."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding

from ...model.attention import Attention
from ...model.cache import KVCache, cache_sharding, map_cache, row_sharding
from ...model.config import Config
from ...model.sharding import replicated
from .decode_state import DecodeBatch


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
