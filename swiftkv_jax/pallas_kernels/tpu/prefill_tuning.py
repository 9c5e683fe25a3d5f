"""How the prefill and gradient kernels' work is cut up, and what they cannot do."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

LANES = 128
MAX_PAIRS = 3 * 2**16  # of blocks in a schedule, and entries of a table: words of scalar memory


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Block sizes; independent of the number of heads and valid for any T and S."""

    # rows of a step: block_q queries of each of the heads that share the fetched keys and values
    block_rows: int = 1024
    block_kv: int = 1024  # keys fetched for a step
    block_kv_compute: int = 512  # keys multiplied at a time: columns of the float32 score tile
    vmem_limit_bytes: int | None = None  # None: the compiler's default, 16 or 32 MiB

    def __post_init__(self):
        for name in ("block_rows", "block_kv", "block_kv_compute"):
            if getattr(self, name) <= 0 or getattr(self, name) % LANES:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a positive multiple of {LANES}"
                )
        if self.block_kv % self.block_kv_compute:
            raise ValueError(
                f"block_kv={self.block_kv} must be a multiple of "
                f"block_kv_compute={self.block_kv_compute}"
            )
        if self.block_rows * self.block_kv_compute > 2**21:
            raise ValueError(
                f"a score tile of {self.block_rows=} x {self.block_kv_compute=} does not fit in "
                f"VMEM: at most 2**21 elements"
            )

    def rows(self, group: int, queries: int) -> tuple[int, int]:
        """(heads, block_q): as many heads of the group as fit at 128 queries each, and the queries
        for which there is room."""
        heads = max(
            h for h in range(1, group + 1) if group % h == 0 and h * LANES <= self.block_rows
        )
        return heads, min(
            self.block_rows // heads, pl.cdiv(queries, LANES) * LANES
        ) // LANES * LANES


def obstacle(q, k, page_table, tuning: Tuning) -> str | None:
    """Why the kernel cannot run on operands like these; None if it can."""
    (batch, queries, heads, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    entries = 0
    if page_table is not None:
        if keys % LANES:
            return f"takes pages of a multiple of {LANES} positions, got {keys} with {k.shape=}"
        pages, entries = page_table.shape[1], page_table.size
        tuning, keys = fit(tuning, keys, pages), keys * pages
    block_q = tuning.rows(heads // kv_heads, queries)[1]
    reason = schedule_obstacle(
        batch * pl.cdiv(queries, block_q), pl.cdiv(keys, tuning.block_kv), entries
    )
    return reason and f"{reason}, got {q.shape=}, {k.shape=}"


def schedule_obstacle(tasks: int, inner_blocks: int, table_entries: int = 0) -> str | None:
    """Why a schedule of so many outer and inner blocks, beside a table, cannot be; None if it
    can."""
    if tasks * inner_blocks + table_entries > MAX_PAIRS:
        table = f" and a page_table of {table_entries} entries" if table_entries else ""
        return (
            f"has room in scalar memory for {MAX_PAIRS} pairs of blocks, not for {tasks} x "
            f"{inner_blocks}{table}"
        )
    return None


def fit(tuning: Tuning, page: int, pages: int) -> Tuning:
    """`tuning` for rows of so many pages: blocks of keys are whole pages, as many as fit, or an
    even part of a large one."""
    fetched, multiplied = tuning.block_kv, tuning.block_kv_compute
    if page > multiplied:
        fetched = _largest_part(page, fetched)
        multiplied = _largest_part(fetched, multiplied)
    else:
        multiplied = page * min(multiplied // page, pages)
        fetched = multiplied * (min(fetched, page * pages) // multiplied)
    return dataclasses.replace(tuning, block_kv=fetched, block_kv_compute=multiplied)


def _largest_part(whole: int, limit: int) -> int:
    """The largest multiple of the lanes up to `limit` that divides `whole`."""
    return max(part for part in range(LANES, limit + 1, LANES) if whole % part == 0)
