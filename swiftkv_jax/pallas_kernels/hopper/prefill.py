"""Causal grouped-query attention of many queries on Hopper: FlashAttention-3's schedule in Pallas
Mosaic GPU.

A thread block owns a tile of 2 x `block_q` queries of one head and has three warpgroups. One only
issues TMA copies of K and V blocks into rings of `stages` slots; the other two each multiply for
their half of the queries. The softmax, which tensor cores cannot do, is hidden twice: behind the
warpgroup's own products (step i issues S_i = Q K_i^T and O += P_{i-1} V_{i-1} together, and turns
S_i into P_i while the second one runs), and behind the other warpgroup's (they take turns at
issuing, `ping_pong`, so that one exponentiates while the other multiplies).

Key blocks are walked from the last visible one to the first. Blocks past the last visible key of
the tile, or before its first document or window, are neither loaded nor multiplied; only blocks cut
by the diagonal, or by the edge of a document or of the window, are masked. Tiles with the most keys
start first, and the query heads of one key/value head run next to each other to share the L2.
`prefill_tiles` has the order of the tiles and the loads, `prefill_tuning` what can be chosen: with
`persistent` a thread block works on several tiles, with `multicast` two thread blocks share their
loads.

Cost for T queries after P cached keys: 4 H (T P + T^2 / 2) FLOPs per head and 2 (2 T N + 2 (P + T)
K) H bytes, so from a few hundred queries on the floor is the tensor cores' 989 TFLOP/s. The
exponentials, one per 4 H FLOPs at 16 per clock and multiprocessor, take half as long as the
products at H = 128 and just as long at H = 64.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from .. import segments
from ..operands import AttentionOperands, page_size
from .padding import pad
from .prefill_tiles import Ring, Tile, drain, full_from, launch, load_keys_and_values, tile_at, walk
from .prefill_tuning import CLUSTER, CONSUMERS, Tuning, fit, for_heads, unsupported_reason

__all__ = ["Tuning", "attention", "fit", "for_heads", "unsupported_reason"]

_LOG2E = math.log2(math.e)
_TILE = plgpu.Layout.WGMMA  # of a query x key or query x feature array in registers
_Accumulator = plgpu.WGMMAAccumulatorRef
_ROWS = _TILE.reduce(1)
_LANES = 8  # columns after which the threads of _TILE repeat: the width of a row's partial sums


def attention(
    operands: AttentionOperands,
    *,
    tuning: Tuning,
    window: int | None = None,
    save_lse: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"] | None]:
    """Attention of these operands, with `window` of each query to the last so many positions; with
    `save_lse` also log(sum(exp(scores))), +inf where a query sees nothing.

    Without `q_offset` that is 0, without `lengths` all queries are real: a block then starts its
    loads without reading either first. What no query sees may be anything finite, and pages that no
    real query sees are not read. An S that is not a multiple of 8 costs a padded copy of k and v, a
    T only one of q.
    """
    q = operands.q
    k = operands.k
    v = operands.v
    page_table = operands.page_table
    segment_ids = operands.segment_ids
    batch, queries, heads, head_dim = q.shape
    tuning = fit(tuning, page_size(operands))
    block_q = tuning.block_q
    block_kv = tuning.block_kv
    stages = tuning.stages
    tiles = pl.cdiv(queries, tile := CONSUMERS * block_q)
    # TMA addresses rows of 8 positions; boxes that stick out of the array read zeros there and
    # write nothing. The pages of a pool are multiples of 64: it is never padded.
    q = pad(q, 1, 8)
    k = pad(k, 2, 8)
    v = pad(v, 2, 8)
    ids = first_visible = first_full = None
    if segment_ids is not None:
        ids = pad(segment_ids.astype(jnp.int32), 1, math.lcm(tile, block_kv), value=None)
        first_visible, _ = segments.visible_kv_blocks(ids, tile, block_kv, window)
        first_full = full_from(ids, block_q, block_kv, window)

    swizzle = next(s for s in (128, 64, 32) if head_dim * q.dtype.itemsize % s == 0)
    width = swizzle // q.dtype.itemsize
    tiling = plgpu.TilingTransform((8, width))  # pyright: ignore[reportAbstractUsage]
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]
    rows = plgpu.SMEM((CONSUMERS, block_q, head_dim), q.dtype, transforms=transforms)
    ring = plgpu.SMEM((stages, block_kv, head_dim), q.dtype, transforms=transforms)
    lse = lse_type = None
    if save_lse:
        lse = plgpu.SMEM((CONSUMERS, block_q), jnp.float32)
        # Whole tiles: a one-dimensional store is clipped at the end of the array, not of its row.
        lse_type = jax.ShapeDtypeStruct((batch, heads, tiles * tile), jnp.float32)
    own = plgpu.Barrier(num_barriers=CONSUMERS)
    ready = plgpu.Barrier(num_barriers=stages)
    free = _free_slots(tuning)
    grid = (tiles, batch, heads // CLUSTER if tuning.multicast else heads)
    limits = operands.q_offset, operands.lengths
    bounds = first_visible, first_full, ids
    inputs = (q, k, v, *limits, *bounds, page_table, operands.kv_lengths)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, tuning=tuning, queries=queries, grid=grid, window=window),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype), lse_type],
        scratch_types=[
            *(rows, rows if tuning.persistent else None, ring, ring, lse),
            *(own, own if tuning.persistent else None, ready, ready, free, free, own),
        ],
        **launch(grid, tuning),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="hopper_prefill",
        # Lane: every layout is stated here. Rows are reduced within a quad of threads, which needs
        # no scratch.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*inputs)
    return out[:, :queries], None if lse is None else lse[:, :, :queries]


def _free_slots(tuning: Tuning):
    """Barriers of the slots of a ring that each consumer arrives at when it has read one: with
    `multicast` at those of both thread blocks, since a slot is filled in both at once."""
    slots: Any = {"num_barriers": tuning.stages, "num_arrivals": CONSUMERS}
    if tuning.multicast:
        return plgpu.ClusterBarrier(collective_axes=("rank",), **slots)
    return plgpu.Barrier(**slots)


def _kernel(
    # Inputs
    q_gmem,  # B T N H
    k_gmem,  # B K S H, or X K page H
    v_gmem,  # as k_gmem
    offset_gmem,  # B, or None
    lengths_gmem,  # B, or None
    first_visible_gmem,  # B tiles, or None without segment_ids
    first_full_gmem,  # B 2*tiles, or None
    ids_gmem,  # B T, or None
    table_gmem,  # B P, or None
    kv_lengths_gmem,  # B, or None
    # Outputs
    out_gmem,  # B T N H
    lse_gmem,  # B N T, or None
    # Scratch
    q_smem,  # 2 block_q H
    out_smem,  # 2 block_q H, or None: in place of the queries
    k_smem,  # stages block_kv H
    v_smem,  # stages block_kv H
    lse_smem,  # 2 block_q, or None
    q_ready,  # 2
    q_free,  # 2, or None
    k_ready,  # stages
    v_ready,  # stages
    k_free,  # stages
    v_free,  # stages
    turn,  # 2: whose turn it is to issue matrix products
    *,
    tuning: Tuning,
    queries: int,
    grid: tuple[int, int, int],
    window: int | None,
):
    block_q = tuning.block_q
    block_kv = tuning.block_kv
    persistent = tuning.persistent
    head_dim = q_gmem.shape[3]
    group = q_gmem.shape[2] // k_gmem.shape[1]
    scale = head_dim**-0.5 * _LOG2E  # of the scores as exponents of 2
    warpgroup = lax.axis_index("warpgroup")
    keys = Ring(k_gmem, k_smem, k_ready, k_free, tuning.stages)
    values = Ring(v_gmem, v_smem, v_ready, v_free, tuning.stages)

    find = functools.partial(
        tile_at,
        *(offset_gmem, lengths_gmem, kv_lengths_gmem, first_visible_gmem),
        tiles=grid[0],
        queries=queries,
        tuning=tuning,
        window=window,
    )
    for_each_tile = walk(grid, tuning, find)

    def load_queries(tile: Tile, consumer):
        rows = pl.ds(tile.start + consumer * block_q, block_q)
        plgpu.copy_gmem_to_smem(
            q_gmem.at[tile.batch, rows, tile.head], q_smem.at[consumer], q_ready.at[consumer]
        )

    @pl.when(warpgroup == CONSUMERS)
    def producer():
        plgpu.set_max_registers(24, action="decrease")

        def load_tile(tile: Tile, done):
            def load_queries_when_free():
                for consumer in range(CONSUMERS):
                    pl.when(done > 0)(lambda w=consumer: plgpu.barrier_wait(q_free.at[w]))
                    load_queries(tile, consumer)

            load_keys_and_values(
                *(tile, done, keys, values, lax.div(tile.head, jnp.int32(group)), table_gmem),
                multicast=tuning.multicast,
                load_queries=load_queries_when_free if persistent else None,
            )

        total = for_each_tile(load_tile)
        drain(total, keys, values)
        if persistent:
            for consumer in range(CONSUMERS):
                pl.when(total > 0)(lambda w=consumer: plgpu.barrier_wait(q_free.at[w]))

    def spread(x, columns):
        return lax.broadcast_in_dim(x, (block_q, columns), [0])

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def product(acc, a, b) -> Any:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(_Accumulator.init(acc))

    def attend(tile: Tile, done):
        batch = tile.batch
        head = tile.head
        end = tile.end
        steps = tile.steps
        start = tile.start + warpgroup * block_q
        rows = pl.ds(start, block_q)
        q = q_smem.at[warpgroup]

        def slot(i):
            return keys.slot(done + i)

        def store(value, smem, gmem):
            smem[...] = value.astype(smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, gmem)

        def finish(out, lse):
            if persistent:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output of the tile before
            smem = q_smem if out_smem is None else out_smem
            store(out, smem.at[warpgroup], out_gmem.at[batch, rows, head])
            if lse_gmem is not None:
                store(lse, lse_smem.at[warpgroup], lse_gmem.at[batch, head, rows])
            if not persistent:  # what is written, the next kernel sees
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(steps == 0)(
            lambda: finish(full((block_q, head_dim), 0.0, _TILE), full((block_q,), jnp.inf, _ROWS))
        )

        @pl.when(steps > 0)
        def _():
            if not persistent:
                load_queries(tile, warpgroup)
            position = (
                tile.offset + start + plgpu.broadcasted_iota(jnp.int32, (block_q,), 0, layout=_ROWS)
            )
            zeros = full((block_q, block_kv), 0.0, _TILE)
            # Neither the diagonal nor the edge of a document or of the window cuts the blocks of
            # the steps between these two.
            diagonal_end = end - lax.div(tile.offset + start + 1, jnp.int32(block_kv))
            edge = steps
            if ids_gmem is not None:
                edge = end - first_full_gmem[batch, tile.number * CONSUMERS + warpgroup]
            elif window is not None:
                first_of_last = lax.max(tile.offset + start + block_q - window, 0)
                edge = end - pl.cdiv(first_of_last, jnp.int32(block_kv))

            def mask(i, s):
                cols = tile.keys(i)
                key = cols.start + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=_TILE)
                visible = key <= spread(position, block_kv)
                if window is not None:
                    visible &= key > spread(position - window, block_kv)
                if kv_lengths_gmem is not None:  # they cut the last block only
                    visible &= key < kv_lengths_gmem[batch]
                if ids_gmem is not None:  # read for each masked block: registers are short
                    q_ids = plgpu.load(ids_gmem.at[batch, rows], layout=_ROWS, optimized=False)
                    kv_ids = plgpu.load(
                        ids_gmem.at[batch, cols], layout=_TILE.reduce(0), optimized=False
                    )
                    visible &= lax.broadcast_in_dim(kv_ids, s.shape, [1]) == spread(q_ids, block_kv)
                return jnp.where(visible, s, -jnp.inf)

            def softmax(s, m, total):
                """The exponentials of a block, the new maxima and sums, and the factor that what
                was summed shrinks by."""
                m_new = jnp.maximum(m, s.max(axis=1) * scale)
                # A row that has seen nothing yet has the maximum -inf: any finite shift gives it
                # exponentials of 0.
                shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
                alpha = jnp.exp2(m - shift)
                p = jnp.exp2(s * scale - spread(shift, block_kv))
                # Each thread sums what it holds; the sum over threads waits until the end.
                total = total * spread(alpha, _LANES) + sum(
                    p[:, j : j + _LANES] for j in range(0, block_kv, _LANES)
                )
                return p, m_new, total, alpha

            def step(i, carry):
                acc, p, m, total = carry
                now = slot(i)
                before = keys.before(now)
                after = keys.after(now)
                pl.when(tuning.ping_pong)(lambda: plgpu.barrier_wait(turn.at[warpgroup]))

                def overlapped(refs):
                    acc_ref, s_ref, p_ref, m_ref, total_ref, alpha_ref = refs
                    plgpu.wgmma(s_ref, q, k_smem.at[now].transpose((1, 0)))
                    plgpu.barrier_wait(v_ready.at[before])
                    plgpu.wgmma(acc_ref, p, v_smem.at[before])
                    pl.when(tuning.ping_pong)(lambda: plgpu.barrier_arrive(turn.at[1 - warpgroup]))
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)  # P V goes on
                    plgpu.barrier_arrive(k_free.at[now])
                    s = lax.cond((i < diagonal_end) | (i >= edge), lambda: mask(i, s), lambda: s)
                    # Compilers like to move the exponentials past the wait for P V that ends this
                    # function. LLVM keeps to the barrier on the values, ptxas does not cross the
                    # branches of the wait for the next K.
                    values = lax.optimization_barrier(softmax(s, m_ref[...], total_ref[...]))
                    p_ref[...], m_ref[...], total_ref[...], alpha_ref[...] = values
                    pl.when(i + 1 < steps)(lambda: plgpu.barrier_wait(k_ready.at[after]))

                state: Any = (_Accumulator.init(acc), _Accumulator.init(zeros), zeros, m, total, m)
                acc, _, p, m, total, alpha = pl.run_state(overlapped)(state)
                plgpu.barrier_arrive(v_free.at[before])
                return acc * spread(alpha, head_dim), p.astype(v_smem.dtype), m, total

            # 1. The last block, always masked: S_0 and its softmax.
            if not persistent:
                begin_turns()
            plgpu.barrier_wait(q_ready.at[warpgroup])
            plgpu.barrier_wait(k_ready.at[slot(0)])
            s = mask(jnp.int32(0), product(zeros, q, k_smem.at[slot(0)].transpose((1, 0))))
            plgpu.barrier_arrive(k_free.at[slot(0)])
            p, m, total, _ = softmax(
                s, full((block_q,), -jnp.inf, _ROWS), full((block_q, _LANES), 0.0, _TILE)
            )
            pl.when(steps > 1)(lambda: plgpu.barrier_wait(k_ready.at[slot(1)]))

            # 2. The other blocks.
            carry = (full((block_q, head_dim), 0.0, _TILE), p.astype(v_smem.dtype), m, total)
            acc, p, m, total = lax.fori_loop(1, steps, step, carry)
            if persistent:
                plgpu.barrier_arrive(q_free.at[warpgroup])

            # 3. The last product, and the output.
            last = slot(steps - 1)
            plgpu.barrier_wait(v_ready.at[last])
            acc = product(acc, p, v_smem.at[last])
            plgpu.barrier_arrive(v_free.at[last])
            total = total.sum(axis=1)
            out = acc * spread(1.0 / total, head_dim)
            lse = m * (1 / _LOG2E) + jnp.log(total)
            valid = None
            if lengths_gmem is not None:  # read again: registers are short
                start_of_row = 0 if offset_gmem is None else offset_gmem[batch]
                valid = position < start_of_row + lengths_gmem[batch]
            if kv_lengths_gmem is not None and window is not None:  # past all keys in its window
                valid = total > 0 if valid is None else valid & (total > 0)
            if valid is not None:
                out = jnp.where(spread(valid, head_dim), out, 0.0)
                lse = jnp.where(valid, lse, jnp.inf)
            finish(out, lse)
            if not persistent:
                end_turns()

    def begin_turns():
        """Warpgroup 0 begins."""
        pl.when(tuning.ping_pong and warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

    def end_turns():
        """Wait for the turn that is left: both warpgroups take as many, so the last one handed over
        is not taken."""
        pl.when(tuning.ping_pong and warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    @pl.when(warpgroup < CONSUMERS)
    def consumer():
        plgpu.set_max_registers(240, action="increase")
        if persistent:  # turns go on from tile to tile
            begin_turns()
        for_each_tile(attend)
        if persistent:
            end_turns()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
