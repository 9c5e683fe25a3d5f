"""The arguments that the two ops accept, and the errors for those that do not fit together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import (
    check_decode,
    check_prefill,
    decode_attention,
    prefill_attention,
)
from tests.pallas_kernels.small_operands import (
    SCALE,
    B,
    H,
    K,
    N,
    S,
    T,
    decode_operands,
    prefill_operands,
    zeros,
)


def prefill(**changes):
    return check_prefill(**prefill_operands(**changes))


def decode(**changes):
    return check_decode(**decode_operands(**changes))


def both(**arrays):
    return {"prefill": (prefill, arrays), "decode": (decode, arrays)}


INT8 = {"k": zeros(B, K, S, H, dtype=jnp.int8), "v": zeros(B, K, S, H, dtype=jnp.int8)}
WRONG = {  # name -> (call, arguments that are wrong, what the message names)
    "k and v differ in shape": (both(v=zeros(B, K, 5, H)), r"v\.shape=\(2, 2, 5, 64\)"),
    "k and v differ in dtype": (both(v=zeros(B, K, S, H, dtype=jnp.float32)), "v.dtype=dtype"),
    "rows differ": (both(k=zeros(3, K, S, H), v=zeros(3, K, S, H)), r"k\.shape=\(3, 2, 8, 64\)"),
    "head dims differ": (both(q=zeros(B, T, N, 80)), r"q\.shape=\(2, 6, 4, 80\)"),
    "q without heads": (both(q=zeros(B, T, H)), "q must be B T N H"),
    "k without heads": (both(k=zeros(B, S, H), v=zeros(B, S, H)), "k, v B K S H"),
    "heads do not divide": (both(q=zeros(B, T, 3, H)), r"query heads.*q\.shape=\(2, 6, 3, 64\)"),
    "integer q": (both(q=zeros(B, T, N, H, dtype=jnp.int32)), "q must be bfloat16"),
    "keys wider than q": (
        both(k=zeros(B, K, S, H, dtype=jnp.float32), v=zeros(B, K, S, H, dtype=jnp.float32)),
        "k.dtype=dtype",
    ),
    "int8 without scales": (both(**INT8), "k_scale goes with"),
    "scales without int8": (both(k_scale=SCALE, v_scale=SCALE), "k_scale goes with"),
    "one scale missing": (both(**INT8, k_scale=SCALE), "v_scale goes with"),
    "scales of another shape": (
        both(**INT8, k_scale=SCALE, v_scale=SCALE[..., None]),
        "v_scale must be float32 and B K S",
    ),
    "scales in half": (
        both(**INT8, k_scale=SCALE.astype(jnp.bfloat16), v_scale=SCALE),
        "k_scale.*bfloat16",
    ),
    "offset beyond the keys": (
        {"prefill": (prefill, {"q_offset": 3})},
        "q_offset must be from 0 to 2",
    ),
    "negative offset": (
        {"prefill": (prefill, {"q_offset": jnp.asarray([0, -1])})},
        "q_offset.*got -1",
    ),
    "offsets of other rows": (
        {"prefill": (prefill, {"q_offset": jnp.zeros(3, int)})},
        "q_offset must be a scalar or one a row",
    ),
    "more queries than keys": (both(q=zeros(B, 9, N, H)), "8 keys and q.shape=.2, 9, 4, 64"),
    "lengths beyond the queries": (
        {"prefill": (prefill, {"lengths": jnp.asarray([7, 1])})},
        "lengths must be from 0 to 6",
    ),
    "lengths not one a row": (
        {"prefill": (prefill, {"lengths": jnp.asarray([7])})},
        "lengths must be one integer a row",
    ),
    "length beyond the cache": (
        {"decode": (decode, {"length": jnp.asarray([1, 9])})},
        "length must be from 0 to 8",
    ),
    "length not one a row": (
        {"decode": (decode, {"length": jnp.asarray([6])})},
        "length must be one integer a row",
    ),
    "length for all": (
        {"decode": (decode, {"length": jnp.asarray(6)})},
        "length must be one integer a row",
    ),
    "fractional length": (
        {"decode": (decode, {"length": jnp.asarray([1.0, 2.0])})},
        "length must be integers, got value.dtype=dtype.'float32'",
    ),
    "page table of other rows": (
        {"decode": (decode, {"page_table": jnp.zeros((3, 2), int)})},
        "page_table must be B P",
    ),
    "fractional page table": (
        {"decode": (decode, {"page_table": jnp.zeros((B, 1))})},
        "page_table must be integers",
    ),
    "fractional offset": (
        {"prefill": (prefill, {"q_offset": 1.0})},
        "q_offset must be integers.*float32",
    ),
    "offset true": ({"prefill": (prefill, {"q_offset": True})}, "q_offset must be integers.*bool"),
    "NumPy offset beyond the keys": (
        {"prefill": (prefill, {"q_offset": np.int64(3)})},
        "q_offset must be from 0 to 2",
    ),
    "lengths true": (
        {"prefill": (prefill, {"lengths": jnp.ones(B, bool)})},
        "lengths must be integers.*bool",
    ),
    "a list beyond the cache": (
        {"decode": (decode, {"length": [1, 9]})},
        "length must be from 0 to 8",
    ),
    "fractional segments": (
        {"prefill": (prefill, {"segment_ids": jnp.ones((B, T))})},
        "segment_ids must be integers",
    ),
    "no rows": (
        both(q=zeros(0, T, N, H), k=zeros(0, K, S, H), v=zeros(0, K, S, H)),
        r"no axis.*q\.shape=\(0, 6, 4, 64\)",
    ),
    "no queries": (both(q=zeros(B, 0, N, H)), "no axis of q, k and v may be empty"),
    "no key/value heads": (
        both(k=zeros(B, 0, S, H), v=zeros(B, 0, S, H)),
        "no axis of q, k and v may be empty",
    ),
    "no pages": (
        {"decode": (decode, {"page_table": jnp.zeros((B, 0), int)})},
        r"page_table must be B P.*\(2, 0\)",
    ),
    "double q": (
        both(q=np.zeros((B, T, N, H))),
        "q must be bfloat16, float16 or float32, got q.dtype=dtype.'float64'",
    ),
    "q of no type": (both(q=None), "q must be an array, got None"),
    "visible keys beyond the keys": (
        {"prefill": (prefill, {"kv_lengths": jnp.asarray([9, 1])})},
        "kv_lengths must be from 0 to 8",
    ),
    "visible keys not one a row": (
        {"prefill": (prefill, {"kv_lengths": 3})},
        "kv_lengths must be one integer a row",
    ),
    "fractional visible keys": (
        {"prefill": (prefill, {"kv_lengths": jnp.ones(B)})},
        "kv_lengths must be integers",
    ),
    "visible keys and segments": (
        {"prefill": (prefill, {"kv_lengths": [1, 1], "segment_ids": jnp.ones((B, T), int)})},
        "segment_ids do not go with kv_lengths",
    ),
    "negative offset of visible keys": (
        {"prefill": (prefill, {"kv_lengths": [1, 1], "q_offset": -1})},
        "q_offset must be from 0 to 2147483641",
    ),
    "offset beyond int32": (
        {"prefill": (prefill, {"kv_lengths": [1, 1], "q_offset": 2**31 - T + 1})},
        "q_offset must be from 0 to 2147483641, what int32 holds less 6",
    ),
    "segments and an offset": (
        {"prefill": (prefill, {"segment_ids": jnp.ones((B, T), int), "q_offset": 1})},
        r"segment_ids need.*q_offset=1",
    ),
    "segments and a cache": (
        {"prefill": (prefill, {"segment_ids": jnp.ones((B, T), int)})},
        r"segment_ids need.*k\.shape",
    ),
    "segments of other rows": (
        {"prefill": (prefill, {"segment_ids": jnp.ones((1, T), int)})},
        "segment_ids must be B T",
    ),
}


@pytest.mark.parametrize(
    ("name", "op"), [(name, op) for name, (calls, _) in WRONG.items() for op in calls]
)
def test_wrong_arguments(name, op):
    calls, message = WRONG[name]
    call, arguments = calls[op]
    with pytest.raises(ValueError, match=message):
        call(**arguments)


def test_the_ops_check_their_arguments():
    q, kv = zeros(B, T, N, H), zeros(B, K, S, H)
    with pytest.raises(ValueError, match="q_offset must be from 0 to 2"):
        prefill_attention(q, kv, kv, q_offset=3)
    with pytest.raises(ValueError, match="length must be from 0 to 8"):
        decode_attention(q, kv, kv, jnp.asarray([1, 9]))


@pytest.mark.parametrize("call", [prefill, decode])
def test_good_arguments(call):
    """What the tests above start from is accepted."""
    assert call().q.dtype == jnp.bfloat16
    assert call(**INT8, k_scale=SCALE, v_scale=SCALE).k.dtype == jnp.int8


def test_queries_past_the_visible_keys():
    """Their positions need not be any of the keys'."""
    found = prefill(q=zeros(B, 9, N, H), q_offset=[100, 0], kv_lengths=[8, 0], lengths=[9, 1])
    assert found.kv_lengths.dtype == jnp.int32 and found.kv_lengths.tolist() == [8, 0]


