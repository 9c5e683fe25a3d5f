"""Operands of the two ops drawn for a shape, and the check of their results against the reference
formula."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.pallas_kernels import reference
from tests.pallas_kernels.interpreted import device_of
from tests.pallas_kernels.shapes import Chunks, Context, Decode, Prefill

TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2}
UNSEEN_KEY, UNSEEN_VALUE = jnp.nan, 1e3
"""Keys and values beyond the valid positions: read by mistake, they change the result. A cache may
hold keys of NaN, but no such values."""
ALIGNMENT = 3.0
"""Length of what is added to a key, along a query, so that it weighs much."""


def inputs(shape: Prefill | Chunks | Context | Decode, dtype: str, keys: int | None = None):
    """Random q[B, T, N, H] and k, v[B, K, S, H]; queries are large, so that scores rounded to
    bfloat16 would show."""
    rng = np.random.default_rng(0)
    cache = (shape.batch, shape.kv_heads, keys or shape.keys, shape.head_dim)
    q, k, v = (
        rng.normal(size=size)
        for size in ((shape.batch, shape.queries, shape.heads, shape.head_dim), cache, cache)
    )
    return [jnp.asarray(x, dtype) for x in (4 * q, k, v)]


def prefill_mask(shape: Prefill | Chunks | Context, window: int | None = None) -> np.ndarray:
    """bool[B, T, S], one entry at a time."""
    mask = np.zeros((shape.batch, shape.queries, shape.keys), bool)
    offsets = np.broadcast_to(shape.offset, shape.batch)
    for row in range(shape.batch):
        for query in range(shape.queries if shape.lengths is None else shape.lengths[row]):
            end = offsets[row] + query + 1
            mask[row, query, _first(end, window) : end] = True
        if isinstance(shape, Context):
            mask[row, :, shape.kv_lengths[row] :] = False
    return mask


def decode_mask(shape: Decode, window: int | None = None) -> np.ndarray:
    """bool[B, T, S], one entry at a time."""
    mask = np.zeros((shape.batch, shape.queries, shape.keys), bool)
    for row, length in enumerate(shape.lengths):
        for query in range(shape.queries):
            end = max(0, length - shape.queries + query + 1)
            mask[row, query, _first(end, window) : end] = True
    return mask


def _first(end: int, window: int | None) -> int:
    """The first position that a query sees that sees those up to `end`."""
    return 0 if window is None else max(0, end - window)


def segments(shape: Prefill, documents) -> np.ndarray:
    """i32[B, T]: 1, 2, ... for the documents of each row in order, 0 for padding."""
    ids = np.zeros((shape.batch, shape.queries), np.int32)
    for row, lengths in enumerate(documents):
        ends = np.cumsum(lengths)
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), start=1):
            ids[row, start:end] = number
    return ids


def hide(k, v, mask):
    """k and v[B, K, S, H] with the positions that no query may see filled with `UNSEEN_KEY` and
    `UNSEEN_VALUE`."""
    seen = jnp.asarray(mask.any(axis=1))[:, None, :, None]
    return [
        jnp.where(seen, x, jnp.asarray(unseen, x.dtype))
        for x, unseen in ((k, UNSEEN_KEY), (v, UNSEEN_VALUE))
    ]


def run(implementation, op, *operands, **options):
    """`op` compiled and run where `implementation` runs, after a look that it is the one that
    runs."""
    with device_of(implementation):
        traced = jax.jit(op).trace(*operands, **options)
        assert set(re.findall(r"name=(hopper|tpu)_\w+", str(traced.jaxpr))) == {implementation} - {
            "xla"
        }
        return jax.block_until_ready(traced.lower().compile()(*operands, **options))


# One program: one operation at a time, each is compiled for each shape.
expected_attention = jax.jit(reference.attention, static_argnames=("score_cap", "return_lse"))


def check(actual, q, k, v, mask):
    """`actual` is the reference under `mask`[B, T, S]."""
    expected = expected_attention(q, k, v, jnp.asarray(mask))
    assert actual.dtype == q.dtype
    assert actual.shape == q.shape
    tolerance = TOLERANCE[q.dtype.name]
    np.testing.assert_allclose(np.float32(actual), expected, atol=tolerance, rtol=tolerance / 2)


def check_with_lse(actual, q, k, v, mask, score_cap: float | None = None):
    """Output and log-sum-exps are those of the reference under `mask`[B, T, S]."""
    out, lse = actual
    expected, log_sums = expected_attention(
        q, k, v, jnp.asarray(mask), score_cap=score_cap, return_lse=True
    )
    assert (out.dtype, lse.dtype) == (q.dtype, jnp.float32)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    tolerance = TOLERANCE[q.dtype.name]
    np.testing.assert_allclose(np.float32(out), expected, atol=tolerance, rtol=tolerance / 2)
    # Scores are summed in float32 whatever the dtype. Equal infinities are close.
    np.testing.assert_allclose(lse, log_sums, atol=tolerance / 10, rtol=1e-4)


def as_format(x, dtype: str):
    """(x stored as `dtype`, its scales or None, the values it then stands for): one scale per
    position and head."""
    if dtype in ("float32", "bfloat16"):
        return x.astype(dtype), None, x.astype(dtype)
    largest = 448 if dtype == "float8_e4m3fn" else 127
    scale = jnp.abs(x.astype(jnp.float32)).max(axis=-1) / largest
    stored = x.astype(jnp.float32) / scale[..., None]
    stored = (jnp.round(stored) if dtype == "int8" else stored).astype(dtype)
    return stored, scale, stored.astype(jnp.float32) * scale[..., None]


def with_aligned_keys(q, k, shape: Decode, window: int | None = None):
    """k[B, K, S, H] with some keys moved along the queries of their head, so that each weighs much:
    the last that a query sees and the next one, and the first of every 64; with a window also, and
    most, the first of it and the one before. A mask that is wrong by one position, and a page or
    tile that is passed over, then change the result."""
    along = directions(q, shape.kv_heads)
    aligned = np.array(k, np.float32)
    for row, length in enumerate(shape.lengths):
        aligned[row, :, :length:64] += along[row].sum(axis=0)[:, None]
        for query in range(shape.queries):
            last = length - shape.queries + query
            aligned[row, :, max(last, 0) : max(last + 2, 0)] += along[row, query][:, None]
    if window is None:
        return jnp.asarray(aligned, k.dtype)
    for (row, length), query in itertools.product(enumerate(shape.lengths), range(shape.queries)):
        first = length - shape.queries + query - window + 1
        edges = slice(max(first - 1, 0), max(first + 1, 0))
        aligned[row, :, edges] = 1.5 * along[row, query][:, None]
    return jnp.asarray(aligned, k.dtype)


def with_aligned_windows(q, k, shape: Prefill | Chunks | Context, window: int):
    """k[B, K, S, H] with the first key of each query's window, and the one before, moved along the
    query, so that both weigh much."""
    along, aligned = directions(q, shape.kv_heads), np.array(k, np.float32)
    owners = shape.tables if isinstance(shape, Chunks) else range(shape.batch)
    offsets = np.broadcast_to(shape.offset, shape.batch)
    for (row, owner), query in itertools.product(enumerate(owners), range(shape.queries)):
        first = offsets[row] + query - window + 1
        for position in {first - 1, first} & set(range(shape.keys)):
            aligned[owner, :, position] += along[row, query]
    return jnp.asarray(aligned, k.dtype)


def directions(q, kv_heads: int) -> np.ndarray:
    """f32[B, T, K, H]: what is added to a key so that all queries of its head see it."""
    heads = np.float32(q).reshape(*q.shape[:2], kv_heads, -1, q.shape[3])
    return ALIGNMENT * (heads / np.linalg.norm(heads, axis=-1, keepdims=True)).sum(axis=3)


def decode_inputs(
    shape: Decode,
    cache_format: str,
    dtype="bfloat16",
    window: int | None = None,
    spare=UNSEEN_VALUE,
):
    """(operands of the op, options of the op, q, the values of k and v row by row and the mask).
    With a window every other page that no query sees is one of `spare`s, or of none of the pool in
    the table."""
    q, k, v = inputs(shape, dtype)
    k = with_aligned_keys(q, k, shape, window)
    mask = decode_mask(shape, window)
    (k, k_scale, k_values), (v, v_scale, v_values) = (
        as_format(x, cache_format) for x in hide(k, v, mask)
    )
    options = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
    if shape.page is not None:
        table = shuffled_table(shape.batch, shape.keys // shape.page)
        k, v, options = (
            pool(k, table),
            pool(v, table),
            {name: pool(scale, table) for name, scale in options.items()},
        )
        if window is not None:
            k, v, options, table = without_pages(
                k, v, options, table, ~pages_of(mask, table), spare
            )
        options["page_table"] = jnp.asarray(table, jnp.int32)
    return (q, k, v, jnp.asarray(shape.lengths)), options, (q, k_values, v_values, mask)


def shuffled_table(rows: int, pages: int) -> np.ndarray:
    """i32[rows, pages]: each entry another page of a pool that has twice as many."""
    order = np.random.default_rng(3).permutation(2 * rows * pages)
    return order[: rows * pages].reshape(rows, pages)


def pool(x, table):
    """x[B, K, S, ...] as a pool X K page ..., each page of each row where the table says."""
    split = jnp.moveaxis(x.reshape(*x.shape[:2], table.shape[1], -1, *x.shape[3:]), 2, 1)
    unseen = UNSEEN_VALUE if x.dtype.itemsize > 1 else 120  # 8 bits hold no more
    return jnp.full((2 * table.size, *split.shape[2:]), unseen, x.dtype).at[table].set(split)


def pages_of(mask, table) -> np.ndarray:
    """bool[rows, pages]: whether some query sees a position of the page."""
    return mask.any(axis=1).reshape(*table.shape, -1).any(axis=2)


def without_pages(k, v, scales, table, unseen, spare):
    """(k, v, scales, table) with the entries in `unseen` by turns of no page of the pool, and of
    one that is filled with `spare`: in 8 bits its scales are."""
    page = np.setdiff1d(np.arange(len(k) - 1), table)[0]  # the last is what numbers are clipped to
    if scales:
        scales = {name: x.at[page].set(spare) for name, x in scales.items()}
    else:
        k, v = (x.at[page].set(spare) for x in (k, v))
    by_turns = np.where(np.arange(table.shape[1]) % 2, 10**9, page)
    return k, v, scales, np.where(unseen, by_turns, table)


def chunk_inputs(
    shape: Chunks,
    cache_format: str,
    dtype="bfloat16",
    window: int | None = None,
    spare=UNSEEN_VALUE,
):
    """(operands of the op, options of the op, q, the values of k and v row by row and the
    mask): `CHUNKS` in a pool. With a window, pages before it are those of `decode_inputs`."""
    q, k, v = inputs(shape, dtype)
    k = k if window is None else with_aligned_windows(q, k, shape, window)
    rows, mask = np.asarray(shape.tables), prefill_mask(shape, window)
    seen = np.stack(
        [mask[rows == row].any(axis=(0, 1), keepdims=True)[0] for row in rows]
    )  # B 1 S: by any row of the table
    (k, k_scale, k_values), (v, v_scale, v_values) = (
        as_format(x, cache_format) for x in hide(k[rows], v[rows], seen)
    )
    options = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
    table = shuffled_table(shape.batch, shape.keys // shape.page)[rows]
    k, v, options = (
        pool(k, table),
        pool(v, table),
        {name: pool(scale, table) for name, scale in options.items()},
    )
    ends = np.where(shape.lengths, np.add(shape.offset, shape.lengths), 0)
    unused = np.arange(table.shape[1]) * shape.page >= ends[:, None]
    if window is not None:
        before = ~pages_of(mask, table) & ~unused
        k, v, options, table = without_pages(k, v, options, table, before, spare)
    table = jnp.asarray(np.where(unused, 10**9, table), jnp.int32)
    options |= {
        "q_offset": jnp.asarray(shape.offset),
        "lengths": jnp.asarray(shape.lengths),
        "page_table": table,
    }
    return (q, k, v), options, (q, k_values, v_values, mask)


def context_inputs(
    shape: Context,
    cache_format: str,
    dtype="bfloat16",
    window: int | None = None,
    spare=UNSEEN_VALUE,
):
    """(operands of the op, options of the op, q, the values of k and v row by row and the mask).
    The last visible key of a row weighs much for a query. Pages that no query sees are filled, and
    their entries changed, as in `decode_inputs`."""
    q, k, v = inputs(shape, dtype)
    k = k if window is None else with_aligned_windows(q, k, shape, window)
    along, aligned = directions(q, shape.kv_heads), np.array(k, np.float32)
    mask = prefill_mask(shape, window)
    for row, length in enumerate(shape.kv_lengths):
        last = max(length - 1, 0)
        aligned[row, :, last] = along[row, mask[row, :, last].argmax()]
    (k, k_scale, k_values), (v, v_scale, v_values) = (
        as_format(x, cache_format) for x in hide(jnp.asarray(aligned, k.dtype), v, mask)
    )
    options: dict[str, Any] = {"q_offset": jnp.asarray(shape.offset)}
    options["kv_lengths"] = jnp.asarray(shape.kv_lengths)
    if shape.lengths is not None:
        options["lengths"] = jnp.asarray(shape.lengths)
    scales: dict[str, Any] = {}
    if k_scale is not None:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    if shape.page is not None:
        table = shuffled_table(shape.batch, shape.keys // shape.page)
        k, v = pool(k, table), pool(v, table)
        scales = {name: pool(scale, table) for name, scale in scales.items()}
        unseen = ~pages_of(mask, table)
        k, v, scales, table = without_pages(k, v, scales, table, unseen, spare)
        options["page_table"] = jnp.asarray(table, jnp.int32)
    return (q, k, v), options | scales, (q, k_values, v_values, mask)
