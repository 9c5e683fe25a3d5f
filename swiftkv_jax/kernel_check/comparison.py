"""One configuration of a kernel on small operands against the reference in float32."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import pallas_kernels
from ..pallas_kernels import grouped_product, reference
from .configurations import KernelConfig
from .verdicts import Verdict

POSITIONS = 1100
"""Positions of a row: several blocks of every kernel, the last of them cut."""
RUNS = 3
"""Times that a kernel runs: one that reads too early may be right once."""
KV_HEADS = 2
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.5e-2, "float16": 5e-3}
"""Largest difference from the reference, to which half of it times the value is added."""
GRADIENT_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
"""Largest difference of a gradient, as a share of its largest value."""
HIDDEN = 100.0
"""What stands at positions that no query sees: read by mistake, it changes the result."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far a kernel is from the reference. NaN for results that are not finite."""

    difference: float
    """Largest difference of an element, over all runs."""
    error: float
    """The same in units of what is tolerated there: right up to 1."""

    @property
    def right(self) -> bool:
        return self.error <= 1


ALIGNMENT = 3.0
"""Length of what is added to some keys, along the queries that must see them: the last that a query
sees, and in decoding the first and last of each page; with a window its first position and the one
before. A mask that is wrong by one then shows."""


class _Case(NamedTuple):
    call: Callable[..., Any]
    operands: tuple[Any, ...]
    expected: list[np.ndarray]
    tolerated: list[np.ndarray]


def compare(
    config: KernelConfig,
    implementation: str,
    *,
    ops: Any = pallas_kernels,
    positions: int = POSITIONS,
    runs: int = RUNS,
) -> Comparison:
    """Run `implementation` on operands drawn for `config`, on the default device, and compare.

    `ops` has the two attention ops and `plan_decode`. Needs some hundred MB of device memory.
    Raises `NotImplementedError` for what the implementation cannot do.
    """
    make = {"decode": _decode, "gradient": _gradient, "experts": _experts}.get(
        config.op, _whole_rows if config.page_size is None else _chunk
    )
    case = make(config, implementation, ops, positions)
    call = jax.jit(case.call)
    differences, errors = [], []
    for _ in range(runs):
        for actual, expected, tolerated in zip(
            jax.tree.leaves(call(*case.operands)), case.expected, case.tolerated, strict=True
        ):
            difference = np.abs(np.float32(actual) - expected)
            differences.append(difference.max())
            errors.append((difference / tolerated).max())
    return Comparison(float(np.max(differences)), float(np.max(errors)))


def verdict_on(config: KernelConfig, implementation: str, **options: Any) -> Verdict:
    """The verdict of `compare`, with `options` for it. Errors become verdicts too."""
    start = time.monotonic()
    try:
        found = compare(config, implementation, **options)
    except Exception as error:
        seconds, reason = time.monotonic() - start, _first_line(error)
        # The ops refuse so; a compiler that lacks something does not.
        if isinstance(error, NotImplementedError) and reason.startswith("implementation="):
            return Verdict("unsupported", reason, seconds)
        no_memory = "RESOURCE_EXHAUSTED" in reason or "Out of memory" in reason
        detail = f"{type(error).__name__}: {reason}"
        return Verdict("unchecked" if no_memory else "failed", detail, seconds)
    seconds = time.monotonic() - start
    if not math.isfinite(found.difference):
        return Verdict("wrong", "results are not finite", seconds)
    if found.right:
        return Verdict("right", "", seconds, found.difference)
    detail = f"by up to {found.difference:.3g}, {found.error:.3g} times what is tolerated"
    return Verdict("wrong", detail, seconds, found.difference)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def _whole_rows(config: KernelConfig, implementation: str, ops: Any, positions: int) -> _Case:
    rng = np.random.default_rng(0)
    q, k, v, options, mask = _row(config, positions, rng)
    attend = functools.partial(
        ops.prefill_attention, window=_window(config, positions), implementation=implementation
    )
    return _prefill(config, attend, (q, k, v, options), _reference(q, k, v, mask))


