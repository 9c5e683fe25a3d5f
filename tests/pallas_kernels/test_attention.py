"""Both attention ops, every implementation, against the reference formula over one table of shapes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention, reference

IMPLEMENTATIONS = ["xla"]
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2}  # on outputs up to three; bfloat16 keeps 8 bits
UNSEEN = 1e3
"""What keys and values hold beyond the valid positions: seen by mistake, it shows."""


class Shape(NamedTuple):
    batch: int
    queries: int  # T
    heads: int  # N
    kv_heads: int  # K
    keys: int  # S
    head_dim: int  # H
    offset: int = 0  # prefill: where the first query stands


PREFILL = {
    "square": Shape(2, 16, 4, 4, 16, 64),
    "one token": Shape(1, 1, 4, 4, 1, 64),
    "one key/value head": Shape(2, 7, 8, 1, 7, 64),
    "4 queries a head": Shape(1, 33, 8, 2, 33, 80),
    "8 queries a head, odd": Shape(1, 29, 8, 1, 29, 96),
    "chunk": Shape(2, 5, 8, 2, 37, 128, 19),
    "chunk up to the end": Shape(1, 9, 4, 4, 30, 256, 21),
    "chunk of one": Shape(2, 1, 4, 1, 19, 128, 6),
    "first chunk of a long cache": Shape(1, 8, 4, 2, 131, 64),
}
# Rows of different lengths; every length counts the queries.
DECODE = {
    "one token": (Shape(3, 1, 4, 4, 24, 64), [1, 24, 11]),
    "4 queries a head": (Shape(2, 1, 8, 2, 37, 80), [37, 2]),
    "8 queries a head": (Shape(3, 1, 8, 1, 19, 96), [5, 19, 1]),
    "several tokens": (Shape(3, 4, 8, 2, 29, 128), [4, 29, 13]),
    "several tokens, one key/value head": (Shape(1, 7, 4, 1, 45, 256), [31]),
    "two tokens": (Shape(2, 2, 4, 2, 131, 64), [2, 130]),
}


def inputs(shape: Shape, dtype: str):
    """Random q[B, T, N, H] and k, v[B, K, S, H]; queries are large, so that scores rounded to bfloat16 would show."""
    b, t, n, kv, s, h, _ = shape
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=size) for size in ((b, t, n, h), (b, kv, s, h), (b, kv, s, h)))
    return [jnp.asarray(x, dtype) for x in (4 * q, k, v)]


def check(actual, q, k, v, mask):
    """`actual` is the reference under `mask`[B, T, S]."""
    expected = reference.attention(q, k, v, jnp.asarray(mask))
    assert actual.dtype == q.dtype
    assert actual.shape == q.shape
    np.testing.assert_allclose(np.float32(actual), expected, atol=TOLERANCE[q.dtype.name])


def hide(x, mask):
    """x[B, K, S, H] with the positions that no query may see filled with `UNSEEN`."""
    return jnp.where(jnp.asarray(mask.any(axis=1))[:, None, :, None], x, jnp.asarray(UNSEEN, x.dtype))


def test_reference():
    """The formula itself, one query, head and key at a time; a query that sees nothing yields zeros."""
    q, k, v = inputs(Shape(2, 3, 4, 2, 5, 6), "float32")
    mask = np.random.default_rng(1).random((2, 3, 5)) < 0.6
    mask[0, 1] = False
    expected = np.zeros(q.shape)
    for b, t, n in np.ndindex(2, 3, 4):
        seen = [s for s in range(5) if mask[b, t, s]]
        weights = np.array([np.exp(float(np.dot(q[b, t, n], k[b, n // 2, s])) / np.sqrt(6)) for s in seen])
        for weight, s in zip(weights, seen, strict=True):
            expected[b, t, n] += weight / weights.sum() * np.float64(v[b, n // 2, s])
    assert (expected[0, 1] == 0).all()
    np.testing.assert_allclose(reference.attention(q, k, v, jnp.asarray(mask)), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", PREFILL)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prefill(implementation, name, dtype):
    shape = PREFILL[name]
    q, k, v = inputs(shape, dtype)
    mask = np.zeros((shape.batch, shape.queries, shape.keys), bool)
    for t in range(shape.queries):
        mask[:, t, : shape.offset + t + 1] = True
    k, v = hide(k, mask), hide(v, mask)
    op = functools.partial(prefill_attention, implementation=implementation)
    check(jax.jit(functools.partial(op, q_offset=shape.offset))(q, k, v), q, k, v, mask)
    if shape.offset:
        check(jax.jit(lambda q, k, v, offset: op(q, k, v, q_offset=offset))(q, k, v, shape.offset), q, k, v, mask)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode(implementation, name, dtype):
    shape, lengths = DECODE[name]
    q, k, v = inputs(shape, dtype)
    mask = np.zeros((shape.batch, shape.queries, shape.keys), bool)
    for b, length in enumerate(lengths):
        for t in range(shape.queries):
            mask[b, t, : length - shape.queries + t + 1] = True
    k, v = hide(k, mask), hide(v, mask)
    actual = jax.jit(functools.partial(decode_attention, implementation=implementation))(q, k, v, jnp.asarray(lengths))
    check(actual, q, k, v, mask)


# Six positions: documents of three and two tokens, one of padding. Rows are queries, columns keys.
PACKED = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
    [0, 0, 0, 1, 1, 0],
    [0, 0, 0, 0, 0, 1],
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_segments(implementation, dtype):
    q, k, v = inputs(Shape(2, 6, 8, 2, 6, 64), dtype)
    mask = np.stack([np.array(PACKED, bool), np.tri(6, dtype=bool)])  # the second row is one document
    segment_ids = jnp.asarray([[1, 1, 1, 2, 2, 0], [4, 4, 4, 4, 4, 4]])
    actual = prefill_attention(q, k, v, segment_ids=segment_ids, implementation=implementation)
    check(actual, q, k, v, mask)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_is_the_last_row_of_prefill(implementation):
    q, k, v = inputs(Shape(2, 9, 8, 2, 9, 64), "float32")
    whole = prefill_attention(q, k, v, implementation=implementation)
    last = decode_attention(q[:, -2:], k, v, jnp.asarray([9, 9]), implementation=implementation)
    np.testing.assert_allclose(last, whole[:, -2:], atol=TOLERANCE["float32"])


# Wrong arguments ------------------------------------------------------------------------------------------------

GOOD = Shape(2, 6, 4, 2, 6, 8)
BAD = {
    "k and v differ": ({"v": (2, 2, 5, 8)}, "k and v"),
    "batches differ": ({"k": (3, 2, 6, 8), "v": (3, 2, 6, 8)}, "same B and H"),
    "head dims differ": ({"q": (2, 6, 4, 10)}, "same B and H"),
    "q without heads": ({"q": (2, 6, 8)}, "q must be B T N H"),
    "k without heads": ({"k": (2, 6, 8), "v": (2, 6, 8)}, "k, v B K S H"),
    "heads do not divide": ({"q": (2, 6, 3, 8)}, "query heads"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_wrong_shapes(op, name):
    shapes, message = BAD[name]
    arrays = dict(zip("qkv", inputs(GOOD, "float32"), strict=True))
    arrays |= {argument: jnp.zeros(shape) for argument, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        if op == "prefill":
            prefill_attention(arrays["q"], arrays["k"], arrays["v"])
        else:
            decode_attention(arrays["q"], arrays["k"], arrays["v"], jnp.asarray([6, 6]))


@pytest.mark.parametrize(
    "options", [{"q_offset": 1}, {"q_offset": jnp.int32(0)}, {"segment_ids": jnp.ones((2, 5), int)}, {"segment_ids": jnp.ones((1, 6), int)}]
)
def test_segments_need_whole_rows(options):
    with pytest.raises(ValueError, match="segment_ids"):
        prefill_attention(*inputs(GOOD, "float32"), **{"segment_ids": jnp.ones((2, 6), int)} | options)


def test_segments_need_as_many_keys():
    with pytest.raises(ValueError, match="segment_ids"):
        prefill_attention(*inputs(GOOD._replace(keys=8), "float32"), segment_ids=jnp.ones((2, 6), int))


@pytest.mark.parametrize("length", [jnp.asarray([6]), jnp.asarray(6), jnp.ones((2, 6), int)])
def test_one_length_a_row(length):
    q, k, v = inputs(GOOD, "float32")
    with pytest.raises(ValueError, match="length"):
        decode_attention(q, k, v, length)


def test_unknown_implementation():
    """A name is obeyed or refused, never replaced."""
    q, k, v = inputs(GOOD, "float32")
    with pytest.raises(NotImplementedError, match="'cudnn'"):
        prefill_attention(q, k, v, implementation="cudnn")  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotImplementedError, match="'cudnn'"):
        decode_attention(q, k, v, jnp.asarray([6, 6]), implementation="cudnn")  # pyright: ignore[reportArgumentType]
