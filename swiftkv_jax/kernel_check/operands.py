"""The small operands of a comparison: queries, keys and values, and pools of pages."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .configurations import KernelConfig

KV_HEADS = 2
HIDDEN = 100.0
"""What stands at positions that no query sees: read by mistake, it changes the result."""
ALIGNMENT = 3.0
"""Length of what is added to some keys, along the queries that must see them: the last that a query
sees, and in decoding the first and last of each page; with a window its first position and the one
before; with `kv_lengths` the last visible one and the one after. A mask that is wrong by one then
shows."""


def window_of(config: KernelConfig, positions: int) -> int | None:
    """A part of a row: blocks before it are passed over, others are cut by it."""
    return max(1, positions // 3) if config.windowed else None


def edges_of(window: int | None) -> tuple[int, ...]:
    """How far before a query the keys stand that must weigh much."""
    return (0,) if window is None else (0, window - 1, window)


class Pool(NamedTuple):
    kv: tuple[np.ndarray, np.ndarray]
    """Keys and values, X K page H, as they are stored."""
    options: dict[str, np.ndarray]
    """Their scales, X K page, if they have any."""
    table: np.ndarray
    """R P: each page of each row another one of the pool, which has twice as many."""
    k_values: np.ndarray
    """R K S H, as `v_values`."""
    v_values: np.ndarray


def draw_queries(config: KernelConfig, rows: tuple[int, int]) -> np.ndarray:
    """B T N H: large ones, so that scores rounded to 16 bits would show."""
    shape = (*rows, KV_HEADS * config.queries_per_kv_head, config.head_dim)
    drawn = 4 * np.random.default_rng(1).normal(size=shape)
    return drawn.astype(jnp.dtype(config.dtype))


def directions(q: np.ndarray) -> np.ndarray:
    """f64[B, T, K, H]: what is added to a key so that all queries of its head see it."""
    heads = np.asarray(q, np.float64).reshape(*q.shape[:2], KV_HEADS, -1, q.shape[3])
    return ALIGNMENT * (heads / np.linalg.norm(heads, axis=-1, keepdims=True)).sum(axis=3)


def draw_row(config: KernelConfig, positions: int, rng: np.random.Generator):
    """(q, k, v, options of the op, mask) of one row; packed, of three documents and padding."""
    shape, q = (1, KV_HEADS, positions, config.head_dim), draw_queries(config, (1, positions))
    window, along = window_of(config, positions), directions(q)
    added = np.zeros_like(along)
    for edge in edges_of(window):
        added[:, : positions - edge] += along[:, edge:]
    k, v = rng.normal(size=shape) + added.swapaxes(1, 2), rng.normal(size=shape)
    k, v = (x.astype(q.dtype) for x in (k, v))
    mask, options = np.tri(positions, dtype=bool)[None], {}
    if window is not None:
        mask = mask & ~np.tri(positions, k=-window, dtype=bool)
    if config.packed:
        ends = [1, 1 + positions // 3, positions - positions // 16]
        ids = np.searchsorted(ends, np.arange(positions), side="right") + 1
        ids[ends[-1] :] = 0
        options["segment_ids"] = np.int32(ids[None])
        mask = mask & (ids[:, None] == ids)
    return q, k, v, options, mask


def pages_of(config: KernelConfig, positions: int) -> tuple[int, int]:
    """(page size, pages of a row)."""
    if config.page_size is None:
        raise ValueError(f"{config}: only a cache of pages is checked")
    return config.page_size, max(3, -(-positions // config.page_size))


def draw_pool(config: KernelConfig, seen: np.ndarray, added: np.ndarray, page: int) -> Pool:
    """Keys and values of rows of which the positions in `seen`, bool[R, S], are visible; `added`,
    R S K H, to the keys."""
    rng, (rows, keys) = np.random.default_rng(2), seen.shape
    table = rng.permutation(2 * rows * keys // page)[: rows * keys // page].reshape(rows, -1)
    stored, values, options = [], [], {}
    for name in ("k_scale", "v_scale"):
        drawn = rng.normal(size=(rows, KV_HEADS, keys, config.head_dim))
        drawn += added.swapaxes(1, 2) if name == "k_scale" else 0
        drawn = np.where(seen[:, None, :, None], drawn, HIDDEN)
        content, scale, value = _as_format(drawn.astype(jnp.dtype(config.dtype)), config, rng)
        stored.append(_scatter(content, table, page))
        values.append(value)
        if scale is not None:
            options[name] = _scatter(scale, table, page)
    return Pool((stored[0], stored[1]), options, table, values[0], values[1])


def _as_format(x: np.ndarray, config: KernelConfig, rng: np.random.Generator):
    """(x, R K S H, as it is stored, its scales or None, the values that it then stands for).

    Scales are powers of two, so 16 bits hold the values exactly: where a kernel widens them does
    not matter.
    """
    if config.cache_dtype == config.dtype:
        return x, None, x
    values, limit = np.float32(x), 127 if config.cache_dtype == "int8" else 448
    exponents = np.ceil(np.log2(np.abs(values).max(axis=-1) / limit))
    scale = np.exp2(exponents + rng.integers(0, 2, exponents.shape)).astype(np.float32)
    content = values / scale[..., None]
    content = np.round(content) if config.cache_dtype == "int8" else content
    content = content.astype(jnp.dtype(config.cache_dtype))
    return content, scale, np.float32(content) * scale[..., None]


def _scatter(x: np.ndarray, table: np.ndarray, page: int) -> np.ndarray:
    """x[R, K, S, ...] as a pool X K page ..., each page of each row where the table says."""
    split = np.moveaxis(x.reshape(*x.shape[:2], table.shape[1], page, *x.shape[3:]), 2, 1)
    pool = np.full((2 * table.size, *split.shape[2:]), HIDDEN, x.dtype)
    pool[table] = split
    return pool
