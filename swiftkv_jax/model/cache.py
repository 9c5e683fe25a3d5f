"""The static key/value cache: each cache layer has a pool of pages of keys and one of values,
optionally in 8 bits.

The student has pools for each lower layer and for each *group* of upper layers: AcrossKV shares
memory, not only work. A page holds the keys or values of `page_size` consecutive positions of one
row, head-major; a page table says which page holds which positions of which row
(`infer.engine.page_pool`). An unmodified teacher is served as the cut at `num_layers`, with pools
for each layer.

On a mesh whose rows are split, each data-parallel shard has its own part of every pool, and page
numbers count within it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ..errors import UsageError
from . import quantization
from .config import KV_CACHE_DTYPES, Config, KVCacheDtype
from .mesh import MODEL, row_axes
from .params import Leaf

_EIGHT_BITS = tuple(jnp.dtype(dtype) for dtype in quantization.DTYPES.values())


@struct.dataclass
class Pool:
    """Keys, or values, of one cache layer: the stored numbers, times their scales if there are
    any."""

    values: Leaf  # X K page H
    scale: Leaf = None  # f32[X, K, page], one per position and head; None unless in 8 bits


@struct.dataclass
class KVCache:
    """Rotated keys, and values: lower layers first, then one entry per group of upper layers."""

    k: tuple[Pool, ...]
    v: tuple[Pool, ...]
    tap: Leaf = None  # f32[X, D], with `Config.boundary_taps` only
    """The normed boundary state of the last token written to each page: see `infer.runner.taps`."""
    boundary: Pool | None = None  # X K page D/K; with `EngineOptions.prefix_cache_form` only
    """The normed boundary state of every token, in as many parts as there are heads, so that it is
    written and split over devices as keys are."""


def cache_dtype(kv_cache_dtype: KVCacheDtype, dtype) -> jnp.dtype:
    """The dtype of the pools for weights of `dtype`. Raises `UsageError` for an unknown name, or a
    wider dtype than the weights'."""
    named = {"auto": dtype, "float32": jnp.float32, "bfloat16": jnp.bfloat16} | quantization.DTYPES
    if kv_cache_dtype not in named:
        raise UsageError(
            f"`kv_cache_dtype`={kv_cache_dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}"
        )
    stored = jnp.dtype(named[kv_cache_dtype])
    if stored not in (dtype, *_EIGHT_BITS):
        raise UsageError(
            f"`kv_cache_dtype`={kv_cache_dtype!r} needs weights of that dtype, these are "
            f"{jnp.dtype(dtype)}; fp8 and int8 go with any"
        )
    return stored


