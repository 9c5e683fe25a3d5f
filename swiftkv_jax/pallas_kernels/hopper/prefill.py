"""Causal grouped-query attention of many queries on Hopper: FlashAttention-3's schedule in Pallas
Mosaic GPU.

A thread block owns a tile of 2 x `block_q` queries of one head and has three warpgroups. One only
issues TMA copies of K and V blocks into rings of `stages` slots; the other two each multiply for
their half of the queries. The softmax, which tensor cores cannot do, is hidden twice: behind the
warpgroup's own products (step i issues S_i = Q K_i^T and O += P_{i-1} V_{i-1} together, and turns
S_i into P_i while the second one runs), and behind the other warpgroup's (they take turns at
issuing, `ping_pong`, so that one exponentiates while the other multiplies).

Key blocks are walked from the last visible one to the first. Blocks past the last visible key of
the tile, or before its first document, are neither loaded nor multiplied; only blocks cut by the
diagonal or by the edge of a document are masked. Tiles with the most keys start first, and the
query heads of one key/value head run next to each other to share the L2.

Cost for T queries after P cached keys: 4 H (T P + T^2 / 2) FLOPs per head and 2 (2 T N + 2 (P + T)
K) H bytes, so from a few hundred queries on the floor is the tensor cores' 989 TFLOP/s. The
exponentials, one per 4 H FLOPs at 16 per clock and multiprocessor, take half as long as the
products at H = 128 and just as long at H = 64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .. import segments
from ..device import HEAD_DIMS
from .padding import pad

_CONSUMERS = 2
_REGISTERS = 192  # of a consumer's thread, beside those for addresses and counters
_LOG2E = math.log2(math.e)
_TILE = plgpu.Layout.WGMMA  # of a query x key or query x feature array in registers
_Accumulator = plgpu.WGMMAAccumulatorRef
_ROWS = _TILE.reduce(1)
_LANES = 8  # columns after which the threads of _TILE repeat: the width of a row's partial sums


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Block sizes and schedule; more stages hide more of the loads' latency."""

    block_q: int = 64  # queries of one consumer warpgroup; a thread block has twice as many
    block_kv: int = 128
    stages: int = 2
    ping_pong: bool = True

    def __post_init__(self):
        if self.block_q < 64 or self.block_q % 64:
            raise ValueError(f"{self.block_q=} must be a multiple of 64")
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(f"{self.block_kv=} must be a multiple of 64, at most 256")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2")


def unsupported_reason(q, k, page_table, tuning: Tuning) -> str | None:
    """Why the kernel cannot run on operands of these shapes and dtypes; None if it can. Keys have,
    or are widened to, the dtype of q."""
    head_dim, page = q.shape[3], k.shape[2]
    if page_table is not None and page % 64:
        return f"takes pages of a multiple of 64 positions, got {page} with {k.shape=}"
    tuning = fit(tuning, None if page_table is None else page)
    block_q, block_kv = tuning.block_q, tuning.block_kv
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 or float16, got {q.dtype=}"
    if head_dim not in HEAD_DIMS:
        return f"takes head dims {HEAD_DIMS}, got {q.shape=}"
    registers = block_q // 64 * (head_dim // 2 + 3 * block_kv // 4) + block_kv // 4
    if registers > _REGISTERS:
        return (
            f"needs {registers} registers for O, S, P and the mask with {tuning} and "
            f"{q.shape=}, at most {_REGISTERS} fit"
        )
    return None