def _gradient(config: KernelConfig, implementation: str, ops: Any, positions: int) -> _Case:
    rng = np.random.default_rng(0)
    q, k, v, options, mask = _row(config, positions, rng)
    q = (np.float32(q) / 4).astype(q.dtype)
    d_out = rng.normal(size=q.shape).astype(q.dtype)

    def call(q, k, v, d_out, options):
        attend = functools.partial(
            ops.prefill_attention,
            **options,
            window=_window(config, positions),
            implementation=implementation,
        )
        return jax.vjp(attend, q, k, v)[1](d_out)

    tolerance = GRADIENT_TOLERANCE[config.dtype]
    wide = (x.astype(np.float32) for x in (q, k, v, d_out))
    expected = [np.asarray(one) for one in _reference_gradient(mask, *wide)]
    tolerated = [np.full_like(one, tolerance * np.abs(one).max()) for one in expected]
    return _Case(call, (q, k, v, d_out, options), expected, tolerated)


def _chunk(config: KernelConfig, implementation: str, ops: Any, positions: int) -> _Case:
    """A chunk of prefill as the engine packs it: each row the tokens of a page, here of two
    prompts, and an idle row."""
    page, pages = _pages(config, positions)
    prompts = np.array([0, 0, 0, 1, 1])
    starts = np.array([0, pages - 2, pages - 1, 0, 0]) * page
    lengths = np.array([page, page, page // 2 + 3, 1, 0])
    query, key = np.arange(page)[:, None], np.arange(pages * page)
    at, window = starts[:, None, None] + query, _window(config, positions)
    mask = (key <= at) & (query < lengths[:, None, None])  # B T S
    if window is not None:
        mask &= key > at - window
    q = _queries(config, (len(prompts), page))
    seen = np.stack([mask[prompts == prompt].any((0, 1)) for prompt in (0, 1)])
    added = np.zeros((*seen.shape, KV_HEADS, config.head_dim))
    for prompt, start, length, row in zip(prompts, starts, lengths, _directions(q), strict=True):
        for edge in _edges(window):
            first = max(0, edge - start)  # of the row's queries that has a position there
            added[prompt, start + first - edge : max(start + length - edge, 0)] += row[first:length]
    pool = _pool(config, seen, added, page)
    # Entries of pages that no query sees may be anything.
    hidden = np.arange(pages) * page >= np.where(lengths, starts + lengths, 0)[:, None]
    if window is not None:
        hidden |= np.arange(1, pages + 1) * page <= starts[:, None] - window + 1
    options = {
        **pool.options,
        "q_offset": np.int32(starts),
        "lengths": np.int32(lengths),
        "page_table": np.int32(np.where(hidden, 10**9, pool.table[prompts])),
    }
    expected = _reference(q, pool.k_values[prompts], pool.v_values[prompts], mask)
    attend = functools.partial(ops.prefill_attention, window=window, implementation=implementation)
    return _prefill(config, attend, (q, *pool.kv, options), expected)


def _decode(config: KernelConfig, implementation: str, ops: Any, positions: int) -> _Case:
    """A decode step as the engine runs it, with an idle row."""
    page, pages = _pages(config, 4 * positions)  # blocks of two heads have up to 32 pages on TPUs
    window = _window(config, positions)
    keys = pages * page
    lengths = np.array([keys, 0, 1, page + 5, page, keys // 2 + 1, page + 1, keys - 1])
    position = np.arange(keys)
    seen = position < lengths[:, None]
    marked = np.isin(position % page, (0, page - 1)) | (position == lengths[:, None] - 1)
    begins = 0 * lengths
    if window is not None:
        begins = np.maximum(lengths - window, 0)
        seen &= position >= begins[:, None]
        marked |= (position == begins[:, None]) | (position == begins[:, None] - 1)
    q = _queries(config, (len(lengths), 1))
    pool = _pool(config, seen, marked[..., None, None] * _directions(q), page)

    def call(q, k, v, length, table, options):
        same: Any = {"page_table": table, "window": window, "implementation": implementation}
        plan = ops.plan_decode(q, k, length, **same)
        return ops.decode_attention(q, k, v, length, **options, **same, plan=plan)

    # Entries of pages before a window may be anything.
    table = np.where(np.arange(1, pages + 1) * page <= begins[:, None], 10**9, pool.table)
    operands = q, *pool.kv, np.int32(lengths), np.int32(table), pool.options
    expected = _reference(q, pool.k_values, pool.v_values, seen[:, None])
    return _forward(config, call, operands, expected)


def _experts(config: KernelConfig, implementation: Any, ops: Any, positions: int) -> _Case:
    """Products of blocks with the matrices of experts, up and down, stored both ways, in blocks of
    both sizes, of which the last has no rows."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(config.dtype)
    group = np.array([2, 0, 2, 3, 1], np.int32)
    operands, expected = [], []
    for size, widths in itertools.product(
        (64, 128), ((config.embed_dim, config.mlp_dim), (config.mlp_dim, config.embed_dim))
    ):
        x = rng.normal(size=(len(group), size, widths[0])).astype(dtype)
        weight = (rng.normal(size=(4, *widths)) / widths[0] ** 0.5).astype(dtype)
        products = np.einsum("NMI,NIO->NMO", np.float32(x), weight.astype(np.float32)[group])
        operands.append((x, weight, np.ascontiguousarray(weight.swapaxes(1, 2))))
        expected += [products[:-1]] * 2
    none = jnp.zeros((len(group), 0), jnp.int32)
    used = jnp.asarray([len(group) - 1], jnp.int32)
    blocks = grouped_product.Blocks(jnp.asarray(group), used, row=none, place=none[0])

    def call(*operands):
        found = []
        for x, *stored in operands:
            for weight, inputs in zip(stored, ("first", "last"), strict=True):
                out = grouped_product.block_product(
                    x, weight, blocks, inputs, implementation, dtype
                )
                found.append(out[:-1])
        return found

    tolerance = TOLERANCE[config.dtype]
    tolerated = [tolerance + tolerance / 2 * np.abs(one) for one in expected]
    return _Case(call, tuple(operands), expected, tolerated)


def _prefill(config: KernelConfig, attend: Callable[..., Any], operands, expected) -> _Case:
    def call(q, k, v, options):
        return attend(q, k, v, **options)

    return _forward(config, call, operands, expected)


def _forward(config: KernelConfig, call, operands, expected) -> _Case:
    tolerance, expected = TOLERANCE[config.dtype], np.asarray(expected)
    return _Case(call, operands, [expected], [tolerance + tolerance / 2 * np.abs(expected)])


_reference = jax.jit(reference.attention)


@jax.jit
def _reference_gradient(mask, q, k, v, d_out):
    return jax.vjp(functools.partial(reference.attention, mask=mask), q, k, v)[1](d_out)


# Operands ---------------------------------------------------------------------


def _window(config: KernelConfig, positions: int) -> int | None:
    """A part of a row: blocks before it are passed over, others are cut by it."""
    return max(1, positions // 3) if config.windowed else None


def _edges(window: int | None) -> tuple[int, ...]:
    """How far before a query the keys stand that must weigh much."""
    return (0,) if window is None else (0, window - 1, window)


class _Pool(NamedTuple):
    kv: tuple[np.ndarray, np.ndarray]
    """Keys and values, X K page H, as they are stored."""
    options: dict[str, np.ndarray]
    """Their scales, X K page, if they have any."""
    table: np.ndarray
    """R P: each page of each row another one of the pool, which has twice as many."""
    k_values: np.ndarray
    """R K S H, as `v_values`."""
    v_values: np.ndarray


def _queries(config: KernelConfig, rows: tuple[int, int]) -> np.ndarray:
    """B T N H: large ones, so that scores rounded to 16 bits would show."""
    shape = (*rows, KV_HEADS * config.queries_per_kv_head, config.head_dim)
    drawn = 4 * np.random.default_rng(1).normal(size=shape)
    return drawn.astype(jnp.dtype(config.dtype))


def _directions(q: np.ndarray) -> np.ndarray:
    """f64[B, T, K, H]: what is added to a key so that all queries of its head see it."""
    heads = np.asarray(q, np.float64).reshape(*q.shape[:2], KV_HEADS, -1, q.shape[3])
    return ALIGNMENT * (heads / np.linalg.norm(heads, axis=-1, keepdims=True)).sum(axis=3)


def _row(config: KernelConfig, positions: int, rng: np.random.Generator):
    """(q, k, v, options of the op, mask) of one row; packed, of three documents and padding."""
    shape, q = (1, KV_HEADS, positions, config.head_dim), _queries(config, (1, positions))
    window, along = _window(config, positions), _directions(q)
    added = np.zeros_like(along)
    for edge in _edges(window):
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


def _pages(config: KernelConfig, positions: int) -> tuple[int, int]:
    """(page size, pages of a row)."""
    if config.page_size is None:
        raise ValueError(f"{config}: only a cache of pages is checked")
    return config.page_size, max(3, -(-positions // config.page_size))


def _pool(config: KernelConfig, seen: np.ndarray, added: np.ndarray, page: int) -> _Pool:
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
    return _Pool((stored[0], stored[1]), options, table, values[0], values[1])


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
