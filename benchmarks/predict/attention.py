"""Predicted times of the Hopper kernels: thread blocks in the order of their launch, each with the
cycles or bytes that it needs."""

from __future__ import annotations

import collections
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.pallas_kernels import segments
from swiftkv_jax.pallas_kernels.decode_plan import DecodePlan
from swiftkv_jax.pallas_kernels.hopper import backward, backward_block, decode, prefill
from swiftkv_jax.pallas_kernels.tuning import tuning_for

from ..kernels.shapes import Decode, Prefill, Shape
from .devices import DeviceModel

_BLOCK = 128  # queries, and keys, that `pair_cycles` and `gradient_product_cycles` are for
_LONG = 8192  # positions of a row beyond which `long_share` holds
_visible_kv_blocks = jax.jit(segments.visible_kv_blocks, static_argnums=(1, 2))
_visible_q_blocks = jax.jit(segments.visible_q_blocks, static_argnums=(1, 2))


def seconds(device: DeviceModel, shape: Shape) -> float:
    """Seconds of one call of the Hopper kernels, launches included."""
    if isinstance(shape, Decode):
        return decode_seconds(device, shape, shape.lengths)
    forward = device.launch + prefill_seconds(device, shape)
    return forward + gradient_seconds(device, shape) if shape.gradient else forward


# Prefill ----------------------------------------------------------------------


