"""Both attention ops, every implementation, against the reference formula over one table of
shapes."""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention, reference, tpu
from tests.pallas_kernels.operands import (
    TOLERANCE,
    as_format,
    check,
    chunk_inputs,
    decode_inputs,
    decode_mask,
    hide,
    inputs,
    prefill_mask,
    run,
    segments,
)
from tests.pallas_kernels.shapes import CHUNKS, DECODE, PREFILL, SEGMENTS, Decode, Prefill

RUNS = [("xla", "float32"), ("xla", "bfloat16"), ("hopper", "bfloat16"), ("tpu", "bfloat16")]
# Absolute, and half of it relative: bfloat16 keeps 8 bits.
GRADIENT_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of the largest entry of the gradient
parametrize, LONG = pytest.mark.parametrize, pytest.mark.long

# The most telling shapes are interpreted in every run of the tests; the others are `long` (make
# test-kernels). XLA, and kernels on their own hardware, run all of them. Rows at different offsets
# are ragged ones too for Hopper, whose interpreter is slow.
SHORT = {
    *("8B", "rows at different offsets", "ragged rows at different offsets"),
    *("documents across blocks", "of two prompts, an idle row first", "pages of 256"),
    *("wide", "idle rows", "page table, several tokens", "one long row, many short", None),
}


def cases(runs, names, short: Collection[str | None] | None = None) -> list:
    """(implementation, format, name) of each combination, those not in `short` marked `long`; by
    default `SHORT`, and all shapes of XLA."""
    every = [(implementation, form, name) for implementation, form in runs for name in names]
    if short is None:
        chosen = {"xla": set(names), "hopper": SHORT - {"rows at different offsets"}, "tpu": SHORT}
        return [case for run in runs for case in cases([run], names, chosen[run[0]])]
    return [pytest.param(*case, marks=LONG if case[2] not in short else []) for case in every]


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
        out = run(implementation, op, q, k, v)
    else:

        def chunk(q, k, v, offset):
            return op(q, k, v, q_offset=offset)

        out = run(implementation, chunk, q, k, v, jnp.asarray(shape.offset))
    check(out, q, k, v, mask)


@parametrize(("implementation", "dtype", "name"), cases(RUNS, SEGMENTS))
def test_segments(implementation, dtype, name):
    shape, documents = SEGMENTS[name]
    q, k, v = inputs(shape, dtype)
    ids = segments(shape, documents)
    mask = prefill_mask(shape) & (ids[:, :, None] == ids[:, None, :])

    def op(q, k, v, ids):
        return prefill_attention(q, k, v, segment_ids=ids, implementation=implementation)

    check(run(implementation, op, q, k, v, jnp.asarray(ids)), q, k, v, mask)


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
    q, k, v = inputs(Prefill(2, 6, 2, 1, 6, 64), dtype)
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
    cases(
        RUNS,
        [None, "documents across blocks", "odd head dim", "wide"],
        short={"documents across blocks"},
    ),
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

    expected = jax.jit(jax.grad(reference_loss, argnums=(0, 1, 2)))(
        *(x.astype(jnp.float32) for x in (q, k, v))
    )
    for got, wanted in zip(
        run(implementation, jax.grad(loss, argnums=(0, 1, 2)), q, k, v), expected, strict=True
    ):
        assert got.dtype == q.dtype
        np.testing.assert_allclose(
            np.float32(got), wanted, atol=GRADIENT_TOLERANCE[dtype] * float(jnp.abs(wanted).max())
        )


PAGED = cases([("xla", "float32")], CHUNKS)
PAGED += cases(
    [("xla", "bfloat16"), ("xla", "float8_e4m3fn"), ("xla", "int8")],
    ["of one prompt", "pages of 7"],
    short={"pages of 7"},
)
PAGED += cases(
    [("hopper", "bfloat16")],
    [name for name, shape in CHUNKS.items() if shape.page % 64 == 0],
    short={"of two prompts, an idle row first"},
)
PAGED += cases(
    [("tpu", "bfloat16")],
    [name for name, shape in CHUNKS.items() if shape.page % 128 == 0],
    short={"pages of 256"},
)
PAGED += cases([("hopper", "int8"), ("tpu", "float8_e4m3fn")], ["pages of 256"], short=())


@parametrize(("implementation", "cache_format", "name"), PAGED)
def test_prefill_of_chunks_in_a_pool(implementation, cache_format, name):
    operands, options, (q, k, v, mask) = chunk_inputs(
        CHUNKS[name], cache_format, "float32" if cache_format == "float32" else "bfloat16"
    )
    if implementation != "xla":  # these kernels get a widened copy
        k, v = k.astype(q.dtype), v.astype(q.dtype)
    op = functools.partial(prefill_attention, implementation=implementation)
    check(run(implementation, op, *operands, **options), q, k, v, mask)


