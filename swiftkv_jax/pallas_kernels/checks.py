"""Checks of the two ops' arguments. Operands that do not fit together are a `ValueError` that names
the argument and its value."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .operands import AttentionOperands

FLOATS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))
CACHE_FORMATS = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8))
"""Dtypes of keys and values that need scales."""
LARGEST = int(np.iinfo(np.int32).max)


def check_prefill(
    q,
    k,
    v,
    *,
    q_offset: Any = 0,
    lengths=None,
    segment_ids=None,
    k_scale=None,
    v_scale=None,
    page_table=None,
    kv_lengths=None,
) -> AttentionOperands:
    """The arguments of `prefill_attention` as JAX arrays; a static `q_offset` as an int."""
    q, k, v, k_scale, v_scale = _operands(q, k, v, k_scale, v_scale)
    page_table, keys = _table(q, k, page_table)
    batch, queries = q.shape[:2]
    q_offset = _offset(q_offset)
    if np.shape(q_offset) not in ((), (batch,)):
        raise ValueError(
            f"q_offset must be a scalar or one a row, got {np.shape(q_offset)=} and {q.shape=}"
        )
    lengths = (
        None if lengths is None else _one_a_row("lengths", lengths, batch, queries, "the queries")
    )
    if kv_lengths is not None:  # the queries may stand past the keys
        kv_lengths = _one_a_row("kv_lengths", kv_lengths, batch, keys, "the positions of a row")
        _check_range("q_offset", q_offset, LARGEST - queries, f"what int32 holds less {queries}")
        if segment_ids is not None:
            raise ValueError(
                f"segment_ids do not go with kv_lengths, got {np.shape(segment_ids)=} and "
                f"{kv_lengths.shape=}"
            )
    elif page_table is None or lengths is None:
        _check_room(q, keys)
        _check_range(
            "q_offset", q_offset, keys - queries, f"the {keys} keys less {queries} queries"
        )
    else:  # a row needs pages for its real queries only
        _check_range("q_offset", q_offset, keys, f"the {keys} positions of a row's pages")
        if _is_known(q_offset) and _is_known(lengths):
            end = np.asarray(q_offset, np.int64) + np.asarray(lengths, np.int64)
            _check_range("q_offset + lengths", end, keys, f"the {keys} positions of a row's pages")
    if segment_ids is not None:
        if page_table is not None:
            raise ValueError(
                f"segment_ids do not go with a page_table, got {np.shape(segment_ids)=} and "
                f"{page_table.shape=}"
            )
        segment_ids = _integers("segment_ids", segment_ids)
        if segment_ids.shape != q.shape[:2]:
            raise ValueError(f"segment_ids must be B T, got {segment_ids.shape=} and {q.shape=}")
        if keys != queries or not isinstance(q_offset, int) or q_offset:
            raise ValueError(
                f"segment_ids need as many keys as queries and q_offset=0, got {k.shape=}, "
                f"{q.shape=}, {q_offset=}"
            )
    return AttentionOperands(
        q,
        k,
        v,
        q_offset=q_offset if isinstance(q_offset, int) else _int32(q_offset),
        lengths=_int32(lengths),
        segment_ids=_int32(segment_ids),
        k_scale=k_scale,
        v_scale=v_scale,
        page_table=_int32(page_table),
        kv_lengths=_int32(kv_lengths),
    )


def check_decode(
    q, k, v, length, *, k_scale=None, v_scale=None, page_table=None
) -> AttentionOperands:
    """The arguments of `decode_attention` as JAX arrays."""
    q, k, v, k_scale, v_scale = _operands(q, k, v, k_scale, v_scale)
    page_table, keys = _table(q, k, page_table)
    _check_room(q, keys)
    length = _one_a_row("length", length, q.shape[0], keys, "the cache's positions")
    return AttentionOperands(
        q,
        k,
        v,
        length=_int32(length),
        k_scale=k_scale,
        v_scale=v_scale,
        page_table=_int32(page_table),
    )


def check_window(window) -> Any:
    """`window` as an int, or an int32 scalar where it is an array."""
    if window is None:
        return None
    window = _offset(window, "window")
    if np.shape(window) != ():
        raise ValueError(f"window must be a scalar, got {np.shape(window)=}")
    if _is_known(window) and int(window) < 1:
        raise ValueError(f"window must be from 1 up, got {int(window)}")
    return window if isinstance(window, int) else _int32(window)


def hiding(window, operands: AttentionOperands):
    """`window`, or None for an int that hides none of the positions of a row. With `kv_lengths`
    queries may stand anywhere past these."""
    positions = operands.keys if operands.kv_lengths is None else LARGEST
    return None if isinstance(window, int) and window >= positions else window


def _operands(q, k, v, k_scale, v_scale):
    q = _array("q", q)
    k = _array("k", k)
    v = _array("v", v)
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(
            f"k and v must have the same shape and dtype, got {k.shape=}, {k.dtype=}, {v.shape=}, "
            f"{v.dtype=}"
        )
    if q.ndim != 4 or k.ndim != 4 or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q must be B T N H and k, v B K S H with the same H, got {q.shape=} and {k.shape=}"
        )
    if 0 in q.shape + k.shape:
        raise ValueError(f"no axis of q, k and v may be empty, got {q.shape=} and {k.shape=}")
    if q.shape[2] % k.shape[1]:
        raise ValueError(
            f"query heads must be a multiple of key/value heads, got {q.shape=} and {k.shape=}"
        )
    if q.dtype not in FLOATS:
        raise ValueError(f"q must be bfloat16, float16 or float32, got {q.dtype=}")
    if k.dtype not in (q.dtype, *CACHE_FORMATS):
        raise ValueError(
            f"k and v must have q's dtype, or be float8_e4m3fn or int8 with scales; got "
            f"{k.dtype=} and {q.dtype=}"
        )
    return (
        *map(jnp.asarray, (q, k, v)),
        _scale("k_scale", k_scale, k),
        _scale("v_scale", v_scale, k),
    )


def _scale(name, scale, k):
    if (scale is None) == (k.dtype in CACHE_FORMATS):
        raise ValueError(
            f"{name} goes with float8_e4m3fn or int8 keys and values, and only with them; got "
            f"{k.dtype=}"
        )
    if scale is None:
        return None
    scale = _array(name, scale)
    if scale.shape != k.shape[:3] or scale.dtype != jnp.float32:
        raise ValueError(
            f"{name} must be float32 and B K S, got {scale.shape=}, {scale.dtype=} and {k.shape=}"
        )
    return jnp.asarray(scale)


def _table(q, k, page_table):
    """(the page table or None, the number of positions of each row of `q`)."""
    if page_table is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"q and k must have as many rows, got {q.shape=} and {k.shape=}")
        return None, k.shape[2]
    page_table = _integers("page_table", page_table)
    if page_table.ndim != 2 or page_table.shape[0] != q.shape[0] or not page_table.shape[1]:
        raise ValueError(f"page_table must be B P, got {page_table.shape=} and {q.shape=}")
    return page_table, k.shape[2] * page_table.shape[1]


def _array(name, value):
    """`value` itself if it has a shape and a dtype, else `jnp.asarray` of it."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array, got {value!r}") from error