def fit(tuning: Tuning, page: int | None = None) -> Tuning:
    """`tuning` with blocks of keys that divide `page`, a multiple of 64. Smaller blocks get as many
    more stages."""
    if page is None or page % tuning.block_kv == 0:
        return tuning
    block_kv = max(block for block in range(64, tuning.block_kv, 64) if page % block == 0)
    return dataclasses.replace(
        tuning, block_kv=block_kv, stages=tuning.stages * tuning.block_kv // block_kv
    )


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"] | Float[Array, "X K page H"],
    v: Float[Array, "B K S H"] | Float[Array, "X K page H"],
    offset: Int[Array, "B"] | None,
    lengths: Int[Array, "B"] | None,
    segment_ids: Int[Array, "B T"] | None,
    page_table: Int[Array, "B P"] | None = None,
    *,
    tuning: Tuning,
    save_lse: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"] | None]:
    """Attention of query t of row b to the keys s <= offset[b] + t, if t < lengths[b]; otherwise
    zeros. Without `offset` that is 0, without `lengths` all queries are real: a block then starts
    its loads without reading either first.

    With `segment_ids` (then S = T and offset = 0) only to those of its own document. `offset[b] + T
    <= S`; keys and values that no query sees may be anything finite. With `save_lse` also returns
    log(sum(exp(scores))), +inf where a query sees nothing. An S that is not a multiple of 8 costs a
    padded copy of k and v, a T only one of q.

    With `page_table` (and no segment ids) k and v are a pool: position s of row b is position `s %
    page` of page `page_table[b, s // page]`, and only `offset[b] + lengths[b] <= P page`. Pages
    that no real query sees are not read.
    """
    batch, queries, heads, head_dim = q.shape
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype=}, {k.dtype=}, {v.dtype=}")
    if reason := unsupported_reason(q, k, page_table, tuning):
        raise NotImplementedError(f"attention on Hopper {reason}")
    tuning = fit(tuning, None if page_table is None else k.shape[2])
    block_q, block_kv, stages = tuning.block_q, tuning.block_kv, tuning.stages
    tiles = pl.cdiv(queries, tile := _CONSUMERS * block_q)
    # TMA addresses rows of 8 positions; boxes that stick out of the array read zeros there and
    # write nothing. The pages of a pool are multiples of 64: it is never padded.
    q, k, v = pad(q, 1, 8), pad(k, 2, 8), pad(v, 2, 8)
    ids = first_visible = first_full = None
    if segment_ids is not None:
        ids = pad(segment_ids.astype(jnp.int32), 1, math.lcm(tile, block_kv), value=None)
        first_visible, _ = segments.visible_kv_blocks(ids, tile, block_kv)
        first_full = _first_full_block(ids, block_q, block_kv)

    swizzle = next(s for s in (128, 64, 32) if head_dim * q.dtype.itemsize % s == 0)
    width = swizzle // q.dtype.itemsize
    tiling = plgpu.TilingTransform((8, width))  # pyright: ignore[reportAbstractUsage]
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]
    qo = plgpu.SMEM((_CONSUMERS, block_q, head_dim), q.dtype, transforms=transforms)
    ring = plgpu.SMEM((stages, block_kv, head_dim), q.dtype, transforms=transforms)
    lse = plgpu.SMEM((_CONSUMERS, block_q), jnp.float32) if save_lse else None
    own = plgpu.Barrier(num_barriers=_CONSUMERS)
    ready, free = (plgpu.Barrier(num_barriers=stages, num_arrivals=n) for n in (1, _CONSUMERS))
    # Whole tiles: a one-dimensional store is clipped at the end of the array, not of its row.
    lse_type = jax.ShapeDtypeStruct((batch, heads, tiles * tile), jnp.float32) if save_lse else None
    inputs = (q, k, v, offset, lengths, first_visible, first_full, ids, page_table)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, tuning=tuning, queries=queries),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype), lse_type],
        scratch_types=[qo, ring, ring, lse, own, ready, ready, free, free, own],
        # The last axis runs fastest: all heads of the longest tiles start first.
        grid=(tiles, batch, heads),
        grid_names=("tile", "batch", "head"),
        num_threads=_CONSUMERS + 1,
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