def prefill_seconds(device: DeviceModel, shape: Prefill) -> float:
    """Seconds from the first tile to the last. The kernel starts all heads of the longest tiles
    first."""
    kernel = "hopper.prefill.packed" if shape.packed else "hopper.prefill"
    tuning = tuning_for(prefill.Tuning, kernel, shape.head_dim, jnp.bfloat16, device.kind)
    tile = 2 * tuning.block_q
    if shape.packed:
        first, end = _visible_kv_blocks(_segment_ids(shape), tile, tuning.block_kv)
        blocks = np.asarray(end - first)[0].tolist()
    else:
        starts = range(0, shape.queries, tile)
        ends = [shape.offset + min(start + tile, shape.queries) for start in starts]
        blocks = [-(-end // tuning.block_kv) for end in ends]
    tiles = [prefill_tile(device, tuning, shape.head_dim, count) for count in reversed(blocks)]
    cycles = makespan(
        (tile for tile in tiles for _ in range(shape.batch * shape.heads)), device.multiprocessors
    )
    return cycles / device.clock / _sustained(device, shape.keys)


def prefill_tile(device: DeviceModel, tuning: prefill.Tuning, head_dim: int, blocks: int) -> float:
    """Cycles of a tile of 2 `block_q` queries of one head that sees `blocks` key blocks."""
    if not blocks:
        return device.idle_tile_cycles
    tensor = 2048 * head_dim / _BLOCK
    # A warpgroup issues its scores in a quarter of these, and then needs their exponentials.
    loop = max(tensor, tensor / 4 + device.exponential_cycles) / 2048
    size = 2 * tuning.block_q / _BLOCK * tuning.block_kv / _BLOCK
    return device.tile_cycles + blocks * size * loop * device.pair_cycles


def gradient_seconds(device: DeviceModel, shape: Prefill) -> float:
    """Seconds of the three backward kernels after the forward pass: the row sums of out x d_out, 3
    products for the gradient of queries, 4 for that of keys and values."""
    tuning = tuning_for(
        backward.Tuning, "hopper.backward", shape.head_dim, jnp.bfloat16, device.kind
    )
    ids, rows = _segment_ids(shape), backward_block.ROWS
    delta = 2 * 2 * shape.batch * shape.queries * shape.heads * shape.head_dim / device.copy

    def kernel(bounds, products: int, tile: int, block: int, heads: int, passes: int) -> float:
        """Tiles from the longest to the shortest, for each of `heads`; a tile walks its blocks
        `passes` times."""
        size = tile / _BLOCK * block / _BLOCK * shape.head_dim / _BLOCK
        cycles = products * device.gradient_product_cycles * size * passes
        first, end = bounds
        blocks = sorted(np.asarray(end - first)[0].tolist(), reverse=True)
        return makespan(
            (
                device.gradient_tile_cycles + count * cycles
                for count in blocks
                for _ in range(shape.batch * heads)
            ),
            device.multiprocessors,
        )

    tile_q, tile_kv = rows * tuning.dq_warpgroups, rows * tuning.dkv_warpgroups
    cycles = kernel(
        _visible_kv_blocks(ids, tile_q, tuning.dq_block_kv),
        3,
        tile_q,
        tuning.dq_block_kv,
        shape.heads,
        1,
    ) + kernel(
        _visible_q_blocks(ids, tuning.dkv_block_q, tile_kv),
        4,
        tile_kv,
        tuning.dkv_block_q,
        shape.kv_heads,
        shape.heads // shape.kv_heads,
    )
    return delta + 3 * device.launch + cycles / device.clock


def makespan(times: Iterable[float], workers: int) -> float:
    """When all have ended that `workers` take in this order, each the next as soon as it is
    free."""
    free = [0.0] * workers
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def _segment_ids(shape: Prefill) -> jax.Array:
    """i32[1, T]: the documents of every row."""
    ids = np.repeat(np.arange(len(shape.documents), dtype=np.int32), shape.documents)
    return jnp.asarray(ids[None])


def _sustained(device: DeviceModel, keys: int) -> float:
    return device.long_share if keys > _LONG else 1.0


# Decoding ---------------------------------------------------------------------


def decode_seconds(device: DeviceModel, shape: Decode, lengths: Sequence[int]) -> float:
    """Seconds of the two kernels of decode attention, launches included, for rows of `lengths`
    instead of those of `shape`."""
    plan = work_list(device, shape, lengths)
    tiles = np.asarray(plan.entries)[:, 2] - np.asarray(plan.entries)[:, 1]
    # Whole tiles, and all heads of an entry next to each other.
    sizes = np.repeat(tiles * plan.tile * (shape.position_bytes // shape.kv_heads), shape.kv_heads)
    columns = 8 * math.ceil(shape.heads / shape.kv_heads / 8)
    partial_bytes = 4 * len(sizes) * (shape.head_dim + 1) * columns
    reading = reading_seconds(
        sizes.tolist(),
        slots=device.decode_slots * device.multiprocessors,
        latency=device.decode_block,
        block_rate=device.decode_block_rate,
        bandwidth=device.decode_bandwidth(shape.cache),
    )
    return reading + 2 * device.launch + 2 * partial_bytes / device.copy


def work_list(device: DeviceModel, shape: Decode, lengths: Sequence[int]) -> DecodePlan:
    """The plan that the kernel follows, by its own host code."""
    tuning = tuning_for(decode.Tuning, "hopper.decode", shape.head_dim, shape.cache, device.kind)
    rows, page = len(lengths), shape.page
    q = jax.ShapeDtypeStruct((rows, 1, shape.heads, shape.head_dim), jnp.bfloat16)
    k, table = (rows, shape.kv_heads, shape.keys, shape.head_dim), None
    if page is not None:
        table = (rows, (shape.table or shape.keys) // page)
        k = (rows * shape.keys // page, shape.kv_heads, page, shape.head_dim)
    operands = tuning, q, jax.ShapeDtypeStruct(k, jnp.dtype(shape.cache)), table
    return _planner(decode.plan, *operands)(jnp.asarray(lengths, jnp.int32))


@functools.cache
def _planner(plan: Callable[..., DecodePlan], tuning, q, k, table: tuple[int, int] | None):
    """`plan` for operands of these shapes, compiled as a function of the lengths."""

    def run(length):
        page_table = None if table is None else jnp.zeros(table, jnp.int32)
        return plan(q, k, length, page_table, tuning=tuning)

    return jax.jit(run)


def reading_seconds(
    sizes: Iterable[float], *, slots: int, latency: float, block_rate: float, bandwidth: float
) -> float:
    """Seconds until thread blocks that read `sizes` bytes have ended.

    They start in this order, each as soon as one of `slots` is free. A block waits `latency`, and
    then reads beside the others: at `block_rate` bytes a second at most, and all of them together
    at `bandwidth`, in equal shares.
    """
    waiting = collections.deque(sizes)
    starting: collections.deque[tuple[float, float]] = collections.deque()  # (when it reads, bytes)
    reading: list[float] = []  # bytes that a block from the start on has read when each ends
    now = read = 0.0
    while waiting or starting or reading:
        while waiting and len(starting) + len(reading) < slots:
            starting.append((now + latency, waiting.popleft()))
        rate = min(block_rate, bandwidth / len(reading)) if reading else math.inf
        until_start = starting[0][0] - now if starting else math.inf
        until_end = (reading[0] - read) / rate if reading else math.inf
        step = min(until_start, until_end)
        now += step
        read += step * rate if reading else 0.0
        if until_start <= until_end:
            _, size = starting.popleft()
            heapq.heappush(reading, read + size)
        else:
            heapq.heappop(reading)
    return now