# In every implementation the two 8-bit formats differ only in how they are widened.
FORMATS = {
    "bfloat16": list(DECODE),
    "float8_e4m3fn": [
        "8B",
        "long row, few slots",
        "4 queries a head",
        "8 queries a head",
        "wide",
        "idle rows",
        "page table",
    ],
    "int8": ["8B", "4 queries a head", "wide", "several tokens", "page table, several tokens"],
}
CACHES = cases([("xla", "float32")], DECODE)
for cache_format, names in FORMATS.items():
    short = None if cache_format == "bfloat16" else ("idle rows", "page table, several tokens")
    CACHES += cases([("hopper", cache_format), ("tpu", cache_format)], names, short)
    CACHES += cases([("xla", cache_format)], ["8B", "several tokens", "page table, several tokens"])


@parametrize(("implementation", "cache_format", "name"), CACHES)
def test_decode(implementation, cache_format, name):
    dtype = "float32" if cache_format == "float32" else "bfloat16"
    operands, options, expected = decode_inputs(DECODE[name], cache_format, dtype)
    op = functools.partial(decode_attention, implementation=implementation)
    check(run(implementation, op, *operands, **options), *expected)


# Blocks of a TPU: four pages, two, half of one. Rows have whole blocks and rests of one to three
# chunks.
BLOCKS = {
    "bfloat16": (2**17, Decode(4, 1, 8, 2, 1024, 64, (1000, 0, 860, 129), page=128)),
    "int8": (2**16, Decode(3, 2, 8, 2, 768, 128, (768, 1, 630), page=128)),
    "float8_e4m3fn": (2**15, Decode(2, 1, 8, 2, 1024, 128, (1000, 300), page=256)),
}


@parametrize("cache_format", ["bfloat16", "int8", pytest.param("float8_e4m3fn", marks=LONG)])
def test_decode_on_tpus_in_small_blocks(cache_format):
    block_bytes, shape = BLOCKS[cache_format]
    tuning = tpu.decode.Tuning(block_bytes=block_bytes, buffers=2, rows=2)
    operands, options, expected = decode_inputs(shape, cache_format)
    op = functools.partial(decode_attention, implementation="tpu", tuning=tuning)
    check(run("tpu", op, *operands, **options), *expected)


@parametrize("implementation", ["xla", "hopper", "tpu"])
def test_decode_where_float16_ends(implementation):
    """The value of FP8 keys does not depend on magnitudes that bfloat16 holds and float16 does
    not: queries beyond 65504, next to small ones; values far below and above 1, by turns too."""
    shape = Decode(3, 1, 4, 2, 150, 64, (150, 131, 97))
    q, k, v = (x.astype(jnp.float32) for x in inputs(shape, "bfloat16"))
    q = (q * jnp.asarray([1e6, 1e-3, 1e8, 1.0])[:, None]).astype("bfloat16")
    k = k * jnp.asarray([1e-6, 1e-8])[:, None, None]
    unit = jnp.asarray([1e-8, 1e8, 1e4])
    by_turns = jnp.where(jnp.arange(shape.keys) % 3 == 0, 1.0, 1e-8)
    v = (
        v
        * unit[:, None, None, None]
        * jnp.stack([by_turns**0, by_turns**0, by_turns])[:, None, :, None]
    )
    mask = decode_mask(shape)
    (k, k_scale, k_values), (v, v_scale, v_values) = (as_format(x, "float8_e4m3fn") for x in (k, v))
    op = functools.partial(decode_attention, implementation=implementation)
    out = run(
        implementation, op, q, k, v, jnp.asarray(shape.lengths), k_scale=k_scale, v_scale=v_scale
    )
    expected = reference.attention(q, k_values, v_values, jnp.asarray(mask))
    unit = unit[:, None, None, None]
    np.testing.assert_allclose(np.float32(out) / unit, expected / unit, atol=TOLERANCE["bfloat16"])


@parametrize(
    ("implementation", "cache_format"),
    [
        *(("xla", "int8"), ("hopper", "float8_e4m3fn"), ("tpu", "int8")),
        pytest.param("xla", "float8_e4m3fn", marks=LONG),
        pytest.param("hopper", "int8", marks=LONG),
        pytest.param("tpu", "float8_e4m3fn", marks=LONG),
    ],
)
def test_prefill_from_a_quantised_cache(implementation, cache_format):
    shape = Prefill(2, 20, 4, 2, 150, 64, 60)
    q, k, v = inputs(shape, "bfloat16")
    mask = prefill_mask(shape)
    (k, k_scale, k_values), (v, v_scale, v_values) = (
        as_format(x, cache_format) for x in hide(k, v, mask)
    )
    if implementation != "xla":  # these kernels get a widened copy
        k_values, v_values = k_values.astype(q.dtype), v_values.astype(q.dtype)
    op = functools.partial(
        prefill_attention,
        q_offset=60,
        k_scale=k_scale,
        v_scale=v_scale,
        implementation=implementation,
    )
    check(run(implementation, op, q, k, v), q, k_values, v_values, mask)


@parametrize(
    ("implementation", "dtype"),
    [("xla", "float32"), *(pytest.param(*run, marks=LONG) for run in RUNS[1:])],
)
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
