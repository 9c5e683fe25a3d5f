"""How the prefill kernel's work is cut up, and what it cannot do."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ..device import HEAD_DIMS

_REGISTERS = 192  # of a consumer's thread, beside those for addresses and counters


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Block sizes and schedule: more stages hide more of the loads' latency."""

    block_q: int = 64  # queries of one consumer warpgroup; a thread block has twice as many
    block_kv: int = 128
    stages: int = 2
    ping_pong: bool = True

    def __post_init__(self):
        if self.block_q < 64 or self.block_q % 64:
            raise ValueError(f"{self.block_q=} must be a multiple of 64")
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(f"{self.block_kv=} must be a multiple of 64, at most 256")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2")


def obstacle(q, k, page_table, tuning: Tuning) -> str | None:
    """Why the kernel cannot run on operands like these; None if it can. Keys have, or are widened
    to, the dtype of q."""
    head_dim, page = q.shape[3], k.shape[2]
    if page_table is not None and page % 64:
        return f"takes pages of a multiple of 64 positions, got {page} with {k.shape=}"
    tuning = fit(tuning, None if page_table is None else page)
    block_q, block_kv = tuning.block_q, tuning.block_kv
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 or float16, got {q.dtype=}"
    if head_dim not in HEAD_DIMS:
        return f"takes head dims {HEAD_DIMS}, got {q.shape=}"
    if (
        registers := block_q // 64 * (head_dim // 2 + 3 * block_kv // 4) + block_kv // 4
    ) > _REGISTERS:
        return (
            f"needs {registers} registers for O, S, P and the mask with {tuning} and "
            f"{q.shape=}, at most {_REGISTERS} fit"
        )
    return None


def fit(tuning: Tuning, page: int | None = None) -> Tuning:
    """`tuning` with blocks of keys that divide `page`, a multiple of 64; if they are cut, the ring
    gets as many more."""
    if page is None or page % tuning.block_kv == 0:
        return tuning
    block_kv = max(block for block in range(64, tuning.block_kv, 64) if page % block == 0)
    return dataclasses.replace(
        tuning, block_kv=block_kv, stages=tuning.stages * tuning.block_kv // block_kv
    )