def cache_shapes(
    config: Config, pages: int, page_size: int, dtype, *, boundary: bool = False
) -> KVCache:
    """The `ShapeDtypeStruct` of every array of a cache of `pages` pages of `page_size` positions;
    `boundary` says whether it has the boundary states."""
    shape = (pages, config.num_kv_heads, page_size, config.head_dim)
    scale = (
        jax.ShapeDtypeStruct(shape[:3], jnp.float32) if jnp.dtype(dtype) in _EIGHT_BITS else None
    )
    pools = (Pool(jax.ShapeDtypeStruct(shape, dtype), scale),) * config.num_cache_layers
    states = jax.ShapeDtypeStruct((pages, config.embed_dim), jnp.float32)
    part = jax.ShapeDtypeStruct((*shape[:3], config.embed_dim // config.num_kv_heads), dtype)
    tap = states if config.boundary_taps else None
    return KVCache(pools, pools, tap, Pool(part) if boundary else None)


def map_cache(
    cache: KVCache, of_pages: Callable[[Any], Any], of_states: Callable[[Any], Any]
) -> KVCache:
    """The tree of `of_pages` of each array of keys, values and boundary states, and `of_states` of
    that of `tap`."""
    k, v, boundary = jax.tree.map(of_pages, (cache.k, cache.v, cache.boundary))
    return KVCache(k, v, None if cache.tap is None else of_states(cache.tap), boundary)


def cache_sharding(config: Config, mesh: Mesh) -> NamedSharding:
    """Pages over `data` and `fsdp`, heads over `model` where it divides them.

    Axes of size one are left out: XLA drops their names, and an array that it returns would then
    have another sharding than the one that it was given.
    """
    rows = _rows(mesh)
    if mesh.shape[MODEL] > 1 and config.num_kv_heads % mesh.shape[MODEL] == 0:
        return NamedSharding(mesh, PartitionSpec(rows, MODEL))
    return row_sharding(mesh)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays beside a cache that have a row per page or sequence: over `data` and
    `fsdp`."""
    rows = _rows(mesh)
    return NamedSharding(mesh, PartitionSpec() if rows is None else PartitionSpec(rows))


def _rows(mesh: Mesh) -> tuple[str, ...] | str | None:
    axes = tuple(axis for axis in row_axes(mesh) if mesh.shape[axis] > 1)
    return None if not axes else axes[0] if len(axes) == 1 else axes


def bytes_per_token(config: Config, dtype, *, swiftkv: bool = True, scales: bool = True) -> int:
    """Bytes of one token's keys and values in all cache layers, with SwiftKV or without it.
    `scales` False does not count the scales."""
    layers = config.num_cache_layers if swiftkv else config.num_layers
    scale = 4 if scales and jnp.dtype(dtype) in _EIGHT_BITS else 0
    return 2 * layers * config.num_kv_heads * (config.head_dim * jnp.dtype(dtype).itemsize + scale)


def answer_bytes_per_token(config: Config, dtype, *, swiftkv: bool = True) -> int:
    """`bytes_per_token` of a generated token. Where it keeps keys and values beside those of a
    group, these take pages as well."""
    shared = bytes_per_token(config, dtype, swiftkv=swiftkv)
    return shared * (1 + config.pages_per_own_page * swiftkv)


# Writing ----------------------------------------------------------------------


def keys_carry_nan(k: Float[Array, "_ K T H"], v: Float[Array, "_ K T H"]) -> tuple[Array, Array]:
    """Keys and values in which only the keys may hold NaN: at each position and head where either
    is not finite, the key is NaN and the value 0.

    Attention to the position is still NaN. Attention of a sequence that is given the page later and
    has not reached the position is not: scores are masked before the softmax, but 0 times a value
    of NaN would be NaN.
    """
    finite = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)


def write_pages(
    pool: Pool,
    new: Float[Array, "R K page H"],
    pages: Int[Array, " R"],
    written: Bool[Array, "R page"],
    sharding: NamedSharding | None = None,
) -> Pool:
    """Write those positions of `pages` that are `written`; the others stay as they are. Nothing is
    written for page numbers past the pool.

    Pages are read, merged and written back: single positions would be `page` times as many
    scatters, which a TPU runs one after the other. No page may be named twice. `sharding` is that
    of the pool, on a mesh.
    """
    return _on_each_device(_write_pages, sharding)(pool, new, pages, written)


def write_token(
    pool: Pool,
    new: Float[Array, "B K 1 H"],
    page: Int[Array, " B"],
    position: Int[Array, " B"],
    sharding: NamedSharding | None = None,
) -> Pool:
    """Write one position within one page for each row; nothing for a page number past the pool."""
    return _on_each_device(_write_token, sharding)(pool, new, page, position)


def gather_pages(
    pool: Pool, pages: Int[Array, " X"], sharding: NamedSharding | None = None
) -> Pool:
    """A smaller pool of these pages. Page numbers past the pool gather any page."""
    return _on_each_device(_gather_pages, sharding)(pool, pages)


def _write_pages(pool: Pool, new, pages, written) -> Pool:
    values, scale = _stored(pool, new)

    def merge(old, new):
        mask = written[:, None, :, *(None,) * (old.ndim - 3)]
        merged = jnp.where(mask, new, old.at[pages].get(mode="clip"))
        return old.at[pages].set(merged, mode="drop", unique_indices=True)

    return Pool(merge(pool.values, values), None if scale is None else merge(pool.scale, scale))


def _write_token(pool: Pool, new, page, position) -> Pool:
    # As lines of H: for a scatter into X K page H XLA would lay the cache out as X page K H and, on
    # TPUs, transpose all of it for attention in every step.
    pages, heads, size, head_dim = pool.values.shape
    values, scale = _stored(pool, new)
    row = jnp.arange(page.shape[0] * heads)
    line = (jnp.repeat(page, heads) * heads + row % heads) * size + jnp.repeat(position, heads)
    # Lines past the end are dropped. Each has a different index, so that indices are unique.
    line = jnp.where(jnp.repeat(page, heads) < pages, line, pages * heads * size + row)

    def scatter(old, new):
        lines = old.reshape(pages * heads * size, *old.shape[3:])
        new = new.reshape(page.shape[0] * heads, *old.shape[3:])
        return lines.at[line].set(new, mode="drop", unique_indices=True).reshape(old.shape)

    return Pool(scatter(pool.values, values), None if scale is None else scatter(pool.scale, scale))


def _gather_pages(pool: Pool, pages) -> Pool:
    return jax.tree.map(lambda leaf: leaf.at[pages].get(mode="clip"), pool)


def _stored(pool: Pool, new: Float[Array, "_ K _ H"]) -> tuple[Array, Array | None]:
    """Keys or values as the pool stores them, with their scales: the largest of each head of each
    token becomes the largest number of the format."""
    if pool.scale is None:
        return new.astype(pool.values.dtype), None
    return quantization.to_eight_bits(new, (new.ndim - 1,), pool.values.dtype)


def _on_each_device(
    write: Callable[..., Pool], sharding: NamedSharding | None
) -> Callable[..., Pool]:
    """`write` under `shard_map`: on each device's part of the pool, with the rows of that part."""
    if sharding is None:
        return write
    spec = sharding.spec
    rows, heads = (*spec, None, None)[:2]

    @functools.wraps(write)
    def local(pool: Pool, *arrays) -> Pool:
        specs = tuple(
            PartitionSpec(rows, heads) if array.ndim == 4 else PartitionSpec(rows)
            for array in arrays
        )
        return jax.shard_map(write, mesh=sharding.mesh, in_specs=(spec, *specs), out_specs=spec)(
            pool, *arrays
        )

    return local
