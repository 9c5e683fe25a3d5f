"""Windows in every implementation, against the reference formula: edges before, at and after those
of blocks, tiles and pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import (
    decode_attention,
    hopper,
    plan_decode,
    prefill_attention,
    reference,
    tpu,
)
from tests.pallas_kernels.interpreted import under
from tests.pallas_kernels.operands import (
    TOLERANCE,
    UNSEEN_VALUE,
    check,
    chunk_inputs,
    decode_inputs,
    decode_mask,
    hide,
    inputs,
    prefill_mask,
    run,
    segments,
    with_aligned_keys,
    with_aligned_windows,
)
from tests.pallas_kernels.shapes import CHUNKS, Chunks, Decode, Prefill
from tests.pallas_kernels.test_attention import GRADIENT_TOLERANCE

RUNS = [("xla", "float32"), ("hopper", "bfloat16"), ("tpu", "bfloat16")]
parametrize, LONG = pytest.mark.parametrize, pytest.mark.long


def cases(shapes, runs=RUNS) -> list:
    """(implementation, format, name, window) for the windows of each shape; `long` where kernels
    are interpreted, but for those that the last entry of a shape names."""
    return [
        pytest.param(*each, name, window, marks=[] if each[0] == "xla" or window in short else LONG)
        for each in runs
        for name, (*_, windows, short) in shapes.items()
        for window in windows
    ]


def spare(implementation: str) -> float:
    """What pages before all windows may hold: XLA multiplies it by zero."""
    return UNSEEN_VALUE if implementation == "xla" else jnp.nan


# Decoding: a tile of Hopper is 64 or 128 positions, a chunk of a TPU 128 ---------------------

ROWS = Decode(4, 1, 4, 2, 640, 64, (620, 0, 64, 261))
SEVERAL = Decode(2, 3, 4, 2, 640, 64, (640, 130))
DECODE = {
    "pages": (ROWS._replace(page=128), (1, 63, 64, 65, 127, 128, 129, 619, 620), {1, 65}),
    "several tokens": (SEVERAL._replace(page=128), (1, 62, 63, 128, 300), {63}),
    "pages of several tiles": (SEVERAL._replace(page=640), (3, 129), ()),
    "row by row": (ROWS, (1, 64, 65, 129, 256), {129}),
}
EIGHT_BITS = [("hopper", "float8_e4m3fn", "pages", 130), ("tpu", "int8", "pages", 130)] + [
    pytest.param(implementation, cache_format, name, window, marks=LONG)
    for implementation in ("hopper", "tpu")
    for cache_format in ("float8_e4m3fn", "int8")
    for name, window in [("pages", 1), ("several tokens", 128), ("row by row", 65)]
]


@parametrize(("implementation", "cache_format", "name", "window"), cases(DECODE) + EIGHT_BITS)
def test_decode(implementation, cache_format, name, window):
    dtype = "float32" if cache_format == "float32" else "bfloat16"
    operands, options, expected = decode_inputs(
        DECODE[name][0], cache_format, dtype, window, spare(implementation)
    )
    op = functools.partial(decode_attention, window=window, implementation=implementation)
    check(run(implementation, op, *operands, **options), *expected)


# Blocks of a TPU: four pages, half of one; four chunks of a cache without pages.
BLOCKS = {
    "four pages": (2**17, Decode(3, 1, 8, 2, 1024, 64, (1000, 860, 129), page=128)),
    "half a page": (2**15, Decode(2, 2, 8, 2, 1024, 64, (1000, 300), page=256)),
    "row by row": (2**17, Decode(2, 1, 8, 2, 1024, 64, (1000, 300))),
}


@parametrize(
    ("name", "window"),
    [
        ("four pages", 600),
        *(pytest.param(name, window, marks=LONG) for name in BLOCKS for window in (1, 129, 700)),
    ],
)
def test_decode_on_tpus_in_small_blocks(name, window):
    block_bytes, shape = BLOCKS[name]
    tuning = tpu.decode.Tuning(block_bytes=block_bytes, buffers=2, rows=2)
    operands, options, expected = decode_inputs(shape, "bfloat16", window=window, spare=jnp.nan)
    op = functools.partial(decode_attention, window=window, implementation="tpu", tuning=tuning)
    check(run("tpu", op, *operands, **options), *expected)


@parametrize("name", DECODE)
def test_a_wrong_edge_of_decode_shows(name):
    """In these operands one position more or less is another result."""
    shape, windows, _ = DECODE[name]
    for window in windows:
        q, k, v = inputs(shape, "bfloat16")
        k = with_aligned_keys(q, k, shape, window)
        right = reference.attention(q, k, v, jnp.asarray(decode_mask(shape, window)))
        for other in {max(window - 1, 1), window + 1} - {window}:
            wrong = reference.attention(q, k, v, jnp.asarray(decode_mask(shape, other)))
            hides_nothing = min(window, other) >= max(shape.lengths)
            assert hides_nothing or jnp.abs(wrong - right).max() > 5 * TOLERANCE["bfloat16"], other


def test_a_plan_is_for_one_window():
    q, k = jnp.zeros((2, 1, 8, 64), jnp.bfloat16), jnp.zeros((2, 2, 512, 64), jnp.bfloat16)
    length = jnp.asarray([512, 100])
    with under("H200"):
        plan = plan_decode(q, k, length, window=70)
        assert plan is not None and plan.window == 70
        ends = [[0, 442 // plan.tile, 512 // plan.tile], [1, 30 // plan.tile, -(-100 // plan.tile)]]
        np.testing.assert_array_equal(plan.entries[:2], ends)
        for window in (None, 71):
            with pytest.raises(ValueError, match=f"plan is for window=70, .* window={window}"):
                jax.eval_shape(
                    lambda plan, window=window: decode_attention(
                        q, k, k, length, plan=plan, window=window
                    ),
                    plan,
                )
        unhidden = plan_decode(q, k, length, window=512)
        assert unhidden is not None and unhidden.window is None


# Prefill ----------------------------------------------------------------------

TUNING = {
    "xla": {},
    "hopper": {"tuning": hopper.prefill.Tuning(block_kv=64)},
    "tpu": {"tuning": tpu.prefill.Tuning(block_rows=256, block_kv=256, block_kv_compute=128)},
}
PREFILL = {
    "whole rows": (Prefill(1, 300, 2, 1, 300, 64), (1, 63, 64, 65, 127, 128, 129, 299), {65}),
    "ragged rows": (Prefill(3, 140, 2, 1, 140, 64, 0, (140, 0, 77)), (1, 64, 100), ()),
    "rows at different offsets": (
        Prefill(3, 40, 2, 1, 420, 128, (0, 380, 100)),
        (1, 39, 128, 129, 300),
        {129},
    ),
}


@parametrize(("implementation", "dtype", "name", "window"), cases(PREFILL))
def test_prefill(implementation, dtype, name, window):
    shape, *_ = PREFILL[name]
    q, k, v = inputs(shape, dtype)
    mask = prefill_mask(shape, window)
    k, v = hide(with_aligned_windows(q, k, shape, window), v, mask)
    options = TUNING[implementation] | {"window": window, "implementation": implementation}
    if shape.lengths is not None:
        options["lengths"] = jnp.asarray(shape.lengths)
    op = functools.partial(prefill_attention, **options)
    if shape.offset == 0:
        out = run(implementation, op, q, k, v)
    else:
        offset = jnp.asarray(shape.offset)
        out = run(implementation, lambda q, k, v, o: op(q, k, v, q_offset=o), q, k, v, offset)
    check(out, q, k, v, mask)


@parametrize("name", PREFILL)
def test_a_wrong_edge_of_prefill_shows(name):
    shape, windows, _ = PREFILL[name]
    for window in windows:
        q, k, v = inputs(shape, "bfloat16")
        k = with_aligned_windows(q, k, shape, window)
        right = reference.attention(q, k, v, jnp.asarray(prefill_mask(shape, window)))
        for other in {max(window - 1, 1), window + 1} - {window}:
            wrong = reference.attention(q, k, v, jnp.asarray(prefill_mask(shape, other)))
            assert jnp.abs(wrong - right).max() > 5 * TOLERANCE["bfloat16"], (window, other)


DOCUMENTS = Prefill(1, 333, 2, 1, 333, 64)


@parametrize(
    ("implementation", "dtype", "name", "window"),
    cases({"documents across blocks": ((1, 64, 90), {90})}),
)
def test_segments(implementation, dtype, name, window):
    ids = segments(DOCUMENTS, ((100, 200),))
    q, k, v = inputs(DOCUMENTS, dtype)
    k = with_aligned_windows(q, k, DOCUMENTS, window)
    mask = prefill_mask(DOCUMENTS, window) & (ids[:, :, None] == ids[:, None, :])

    def op(q, k, v, ids):
        return prefill_attention(
            *(q, k, v),
            segment_ids=ids,
            window=window,
            implementation=implementation,
            **TUNING[implementation],
        )

    check(run(implementation, op, q, k, v, jnp.asarray(ids)), q, k, v, mask)


POOLS: dict[str, tuple[Chunks, tuple[int, ...], set[int]]] = {
    "of one prompt": (CHUNKS["of one prompt"], (1, 64, 128, 129, 200), {129}),
    "more pages than are loaded at once": (
        CHUNKS["more pages than are loaded at once"],
        (1, 200, 700),
        {200},
    ),
    "pages of 1536": (CHUNKS["pages of 1536"], (500,), set()),
}


@parametrize(("implementation", "dtype", "name", "window"), cases(POOLS))
def test_chunks_in_a_pool(implementation, dtype, name, window):
    """In the kernels' own blocks: several pages on TPUs, parts of one on Hopper."""
    operands, options, expected = chunk_inputs(
        POOLS[name][0], dtype, dtype, window, spare(implementation)
    )
    op = functools.partial(prefill_attention, window=window, implementation=implementation)
    check(run(implementation, op, *operands, **options), *expected)