def _first_full_block(ids, block_q, block_kv):
    """int32[B, I]: the first key block from which on all keys before query block i are of the
    document of all its queries."""
    return pl.cdiv(segments.run_starts(ids)[:, block_q - 1 :: block_q], block_kv)


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
    # Outputs
    out_gmem,  # B T N H
    lse_gmem,  # B N T, or None
    # Scratch
    qo_smem,  # 2 block_q H: the queries, in the end the output
    k_smem,  # stages block_kv H
    v_smem,  # stages block_kv H
    lse_smem,  # 2 block_q, or None
    q_ready,  # 2
    k_ready,  # stages
    v_ready,  # stages
    k_free,  # stages
    v_free,  # stages
    turn,  # 2: whose turn it is to issue matrix products
    *,
    tuning: Tuning,
    queries: int,
):
    block_q, block_kv = tuning.block_q, tuning.block_kv
    head_dim = q_gmem.shape[3]
    scale = head_dim**-0.5 * _LOG2E  # of the scores as exponents of 2
    head, batch, warpgroup = (lax.axis_index(name) for name in ("head", "batch", "warpgroup"))
    tile = lax.axis_size("tile") - 1 - lax.axis_index("tile")
    tile_start = tile * (_CONSUMERS * block_q)
    offset = jnp.int32(0) if offset_gmem is None else offset_gmem[batch]
    length = jnp.int32(queries) if lengths_gmem is None else lengths_gmem[batch]
    # Key blocks [first, end) are visible to the tile. They are counted backwards: step i works on
    # block end - 1 - i.
    end = pl.cdiv(offset + lax.min(tile_start + _CONSUMERS * block_q, length), jnp.int32(block_kv))
    first = jnp.int32(0) if ids_gmem is None else first_visible_gmem[batch, tile]
    steps = jnp.where(tile_start < length, end - first, 0)

    def slot(i):
        return lax.rem(i, jnp.int32(tuning.stages))

    def keys(i):
        return pl.ds((end - 1 - i) * block_kv, block_kv)

    @pl.when(warpgroup == _CONSUMERS)
    def producer():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(q_gmem.shape[2] // k_gmem.shape[1]))

        per_page = jnp.int32(k_gmem.shape[2] // block_kv)

        def row_or_page(i):
            return (
                batch if table_gmem is None else table_gmem[batch, lax.div(end - 1 - i, per_page)]
            )

        def keys_there(i):
            return (
                keys(i)
                if table_gmem is None
                else pl.ds(lax.rem(end - 1 - i, per_page) * block_kv, block_kv)
            )

        def load(i, gmem, smem, ready, free):
            index = row_or_page(i)  # read before the wait for a slot, which hides the latency
            pl.when(i >= tuning.stages)(lambda: plgpu.barrier_wait(free.at[slot(i)]))
            plgpu.copy_gmem_to_smem(
                gmem.at[index, kv_head, keys_there(i)], smem.at[slot(i)], ready.at[slot(i)]
            )

        # In the order of use: K_0, K_1 V_0, K_2 V_1, ..., V_last.
        @pl.loop(0, steps + 1)
        def _(i):
            pl.when(i < steps)(lambda: load(i, k_gmem, k_smem, k_ready, k_free))
            pl.when(i > 0)(lambda: load(i - 1, v_gmem, v_smem, v_ready, v_free))

        @pl.loop(lax.max(steps - tuning.stages, 0), steps)
        def _(i):
            plgpu.barrier_wait(k_free.at[slot(i)])
            plgpu.barrier_wait(v_free.at[slot(i)])

    def spread(x, columns):
        return lax.broadcast_in_dim(x, (block_q, columns), [0])

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def product(acc, a, b) -> Any:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(_Accumulator.init(acc))

    @pl.when(warpgroup < _CONSUMERS)
    def consumer():
        plgpu.set_max_registers(240, action="increase")
        start = tile_start + warpgroup * block_q
        rows = pl.ds(start, block_q)
        qo = qo_smem.at[warpgroup]

        def store(value, smem, gmem):
            smem[...] = value.astype(smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, gmem)

        def finish(out, lse):
            store(out, qo, out_gmem.at[batch, rows, head])
            if lse_gmem is not None:
                store(lse, lse_smem.at[warpgroup], lse_gmem.at[batch, head, rows])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is written, the next kernel sees

        pl.when(steps == 0)(
            lambda: finish(full((block_q, head_dim), 0.0, _TILE), full((block_q,), jnp.inf, _ROWS))
        )

        @pl.when(steps > 0)
        def _():
            plgpu.copy_gmem_to_smem(q_gmem.at[batch, rows, head], qo, q_ready.at[warpgroup])
            position = (
                offset + start + plgpu.broadcasted_iota(jnp.int32, (block_q,), 0, layout=_ROWS)
            )
            zeros = full((block_q, block_kv), 0.0, _TILE)
            # Neither the diagonal nor the edge of a document cuts the blocks of the steps between
            # these two.
            diagonal_end = end - lax.div(offset + start + 1, jnp.int32(block_kv))
            document_edge = (
                steps
                if ids_gmem is None
                else end - first_full_gmem[batch, tile * _CONSUMERS + warpgroup]
            )

            def mask(i, s):
                key = keys(i).start + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=_TILE)
                visible = key <= spread(position, block_kv)
                if ids_gmem is not None:  # read for each masked block: registers are short
                    q_ids = plgpu.load(ids_gmem.at[batch, rows], layout=_ROWS, optimized=False)
                    kv_ids = plgpu.load(
                        ids_gmem.at[batch, keys(i)], layout=_TILE.reduce(0), optimized=False
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
                pl.when(tuning.ping_pong)(lambda: plgpu.barrier_wait(turn.at[warpgroup]))

                def overlapped(refs):
                    acc_ref, s_ref, p_ref, m_ref, total_ref, alpha_ref = refs
                    plgpu.wgmma(s_ref, qo, k_smem.at[slot(i)].transpose((1, 0)))
                    plgpu.barrier_wait(v_ready.at[slot(i - 1)])
                    plgpu.wgmma(acc_ref, p, v_smem.at[slot(i - 1)])
                    pl.when(tuning.ping_pong)(lambda: plgpu.barrier_arrive(turn.at[1 - warpgroup]))
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)  # P V goes on
                    plgpu.barrier_arrive(k_free.at[slot(i)])
                    s = lax.cond(
                        (i < diagonal_end) | (i >= document_edge), lambda: mask(i, s), lambda: s
                    )
                    # Compilers like to move the exponentials past the wait for P V that ends this
                    # function. LLVM keeps to the barrier on the values, ptxas does not cross the
                    # branches of the wait for the next K.
                    values = lax.optimization_barrier(softmax(s, m_ref[...], total_ref[...]))
                    p_ref[...], m_ref[...], total_ref[...], alpha_ref[...] = values
                    pl.when(i + 1 < steps)(lambda: plgpu.barrier_wait(k_ready.at[slot(i + 1)]))

                state: Any = (_Accumulator.init(acc), _Accumulator.init(zeros), zeros, m, total, m)
                acc, _, p, m, total, alpha = pl.run_state(overlapped)(state)
                plgpu.barrier_arrive(v_free.at[slot(i - 1)])
                return acc * spread(alpha, head_dim), p.astype(v_smem.dtype), m, total

            # 1. The last block, always masked: S_0 and its softmax.
            pl.when(tuning.ping_pong and warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
            plgpu.barrier_wait(q_ready.at[warpgroup])
            plgpu.barrier_wait(k_ready.at[0])
            s = mask(jnp.int32(0), product(zeros, qo, k_smem.at[0].transpose((1, 0))))
            plgpu.barrier_arrive(k_free.at[0])
            p, m, total, _ = softmax(
                s, full((block_q,), -jnp.inf, _ROWS), full((block_q, _LANES), 0.0, _TILE)
            )
            pl.when(steps > 1)(lambda: plgpu.barrier_wait(k_ready.at[1]))

            # 2. The other blocks.
            carry = (full((block_q, head_dim), 0.0, _TILE), p.astype(v_smem.dtype), m, total)
            acc, p, m, total = lax.fori_loop(1, steps, step, carry)

            # 3. The last product, and the output.
            last = slot(steps - 1)
            plgpu.barrier_wait(v_ready.at[last])
            acc = product(acc, p, v_smem.at[last])
            plgpu.barrier_arrive(v_free.at[last])
            total = total.sum(axis=1)
            out, lse = acc * spread(1.0 / total, head_dim), m * (1 / _LOG2E) + jnp.log(total)
            if lengths_gmem is not None:  # read again: registers are short
                start_of_row = 0 if offset_gmem is None else offset_gmem[batch]
                valid = position < start_of_row + lengths_gmem[batch]
                out = jnp.where(spread(valid, head_dim), out, 0.0)
                lse = jnp.where(valid, lse, jnp.inf)
            finish(out, lse)
            pl.when(tuning.ping_pong and warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
