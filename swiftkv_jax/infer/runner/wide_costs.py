"""The costs of wide decode calls, measured before the first request."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from ...process.distributed import from_process_0
from ..engine.shapes import DecodeCall, Shapes
from .decode_state import DecodeBatch, empty_batch
from .lowering import DecodeProgram

MOST_CACHED = 1024
"""Most tokens of the sequences of a measurement."""
SECONDS = 0.3
"""Seconds in which a ratio is measured again and again, for each number of rows."""
FEWEST = 3
"""Fewest measurements of a ratio: the first call after the start may take twice as long as the next
ones, and other work may delay any."""
LONGEST = 3.0
"""Seconds after which fewer are enough: long calls differ less."""
SAMPLE = 0.02
"""Seconds of calls whose average is a sample."""


def measured_batch(shapes: Shapes, count: int) -> DecodeBatch:
    """Sequences in the middle of their answers, which end with their page tables. Their pages hold
    anything."""
    batch = empty_batch(count, shapes)
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
    """`ModelRunnerBase.wide_costs`, as process 0 measures them, of plain greedy sequences: without
    the sampler, whose cost grows with the width too. `fill` puts batches of so many
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

        def seconds(program: DecodeProgram) -> float:
            """Seconds of a call, on average over `SAMPLE`: other work on a CPU delays short calls
            as it does long ones."""
            total, count = 0.0, 0
            while total < SAMPLE:
                fill(lambda count: measured_batch(shapes, count))
                start = time.perf_counter()
                jax.block_until_ready(run(program, slots))
                total, count = total + time.perf_counter() - start, count + 1
            return total / count

        ratios, begin, passed = [], time.perf_counter(), 0.0
        while passed < (SECONDS if len(ratios) >= FEWEST else LONGEST):
            narrow, wide = (
                seconds(program) / call.steps for program, call in zip(programs, calls, strict=True)
            )
            ratios.append(wide / narrow)
            passed = time.perf_counter() - begin
        return statistics.median_low(ratios)

    shards = range(shapes.dp_size)
    costs = tuple(cost(rows) for rows in shapes.decode_rows)
    fill(lambda count: empty_batch(count, shapes))
    return from_process_0(costs)