# Gradients --------------------------------------------------------------------

GRADIENTS = {
    "whole rows": ((1, 33, 64, 65, 128, 140, 259), {65}),
    "documents": ((1, 64, 90), ()),
}
BACKWARD_TUNING = {
    "xla": {},
    "hopper": {"backward_tuning": hopper.backward.Tuning(dq_block_kv=64)},
    "tpu": {
        "backward_tuning": tpu.backward.Tuning(block_rows=256, block_kv=128, block_kv_compute=128)
    },
}


@parametrize(("implementation", "dtype", "name", "window"), cases(GRADIENTS))
def test_gradient(implementation, dtype, name, window):
    packed = name == "documents"
    shape = DOCUMENTS if packed else Prefill(1, 260, 2, 1, 260, 64)
    q, k, v = inputs(shape, dtype)
    k = with_aligned_windows(q, k, shape, window)
    q /= 4
    mask, ids = prefill_mask(shape, window), None
    if packed:
        ids = jnp.asarray(segments(shape, ((100, 200),)))
        mask = mask & np.asarray(ids[:, :, None] == ids[:, None, :])
    weights = jnp.asarray(np.random.default_rng(2).normal(size=q.shape), dtype)

    def loss(q, k, v):
        out = prefill_attention(
            *(q, k, v),
            segment_ids=ids,
            window=window,
            implementation=implementation,
            **TUNING[implementation],
            **BACKWARD_TUNING[implementation],
        )
        return (out.astype(jnp.float32) * weights).sum()

    def reference_loss(q, k, v):
        return (reference.attention(q, k, v, jnp.asarray(mask)) * weights.astype(jnp.float32)).sum()

    expected = jax.jit(jax.grad(reference_loss, argnums=(0, 1, 2)))(
        *(x.astype(jnp.float32) for x in (q, k, v))
    )
    found = run(implementation, jax.grad(loss, argnums=(0, 1, 2)), q, k, v)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == q.dtype
        tolerance = GRADIENT_TOLERANCE[dtype] * float(jnp.abs(wanted).max())
        np.testing.assert_allclose(np.float32(got), wanted, atol=max(tolerance, 1e-5))
