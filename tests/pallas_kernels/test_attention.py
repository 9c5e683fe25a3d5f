"""Both attention ops, every implementation, against the reference formula over one table of
shapes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention, reference
from tests.pallas_kernels.interpreted import device_of, on_hardware
from tests.pallas_kernels.shapes import DECODE, PIECES, PREFILL, SEGMENTS, Decode, Pieces, Prefill

RUNS = [("xla", "float32"), ("xla", "bfloat16"), ("hopper", "bfloat16"), ("tpu", "bfloat16")]
TOLERANCE = {
    "float32": 2e-5,
    "bfloat16": 1.5e-2,
}  # absolute, and half of it relative: bfloat16 keeps 8 bits
GRADIENT_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of the largest entry of the gradient
UNSEEN_KEY, UNSEEN_VALUE = jnp.nan, 1e3
"""What keys and values hold beyond the valid positions: seen by mistake, it shows. A cache may hold
keys of NaN, but no such values."""

parametrize = pytest.mark.parametrize

# What is interpreted in every run of the tests, the most telling shapes; the others are `long`
# (make test-kernels). XLA, and kernels on their own hardware, go through all of them.
SHORT = {
    *(
        "8B",
        "4 queries a head, odd",
        "chunk up to the end of the cache",
        "rows at different offsets",
        "ragged rows at different offsets",
    ),
    *(
        "short documents",
        "documents across blocks",
        "of two prompts, an idle row first",
        "pages of 256",
    ),
    *("8 queries a head", "wide", "idle rows", "block table, several tokens", "odd head dim", None),
}


def cases(runs, names) -> list:
    """(implementation, format, name) of each combination, those marked that are `long`."""
    long = [pytest.mark.long]
    every = [(implementation, form, name) for implementation, form in runs for name in names]
    return [
        pytest.param(*case, marks=long if case[0] != "xla" and case[2] not in SHORT else [])
        for case in every
    ]


def inputs(shape: Prefill | Pieces | Decode, dtype: str, keys: int | None = None):
    """Random q[B, T, N, H] and k, v[B, K, S, H]; queries are large, so that scores rounded to
    bfloat16 would show."""
    rng = np.random.default_rng(0)
    cache = (shape.batch, shape.kv_heads, keys or shape.keys, shape.head_dim)
    q, k, v = (
        rng.normal(size=size)
        for size in ((shape.batch, shape.queries, shape.heads, shape.head_dim), cache, cache)
    )
    return [jnp.asarray(x, dtype) for x in (4 * q, k, v)]


def prefill_mask(shape: Prefill | Pieces) -> np.ndarray:
    """bool[B, T, S], one entry at a time."""
    mask = np.zeros((shape.batch, shape.queries, shape.keys), bool)
    offsets = np.broadcast_to(shape.offset, shape.batch)
    for row in range(shape.batch):
        for query in range(shape.queries if shape.lengths is None else shape.lengths[row]):
            mask[row, query, : offsets[row] + query + 1] = True
    return mask


def decode_mask(shape: Decode) -> np.ndarray:
    """bool[B, T, S], one entry at a time."""
    mask = np.zeros((shape.batch, shape.queries, shape.keys), bool)
    for row, length in enumerate(shape.lengths):
        for query in range(shape.queries):
            mask[row, query, : max(0, length - shape.queries + query + 1)] = True
    return mask


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


def check(actual, q, k, v, mask):
    """`actual` is the reference under `mask`[B, T, S]."""
    expected = reference.attention(q, k, v, jnp.asarray(mask))
    assert actual.dtype == q.dtype
    assert actual.shape == q.shape
    tolerance = TOLERANCE[q.dtype.name]
    np.testing.assert_allclose(np.float32(actual), expected, atol=tolerance, rtol=tolerance / 2)


def test_reference():
    """The formula itself, one query, head and key at a time; a query that sees nothing yields
    zeros."""
    q, k, v = inputs(Prefill(2, 3, 4, 2, 5, 6), "float32")
    mask = np.random.default_rng(1).random((2, 3, 5)) < 0.6
    mask[0, 1] = False
    expected = np.zeros(q.shape)
    for b, t, n in np.ndindex(2, 3, 4):
        seen = [s for s in range(5) if mask[b, t, s]]
        weights = np.array(
            [np.exp(float(np.dot(q[b, t, n], k[b, n // 2, s])) / np.sqrt(6)) for s in seen]
        )
        for weight, s in zip(weights, seen, strict=True):
            expected[b, t, n] += weight / weights.sum() * np.float64(v[b, n // 2, s])
    assert (expected[0, 1] == 0).all()
    np.testing.assert_allclose(reference.attention(q, k, v, jnp.asarray(mask)), expected, atol=1e-6)


@parametrize(("implementation", "dtype", "name"), cases(RUNS, PREFILL))
def test_prefill(implementation, dtype, name):
    shape = PREFILL[name]
    q, k, v = inputs(shape, dtype)
    mask = prefill_mask(shape)
    k, v = hide(k, v, mask)
    lengths = None if shape.lengths is None else jnp.asarray(shape.lengths)
    op = functools.partial(prefill_attention, lengths=lengths, implementation=implementation)
    if shape.offset == 0:  # known to be 0: nothing lies before the rows
        check(run(implementation, op, q, k, v), q, k, v, mask)
    else:
        offset = jnp.asarray(shape.offset)
        check(
            run(
                implementation,
                lambda q, k, v, offset: op(q, k, v, q_offset=offset),
                q,
                k,
                v,
                offset,
            ),
            q,
            k,
            v,
            mask,
        )


@parametrize(("implementation", "dtype", "name"), cases(RUNS, SEGMENTS))
def test_segments(implementation, dtype, name):
    shape, documents = SEGMENTS[name]
    q, k, v = inputs(shape, dtype)
    ids = segments(shape, documents)
    mask = prefill_mask(shape) & (ids[:, :, None] == ids[:, None, :])
    op = functools.partial(prefill_attention, implementation=implementation)
    check(
        run(
            implementation,
            lambda q, k, v, ids: op(q, k, v, segment_ids=ids),
            q,
            k,
            v,
            jnp.asarray(ids),
        ),
        q,
        k,
        v,
        mask,
    )


# Six positions: documents of three and two tokens, one of padding. Rows are queries, columns keys.
PACKED = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
    [0, 0, 0, 1, 1, 0],
    [0, 0, 0, 0, 0, 1],
]


@parametrize(("implementation", "dtype"), RUNS)
def test_packed_picture(implementation, dtype):
    """The second row's ids fall and return: any ids will do."""
    q, k, v = inputs(Prefill(2, 6, 8, 2, 6, 64), dtype)
    again = np.tri(6, dtype=bool) & (
        np.array([4, 9, 4, 4, 9, 1])[:, None] == np.array([4, 9, 4, 4, 9, 1])
    )
    mask = np.stack([np.array(PACKED, bool), again])
    segment_ids = jnp.asarray([[1, 1, 1, 2, 2, 0], [4, 9, 4, 4, 9, 1]])
    op = functools.partial(
        prefill_attention, segment_ids=segment_ids, implementation=implementation
    )
    check(run(implementation, op, q, k, v), q, k, v, mask)


