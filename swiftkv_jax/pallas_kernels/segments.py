"""The blocks of a packed row that can see each other: a kernel skips the rest."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def visible_kv_blocks(
    segment_ids: Int[Array, "B T"], block_q: int, block_kv: int, window: int | None = None
) -> tuple[Int[Array, "B I"], Int[Array, "B I"]]:
    """For each of the I query blocks, the first key block it may attend to and one past the last:
    causal, same document, and within `window` positions.

    Blocks are compared by the range of ids in them, so the bounds hold for any ids and are tight
    for documents that lie one after the other with rising ids. Visible blocks must still be masked
    position by position.
    """
    overlap = _overlap(segment_ids, block_q, block_kv, window)
    blocks = jnp.arange(overlap.shape[2], dtype=jnp.int32)
    first = jnp.where(overlap, blocks, overlap.shape[2]).min(axis=2)
    end = jnp.where(overlap, blocks + 1, 0).max(axis=2)
    return first, end


def visible_q_blocks(
    segment_ids: Int[Array, "B T"], block_q: int, block_kv: int, window: int | None = None
) -> tuple[Int[Array, "B J"], Int[Array, "B J"]]:
    """For each of the J key blocks, the first query block that may attend to it and one past the
    last."""
    overlap = _overlap(segment_ids, block_q, block_kv, window)
    blocks = jnp.arange(overlap.shape[1], dtype=jnp.int32)[:, None]
    first = jnp.where(overlap, blocks, overlap.shape[1]).min(axis=1)
    end = jnp.where(overlap, blocks + 1, 0).max(axis=1)
    return first, end


def run_starts(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """For each position, the first of the run of equal ids it lies in."""
    position = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    return lax.cummax(jnp.where(starts, position, 0), axis=1)


def run_ends(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """For each position, one past the last of the run of equal ids it lies in; the largest int32
    for the last run."""
    position = jnp.arange(1, segment_ids.shape[1] + 1, dtype=jnp.int32)
    ends = jnp.diff(segment_ids, axis=1, append=segment_ids[:, -1:]) != 0
    return lax.cummin(jnp.where(ends, position, jnp.iinfo(jnp.int32).max), axis=1, reverse=True)


def _overlap(segment_ids, block_q, block_kv, window):
    """bool[B, I, J]: some query of block i may see some key of block j. A block on the diagonal
    always does."""
    q_low, q_high = _ranges(segment_ids, block_q)
    kv_low, kv_high = _ranges(segment_ids, block_kv)
    last_query = (jnp.arange(q_low.shape[1]) + 1) * block_q - 1
    first_key = jnp.arange(kv_low.shape[1]) * block_kv
    causal = first_key[None, :] <= last_query[:, None]
    if window is not None:
        causal &= first_key[None, :] + (block_kv - 1) > last_query[:, None] - (block_q - 1) - window
    return (
        causal
        & (kv_low[:, None, :] <= q_high[:, :, None])
        & (q_low[:, :, None] <= kv_high[:, None, :])
    )


def _ranges(segment_ids, block):
    """The smallest and the largest id in each block; the last block may be short."""
    batch, length = segment_ids.shape
    padded = jnp.pad(segment_ids, ((0, 0), (0, -length % block)), mode="edge").reshape(
        batch, -1, block
    )
    return padded.min(axis=2), padded.max(axis=2)
