"""Block sizes of the prefill and gradient kernels, the list of blocks that they visit, in scalar
memory, and where their operands lie in HBM."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from ..operands import AttentionSpec

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


def unsupported_reason(spec: AttentionSpec, tuning: Tuning) -> str | None:
    """Why the prefill kernel cannot run such a call; None if it can."""
    q = spec.q
    k = spec.k
    (batch, queries, heads, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    entries = 0
    if spec.page_table is not None:
        if keys % LANES:
            return f"takes pages of a multiple of {LANES} positions, got {keys} with {k.shape=}"
        pages = spec.page_table.shape[1]
        entries = spec.page_table.size
        tuning = fit(tuning, keys, pages)
        keys = keys * pages
    block_q = tuning.rows(heads // kv_heads, queries)[1]
    reason = schedule_unsupported_reason(
        batch * pl.cdiv(queries, block_q), pl.cdiv(keys, tuning.block_kv), entries
    )
    return reason and f"{reason}, got {q.shape=}, {k.shape=}"


def schedule_unsupported_reason(
    tasks: int, inner_blocks: int, table_entries: int = 0
) -> str | None:
    """Why scalar memory cannot hold a schedule of so many outer and inner blocks beside a page
    table; None if it can."""
    if tasks * inner_blocks + table_entries > MAX_PAIRS:
        table = f" and a page_table of {table_entries} entries" if table_entries else ""
        return (
            f"has room in scalar memory for {MAX_PAIRS} pairs of blocks, not for {tasks} x "
            f"{inner_blocks}{table}"
        )
    return None


def fit(tuning: Tuning, page: int, pages: int) -> Tuning:
    """`tuning` for rows of `pages` pages of `page` positions each: a block of keys is as many whole
    pages as fit, or an even part of a large one."""
    fetched = tuning.block_kv
    multiplied = tuning.block_kv_compute
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


# Schedules --------------------------------------------------------------------


class Schedule(NamedTuple):
    """The blocks of each grid step. A task is one outer block of one row of the batch, numbered
    row-major."""

    # i32[steps]: the task each step serves; as long as if everything were visible, used up to
    # start[-1]
    task: Array
    start: Array  # i32[tasks + 1]: the first step of each task; start[-1] is the number of steps
    # i32[tasks]: the task itself, or for one with nothing to do the last one before it that had
    source: Array
    first: Array  # i32[tasks]: the first inner block of each task; the others follow it


def make_schedule(first: Int[Array, "B I"], end: Int[Array, "B I"], inner_blocks: int) -> Schedule:
    """The schedule that visits inner blocks first <= j < end of every outer block; empty ranges get
    one idle step."""
    if reason := schedule_unsupported_reason(first.size, inner_blocks):
        raise NotImplementedError(f"attention on TPUs {reason}")
    count = jnp.maximum(end - first, 0).reshape(-1)
    tasks, steps = (jnp.arange(n, dtype=jnp.int32) for n in (count.size, count.size * inner_blocks))
    start = jnp.pad(jnp.cumsum(jnp.maximum(count, 1), dtype=jnp.int32), (1, 0))
    task = jnp.searchsorted(start[1:], steps, side="right", method="compare_all").astype(jnp.int32)
    source = lax.cummax(jnp.where(count > 0, tasks, 0))
    return Schedule(
        jnp.minimum(task, count.size - 1),
        start,
        source,
        jnp.where(count > 0, first.reshape(-1), 0).astype(jnp.int32),
    )


def fetched(step, task, start, source, first):
    """(task, inner block) whose operands `step` uses; for an idle step those of the step before."""
    busy = source[task[step]]
    return busy, first[busy] + jnp.minimum(step - start[busy], start[busy + 1] - start[busy] - 1)


def block_specs(
    locate, heads: int, block_q: int, block_kv: int, head_dim: int
) -> dict[str, pl.BlockSpec]:
    """`locate` maps grid indices and scalars to (batch row, block of query heads, kv head, query
    block, key block)."""

    def spec(block, pick):
        return pl.BlockSpec(block, lambda *args: pick(*locate(*args)))

    return {
        "q": spec((None, None, heads, block_q, head_dim), lambda b, n, k, i, j: (b, n, 0, i, 0)),
        "kv": spec((None, None, block_kv, head_dim), lambda b, n, k, i, j: (b, k, j, 0)),
        "lse": spec((None, None, heads, block_q), lambda b, n, k, i, j: (b, n, 0, i)),
        "q_ids": spec((None, 1, block_q), lambda b, n, k, i, j: (b, 0, i)),
        "kv_ids": spec((None, 1, block_kv), lambda b, n, k, i, j: (b, 0, j)),
    }


def paged_specs(
    locate,
    block_kv: int,
    pool: tuple[int, ...],
    page_table: Int[Array, "B P"],
    *,
    positions_minor: bool,
):
    """(block specs that look up their pages, the page table as the last of the scalars): one spec
    for each page of a block of keys."""
    num_pages = pool[0]
    page = pool[3 if positions_minor else 2]
    size = min(page, block_kv)
    each, parts = block_kv // size, page // size  # pages a block, blocks a page: one of them is 1
    # Entries of an idle row and beyond the last key may be anything: their pages are fetched at
    # times, though not used.
    table = jnp.clip(page_table, 0, num_pages - 1)
    table = jnp.pad(table, ((0, 0), (0, -page_table.shape[1] % each)))

    def spec(i):
        def index(*args):
            b, _, k, _, j = locate(*args)
            entry, part = (j * each + i, 0) if parts == 1 else (j // parts, j % parts)
            entry = args[-1][b * table.shape[1] + entry]
            return (entry, k, 0, part) if positions_minor else (entry, k, part, 0)

        block = (pool[2], size) if positions_minor else (size, pool[3])
        return pl.BlockSpec((None, None, *block), index)

    return tuple(map(spec, range(each))), table.reshape(-1)


def first_visible(query0, window: int | None):
    """The first key that a query at `query0` sees; None without a window."""
    if window is None:
        return None
    return query0 - (window - 1)


def lanes(x: Array, width: int) -> Array:
    """rows 128 -> rows `width`, of values repeated over the lanes."""
    if width > LANES:
        x = jnp.tile(x, (1, pl.cdiv(width, LANES)))
    return x[:, :width]
