"""Causal attention of many queries on TPUs, forward: FlashAttention over a list of the visible
blocks.

Grid: (query heads / heads per step, steps). A step multiplies the queries of one *task* (a row of
the batch, a block of queries, the query heads that share a key/value head) with one block of keys
and values; the steps of a task follow each other and carry maximum, sum and output in float32 VMEM
scratch. Task and key block of a step are looked up in a `Schedule` in scalar memory that lists the
visible blocks only: those in the future, before the window, of other documents or past `lengths`
are never visited, and the next step's block is always being fetched while this one is multiplied,
also across the border of two tasks. A block of padding queries takes one step that writes zeros and
fetches nothing. The queries x heads of a step are one matrix operand, so each fetched block serves
the whole group. Blocks that every query sees entirely skip the mask arithmetic and are unrolled
over chunks of `block_kv_compute` keys, so that one chunk's softmax overlaps the next one's
products; others begin and end with a visible chunk.

Cost for P visible (query, key) pairs a head: 4 P H FLOPs, P exponentials. The multiply unit is the
floor from a few hundred queries on: K and V are read T / block_q times over, a byte for each
`block_rows` FLOPs in bfloat16.

Layout: q and out are B N T H inside; XLA transposes, in a model as part of rotary embedding and
output projection. K and V are never padded or copied: the DMA clips edge blocks, the rest is
masked. Blocks span all of H; one off a multiple of 128 leaves lanes unused.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..operands import AttentionOperands
from ..segments import visible_kv_blocks
from .schedule import (
    LANES,
    Tuning,
    block_specs,
    fetched,
    first_visible,
    fit,
    lanes,
    make_schedule,
    paged_specs,
    unsupported_reason,
)

__all__ = ["Tuning", "attention", "unsupported_reason"]

LOG2E = math.log2(math.e)  # the hardware's exponential is 2**x: scores are kept in units of log 2
MASKED = -0.7 * float(
    jnp.finfo(jnp.float32).max
)  # finite, or a row that has seen nothing yet would compute inf - inf
MIXED_Q, MIXED_KV = -(2**31), -(2**31) + 1  # stand for "several documents" in a block; never equal


def only_id(segment_ids: Int[Array, "B T"], block: int, several: int) -> Int[Array, "blocks"]:
    """The segment id of each block of each row, `several` where there is more than one."""
    ids = jnp.pad(segment_ids, ((0, 0), (0, -segment_ids.shape[1] % block)), mode="edge").reshape(
        -1, block
    )
    return jnp.where(ids.min(axis=1) == ids.max(axis=1), ids[:, 0], several).astype(jnp.int32)


def dot(a, b, *, transpose_b=False):
    """Matrix product with float32 sums; float32 operands are not rounded to bfloat16 on the way
    into the multiply unit."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def column(x: Array) -> Array:
    """1 n -> n 128: turn values that lie along the lanes into rows, each repeated over the
    lanes."""
    return jnp.broadcast_to(x, (LANES, x.shape[1])).T


