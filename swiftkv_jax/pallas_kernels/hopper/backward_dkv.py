"""The gradients with respect to keys and values: see `backward`."""

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
    COLUMN,
    REGISTERS,
    ROWS,
    Accumulator,
    across,
    causal_mask,
    compiler_params,
    documents_of,
    hidden_zero,
    i32,
    load_rows,
    weights,
)


def dkv(q, k, v, segment_ids, d_out, lse, delta, tuning, window):
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    block_q = tuning.dkv_block_q
    stages = tuning.dkv_stages
    warpgroups = tuning.dkv_warpgroups
    split = head_dim > 128  # dk and dv to different warpgroups
    owners = 1 if split else warpgroups  # parts of 64 keys
    tile_kv = ROWS * owners
    tiles = pl.cdiv(length, tile_kv)
    ids, documents = documents_of(segment_ids, batch, length, math.lcm(tile_kv, block_q))
    first, end = segments.visible_q_blocks(documents, block_q, tile_kv, window)
    query_end = segments.run_ends(documents)[:, ::tile_kv]
    if window is not None:
        query_end = jnp.minimum(query_end, jnp.arange(tiles) * tile_kv + window)
    bounds = jnp.stack([first, query_end // block_q, end])

    def kernel(
        q_gmem,  # B T N H
        k_gmem,  # B K T H
        v_gmem,  # B K T H
        do_gmem,  # B T N H
        lse_gmem,  # B N T, like delta padded at the end and in base 2
        delta_gmem,  # B N T
        ids_gmem,  # B T or None
        # 3 B tiles: first visible block, first that an edge of a document or window crosses, end
        bounds_gmem,
        dk_gmem,  # B K T H
        dv_gmem,  # B K T H
        k_smem,  # owners 64 H; dk in the end
        v_smem,  # owners 64 H; dv in the end
        q_smem,  # stages block_q H
        do_smem,  # stages block_q H
        lse_smem,  # stages block_q
        delta_smem,  # stages block_q
        kv_full,
        kv_read,
        q_full,
        do_full,
        q_free,
        do_free,
    ):
        tile, b, h, wg = (lax.axis_index(name) for name in ("tile", "batch", "kv_head", "wg"))
        first, clear, end = (bounds_gmem[x, b, tile] for x in range(3))
        start, stop = (
            first * group,
            end * group,
        )  # a step is one query block of one head; the heads of a block in a row

        @pl.when(wg == warpgroups)
        def _producer():
            plgpu.set_max_registers(REGISTERS[warpgroups][0], action="decrease")
            for w in range(owners):
                rows = pl.ds(tile * tile_kv + w * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(k_gmem.at[b, h, rows], k_smem.at[w], kv_full.at[w])
                plgpu.copy_gmem_to_smem(v_gmem.at[b, h, rows], v_smem.at[w], kv_full.at[w])

            @pl.loop(start, stop)
            def _load(step):
                stage = lax.rem(step, i32(stages))
                n = h * group + lax.rem(step, i32(group))
                rows = pl.ds(lax.div(step, i32(group)) * block_q, block_q)
                for block, vector, block_smem, vector_smem, full, free in (
                    (q_gmem, lse_gmem, q_smem, lse_smem, q_full, q_free),
                    (do_gmem, delta_gmem, do_smem, delta_smem, do_full, do_free),
                ):
                    pl.when(step >= start + stages)(
                        functools.partial(plgpu.barrier_wait, free.at[stage])
                    )
                    plgpu.copy_gmem_to_smem(
                        block.at[b, rows, n], block_smem.at[stage], full.at[stage]
                    )
                    plgpu.copy_gmem_to_smem(
                        vector.at[b, n, rows], vector_smem.at[stage], full.at[stage]
                    )

            # Whatever was loaded must be seen consumed before the block ends.
            @pl.loop(lax.max(stop - stages, start), stop)
            def _drain(step):
                stage = lax.rem(step, i32(stages))
                plgpu.barrier_wait(q_free.at[stage])
                plgpu.barrier_wait(do_free.at[stage])

        def consume(owner, names):
            """Sum the gradients in `names` of part `owner` of the tile."""
            k_start = tile * tile_kv + owner * ROWS
            rows = pl.ds(k_start, ROWS)
            shape = (ROWS, block_q)
            row_ids = load_rows(ids_gmem, b, rows)
            plgpu.barrier_wait(kv_full.at[owner])

            def walk(*accs):
                acc = dict(zip(names, accs, strict=True))

                def block(step, masked):
                    stage = lax.rem(step, i32(stages))
                    q_start = lax.div(step, i32(group)) * block_q
                    mask = None
                    if masked:
                        columns = q_start, ids_gmem, b, shape
                        mask = functools.partial(
                            causal_mask, k_start, row_ids, *columns, lax.le, window
                        )

                    # 1. P, transposed.
                    def scores(s_acc):
                        plgpu.barrier_wait(q_full.at[stage])
                        plgpu.wgmma(
                            s_acc,
                            k_smem.at[owner + hidden_zero(step)],
                            q_smem.at[stage].transpose((1, 0)),
                        )
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                        return weights(
                            s,
                            mask,
                            across(plgpu.load(lse_smem.at[stage], layout=COLUMN), shape),
                            head_dim,
                        )

                    p = pl.run_scoped(scores, Accumulator(shape, jnp.float32))
                    plgpu.barrier_wait(do_full.at[stage])

                    # 2. dP and dV += P dO, which is still running when dP is read.
                    def d_scores(dp_acc):
                        plgpu.wgmma(
                            dp_acc,
                            v_smem.at[owner + hidden_zero(step)],
                            do_smem.at[stage].transpose((1, 0)),
                        )
                        if "dv" in acc:
                            plgpu.wgmma(acc["dv"], p.astype(q.dtype), do_smem.at[stage])
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=len(acc) - 1)
                        return p * (
                            dp - across(plgpu.load(delta_smem.at[stage], layout=COLUMN), shape)
                        )

                    # 3. dK += dS Q.
                    if "dk" in acc:
                        ds = pl.run_scoped(d_scores, Accumulator(shape, jnp.float32))
                        plgpu.wgmma(acc["dk"], ds.astype(q.dtype), q_smem.at[stage])
                    else:
                        plgpu.wgmma(acc["dv"], p.astype(q.dtype), do_smem.at[stage])
                    plgpu.commit_smem()  # orders the reads of lse and delta before the next loads
                    plgpu.wgmma_wait(len(acc) - 1)
                    plgpu.barrier_arrive(do_free.at[stage])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(q_free.at[stage])

                diagonal = lax.clamp(first, pl.cdiv(k_start + ROWS - 1, i32(block_q)), end)
                edge = lax.clamp(diagonal, clear, end)
                pl.loop(start, diagonal * group)(functools.partial(block, masked=True))
                pl.loop(diagonal * group, edge * group)(functools.partial(block, masked=False))
                if ids_gmem is not None or window is not None:
                    pl.loop(edge * group, stop)(functools.partial(block, masked=True))
                return tuple(plgpu.wgmma_accumulator_load(a, wait_n=0) for a in accs)

            grads = pl.run_scoped(walk, *[Accumulator((ROWS, head_dim), jnp.float32)] * len(names))
            if split:
                plgpu.barrier_arrive(kv_read)
                plgpu.barrier_wait(kv_read)
            for name, grad in zip(names, grads, strict=True):
                scale, smem, gmem = (
                    (head_dim**-0.5, k_smem, dk_gmem) if name == "dk" else (1.0, v_smem, dv_gmem)
                )
                smem.at[owner][...] = (grad * scale).astype(q.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem.at[owner], gmem.at[b, h, rows])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(wg < warpgroups)
        def _consumer():
            plgpu.set_max_registers(REGISTERS[warpgroups][1], action="increase")
            if split:
                pl.when(wg == 0)(lambda: consume(0, ("dv",)))
                pl.when(wg == 1)(lambda: consume(0, ("dk",)))
            else:
                consume(wg, ("dk", "dv"))

    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        scratch_types=[
            plgpu.SMEM((owners, ROWS, head_dim), q.dtype),
            plgpu.SMEM((owners, ROWS, head_dim), q.dtype),
            plgpu.SMEM((stages, block_q, head_dim), q.dtype),
            plgpu.SMEM((stages, block_q, head_dim), q.dtype),
            plgpu.SMEM((stages, block_q), jnp.float32),
            plgpu.SMEM((stages, block_q), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=owners),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=1) if split else None,
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        ],
        grid=(tiles, batch, kv_heads),
        grid_names=("tile", "batch", "kv_head"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        kernel_name="hopper_dkv",
        compiler_params=compiler_params(),
    )(q, k, v, d_out, lse, delta, ids, bounds)
