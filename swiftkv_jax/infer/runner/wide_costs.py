"""The costs of wide decode calls, measured before the first request."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import jax
import numpy as np

from ...process.distributed import from_process_0
from ..engine.speculation import DecodeCall
from .decode_state import DecodeBatch
from .lowering import DecodeProgram
from .shapes import Shapes

MOST_CACHED = 1024
"""Most tokens of the sequences of a measurement."""
SECONDS = 0.2
"""Seconds of runs for each number of rows, with one of each program at least. The fastest count."""


def measured_batch(shapes: Shapes, count: int) -> DecodeBatch:
    """Sequences in the middle of their answers, which end with their page tables. Their pages hold
    anything."""
    batch = shapes.empty_batch(count)
    pages = np.arange(count * shapes.table_pages, dtype=np.int32) % shapes.num_pages
    most = shapes.table_pages * shapes.page_size
    cached = min(MOST_CACHED, most // 2)
    return dataclasses.replace(
        batch,
        length=np.full(count, cached, np.int32),
        remaining=np.full(count, most - cached, np.int32),
        page_table=pages.reshape(count, -1),
    )


def measure_wide_costs(
    shapes: Shapes,
    fill: Callable[[Callable[[int], DecodeBatch]], object],
    run: Callable[[DecodeProgram, list[list[int]]], object],
) -> tuple[float, ...]:
    """`ModelRunnerBase.wide_costs`, as process 0 measures them. `fill` puts batches of so many
    sequences into all slots and waits; `run` runs a program with some slots of each shard."""
    if not shapes.widths:
        return ()

    def cost(rows: int) -> float:
        single = rows in shapes.single_step_sizes
        calls = DecodeCall(1 if single else shapes.decode_steps), shapes.wide_call(rows)
        programs = [
            DecodeProgram(
                rows,
                shapes.decode_kind(call, plain_greedy=True),
                single_step=single and call.width == 1,
                width=call.width,
            )
            for call in calls
        ]
        slots = [[shard * shapes.slots + row for row in range(rows)] for shard in shards]
        best, begin = [math.inf, math.inf], time.perf_counter()
        while math.inf in best or time.perf_counter() - begin < SECONDS:
            fill(lambda count: measured_batch(shapes, count))
            for index, program in enumerate(programs):
                start = time.perf_counter()
                jax.block_until_ready(run(program, slots))
                best[index] = min(best[index], time.perf_counter() - start)
        narrow, wide = (one / call.steps for one, call in zip(best, calls, strict=True))
        return wide / narrow

    shards = range(shapes.dp_size)
    costs = tuple(cost(rows) for rows in shapes.decode_rows)
    fill(shapes.empty_batch)
    return from_process_0(costs)