def _integers(name, value):
    value = _array(name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {value.dtype=}")
    return value


def _offset(value, name="q_offset"):
    """An int if the offset is static: only then is it known while tracing whether rows start where
    their keys start."""
    if not isinstance(value, (bool, np.bool_, jax.Array)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    return _integers(name, value)


def _one_a_row(name, value, batch, high, what):
    value = _integers(name, value)
    if value.shape != (batch,):
        raise ValueError(f"{name} must be one integer a row, got {value.shape=} for {batch} rows")
    _check_range(name, value, high, what)
    return value


def _int32(value):
    return None if value is None else jnp.asarray(value, jnp.int32)


def _check_room(q, keys):
    if q.shape[1] > keys:
        raise ValueError(
            f"there must be at least as many keys as queries, got {keys} keys and {q.shape=}"
        )


def _check_range(name, value, high, what):
    """Raise `ValueError` unless 0 <= value <= high, for a value that `_is_known`."""
    if not _is_known(value):
        return
    value = np.asarray(value)
    if value.min() < 0 or value.max() > high:
        raise ValueError(
            f"{name} must be from 0 to {high}, {what}; got {int(value.min())} to {int(value.max())}"
        )


def _is_known(value) -> bool:
    """True if this process can read the value now: not while tracing, nor if other processes hold
    shards of it."""
    return not isinstance(value, Tracer) and (
        not isinstance(value, jax.Array) or value.is_fully_addressable
    )