@parametrize(
    ("implementation", "dtype", "name"),
    cases(RUNS, [None, "documents across blocks", "odd head dim", "wide"]),
)
def test_gradient(implementation, dtype, name):
    shape, documents = SEGMENTS[name] if name else (Prefill(1, 200, 4, 1, 200, 128), None)
    q, k, v = inputs(shape, dtype)
    q /= 4
    mask, ids = prefill_mask(shape), None
    if documents is not None:
        ids = jnp.asarray(segments(shape, documents))
        mask = mask & np.asarray(ids[:, :, None] == ids[:, None, :])
    weights = jnp.asarray(np.random.default_rng(2).normal(size=q.shape), dtype)

    def loss(q, k, v):
        out = prefill_attention(q, k, v, segment_ids=ids, implementation=implementation)
        return (out.astype(jnp.float32) * weights).sum()

    def reference_loss(q, k, v):
        return (reference.attention(q, k, v, jnp.asarray(mask)) * weights.astype(jnp.float32)).sum()

    expected = jax.grad(reference_loss, argnums=(0, 1, 2))(
        *(x.astype(jnp.float32) for x in (q, k, v))
    )
    for got, wanted in zip(
        run(implementation, jax.grad(loss, argnums=(0, 1, 2)), q, k, v), expected, strict=True
    ):
        assert got.dtype == q.dtype
        np.testing.assert_allclose(
            np.float32(got), wanted, atol=GRADIENT_TOLERANCE[dtype] * float(jnp.abs(wanted).max())
        )


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


