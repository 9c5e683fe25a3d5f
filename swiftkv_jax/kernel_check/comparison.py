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
from .operands import (
    KV_HEADS,
    directions,
    draw_pool,
    draw_queries,
    draw_row,
    edges_of,
    pages_of,
    window_of,
)
from .verdicts import Verdict

POSITIONS = 1100
"""Positions of a row: several blocks of every kernel, the last of them cut."""
RUNS = 3
"""Times that a kernel runs: one that reads too early may be right once."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.5e-2, "float16": 5e-3}
"""Largest difference from the reference, to which half of it times the value is added."""
GRADIENT_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
"""Largest difference of a gradient, as a share of its largest value."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far a kernel is from the reference. NaN or infinity for results that are not finite, or
    are so where the reference is not."""

    difference: float
    """Largest difference of an element, over all runs."""
    error: float
    """The same in units of what is tolerated there: right up to 1."""

    @property
    def right(self) -> bool:
        return self.error <= 1


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
            difference = _difference(np.asarray(actual, np.float32), expected)
            differences.append(difference.max())
            errors.append((difference / tolerated).max())
    return Comparison(float(np.max(differences)), float(np.max(errors)))


def _difference(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """How far each element is off; 0 where both are -inf, as the logarithm of an empty sum is."""
    with np.errstate(invalid="ignore"):
        return np.where(actual == expected, 0, np.abs(actual - expected))


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
        detail = "results are not finite"
        if config.parts:
            detail += ", or a log-sum-exp is where a query sees nothing"
        return Verdict("wrong", detail, seconds)
    if found.right:
        return Verdict("right", "", seconds, found.difference)
    detail = f"by up to {found.difference:.3g}, {found.error:.3g} times what is tolerated"
    return Verdict("wrong", detail, seconds, found.difference)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def _whole_rows(config: KernelConfig, implementation: str, ops: Any, positions: int) -> _Case:
    rng = np.random.default_rng(0)
    q, k, v, options, mask = draw_row(config, positions, rng)
    attend = functools.partial(
        ops.prefill_attention, window=window_of(config, positions), implementation=implementation
    )
    return _prefill(config, attend, (q, k, v, options), _reference(q, k, v, mask))


def _gradient(config: KernelConfig, implementation: str, ops: Any, positions: int) -> _Case:
    rng = np.random.default_rng(0)
    q, k, v, options, mask = draw_row(config, positions, rng)
    q = (np.float32(q) / 4).astype(q.dtype)
    d_out = rng.normal(size=q.shape).astype(q.dtype)

    def call(q, k, v, d_out, options):
        attend = functools.partial(
            ops.prefill_attention,
            **options,
            window=window_of(config, positions),
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
    prompts, and an idle row.

    In parts the visible positions end inside the page of a row's queries, right before it, one
    before the end of an earlier page, and before the first; and in a row of a third prompt they are
    all that there are.
    """
    page, pages = pages_of(config, positions)
    rows = [  # prompt, page, queries, positions that are visible in parts
        (0, 0, page, page // 2 + 1),
        (0, pages - 2, page, (pages - 2) * page),
        (0, pages - 1, page // 2 + 3, 2 * page - 1),
        (1, 0, 1, 0),
        (1, 0, 0, page),
    ]
    if config.parts:
        rows.append((2, 1, page, pages * page))
    prompts, first_pages, lengths, kv_lengths = np.array(rows).T
    starts = first_pages * page
    query, key = np.arange(page)[:, None], np.arange(pages * page)
    at, window = starts[:, None, None] + query, window_of(config, positions)
    mask = (key <= at) & (query < lengths[:, None, None])  # B T S
    ends = np.where(lengths, starts + lengths, 0)
    if window is not None:
        mask &= key > at - window
    if config.parts:
        mask &= key < kv_lengths[:, None, None]
        ends = np.minimum(ends, kv_lengths)
    q = draw_queries(config, (len(rows), page))
    seen = np.stack([mask[prompts == prompt].any((0, 1)) for prompt in range(prompts.max() + 1)])
    added = np.zeros((*seen.shape, KV_HEADS, config.head_dim))
    for prompt, start, length, end, row in zip(
        prompts, starts, lengths, kv_lengths, directions(q), strict=True
    ):
        for edge in edges_of(window):
            first = max(0, edge - start)  # of the row's queries that has a position there
            added[prompt, start + first - edge : max(start + length - edge, 0)] += row[first:length]
        if config.parts and end < start + length:
            added[prompt, max(end - 1, 0) : end + 1] += row[length - 1]
    pool = draw_pool(config, seen, added, page)
    # Entries of pages that no query sees may be anything.
    hidden = np.arange(pages) * page >= ends[:, None]
    if window is not None:
        hidden |= np.arange(1, pages + 1) * page <= starts[:, None] - window + 1
    options = {
        **pool.options,
        "q_offset": np.int32(starts),
        "lengths": np.int32(lengths),
        "page_table": np.int32(np.where(hidden, 10**9, pool.table[prompts])),
    }
    restricted: dict[str, Any] = {"window": window}
    if config.parts:
        options["kv_lengths"] = np.int32(kv_lengths)
        restricted["return_lse"] = True
    values = pool.k_values[prompts], pool.v_values[prompts]
    expected = _reference(q, *values, mask, return_lse=config.parts)
    attend = functools.partial(ops.prefill_attention, **restricted, implementation=implementation)
    return _prefill(config, attend, (q, *pool.kv, options), expected)


def _decode(config: KernelConfig, implementation: str, ops: Any, positions: int) -> _Case:
    """A decode step as the engine runs it, with an idle row."""
    # On TPUs blocks of two heads have up to 32 pages.
    page, pages = pages_of(config, 4 * positions)
    window = window_of(config, positions)
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
    q = draw_queries(config, (len(lengths), 1))
    pool = draw_pool(config, seen, marked[..., None, None] * directions(q), page)

    def call(q, k, v, length, table, options):
        same: Any = {"page_table": table, "window": window, "implementation": implementation}
        plan = ops.plan_decode(q, k, length, **same)
        if config.parts:
            same["return_lse"] = True
        return ops.decode_attention(q, k, v, length, **options, **same, plan=plan)

    # Entries of pages before a window may be anything.
    table = np.where(np.arange(1, pages + 1) * page <= begins[:, None], 10**9, pool.table)
    operands = q, *pool.kv, np.int32(lengths), np.int32(table), pool.options
    expected = _reference(q, pool.k_values, pool.v_values, seen[:, None], return_lse=config.parts)
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
    """`expected` is what attention returns: its result, or that and the log-sum-exp, whose error is
    one of weights and counts as it is."""
    tolerance = TOLERANCE[config.dtype]
    out, *lse = (np.asarray(one) for one in jax.tree.leaves(expected))
    tolerated = [
        tolerance + tolerance / 2 * np.abs(out),
        *(np.full_like(x, tolerance) for x in lse),
    ]
    return _Case(call, operands, [out, *lse], tolerated)


_reference = jax.jit(reference.attention, static_argnames="return_lse")


@jax.jit
def _reference_gradient(mask, q, k, v, d_out):
    return jax.vjp(functools.partial(reference.attention, mask=mask), q, k, v)[1](d_out)
