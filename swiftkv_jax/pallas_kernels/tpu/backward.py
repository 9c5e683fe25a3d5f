"""Gradient of causal attention on TPUs: two passes over the visible blocks that recompute the
weights from `lse`.

With P = exp(scores - lse), the softmax as the forward pass left it, and delta = sum(out * d_out) of
each query,

    dV = P^T dO,    dS = P * (dO V^T - delta),    dQ = dS K / sqrt(H),    dK = dS^T Q / sqrt(H).

The dQ pass walks like the forward kernel: the steps of a task hold one block of queries (of the
heads that share a key/value head) and run over its key blocks. The dK, dV pass holds one block of
keys and runs over the query blocks and heads that see it, so the sum over the group's query heads
happens in float32 VMEM scratch; it works on transposed scores, keys x queries, in which `lse` and
`delta` lie along the lanes as they are stored and no product needs a transposed operand. No score
ever reaches HBM, and nothing is added up across grid steps of different tasks. Both passes visit,
fetch and mask blocks as the forward kernel does (`schedule.Schedule`).

Cost for P visible (query, key) pairs and a head: 6 P H FLOPs for dQ and 8 P H for dK, dV, with P
exponentials each; the scores and dO V^T are computed twice, which is cheaper than adding dQ up
through HBM.

Layout: q, d_out and dQ are transposed to B N T H and back by XLA, in a model as part of the
neighbouring projections. Any T is taken without padding k, v, q or d_out; only `lse` and `delta`, 1
/ H of their size, are padded to whole blocks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..segments import visible_kv_blocks, visible_q_blocks
from . import prefill
from .prefill import LANES, LOG2E, Tuning, column, dot, visible_chunks, zero_past
from .schedule import block_specs, fetched, first_visible, lanes, make_schedule

__all__ = ["Tuning", "attention_grad"]


def attention_grad(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    segment_ids: Int[Array, "B T"] | None,
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B N T"],
    d_out: Float[Array, "B T N H"],
    *,
    tuning: Tuning,
    window: int | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    """(dq, dk, dv) of `prefill.attention` with this `window`, offset 0, as many keys as queries and
    no padding queries."""
    batch, length, num_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    heads, bq = tuning.rows(num_heads // kv_heads, length)
    bkv = tuning.block_kv
    rows = heads * bq
    group = num_heads // heads // kv_heads
    num_q = pl.cdiv(length, bq)
    num_kv = pl.cdiv(length, bkv)
    parts = num_heads // heads

    # 1. The blocks that see each other.
    if segment_ids is None:
        i, j = (
            jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n)) for n in (num_q, num_kv)
        )
        first_kv = jnp.zeros_like(i)
        end_kv = jnp.minimum(pl.cdiv((i + 1) * bq, bkv), num_kv)
        first_q = j * bkv // bq
        end_q = jnp.full_like(j, num_q)
        if window is not None:
            first_kv = jnp.maximum(i * bq - (window - 1), 0) // bkv
            end_q = jnp.minimum(pl.cdiv((j + 1) * bkv + window - 1, bq), num_q)
        ids = single_ids = (None, None)
    else:
        first_kv, end_kv = visible_kv_blocks(segment_ids, bq, bkv, window)
        first_q, end_q = visible_q_blocks(segment_ids, bq, bkv, window)
        ids = (segment_ids[:, None],) * 2
        single_ids = (
            prefill.only_id(segment_ids, bq, prefill.MIXED_Q),
            prefill.only_id(segment_ids, bkv, prefill.MIXED_KV),
        )

    # 2. Operands.
    def head_major(x):
        return x.reshape(batch, length, parts, heads, head_dim).transpose(0, 2, 3, 1, 4)

    def whole_blocks(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, num_q * bq - length))).reshape(
            batch, parts, heads, num_q * bq
        )

    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1).transpose(0, 2, 1)
    operands = (
        head_major(q),
        k,
        v,
        head_major(d_out),
        whole_blocks(lse * LOG2E),
        whole_blocks(delta),
        *ids,
    )

    # 3. What each grid step works on.
    def dq_blocks(n, step, _, *scalars):
        task, j = fetched(step, *scalars[:4])
        return task // num_q, n, n // group, task % num_q, j

    def dkv_blocks(k, step, part, *scalars):
        task, i = fetched(step, *scalars[:4])
        return task // num_kv, k * group + part, k, i, task % num_kv

    def run(kernel, locate, schedule, grid, out_spec, out_like, scratch, *, products, elements):
        specs = block_specs(locate, heads, bq, bkv, head_dim)
        id_specs = [None, None] if segment_ids is None else [specs["q_ids"], specs["kv_ids"]]
        pairs = batch * num_heads * length * (length + 1) / 2
        if window is not None:
            pairs = min(pairs, batch * num_heads * length * window)
        return pl.pallas_call(
            functools.partial(
                kernel,
                length=length,
                num_q=num_q,
                num_kv=num_kv,
                chunk=tuning.block_kv_compute,
                window=window,
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=6,
                grid=grid,
                in_specs=[
                    *(specs[kind] for kind in ("q", "kv", "kv", "q", "lse", "lse")),
                    *id_specs,
                ],
                out_specs=[specs[out_spec]] * len(out_like),
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype) for like in out_like],
            # Heads may be shared out between two cores; the steps of a task must stay in order.
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"),
                vmem_limit_bytes=tuning.vmem_limit_bytes,
            ),
            cost_estimate=pl.CostEstimate(
                flops=int(2 * products * pairs * head_dim),
                transcendentals=int(pairs),
                bytes_accessed=elements * q.dtype.itemsize,
            ),
            name=kernel.__name__.replace("_attention_", "tpu_"),
        )(*schedule, *single_ids, *operands)

    # 4. The two passes. About half of the blocks lie in the future and are never read.
    schedule = make_schedule(first_kv, end_kv, num_kv)
    grid = (parts, schedule.start[-1], 1)
    scratch = [(rows, LANES), (rows, LANES), (rows, head_dim)]
    elements = 3 * q.size + k.size * num_q * group
    (dq,) = run(
        _attention_dq,
        dq_blocks,
        schedule,
        grid,
        "q",
        operands[:1],
        scratch,
        products=3,
        elements=elements,
    )

    schedule = make_schedule(first_q, end_q, num_q)
    grid = (kv_heads, schedule.start[-1], group)
    scratch = [(bkv, head_dim), (bkv, head_dim)]
    elements = 4 * k.size + q.size * num_kv
    dk, dv = run(
        _attention_dkv,
        dkv_blocks,
        schedule,
        grid,
        "kv",
        (k, v),
        scratch,
        products=4,
        elements=elements,
    )
    return dq.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads, head_dim), dk, dv


def _attention_dq(
    # scalars
    task_ref,  # steps
    start_ref,  # tasks + 1
    source_ref,  # tasks
    first_ref,  # tasks
    q_id_ref,  # tasks
    kv_id_ref,  # B * key blocks
    # inputs
    q_ref,  # heads block_q H
    k_ref,  # block_kv H
    v_ref,  # block_kv H
    do_ref,  # heads block_q H
    lse_ref,  # heads block_q, in units of log 2
    delta_ref,  # heads block_q
    q_ids_ref,  # 1 block_q
    kv_ids_ref,  # 1 block_kv
    # outputs
    dq_ref,  # heads block_q H
    # scratch
    lse_rows_ref,  # rows 128, every lane the same
    delta_rows_ref,  # rows 128, every lane the same
    acc_ref,  # rows H
    *,
    length: int,
    num_q: int,
    num_kv: int,
    chunk: int,
    window: int | None,
):
    heads, bq, head_dim = q_ref.shape
    rows = heads * bq
    bkv = k_ref.shape[0]
    step = pl.program_id(1)
    task = task_ref[step]
    row = task // num_q
    i = task % num_q
    j = first_ref[task] + step - start_ref[task]
    query0 = i * bq
    key0 = j * bkv
    key_first = first_visible(query0, window)

    def attend(c, masked):
        part = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
        q = q_ref[...].reshape(rows, head_dim)
        do = do_ref[...].reshape(rows, head_dim)
        k = k_ref[part, :]
        v = v_ref[part, :]
        if masked and length % bkv:
            k, v = (zero_past(x, length - key0 - c * chunk) for x in (k, v))
        scores = dot(q, k, transpose_b=True) * (head_dim**-0.5 * LOG2E)
        if masked:
            query, key = (lax.broadcasted_iota(jnp.int32, (bq, chunk), axis) for axis in (0, 1))
            visible = query + query0 >= key + (key0 + c * chunk)
            if key_first is not None:
                visible &= query + key_first <= key + (key0 + c * chunk)
            if q_ids_ref is not None:
                visible &= lanes(column(q_ids_ref[...]), chunk) == kv_ids_ref[:, part]
            scores = jnp.where(visible, scores.reshape(heads, bq, chunk), prefill.MASKED).reshape(
                rows, chunk
            )
        p = jnp.exp2(scores - lanes(lse_rows_ref[...], chunk))
        ds = p * (dot(do, v, transpose_b=True) - lanes(delta_rows_ref[...], chunk))
        acc_ref[...] += dot(ds.astype(k.dtype), k)

    # 1. A new block of queries begins: turn its statistics into rows once, for all key blocks.
    @pl.when(step == start_ref[task])
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        for head in range(heads):
            lse_rows_ref[head * bq : (head + 1) * bq, :] = column(lse_ref[head : head + 1, :])
            delta_rows_ref[head * bq : (head + 1) * bq, :] = column(delta_ref[head : head + 1, :])

    # 2. Every query sees every key: no mask. Static indices, so that the chunks overlap.
    full = key0 + bkv - 1 <= query0
    if key_first is not None:
        full &= key0 >= key_first + (bq - 1)
    if q_ids_ref is not None:
        full &= q_id_ref[task] == kv_id_ref[row * num_kv + j]

    @pl.when(full)
    def _():
        for c in range(bkv // chunk):
            attend(c, masked=False)

    # 3. The diagonal, or the border of a document or of the window.
    @pl.when(jnp.logical_not(full))
    def _():
        key_end = jnp.minimum(query0 + bq, length)
        low, high = visible_chunks(key_first, key_end, key0, chunk, bkv // chunk)

        @pl.loop(low, high)
        def _(c):
            attend(c, masked=True)

    # 4. The last block of keys is done.
    @pl.when(step + 1 == start_ref[task + 1])
    def _():
        dq_ref[...] = (acc_ref[...] * head_dim**-0.5).astype(dq_ref.dtype).reshape(dq_ref.shape)


def _attention_dkv(
    # scalars
    task_ref,  # steps
    start_ref,  # tasks + 1
    source_ref,  # tasks
    first_ref,  # tasks
    q_id_ref,  # B * query blocks
    kv_id_ref,  # tasks
    # inputs
    q_ref,  # heads block_q H
    k_ref,  # block_kv H
    v_ref,  # block_kv H
    do_ref,  # heads block_q H
    lse_ref,  # heads block_q, in units of log 2
    delta_ref,  # heads block_q
    q_ids_ref,  # 1 block_q
    kv_ids_ref,  # 1 block_kv
    # outputs
    dk_ref,  # block_kv H
    dv_ref,  # block_kv H
    # scratch
    dk_acc_ref,  # block_kv H
    dv_acc_ref,  # block_kv H
    *,
    length: int,
    num_q: int,
    num_kv: int,
    chunk: int,
    window: int | None,
):
    heads, bq, head_dim = q_ref.shape
    bkv = k_ref.shape[0]
    step = pl.program_id(1)
    part = pl.program_id(2)
    task = task_ref[step]
    row = task // num_kv
    j = task % num_kv
    i = first_ref[task] + step - start_ref[task]
    query0 = i * bq
    key0 = j * bkv
    key_first = first_visible(query0, window)

    def attend(head, c, masked):
        keys = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
        q = q_ref[head]
        do = do_ref[head]
        k = k_ref[keys, :]
        v = v_ref[keys, :]
        if masked and length % bq:
            q, do = (zero_past(x, length - query0) for x in (q, do))
        scores = dot(k, q, transpose_b=True) * (head_dim**-0.5 * LOG2E)  # chunk block_q
        if masked:
            key, query = (lax.broadcasted_iota(jnp.int32, (chunk, bq), axis) for axis in (0, 1))
            visible = query + query0 >= key + (key0 + c * chunk)
            if key_first is not None:
                visible &= query + key_first <= key + (key0 + c * chunk)
            if q_ids_ref is not None:
                visible &= lanes(column(kv_ids_ref[:, keys]), bq) == q_ids_ref[...]
            scores = jnp.where(visible, scores, prefill.MASKED)
        p = jnp.exp2(scores - lse_ref[pl.ds(head, 1), :])
        dv_acc_ref[keys, :] += dot(p.astype(do.dtype), do)
        ds = p * (dot(v, do, transpose_b=True) - delta_ref[pl.ds(head, 1), :])
        dk_acc_ref[keys, :] += dot(ds.astype(q.dtype), q)

    # 1. A new block of keys begins.
    @pl.when((step == start_ref[task]) & (part == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)

    # 2. Every query exists and sees every key: no mask.
    full = (key0 + bkv - 1 <= query0) & (query0 + bq <= length)
    if key_first is not None:
        full &= key0 >= key_first + (bq - 1)
    if q_ids_ref is not None:
        full &= q_id_ref[row * num_q + i] == kv_id_ref[task]

    @pl.when(full)
    def _():
        @pl.loop(0, heads)
        def _(head):
            for c in range(bkv // chunk):
                attend(head, c, masked=False)

    # 3. The diagonal, the border of a document or of the window, or the last queries.
    @pl.when(jnp.logical_not(full))
    def _():
        key_end = jnp.minimum(query0 + bq, length)
        low, high = visible_chunks(key_first, key_end, key0, chunk, bkv // chunk)

        @pl.loop(0, heads)
        def _(head):
            @pl.loop(low, high)
            def _(c):
                attend(head, c, masked=True)

    # 4. The last queries and heads that see these keys are done.
    @pl.when((step + 1 == start_ref[task + 1]) & (part == pl.num_programs(2) - 1))
    def _():
        dk_ref[...] = (dk_acc_ref[...] * head_dim**-0.5).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)