def zero_past(x: Array, rows) -> Array:
    """x with zeros from row `rows` on: an edge block's memory past the array may hold NaN, and 0 x
    NaN is NaN."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) < rows, x, jnp.zeros_like(x))


def visible_chunks(
    first: Array | None, end: Array, key0: Array, chunk: int, count: int
) -> tuple[Any, Array]:
    """The first of the `count` chunks of a block of keys from `key0` on that holds one from `first`
    on, and one past the last that holds one before `end`."""
    low: Any = 0
    if first is not None:
        low = jnp.maximum(first - key0, 0) // chunk
    return low, jnp.minimum(pl.cdiv(end - key0, chunk), count)


def dot_keys(q: Array, pages: list[Array], positions_minor: bool) -> Array:
    """The products of q with the keys of all pages, next to each other."""
    products = [dot(q, page, transpose_b=not positions_minor) for page in pages]
    return products[0] if len(products) == 1 else jnp.concatenate(products, axis=1)


def dot_values(weights: Array, pages: list[Array], positions_minor: bool) -> Array:
    """The sum of the values of all pages, weighed."""
    size = weights.shape[1] // len(pages)
    parts = [weights]
    if len(pages) > 1:
        parts = [weights[:, i * size : (i + 1) * size] for i in range(len(pages))]
    products = (
        dot(part, page, transpose_b=positions_minor)
        for part, page in zip(parts, pages, strict=True)
    )
    return functools.reduce(jnp.add, products)


def attention(
    operands: AttentionOperands,
    *,
    tuning: Tuning,
    window: int | None = None,
    save_lse: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"] | None]:
    """Attention of these operands, with `window` of each query to the last so many positions; with
    `save_lse` also the logarithm of each softmax's denominator, +inf where a query sees nothing.
    """
    q = operands.q
    k = operands.k
    v = operands.v
    offset = operands.q_offset
    lengths = operands.lengths
    kv_lengths = operands.kv_lengths
    page_table = operands.page_table
    segment_ids = operands.segment_ids
    batch, queries, num_heads, head_dim = q.shape
    if offset is None:
        offset = jnp.zeros(batch, jnp.int32)
    if lengths is None:
        lengths = jnp.full(batch, queries, jnp.int32)
    kv_heads, keys = k.shape[1:3]
    positions_minor = page_table is not None and head_dim % LANES != 0
    if page_table is not None:
        page = keys
        keys = keys * page_table.shape[1]
        tuning = fit(tuning, page, page_table.shape[1])
        if positions_minor:  # XLA stores such heads so, unpadded: this moves nothing
            k = k.swapaxes(2, 3)
            v = v.swapaxes(2, 3)
    bkv = tuning.block_kv
    heads, bq = tuning.rows(num_heads // kv_heads, queries)
    num_q = pl.cdiv(queries, bq)
    num_kv = pl.cdiv(keys, bkv)
    parts = num_heads // heads

    # 1. Which key blocks each query block sees.
    query0 = bq * jnp.arange(num_q, dtype=jnp.int32)
    first = jnp.zeros((batch, num_q), jnp.int32)
    end = offset[:, None] + jnp.minimum(query0 + bq, lengths[:, None])
    if kv_lengths is not None:
        end = jnp.minimum(end, kv_lengths[:, None])
    end = pl.cdiv(end, bkv)
    if window is not None:
        first = jnp.maximum(offset[:, None] + query0 - (window - 1), 0) // bkv
    q_id = kv_id = None
    if segment_ids is not None:
        first, document_end = visible_kv_blocks(segment_ids, bq, bkv, window)
        q_id = only_id(segment_ids, bq, MIXED_Q)
        kv_id = only_id(segment_ids, bkv, MIXED_KV)
        end = jnp.minimum(end, document_end)
        segment_ids = segment_ids[:, None]
    schedule = make_schedule(first, jnp.where(query0 < lengths[:, None], end, 0), num_kv)

    # 2. What each grid step reads and writes.
    def reads(n, step, *scalars):
        task, j = fetched(step, *scalars[:4])
        return task // num_q, n, n * kv_heads // parts, task % num_q, j

    def writes(n, step, task, *scalars):
        return task[step] // num_q, n, 0, task[step] % num_q, 0

    inputs, outputs = (block_specs(locate, heads, bq, bkv, head_dim) for locate in (reads, writes))
    kv_specs = (inputs["kv"],)
    if page_table is not None:
        keys = num_kv * bkv  # pages are whole: no block sticks out
        kv_specs, page_table = paged_specs(
            reads, bkv, k.shape, page_table, positions_minor=positions_minor
        )
    ids_specs = [None, None] if segment_ids is None else [inputs["q_ids"], inputs["kv_ids"]]
    q = q.reshape(batch, queries, parts, heads, head_dim).transpose(0, 2, 3, 1, 4)
    # Keys a query, as if the last query were the last key.
    visible = max(keys - (queries - 1) / 2, 1)
    if window is not None:
        visible = min(visible, window)
    pairs = batch * num_heads * queries * visible
    kv_elements = 2 * batch * head_dim * num_q * parts * visible
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            num_q=num_q,
            num_kv=num_kv,
            keys=keys,
            chunk=tuning.block_kv_compute,
            positions_minor=positions_minor,
            window=window,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=10,
            grid=(parts, schedule.start[-1]),
            in_specs=[inputs["q"], kv_specs, kv_specs, *ids_specs],
            out_specs=[outputs["q"], outputs["lse"] if save_lse else None],
            scratch_shapes=[
                pltpu.VMEM((heads * bq, width), jnp.float32) for width in (LANES, LANES, head_dim)
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32) if save_lse else None,
        ],
        # Heads may be shared out between two cores; the steps of a task must stay in order.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tuning.vmem_limit_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=int(4 * pairs * head_dim),
            transcendentals=int(pairs),
            bytes_accessed=int((2 * q.size + kv_elements) * q.dtype.itemsize),
        ),
        name="tpu_prefill",
    )(
        *schedule,
        q_id,
        kv_id,
        offset,
        lengths,
        kv_lengths,
        page_table,
        q,
        (k,) * len(kv_specs),
        (v,) * len(kv_specs),
        segment_ids,
        segment_ids,
    )
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, queries, num_heads, head_dim)
    return out, None if lse is None else lse.reshape(batch, num_heads, queries)


def _kernel(
    # scalars
    task_ref,  # steps
    start_ref,  # tasks + 1
    source_ref,  # tasks
    first_ref,  # tasks
    q_id_ref,  # tasks
    kv_id_ref,  # B * key blocks
    offset_ref,  # B
    lengths_ref,  # B
    kv_lengths_ref,  # B, or None
    _table_ref,  # B * P, or None: for the index maps
    # inputs
    q_ref,  # heads block_q H
    k_refs,  # one block_kv H, or pages that are as much, or either with H first
    v_refs,  # as k_refs
    q_ids_ref,  # 1 block_q
    kv_ids_ref,  # 1 block_kv
    # outputs
    out_ref,  # heads block_q H
    lse_ref,  # heads block_q
    # scratch
    max_ref,  # rows 128, every lane the same
    sum_ref,  # rows 128, every lane the same
    acc_ref,  # rows H
    *,
    num_q: int,
    num_kv: int,
    keys: int,
    chunk: int,
    positions_minor: bool,
    window: int | None,
):
    heads, bq, head_dim = q_ref.shape
    size = k_refs[0].shape[1 if positions_minor else 0]
    rows = heads * bq
    bkv = size * len(k_refs)
    task = task_ref[step := pl.program_id(1)]
    row = task // num_q
    i = task % num_q
    j = first_ref[task] + step - start_ref[task]
    query0 = offset_ref[row] + i * bq
    key0 = j * bkv
    length = lengths_ref[row]
    # One past the last key that a query of this block sees.
    key_end = offset_ref[row] + jnp.minimum((i + 1) * bq, length)
    kv_length = None if kv_lengths_ref is None else kv_lengths_ref[row]
    if kv_length is not None:
        key_end = jnp.minimum(key_end, kv_length)
    # The first key that one sees.
    key_first = first_visible(query0, window)

    def attend(c, masked):
        part = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
        q = q_ref[...].reshape(rows, head_dim)
        if len(k_refs) == 1:
            here = (slice(None), part) if positions_minor else (part, slice(None))
            k = [k_refs[0][here]]
            v = [v_refs[0][here]]
        else:  # c is static: the chunk is whole pages
            k, v = (
                [ref[...] for ref in refs[c * chunk // size : (c + 1) * chunk // size]]
                for refs in (k_refs, v_refs)
            )
        scores = dot_keys(q, k, positions_minor) * (head_dim**-0.5 * LOG2E)
        if masked:
            query, key = (lax.broadcasted_iota(jnp.int32, (bq, chunk), axis) for axis in (0, 1))
            visible = query + query0 >= key + (key0 + c * chunk)
            if key_first is not None:
                visible &= query + key_first <= key + (key0 + c * chunk)
                if len(k_refs) > 1:  # pages before the window may hold anything, NaN too
                    v = [
                        jnp.where(key0 + c * chunk + (p + 1) * size > key_first, page, 0)
                        for p, page in enumerate(v)
                    ]
            if kv_length is not None:
                visible &= key < kv_length - (key0 + c * chunk)
                if len(k_refs) > 1:  # so may pages past the keys
                    v = [
                        jnp.where(key0 + c * chunk + p * size < key_end, page, 0)
                        for p, page in enumerate(v)
                    ]
            if q_ids_ref is not None:
                visible &= lanes(column(q_ids_ref[...]), chunk) == kv_ids_ref[:, part]
            scores = jnp.where(visible, scores.reshape(heads, bq, chunk), MASKED).reshape(
                rows, chunk
            )
            if keys % bkv:
                v = [zero_past(v[0], keys - key0 - c * chunk)]
        # While a row has seen nothing its maximum is MASKED and what it adds up is rubbish; the
        # first visible key's correction, 2**(MASKED - score) = 0, wipes that out.
        old_max = max_ref[...]
        new_max = jnp.maximum(old_max, scores.max(axis=1, keepdims=True))
        correction = jnp.exp2(old_max - new_max)
        p = jnp.exp2(scores - lanes(new_max, chunk))
        max_ref[...] = new_max
        sum_ref[...] = sum_ref[...] * correction + p.sum(axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * lanes(correction, head_dim) + dot_values(
            p.astype(v[0].dtype), v, positions_minor
        )

    # 1. A new block of queries begins.
    @pl.when(step == start_ref[task])
    def _():
        max_ref[...] = jnp.full_like(max_ref, MASKED)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    # 2. Every query sees every key: no mask. Static indices, so that the chunks overlap.
    real = i * bq < length
    full = key0 + bkv - 1 <= query0
    if key_first is not None:
        full &= key0 >= key_first + (bq - 1)
    if kv_length is not None:
        full &= key0 + bkv <= kv_length
    if q_ids_ref is not None:
        full &= q_id_ref[task] == kv_id_ref[row * num_kv + j]

    @pl.when(real & full)
    def _():
        for c in range(bkv // chunk):
            attend(c, masked=False)

    # 3. The diagonal, the border of a document or of the window, or the last keys.
    @pl.when(real & jnp.logical_not(full))
    def _():
        low, high = visible_chunks(key_first, key_end, key0, chunk, bkv // chunk)
        if len(k_refs) == 1:
            pl.loop(low, high)(functools.partial(attend, masked=True))
        else:  # which page is known only where the program is written
            for c in range(bkv // chunk):
                here = c < high if key_first is None else (c >= low) & (c < high)
                pl.when(here)(functools.partial(attend, c, masked=True))

    # 4. The last block of keys is done.
    @pl.when(step + 1 == start_ref[task + 1])
    def _():
        exists = (i * bq + lax.broadcasted_iota(jnp.int32, (heads, bq, LANES), 1) < length).reshape(
            rows, LANES
        )
        if kv_length is not None:  # of a query that has seen nothing the sum is rubbish
            exists &= max_ref[...] > MASKED
        out = jnp.where(lanes(exists, head_dim), acc_ref[...] / lanes(sum_ref[...], head_dim), 0.0)
        out_ref[...] = out.astype(out_ref.dtype).reshape(out_ref.shape)
        if lse_ref is not None:
            lse = jnp.where(exists, (max_ref[...] + jnp.log2(sum_ref[...])) / LOG2E, jnp.inf)
            for head in range(heads):
                lse_ref[head : head + 1, :] = lse[head * bq : (head + 1) * bq].T[:1]
