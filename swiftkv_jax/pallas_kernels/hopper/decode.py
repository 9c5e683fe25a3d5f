"""Decode attention for Hopper: a few queries per row against a long cache, at the speed of memory.

The floor is one read of the cache: 4 H bytes per position and head in bf16, 2 H + 8 in 8 bits.
B=64, K=8, S=2048, H=128 is 0.54 GB, 125 us at the 4.3 TB/s an H200 copies with. Little's law asks
for 4.3 TB/s x 1 us / 132 SMs = 33 kB in flight on each SM; the rings hold about 200 kB.

A block has one entry of the work list (`decode_plan`), a split of a row, and one key/value head.
The heads of an entry run next to each other: a page is read as a whole. The T * G queries that read
the head form one tile, so each byte is read once, and no tile beyond `length` or before the window
is. One warpgroup keeps a ring of TMA loads full, the other multiplies. Where registers and shared
memory allow, two blocks share an SM: one fills its ring while the other finishes. Each writes
4 (H + 1) C bytes, C being T * G in whole eights, and a second kernel (`decode_combine`) weighs and
sums those of a row.

wgmma always multiplies 64 rows, so the operands are swapped: S^T = K Q^T and O^T = V^T P^T have
keys and head dims on the rows and only C = 8, 16 .. 64 columns of queries. A byte of bf16 then
costs C FLOPs, 34 TFLOP/s at 4.3 TB/s and C=8; queries padded to 64 rows would always need 275, and
550 for an 8-bit cache, of the roughly 800 there are. In return the maximum runs over the rows of an
accumulator, an exchange between the warps per tile; the sums stay apart until the end.

8-bit keys are widened in registers and multiplied from there. wgmma transposes only 16-bit operands
in shared memory, so 8-bit values are widened into a tile there. int8 becomes the dtype of q: Pallas
has a short sequence of instructions for bfloat16, and none for float16. FP8 always becomes float16,
and is multiplied in it: Hopper converts a pair to that in one instruction, to bfloat16 in four, by
way of float32. float16 holds every e4m3 number, but has a narrow range. The other two operands are
brought into it without loss, whatever their magnitudes:
- each query by a power of two, chosen by the largest of its H numbers and undone in the scores;
- weights times the scales of the values by the running maximum of that product, which is subtracted
  from the scores in place of their own: as a shift of the exponentials it serves as well.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..decode_plan import DecodePlan, make_plan
from ..operands import AttentionOperands, page_size
from .decode_combine import (
    UNSEEN,
    combine,
    head_dim_parts,
    store_plain,
    tile_transforms,
    to_columns,
)
from .decode_tuning import LEAST_TILES, Tuning, fit, splits, unsupported_reason
from .padding import pad

__all__ = ["Tuning", "attention", "plan", "unsupported_reason"]

_LEAST = 2.0**-100  # numbers below it count as it where their inverse must be finite
_LAYOUT = plgpu.Layout.WGMMA
_Accumulator = plgpu.WGMMAAccumulatorRef


def attention(
    operands: AttentionOperands,
    work: DecodePlan | None = None,
    *,
    tuning: Tuning,
    window: int | None = None,
    return_lse: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"] | None]:
    """Attention of these operands, with `window` of each query to the last so many positions; with
    `return_lse` also the logarithm of each query's sum of exponentials, -inf where it sees nothing.

    `work` is their `plan`. What no query sees may be anything finite. Without a page table, an S
    that is no multiple of 8 costs a padded copy of the cache.
    """
    q = operands.q
    k = operands.k
    v = operands.v
    length = operands.length
    k_scale = operands.k_scale
    v_scale = operands.v_scale
    page_table = operands.page_table
    B, T, N, H = q.shape
    K = k.shape[1]
    S = k.shape[2]
    G = N // k.shape[1]
    tuning = fit(tuning, H, T * G, k.dtype.itemsize, page_size(operands))
    if work is None:
        work = plan(operands, tuning=tuning, window=window)
    if work.window != window:
        raise ValueError(
            f"plan is for window={work.window}, this call has {window=}: make one for each window"
        )
    if work.tile != tuning.block_kv or work.row_entries.shape[0] != B:
        raise ValueError(
            f"plan is for {work.row_entries.shape[0]} rows in tiles of {work.tile} positions, this "
            f"call has {B} rows in tiles of {tuning.block_kv}: make it with plan_decode from "
            f"operands of the same shapes"
        )
    if page_table is None and S % 8:
        k, v, k_scale, v_scale = jax.tree.map(lambda x: pad(x, 2, 8), (k, v, k_scale, v_scale))
    product = jnp.float16 if k.dtype == jnp.float8_e4m3fn else q.dtype
    rows = q.reshape(B, T, K, G, H).swapaxes(1, 2).reshape(B, K, T * G, H)
    rows = pad(rows, 2, 8)

    W = work.entries.shape[0]
    C = rows.shape[2]
    wide = k_scale is not None
    block_kv = tuning.block_kv
    slots = 2 * tuning.stages
    tile = tile_transforms(H, 2)
    partial = (
        jax.ShapeDtypeStruct((W, K, H, C), jnp.float32),
        jax.ShapeDtypeStruct((W, K, C), jnp.float32),
    )
    scale_smem = wide_smem = None
    if wide:
        scale_smem = plgpu.SMEM((slots, block_kv), jnp.float32)
        wide_smem = plgpu.SMEM((block_kv, H), product, transforms=tile)
    scratch: Any = dict(
        q_smem=plgpu.SMEM((C, H), q.dtype, transforms=tile),
        half_smem=plgpu.SMEM((C, H), product, transforms=tile) if product != q.dtype else None,
        ring_smem=plgpu.SMEM(
            (slots, block_kv, H), k.dtype, transforms=tile_transforms(H, k.dtype.itemsize)
        ),
        scale_smem=scale_smem,
        wide_smem=wide_smem,
        p_smem=plgpu.SMEM((C, block_kv), product, transforms=tile),
        q_full=plgpu.Barrier(num_arrivals=1, num_barriers=1),
        full=plgpu.Barrier(num_arrivals=1 + wide, num_barriers=slots),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=slots),
    )
    # The scratch for reductions lets all columns be reduced in one exchange between the warps.
    params = plgpu.CompilerParams(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        reduction_scratch_bytes=128 * C,
    )
    o, lse = plgpu.kernel(
        functools.partial(_kernel, queries=T, group_size=G, window=window),
        out_type=partial,
        scratch_types=scratch,
        # The last axis runs fastest.
        grid=(W, K),
        grid_names=("entry", "head"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="hopper_decode",
        compiler_params=params,
    )(rows, k, v, length, work.entries, k_scale, v_scale, page_table)
    out, lse = combine(
        o, lse, work.row_entries, queries=T * G, dtype=q.dtype, return_lse=return_lse
    )
    out = out.reshape(B, K, T, G, H).swapaxes(1, 2).reshape(q.shape)
    return out, None if lse is None else lse.reshape(B, K, T, G).swapaxes(1, 2).reshape(B, T, N)


def plan(operands: AttentionOperands, *, tuning: Tuning, window: int | None = None) -> DecodePlan:
    """The work list of `attention` of these operands. Only their `length` has to be an array."""
    _, T, N, H = operands.q.shape
    K = operands.k.shape[1]
    page = page_size(operands)
    tile = fit(tuning, H, T * (N // K), operands.k.dtype.itemsize, page).block_kv
    return make_plan(
        operands.length,
        tile=tile,
        room=pl.cdiv(operands.keys, tile),
        splits=splits(K),
        least=LEAST_TILES,
        window=window,
        queries=T,
    )


def _kernel(
    # Inputs
    q_gmem,  # B K C H
    k_gmem,  # B K S H, or X K page H
    v_gmem,  # as k_gmem
    length_gmem,  # B
    entries_gmem,  # W 3: row, first tile, end
    k_scale_gmem,  # None, or B K S, or X K page
    v_scale_gmem,  # as k_scale_gmem
    table_gmem,  # None, or B P
    # Outputs
    o_gmem,  # W K H C
    lse_gmem,  # W K C
    # Scratch
    q_smem,  # C H
    half_smem,  # None, or C H: the queries in float16
    ring_smem,  # 2 * stages, block_kv, H: K and V by turns
    scale_smem,  # None, or 2 * stages, block_kv
    wide_smem,  # None, or block_kv H
    p_smem,  # C block_kv
    q_full,  # 1
    full,  # 2 * stages
    free,  # 2 * stages
    *,
    queries: int,
    group_size: int,
    window: int | None,
):
    (slots, block_kv, H), C = ring_smem.shape, q_smem.shape[0]
    stages = jnp.int32(slots // 2)
    entry, head, warpgroup = (lax.axis_index(name) for name in ("entry", "head", "warpgroup"))
    row, first, end = (entries_gmem[entry, i] for i in range(3))
    length = length_gmem[row]

    def slots_of(i):
        slot = 2 * lax.rem(i - first, stages)
        return slot, slot + 1

    @pl.when(warpgroup == 1)
    def _load():
        @pl.loop(first, end)
        def _(i):
            index = row
            tile = i
            if table_gmem is not None:  # read before the wait for a slot, which hides the latency
                tiles_per_page = jnp.int32(k_gmem.shape[2] // block_kv)
                index = table_gmem[row, lax.div(i, tiles_per_page)]
                tile = lax.rem(i, tiles_per_page)
            at = (index, head, pl.ds(tile * block_kv, block_kv))
            for slot, source, scales in zip(
                slots_of(i), (k_gmem, v_gmem), (k_scale_gmem, v_scale_gmem), strict=True
            ):
                pl.when(i - first >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                plgpu.copy_gmem_to_smem(source.at[at], ring_smem.at[slot], full.at[slot])
                if scales is not None:
                    plgpu.copy_gmem_to_smem(scales.at[at], scale_smem.at[slot], full.at[slot])

        @pl.loop(lax.max(end - stages, first), end)
        def _(i):  # drain: no phase of a barrier may be left unobserved
            for slot in slots_of(i):
                plgpu.barrier_wait(free.at[slot])

    @pl.when((warpgroup == 0) & (first < end))
    def _multiply():
        plgpu.copy_gmem_to_smem(q_gmem.at[row, head, pl.ds(0, C)], q_smem, q_full.at[0])
        plgpu.barrier_wait(q_full.at[0])
        # wgmma takes 64 rows at a time, keys or head dims.
        keys = [pl.ds(start, 64) for start in range(0, block_kv, 64)]
        parts = head_dim_parts(H)
        chunks = [pl.ds(start, math.gcd(H, 64)) for start in range(0, H, math.gcd(H, 64))]
        key, query = (
            plgpu.broadcasted_iota(jnp.int32, (64, C), dimension, layout=_LAYOUT)
            for dimension in (0, 1)
        )
        # float16 loses bits below 2**-14: weights, which are at most 1, are moved up.
        weight_scale = 2.0**15 if p_smem.dtype == jnp.float16 else 1.0
        by_values = wide_smem is not None and p_smem.dtype == jnp.float16
        visible_end = (
            length
            if queries == 1
            else length - (queries - 1) + lax.div(query, jnp.int32(group_size))
        )

        def visible(start):
            end = visible_end - start
            return key < end if window is None else (key < end) & (key >= end - window)

        queries_smem = q_smem
        undo = None
        if half_smem is not None:
            q = [q_smem.at[:, part].T[...].astype(jnp.float32) for part in parts]
            largest = functools.reduce(jnp.maximum, [jnp.abs(x).max(axis=0) for x in q])
            up, undo = _to_float16_range(largest)
            for x, part in zip(q, parts, strict=True):
                half_smem.at[:, part].T[...] = (x * to_columns(up, x.shape[0])).astype(jnp.float16)
            plgpu.commit_smem()
            queries_smem = half_smem

        def scores(slot, rows, acc):
            if wide_smem is None:
                plgpu.wgmma(acc, ring_smem.at[slot, rows], queries_smem.T)
            else:
                for chunk in chunks:
                    plgpu.wgmma(
                        acc,
                        ring_smem[slot, rows, chunk].astype(queries_smem.dtype),
                        queries_smem.at[:, chunk].T,
                    )
                    # Frees the chunk's registers: with over 128 a thread, no second block fits.
                    plgpu.wgmma_wait(0)
            return acc[...]

        def step(i, carry):
            o, m, total = carry
            k_slot, v_slot = slots_of(i)

            # 1. S^T = K Q^T, in units of log2
            plgpu.barrier_wait(full.at[k_slot])
            s = [
                pl.run_scoped(
                    functools.partial(scores, k_slot, rows), _Accumulator((64, C), jnp.float32)
                )
                for rows in keys
            ]
            s = [
                _scale_rows(x, scale_smem, (k_slot, rows), H**-0.5 * math.log2(math.e))
                for x, rows in zip(s, keys, strict=True)
            ]
            if undo is not None:
                s = [x * to_columns(undo, 64) for x in s]
            s = [
                jnp.where(visible(i * block_kv + rows.start), x, -jnp.inf)
                for x, rows in zip(s, keys, strict=True)
            ]

            # 2. P^T, and what the new maximum makes of the old sums
            weighed = s
            if by_values:
                plgpu.barrier_wait(full.at[v_slot])
                weighed = [
                    x + _to_rows(jnp.log2(_scales(scale_smem, (v_slot, rows), _LEAST)), C)
                    for x, rows in zip(s, keys, strict=True)
                ]
            m_new = jnp.maximum(m, functools.reduce(jnp.maximum, weighed).max(axis=0))
            p = [jnp.exp2(x - to_columns(m_new, 64)) for x in s]
            correction = jnp.exp2(m - m_new)
            total = total * to_columns(correction, 64) + sum(p)

            # 3. P and, if need be, V in 16 bits to shared memory
            if not by_values:
                plgpu.barrier_wait(full.at[v_slot])
            for x, rows in zip(p, keys, strict=True):
                weights = _scale_rows(x, scale_smem, (v_slot, rows), weight_scale)
                p_smem.at[:, rows].T[...] = weights.astype(p_smem.dtype)
            if wide_smem is not None:
                for rows, chunk in itertools.product(keys, chunks):
                    wide_smem[rows, chunk] = ring_smem[v_slot, rows, chunk].astype(wide_smem.dtype)
            # for wgmma; it also keeps the next TMA write behind our own reads of the slots
            plgpu.commit_smem()
            plgpu.barrier_arrive(free.at[k_slot])
            if wide_smem is not None:  # V has been copied
                plgpu.barrier_arrive(free.at[v_slot])

            # 4. O^T += V^T P^T
            def accumulate(accumulators):
                values = ring_smem.at[v_slot] if wide_smem is None else wide_smem
                for acc, part in zip(accumulators, parts, strict=True):
                    plgpu.wgmma(acc, values.at[:, part].T, p_smem.T)

            o = pl.run_state(accumulate)(
                [_Accumulator.init(x * to_columns(correction, x.shape[0])) for x in o]
            )
            if wide_smem is None:
                plgpu.barrier_arrive(free.at[v_slot])
            return o, m_new, total

        o = [plgpu.layout_cast(jnp.zeros((part.size, C), jnp.float32), _LAYOUT) for part in parts]
        m = plgpu.layout_cast(jnp.full((C,), UNSEEN, jnp.float32), _LAYOUT.reduce(0))
        # Summed over its rows at the end.
        total = plgpu.layout_cast(jnp.zeros((64, C), jnp.float32), _LAYOUT)
        o, m, total = lax.fori_loop(first, end, step, (o, m, total))

        # 5. Normalise and store. What saw nothing stores zeros and the weight of nothing.
        total = total.sum(axis=0)
        inverse = jnp.where(total > 0, (1 / weight_scale) / total, 0.0)
        for x, part in zip(o, parts, strict=True):
            o_gmem[entry, head, part] = x * to_columns(inverse, x.shape[0])
        lse = jnp.where(total > 0, m * math.log(2) + jnp.log(total), UNSEEN)
        store_plain(lse_gmem.at[entry, head], lse)


def _to_float16_range(largest):
    """(the powers of two that bring numbers of up to `largest` to less than 2**15, their inverses).

    What was between 2**-31 of the largest and it is then above 2**-17, where float16 holds the 8
    bits of a bfloat16. With infinity or NaN among the numbers those become NaN.
    """
    bits = lax.bitcast_convert_type(jnp.maximum(largest, _LEAST), jnp.int32)
    power = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    return 2.0**14 / power, power * 2.0**-14


def _scales(scales, index, least=None):
    """Scales of 64 rows of a tile, in the layout of its rows; those below `least` are that."""
    x = plgpu.layout_cast(scales[index], _LAYOUT.reduce(1))
    return x if least is None else jnp.maximum(x, least)


def _scale_rows(x, scales, index, factor=1.0):
    if scales is None:
        return x * factor
    return x * _to_rows(_scales(scales, index) * factor, x.shape[1])


def _to_rows(x, columns):
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])
