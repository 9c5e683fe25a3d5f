"""Blocks and VMEM of the decode kernel."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..operands import AttentionSpec

LANES = 128
CHUNK = LANES  # positions: the finest slice of a scale, or of a cache whose positions are minor
VMEM_BYTES = 14 * 2**20  # of the 16 MiB that a kernel may use


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A ring of `buffers` blocks, each of about `block_bytes` of keys and as many of values; heads
    are split over `cores`."""

    block_bytes: int = 2**19
    buffers: int = 4
    rows: int = 8
    cores: int = 1

    def __post_init__(self):
        if not 2**14 <= self.block_bytes <= VMEM_BYTES:
            raise ValueError(f"{self.block_bytes=} must be from 16 KiB to {VMEM_BYTES}")
        if self.buffers < 2 or min(self.rows, self.cores) < 1:
            raise ValueError(
                f"{self.buffers=} must be at least 2, {self.rows=} and {self.cores=} positive"
            )

    def block(
        self, kv_heads: int, positions: int, pages: int | None, head_dim: int, itemsize: int
    ) -> tuple[int, int]:
        """(positions, heads) of a block: whole chunks of a row of `positions`; of rows of `pages`
        with so many each, whole pages or an even part of one."""
        heads = kv_heads // self.cores if kv_heads % self.cores == 0 else kv_heads
        while heads > 1 and heads * CHUNK * head_dim * itemsize > self.block_bytes:
            heads = next(count for count in range(heads - 1, 0, -1) if kv_heads % count == 0)
        chunks = positions // CHUNK
        room = max(1, self.block_bytes // (heads * CHUNK * head_dim * itemsize))  # chunks
        if pages is None:
            return CHUNK * min(chunks, room), heads
        if chunks <= room:
            return positions * min(pages, room // chunks), heads
        return CHUNK * max(part for part in range(1, room + 1) if chunks % part == 0), heads


def unsupported_reason(spec: AttentionSpec, tuning: Tuning) -> str | None:
    """Why the kernel cannot run such a call; None if it can. Head dim and dtype are right."""
    q = spec.q
    k = spec.k
    (batch, queries, heads, head_dim), (all_kv_heads, page) = q.shape, k.shape[1:3]
    if spec.page_table is not None and page % CHUNK:
        return f"takes pages of a multiple of {CHUNK} positions, got {page} with {k.shape=}"
    page = pl.cdiv(page, CHUNK) * CHUNK
    itemsize = k.dtype.itemsize
    pages = None if spec.page_table is None else spec.page_table.shape[1]
    block_kv, kv_heads = tuning.block(all_kv_heads, page, pages, head_dim, itemsize)
    # The ring, and two buffers each of queries and outputs; those are bfloat16 but for float32
    # keys.
    vmem = 2 * tuning.buffers * kv_heads * head_dim * block_kv * itemsize
    tile = max(queries * heads // all_kv_heads, 16) * pl.cdiv(head_dim, LANES) * LANES
    vmem += 4 * min(tuning.rows, batch) * kv_heads * tile * (4 if k.dtype == jnp.float32 else 2)
    if vmem > VMEM_BYTES:
        return (
            f"needs {vmem} bytes of VMEM, of {VMEM_BYTES}, with {tuning} for {q.shape=}, "
            f"{k.shape=}, {k.dtype=}"
        )
    return None