def decode_inputs(shape: Decode, cache_format: str, dtype="bfloat16"):
    """(operands of the op, options of the op, what k and v stand for row by row)."""
    q, k, v = inputs(shape, dtype)
    mask = decode_mask(shape)
    (k, k_scale, k_values), (v, v_scale, v_values) = (
        as_format(x, cache_format) for x in hide(k, v, mask)
    )
    options = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
    if shape.page is not None:
        blocks = shape.keys // shape.page
        table = shuffled_table(shape.batch, blocks)
        k, v, options = (
            pool(k, table),
            pool(v, table),
            {name: pool(scale, table) for name, scale in options.items()},
        )
        options["page_table"] = jnp.asarray(table, jnp.int32)
    return (q, k, v, jnp.asarray(shape.lengths)), options, (q, k_values, v_values, mask)


def shuffled_table(rows: int, blocks: int) -> np.ndarray:
    """i32[rows, blocks]: each entry another block of a pool that has twice as many."""
    return (
        np.random.default_rng(3)
        .permutation(2 * rows * blocks)[: rows * blocks]
        .reshape(rows, blocks)
    )


def pool(x, table):
    """x[B, K, S, ...] as a pool X K page ..., each block of each row at its place in the table."""
    split = jnp.moveaxis(x.reshape(*x.shape[:2], table.shape[1], -1, *x.shape[3:]), 2, 1)
    unseen = UNSEEN_VALUE if x.dtype.itemsize > 1 else 120  # 8 bits hold no more
    return jnp.full((2 * table.size, *split.shape[2:]), unseen, x.dtype).at[table].set(split)


def piece_inputs(shape: Pieces, cache_format: str, dtype="bfloat16"):
    """(operands of the op, options of the op, what k and v stand for row by row): `PIECES` in a
    pool."""
    q, k, v = inputs(shape, dtype)
    rows, mask = np.asarray(shape.tables), prefill_mask(shape)
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
    table = jnp.asarray(np.where(unused, 10**9, table), jnp.int32)
    options |= {
        "q_offset": jnp.asarray(shape.offset),
        "lengths": jnp.asarray(shape.lengths),
        "page_table": table,
    }
    return (q, k, v), options, (q, k_values, v_values, mask)


PAGED = cases([("xla", "float32")], PIECES)
PAGED += cases(
    [("xla", "bfloat16"), ("xla", "float8_e4m3fn"), ("xla", "int8")],
    ["of one prompt", "pages of 7"],
)
PAGED += cases(
    [("hopper", "bfloat16")], [name for name, shape in PIECES.items() if shape.page % 64 == 0]
)
PAGED += cases(
    [("tpu", "bfloat16")], [name for name, shape in PIECES.items() if shape.page % 128 == 0]
)
PAGED += cases([("hopper", "int8"), ("tpu", "float8_e4m3fn")], ["pages of 256"])


@parametrize(("implementation", "cache_format", "name"), PAGED)
def test_prefill_of_pieces(implementation, cache_format, name):
    operands, options, (q, k, v, mask) = piece_inputs(
        PIECES[name], cache_format, "float32" if cache_format == "float32" else "bfloat16"
    )
    if implementation != "xla":  # they are handed a widened copy
        k, v = k.astype(q.dtype), v.astype(q.dtype)
    op = functools.partial(prefill_attention, implementation=implementation)
    check(run(implementation, op, *operands, **options), q, k, v, mask)