def test_lists_and_numpy_integers():
    """Arguments need not be JAX arrays. A NumPy integer is as static as one of Python: with it
    segments are allowed."""
    length = decode(length=np.asarray([8, 3], np.uint8)).length
    assert length.dtype == jnp.int32 and (length == decode(length=[8, 3]).length).all()
    q, ids = zeros(B, S, N, H), [[1] * S] * B
    found = prefill(q=q, segment_ids=ids, q_offset=np.int64(0), lengths=[S, 1])
    assert found.q_offset == 0 and isinstance(found.q_offset, int)
    assert found.segment_ids.shape == (B, S) and found.lengths.tolist() == [S, 1]


def test_a_numpy_offset_is_static():
    q, kv = zeros(B, S, N, H), zeros(B, K, S, H)
    ids = jnp.ones((B, S), jnp.int32)
    assert prefill_attention(q, kv, kv, segment_ids=ids, q_offset=np.int64(0)).shape == q.shape


def test_the_room_is_checked_inside_jit():
    """Shapes are known there, whatever the offset is."""
    with pytest.raises(ValueError, match="at least as many keys as queries, got 8 keys"):
        jax.eval_shape(lambda offset: prefill(q=zeros(B, 9, N, H), q_offset=offset).q, jnp.int32(0))


