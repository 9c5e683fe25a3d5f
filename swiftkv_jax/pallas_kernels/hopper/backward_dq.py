"""The gradient with respect to the queries: see `backward`."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import segments
from .backward_block import (
    REGISTERS,
    ROW,
    ROWS,
    Accumulator,
    causal_mask,
    compiler_params,
    documents_of,
    down,
    hidden_zero,
    i32,
    load_rows,
    weights,
)


def dq(q, k, v, segment_ids, d_out, lse, delta, tuning, window):
    batch, length, heads, head_dim = q.shape
    group = heads // k.shape[1]
    block_kv = tuning.dq_block_kv
    stages = tuning.dq_stages
    warpgroups = tuning.dq_warpgroups
    tile_q = ROWS * warpgroups
    tiles = pl.cdiv(length, tile_q)
    ids, documents = documents_of(segment_ids, batch, length, math.lcm(tile_q, block_kv))
    first, end = segments.visible_kv_blocks(documents, tile_q, block_kv, window)
    last_query = jnp.minimum(jnp.arange(1, tiles + 1) * tile_q, documents.shape[1]) - 1
    first_key = segments.run_starts(documents)[:, last_query]
    if window is not None:
        first_key = jnp.maximum(first_key, last_query - (window - 1))
    bounds = jnp.stack([first, pl.cdiv(first_key, block_kv), end])

    def kernel(
        q_gmem,  # B T N H
        k_gmem,  # B K T H
        v_gmem,  # B K T H
        do_gmem,  # B T N H
        lse_gmem,  # B N T, like delta padded at the end and in base 2
        delta_gmem,  # B N T
        ids_gmem,  # B T or None
        # 3 B tiles: first visible block, first that no edge of a document or window crosses, end
        bounds_gmem,
        dq_gmem,  # B T N H
        q_smem,  # warpgroups 64 H; dq in the end
        do_smem,  # warpgroups 64 H
        kv_smem,  # stages block_kv H: V and K of a block by turns
        q_full,
        kv_full,
        kv_free,
    ):
        tile = tiles - 1 - lax.axis_index("tile")
        b = lax.axis_index("batch")
        n = lax.axis_index("head")
        wg = lax.axis_index("wg")
        first, clear, end = (bounds_gmem[x, b, tile] for x in range(3))

        @pl.when(wg == warpgroups)
        def _producer():
            plgpu.set_max_registers(REGISTERS[warpgroups][0], action="decrease")
            for w in range(warpgroups):
                rows = pl.ds(tile * tile_q + w * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q_gmem.at[b, rows, n], q_smem.at[w], q_full.at[w])
                plgpu.copy_gmem_to_smem(do_gmem.at[b, rows, n], do_smem.at[w], q_full.at[w])

            @pl.loop(first, end)
            def _load(j):
                for turn, gmem in enumerate((v_gmem, k_gmem)):
                    stage = lax.rem(2 * j + turn, i32(stages))
                    pl.when(2 * j + turn >= 2 * first + stages)(
                        functools.partial(plgpu.barrier_wait, kv_free.at[stage])
                    )
                    rows = pl.ds(j * block_kv, block_kv)
                    plgpu.copy_gmem_to_smem(
                        gmem.at[b, lax.div(n, i32(group)), rows],
                        kv_smem.at[stage],
                        kv_full.at[stage],
                    )

            # Whatever was loaded must be seen consumed before the block ends.
            @pl.loop(lax.max(2 * end - stages, 2 * first), 2 * end)
            def _drain(item):
                plgpu.barrier_wait(kv_free.at[lax.rem(item, i32(stages))])

        @pl.when(wg < warpgroups)
        def _consumer():
            plgpu.set_max_registers(REGISTERS[warpgroups][1], action="increase")
            q_start = tile * tile_q + wg * ROWS
            rows = pl.ds(q_start, ROWS)
            shape = (ROWS, block_kv)
            lse = plgpu.load(lse_gmem.at[b, n, rows], layout=ROW, optimized=False)
            delta = plgpu.load(delta_gmem.at[b, n, rows], layout=ROW, optimized=False)
            row_ids = load_rows(ids_gmem, b, rows)
            plgpu.barrier_wait(q_full.at[wg])

            def walk(dq_acc):
                def block(j, masked):
                    v_stage = lax.rem(2 * j, i32(stages))
                    k_stage = lax.rem(2 * j + 1, i32(stages))
                    mask = None
                    if masked:
                        columns = j * block_kv, ids_gmem, b, shape
                        mask = functools.partial(
                            causal_mask, q_start, row_ids, *columns, lax.ge, window
                        )

                    # 1. S and dP; the exponentials of S run while dP is still being multiplied.
                    def scores(s_acc, dp_acc):
                        plgpu.barrier_wait(kv_full.at[v_stage])
                        plgpu.barrier_wait(kv_full.at[k_stage])
                        plgpu.wgmma(
                            s_acc,
                            q_smem.at[wg + hidden_zero(j)],
                            kv_smem.at[k_stage].transpose((1, 0)),
                        )
                        plgpu.wgmma(
                            dp_acc,
                            do_smem.at[wg + hidden_zero(j)],
                            kv_smem.at[v_stage].transpose((1, 0)),
                        )
                        p = weights(
                            plgpu.wgmma_accumulator_load(s_acc, wait_n=1),
                            mask,
                            down(lse, shape),
                            head_dim,
                        )
                        return p, plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)

                    p, dp = pl.run_scoped(
                        scores, Accumulator(shape, jnp.float32), Accumulator(shape, jnp.float32)
                    )
                    plgpu.barrier_arrive(kv_free.at[v_stage])

                    # 2. dQ += dS K.
                    ds = p * (dp - down(delta, shape))
                    plgpu.wgmma(dq_acc, ds.astype(q.dtype), kv_smem.at[k_stage])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(kv_free.at[k_stage])

                diagonal = lax.clamp(first, lax.div(q_start, i32(block_kv)), end)
                edge = lax.clamp(first, clear, diagonal)
                if ids_gmem is not None or window is not None:
                    pl.loop(first, edge)(functools.partial(block, masked=True))
                pl.loop(edge, diagonal)(functools.partial(block, masked=False))
                pl.loop(diagonal, end)(functools.partial(block, masked=True))
                return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

            dq = pl.run_scoped(walk, Accumulator((ROWS, head_dim), jnp.float32))
            q_smem.at[wg][...] = (dq * head_dim**-0.5).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[wg], dq_gmem.at[b, rows, n])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            plgpu.SMEM((warpgroups, ROWS, head_dim), q.dtype),
            plgpu.SMEM((warpgroups, ROWS, head_dim), q.dtype),
            plgpu.SMEM((stages, block_kv, head_dim), q.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        ],
        grid=(tiles, batch, heads),
        grid_names=("tile", "batch", "head"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        kernel_name="hopper_dq",
        compiler_params=compiler_params(),
    )(q, k, v, d_out, lse, delta, ids, bounds)
