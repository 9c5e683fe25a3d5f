"""Attention, as two ops. Everything in the model attends through them; nothing else in the package does.

`implementation=None` chooses for the platform; a name is obeyed or refused with `NotImplementedError`. Wrong
arguments are a `ValueError`. Queries are `B T N H` as the projection leaves them, keys and values are head-major
`B K S H` as the cache holds them.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import xla

Implementation = Literal["xla"]

__all__ = ["Implementation", "decode_attention", "prefill_attention"]


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    *,
    q_offset: Int[Array, ""] | int = 0,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Causal grouped-query attention of many queries.

    Query t stands at key position `q_offset + t` and sees the positions up to and including its own: with a cache as
    `k`, `v` a chunk attends to all that came before it. `segment_ids` (only with S = T and no offset) confines each
    query to its own packed document.
    """
    _check(q, k, v, implementation)
    positions = q_offset + jnp.arange(q.shape[1])
    mask = jnp.arange(k.shape[2])[None, :] <= positions[:, None]  # T S
    if segment_ids is None:
        mask = jnp.broadcast_to(mask, (q.shape[0], *mask.shape))
    else:
        if segment_ids.shape != q.shape[:2]:
            raise ValueError(f"segment_ids must be B T, got {segment_ids.shape=} and {q.shape=}")
        if k.shape[2] != q.shape[1] or not (isinstance(q_offset, int) and q_offset == 0):
            raise ValueError(f"segment_ids need as many keys as queries and q_offset=0, got {k.shape=}, {q.shape=}, {q_offset=}")
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return xla.attention(q, k, v, mask)


def decode_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    length: Int[Array, "B"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of the last T tokens of each row against a static cache.

    `length[b]` counts the valid positions of row b, the T new ones included; query t sees the first
    `length[b] - T + t + 1`.
    """
    _check(q, k, v, implementation)
    if length.shape != q.shape[:1]:
        raise ValueError(f"length must be B, got {length.shape=} and {q.shape=}")
    last = length[:, None] - q.shape[1] + jnp.arange(q.shape[1])  # B T
    mask = jnp.arange(k.shape[2]) <= last[:, :, None]  # B T S
    return xla.attention(q, k, v, mask)


def _check(q, k, v, implementation):
    """Raise `ValueError` for shapes that do not belong together, `NotImplementedError` for an unknown implementation."""
    if implementation not in (None, "xla"):
        raise NotImplementedError(f"{implementation=} is not available; available: 'xla'")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got {k.shape=} and {v.shape=}")
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q must be B T N H and k, v B K S H with the same B and H, got {q.shape=} and {k.shape=}")
    if q.shape[2] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {q.shape[2]} and {k.shape[1]}")