def test_values_are_not_checked_inside_jit():
    """There they are not known; all that is promised is a result of the right shape."""
    kv = zeros(B, K, S, H)
    op = jax.jit(lambda q, offset: prefill_attention(q, kv, kv, q_offset=offset))
    assert op(zeros(B, T, N, H), jnp.int32(7)).shape == (B, T, N, H)


# From a pool of pages ----------------------------------------------------------

X, PAGE, P = 5, 8, 3


def pool(**changes):
    kv = zeros(X, K, PAGE, H)
    usual = {"q": zeros(B, T, N, H), "k": kv, "v": kv, "page_table": jnp.zeros((B, P), int)}
    return usual | changes


WRONG_OF_POOLS = {
    "other rows": ({"page_table": jnp.zeros((3, P), int)}, r"page_table must be B P.*\(3, 3\)"),
    "no pages": ({"page_table": jnp.zeros((B, 0), int)}, r"page_table must be B P.*\(2, 0\)"),
    "fractions": ({"page_table": jnp.zeros((B, P))}, "page_table must be integers"),
    "segments": (
        {"segment_ids": jnp.ones((B, T), int)},
        "segment_ids do not go with a page_table",
    ),
    "an offset beyond the pages": (
        {"q_offset": 25, "lengths": [0, 0]},
        "q_offset must be from 0 to 24, the 24 positions of a row",
    ),
    "queries beyond the pages": (
        {"q_offset": [20, 0], "lengths": [5, 6]},
        "q_offset . lengths must be from 0 to 24.*got 6 to 25",
    ),
    "a sum beyond 8 bits": (
        {
            "q_offset": np.asarray([255, 0], np.uint8),
            "lengths": np.asarray([6, 6], np.uint8),
            "page_table": jnp.zeros((B, 32), int),
        },
        "q_offset . lengths must be from 0 to 256.*got 6 to 261",
    ),
    "without lengths all are real": (
        {"q_offset": [19, 0]},
        "q_offset must be from 0 to 18, the 24 keys less 6 queries",
    ),
    "more queries than positions": (
        {"q": zeros(B, 25, N, H)},
        "at least as many keys as queries, got 24 keys",
    ),
    "visible keys beyond the pages": (
        {"kv_lengths": [25, 0], "q_offset": 99},
        "kv_lengths must be from 0 to 24, the positions of a row",
    ),
    "scales of another pool": (
        {name: jnp.zeros((X, K, PAGE, H), jnp.int8) for name in "kv"}
        | {f"{name}_scale": jnp.zeros((B, K, 24)) for name in "kv"},
        r"k_scale must be float32 and B K S, got scale.shape=\(2, 2, 24\)",
    ),
}


@pytest.mark.parametrize("name", WRONG_OF_POOLS)
def test_wrong_arguments_of_a_pool(name):
    changes, message = WRONG_OF_POOLS[name]
    with pytest.raises(ValueError, match=message):
        check_prefill(**pool(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_offset": jnp.asarray([18, 24]), "lengths": jnp.asarray([6, 0])},
        {"q": zeros(B, 30, N, H), "lengths": jnp.asarray([24, 1])},
        {"q": zeros(B, 30, N, H), "q_offset": 99, "kv_lengths": jnp.asarray([24, 0])},
    ],
)
def test_good_arguments_of_a_pool(changes):
    """Queries past `lengths` may stand past the last page."""
    assert check_prefill(**pool(**changes)).q.shape[0] == B
