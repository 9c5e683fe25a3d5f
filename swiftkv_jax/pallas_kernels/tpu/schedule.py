"""The list of blocks that a prefill or gradient kernel visits, in scalar memory, and where their
operands lie in HBM."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from .prefill_tuning import schedule_obstacle


class Schedule(NamedTuple):
    """Which blocks each grid step works on. A task is one outer block of one row of the batch,
    numbered row-major."""

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
    if reason := schedule_obstacle(first.size, inner_blocks):
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
    """(block specs that look their pages up, the table as the last of the scalars): one spec for
    each page of a block of keys."""
    blocks, page = pool[0], pool[3 if positions_minor else 2]
    size = min(page, block_kv)
    each, parts = (
        block_kv // size,
        page // size,
    )  # pages of a block, blocks of a page: one of them is 1
    # An idle row and what lies beyond the last key may hold anything, and are fetched at times,
    # though not looked at.
    table = jnp.pad(jnp.clip(page_table, 0, blocks - 1), ((0, 0), (0, -page_table.shape[1] % each)))

    def spec(i):
        def index(*args):
            b, _, k, _, j = locate(*args)
            entry, part = (j * each + i, 0) if parts == 1 else (j // parts, j % parts)
            return (
                args[-1][b * table.shape[1] + entry],
                k,
                *((0, part) if positions_minor else (part, 0)),
            )

        block = (pool[2], size) if positions_minor else (size, pool[3])
        return pl.BlockSpec((None, None, *block), index)

    return tuple(map(spec, range(each))), table.reshape(-1)