# The two 8-bit formats take the same way through every implementation, but for how they are
# widened.
FORMATS = {
    "bfloat16": list(DECODE),
    "float8_e4m3fn": [
        "8B",
        "long row, few slots",
        "4 queries a head",
        "8 queries a head",
        "wide",
        "idle rows",
        "block table",
    ],
    "int8": ["8B", "4 queries a head", "wide", "several tokens", "block table, several tokens"],
}
CACHES = cases([("xla", "float32")], DECODE)
for cache_format, names in FORMATS.items():
    CACHES += cases([("hopper", cache_format), ("tpu", cache_format)], names)
    CACHES += cases(
        [("xla", cache_format)], ["8B", "several tokens", "block table, several tokens"]
    )


@parametrize(("implementation", "cache_format", "name"), CACHES)
def test_decode(implementation, cache_format, name):
    dtype = "float32" if cache_format == "float32" else "bfloat16"
    operands, options, expected = decode_inputs(DECODE[name], cache_format, dtype)
    op = functools.partial(decode_attention, implementation=implementation)
    check(run(implementation, op, *operands, **options), *expected)


@parametrize("cache_format", ["float8_e4m3fn", "int8"])
@parametrize("implementation", ["xla", "hopper", "tpu"])
def test_prefill_from_a_quantised_cache(implementation, cache_format):
    shape = Prefill(2, 20, 4, 2, 150, 64, 60)
    q, k, v = inputs(shape, "bfloat16")
    mask = prefill_mask(shape)
    (k, k_scale, k_values), (v, v_scale, v_values) = (
        as_format(x, cache_format) for x in hide(k, v, mask)
    )
    if implementation != "xla":  # they are handed a widened copy
        k_values, v_values = k_values.astype(q.dtype), v_values.astype(q.dtype)
    op = functools.partial(
        prefill_attention,
        q_offset=60,
        k_scale=k_scale,
        v_scale=v_scale,
        implementation=implementation,
    )
    check(run(implementation, op, q, k, v), q, k_values, v_values, mask)


@parametrize(("implementation", "dtype"), RUNS)
def test_decode_is_the_last_row_of_prefill(implementation, dtype):
    q, k, v = inputs(Prefill(2, 9, 8, 2, 9, 64), dtype)
    whole = run(
        implementation, functools.partial(prefill_attention, implementation=implementation), q, k, v
    )
    op = functools.partial(decode_attention, implementation=implementation)
    last = run(implementation, op, q[:, -2:], k, v, jnp.asarray([9, 9]))
    np.testing.assert_allclose(np.float32(last), np.float32(whole[:, -2:]), atol=TOLERANCE[dtype])


@parametrize(("implementation", "dtype"), RUNS)
def test_the_same_twice(implementation, dtype):
    """No result depends on the order in which blocks or threads finish."""
    q, k, v = inputs(PREFILL["rows at different offsets"], dtype)
    op = functools.partial(decode_attention, implementation=implementation)
    first, second = (
        run(implementation, op, q[:, :1], k, v, jnp.asarray([7, 300, 131])) for _ in range(2)
    )
    np.testing.assert_array_equal(np.float32(first), np.float32(second))


@pytest.mark.hardware
@pytest.mark.skipif(not on_hardware("cudnn"), reason="needs an NVIDIA GPU: make test-gpu")
@parametrize("name", ["8B", "square, several blocks", "ragged rows"])
def test_cudnn(name):
    shape = PREFILL[name]
    q, k, v = inputs(shape, "bfloat16")
    lengths = None if shape.lengths is None else jnp.asarray(shape.lengths)
    check(
        prefill_attention(q, k, v, lengths=lengths, implementation="cudnn"),
        q,
        k,
        v,
        prefill_mask(shape),
    )
