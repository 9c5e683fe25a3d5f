"""Decode attention on TPUs: a few new tokens of each row against a long cache, at the speed of HBM.

Every key and value byte is read once. A bfloat16 position of one head is 4 H bytes and 4 T G H
FLOPs, far below what the chip could multiply meanwhile, so the floor is bytes / bandwidth and the
schedule serves the copies alone.

- The scalar core walks one list of work: the key/value blocks of row 0, of row 1, ... up to their
  `length`; rows of length 0 are not on it. A ring of `buffers` blocks runs ahead of the arithmetic
  along that list, across rows and grid steps: the next row is copied while this one is computed,
  and the copies pause only at the very end.
- A block is several pages. Each is a copy of its own of the keys, the values and, of 8 bits, their
  scales, all on the semaphore of the block's slot, which is waited for by the bytes of the block.
- With a window the blocks of a row begin at the page of the first position that a query sees, or
  at its 128 positions of a cache without pages.
- The last block of a row is copied in chunks of 128 positions, only those that hold valid ones, and
  attended in parts of half a block, a quarter, and so on.
- The T G queries that share a head are one tile. The matrix units take keys and values as weights,
  the fastest way in.
- A grid step is `rows` rows of queries and outputs, which Pallas copies, and only those. The outer
  grid axis, over groups of heads, is parallel: two cores (v4, v5p) need two groups, all other chips
  are fastest with one.

XLA lays out a head dim that is no multiple of the 128 lanes with the positions minor, so as not to
pad it. It is read as B K H S, which in that layout moves nothing. An S that is no multiple of 128
is padded by copying the cache, each call.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..operands import AttentionOperands
from .decode_tuning import CHUNK, LANES, Tuning, unsupported_reason

__all__ = ["Tuning", "attention", "unsupported_reason"]

# Half of the 120 by which the exponents of bfloat16 and float8_e4m3fn differ: see _bfloat16.
FLOAT8_SHIFT = 60


def attention(
    operands: AttentionOperands,
    *,
    tuning: Tuning,
    window: int | None = None,
    return_lse: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"] | None]:
    """Attention of these operands, with `window` of each query to the last so many positions; with
    `return_lse` also the logarithm of each query's sum of exponentials, -inf where it sees nothing.
    """
    q = operands.q
    k = operands.k
    page_table = operands.page_table
    batch, queries, heads, head_dim = q.shape
    all_kv_heads, page = k.shape[1:3]
    kv = k, operands.v
    scales = () if operands.k_scale is None else (operands.k_scale, operands.v_scale)
    if pad := -page % CHUNK:
        kv, scales = jax.tree.map(
            lambda x: jnp.pad(x, [(0, pad if axis == 2 else 0) for axis in range(x.ndim)]),
            (kv, scales),
        )
        page += pad
    if positions_minor := head_dim % LANES != 0:
        kv = tuple(x.swapaxes(2, 3) for x in kv)
    capacity = page if page_table is None else page * page_table.shape[1]

    # Query heads that share a key/value head become rows of one tile: B T (K G) H -> B K (T G) H.
    group = heads // all_kv_heads
    tiles = q.reshape(batch, queries, all_kv_heads, group, head_dim).swapaxes(1, 2)
    tiles = tiles.reshape(batch, all_kv_heads, queries * group, head_dim)
    tiles = tiles.astype(jnp.float32 if k.dtype == jnp.float32 else jnp.bfloat16)
    if k.dtype == jnp.float8_e4m3fn:
        tiles *= 2.0**FLOAT8_SHIFT

    rows = min(tuning.rows, batch)
    if return_lse:  # of which a row takes as much VMEM as of queries and outputs
        rows = max(rows // 2, 1)
    pages = None if page_table is None else page_table.shape[1]
    block_kv, kv_heads = tuning.block(all_kv_heads, page, pages, head_dim, k.dtype.itemsize)
    tile_spec = pl.BlockSpec(
        (rows, kv_heads, queries * group, head_dim), lambda h, i, *_: (i, h, 0, 0)
    )
    lse_spec = lse_shape = None
    if return_lse:  # as wide as a tile of HBM is in any case
        lse_spec = pl.BlockSpec((rows, kv_heads, queries * group, LANES), tile_spec.index_map)
        lse_shape = jax.ShapeDtypeStruct((*tiles.shape[:3], LANES), jnp.float32)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    block = (head_dim, block_kv) if positions_minor else (block_kv, head_dim)
    buffer = pltpu.VMEM((tuning.buffers, kv_heads, *block), k.dtype)
    # Eight rows of scales share a tile of HBM, which cannot be cut: a group of fewer heads takes
    # the scales of all.
    scale_heads = kv_heads if kv_heads % 8 == 0 else all_kv_heads
    scale_buffer = pltpu.VMEM((tuning.buffers, scale_heads, block_kv), jnp.float32)

    read = capacity
    if window is not None:
        read = min(capacity, window + queries - 1)
    work = batch * heads * queries * read
    cache_bytes = (
        2 * batch * read * all_kv_heads * (head_dim * k.dtype.itemsize + (4 if scales else 0))
    )
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            batch=batch,
            queries=queries,
            capacity=capacity,
            block_kv=block_kv,
            positions_minor=positions_minor,
            window=window,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(all_kv_heads // kv_heads, pl.cdiv(batch, rows)),
            in_specs=[tile_spec, (hbm,) * 2, (hbm,) * len(scales)],
            out_specs=[tile_spec, lse_spec],
            scratch_shapes=[
                (buffer,) * 2,
                (scale_buffer,) * len(scales),
                pltpu.SemaphoreType.DMA((tuning.buffers,)),
                pltpu.SMEM((3,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(tiles.shape, q.dtype), lse_shape],
        # Checked, the start of a copy takes four times as many instructions: a block of
        # float8_e4m3fn on v6e would then take longer to compute than to copy.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * work * head_dim, transcendentals=work, bytes_accessed=cache_bytes
        ),
        name="tpu_decode",
    )(operands.length, page_table, tiles, kv, scales)
    shape = batch, all_kv_heads, queries, group
    out = out.reshape(*shape, head_dim).swapaxes(1, 2).reshape(q.shape)
    if lse is not None:
        lse = lse[..., 0].reshape(shape).swapaxes(1, 2).reshape(q.shape[:3])
    return out, lse


def _kernel(
    # scalars
    length_ref,  # [B]
    table_ref,  # [B, P] or None
    # inputs
    q_ref,  # [rows, kv_heads, T * G, H]
    # keys and values in HBM: each [B, K, S, H], or a pool [X, K, page, H], or either with the last
    # two swapped
    kv_refs,
    scale_refs,  # their scales in HBM: each [B, K, S] or [X, K, page]; or ()
    # outputs
    out_ref,  # [rows, kv_heads, T * G, H]
    lse_ref,  # [rows, kv_heads, T * G, 128], every lane the same, or None
    # scratch
    kv_buffers,  # each [buffers, kv_heads, block_kv, H], or the last two swapped
    scale_buffers,  # each [buffers, kv_heads or K, block_kv]; or ()
    copied,  # [buffers] semaphores
    cursor,  # [3]: row and block that the next copy takes, slot of the ring that is read next
    *,
    batch,
    queries,
    capacity,
    block_kv,
    positions_minor,
    window,
):
    rows, kv_heads, tile, head_dim = q_ref.shape
    buffers = kv_buffers[0].shape[0]
    page = kv_refs[0].shape[3 if positions_minor else 2]
    block_chunks = block_kv // CHUNK
    head_group = pl.program_id(0)
    first_row = pl.program_id(1) * rows
    heads = pl.ds(head_group * kv_heads, kv_heads)
    unshift = 2.0**FLOAT8_SHIFT if kv_refs[0].dtype == jnp.float8_e4m3fn else 1.0
    factor = unshift * head_dim**-0.5 * math.log2(math.e)

    stored = "KHS" if positions_minor else "KSH"

    def kv_at(positions):
        if positions_minor:
            return slice(None), positions
        return positions, slice(None)

    def valid(row):
        return jnp.minimum(length_ref[row], capacity)

    def chunk_of(row, block):
        """The first chunk of a block of a row."""
        if window is None:
            return block * block_chunks
        # A whole block is copied page by page: it must begin with a page, or with a part of one.
        step = CHUNK if table_ref is None else min(page, block_kv)
        oldest = jnp.maximum(valid(row) - (window + queries - 1), 0)
        return lax.div(oldest, step) * (step // CHUNK) + block * block_chunks

    def my_heads(scales):  # by selection: a tile cannot be cut at a row known only at run time
        mine = scales[:kv_heads]
        for g in range(1, scales.shape[0] // kv_heads):
            mine = jnp.where(head_group == g, scales[g * kv_heads : (g + 1) * kv_heads], mine)
        return mine

    def next_busy(row):
        """The first row from `row` on that has something to read; `batch` if none has."""
        return lax.while_loop(
            lambda r: (r < batch) & (length_ref[jnp.minimum(r, batch - 1)] <= 0),
            lambda r: r + 1,
            row,
        )

    def copies(row, block, slot, first, chunks):
        """The copies of so many chunks, the first `first` within their block, into the ring: of a
        pool, a page at a time."""
        ends = []
        step = chunks if table_ref is None else min(chunks, page // CHUNK)
        begin = chunk_of(row, block)
        for part in range(0, chunks, step):
            source = row
            start = begin + first + part
            if table_ref is not None:
                source = table_ref[row, lax.div(start, page // CHUNK)]
                start = lax.rem(start, page // CHUNK)
            there, here = (pl.ds(at * CHUNK, step * CHUNK) for at in (start, first + part))
            for hbm, buf in zip(kv_refs, kv_buffers, strict=True):
                ends.append((hbm.at[source, heads, *kv_at(there)], buf.at[slot, :, *kv_at(here)]))
            for hbm, buf in zip(scale_refs, scale_buffers, strict=True):
                whose = heads if buf.shape[1] == kv_heads else slice(None)
                ends.append((hbm.at[source, whose, there], buf.at[slot, :, here]))
        return [
            pltpu.make_async_copy(from_hbm, to_vmem, copied.at[slot]) for from_hbm, to_vmem in ends
        ]

    def wait_for(slot, size):
        """Wait for the bytes of `size` positions in `slot`, whichever those are: a wait asks its
        copy for the semaphore and the size alone, as in vLLM's ragged paged attention for TPUs."""
        parts = [buffer.at[slot, :, *kv_at(pl.ds(0, size))] for buffer in kv_buffers]
        parts += [buffer.at[slot, :, pl.ds(0, size)] for buffer in scale_buffers]
        for part in parts:
            pltpu.make_async_copy(part, part, copied.at[slot]).wait()

    def start_copy(slot):
        """Start to fill `slot` with the block under the cursor, and move the cursor on. Past the
        last block: nothing."""
        row = cursor[0]
        block = cursor[1]

        @pl.when(row < batch)
        def _():
            left = pl.cdiv(valid(row), CHUNK) - chunk_of(row, block)

            @pl.when(left >= block_chunks)
            def _():
                for copy in copies(row, block, slot, 0, block_chunks):
                    copy.start()

            @pl.when(left < block_chunks)
            def _():
                @pl.loop(0, left)
                def _(chunk):
                    for copy in copies(row, block, slot, chunk, 1):
                        copy.start()

            cursor[1] = block + 1

            @pl.when(left <= block_chunks)
            def _():
                cursor[0], cursor[1] = next_busy(row + 1), 0

    def take_slot():
        """The slot to read next; the one read before it is free, and starts to fill again."""
        slot = cursor[2]
        cursor[2] = jnp.where(slot == buffers - 1, 0, slot + 1)
        start_copy(jnp.where(slot == 0, buffers - 1, slot - 1))
        return slot

    # 1. Once per group of heads: fill all of the ring but the slot that the first take_slot fills.
    @pl.when(pl.program_id(1) == 0)
    def _():
        cursor[0], cursor[1], cursor[2] = next_busy(jnp.int32(0)), 0, 0
        pl.loop(0, buffers - 1)(start_copy)

    @pl.loop(0, jnp.minimum(rows, batch - first_row))
    def _(r):
        row = first_row + r
        length = valid(row)
        end = length - queries + 1  # one past the last position that the first query sees
        end += lax.div(lax.broadcasted_iota(jnp.int32, (tile, 1), 0), tile // queries)
        q = q_ref[r]

        def attend(block, slot, first, size, carry):
            """Online softmax over `size` positions, the first `first` within their block."""
            running_max, total, acc = carry
            here = pl.ds(pl.multiple_of(first, CHUNK), size)
            k, v = (buffer[slot, :, *kv_at(here)] for buffer in kv_buffers)
            k_scale = v_scale = 1.0
            if scale_buffers:
                k_scale, v_scale = (my_heads(buf[slot, :, here])[:, None] for buf in scale_buffers)
            scores = _dot(f"KRH,{stored}->KRS", q, k) * (k_scale * factor)
            start = block * block_kv if window is None else chunk_of(row, block) * CHUNK
            position = start + first + lax.broadcasted_iota(jnp.int32, (tile, size), 1)
            visible = position < end
            if window is not None:
                visible &= position >= end - window
            scores = jnp.where(visible, scores, -jnp.inf)
            new_max = jnp.maximum(running_max, scores.max(axis=2, keepdims=True))
            decay = jnp.exp2(running_max - new_max)
            weights = jnp.exp2(scores - new_max)
            total = decay * total + weights.sum(axis=2, keepdims=True)
            weights = (weights * (v_scale * unshift)).astype(q.dtype)
            seen = _dot(f"KRS,{stored}->KRH", weights, v)
            return new_max, total, decay * acc + seen

        # The maximum starts finite: a query that sees nothing in a block then gets weights of
        # exp2(-inf) = 0, not nan.
        start = jnp.full((kv_heads, tile, 1), jnp.finfo(jnp.float32).min, jnp.float32)
        carry = start, jnp.zeros_like(start), jnp.zeros((kv_heads, tile, head_dim), jnp.float32)

        # 2. Whole blocks, the last chunk of which may be cut.
        def whole_block(block, carry):
            slot = take_slot()
            wait_for(slot, block_kv)
            return attend(block, slot, 0, block_kv, carry)

        chunks = pl.cdiv(length, CHUNK)
        if window is not None:
            chunks -= chunk_of(row, 0)
        full = lax.div(chunks, block_chunks)
        rest = lax.rem(chunks, block_chunks)
        carry = lax.fori_loop(0, full, whole_block, carry)

        # 3. The rest of the row: the powers of two, in chunks, that add up to it. The semaphore is
        # complete only when all of them have arrived.
        slot = lax.cond(rest > 0, take_slot, lambda: jnp.int32(0))
        parts = [2**i for i in reversed(range((block_chunks - 1).bit_length()))]
        for part in parts:
            pl.when((rest & part) > 0)(functools.partial(wait_for, slot, part * CHUNK))
        for part in parts:
            first = rest & ~(2 * part - 1)  # the larger parts
            carry = lax.cond(
                (rest & part) > 0,
                functools.partial(attend, full, slot, first * CHUNK, part * CHUNK),
                lambda carry: carry,
                carry,
            )
        running_max, total, acc = carry
        out_ref[r] = jnp.where(total > 0, acc * unshift / total, 0.0).astype(out_ref.dtype)
        if lse_ref is not None:
            lse = jnp.where(total > 0, (running_max + jnp.log2(total)) * math.log(2), -jnp.inf)
            lse_ref[r] = jnp.broadcast_to(lse, lse_ref.shape[1:])


def _dot(equation, x, y):
    """A product with float32 sums in the dtype of `x`; float32 stays float32, which the matrix
    units do not do unasked."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = _bfloat16(y) if y.dtype == jnp.float8_e4m3fn else y.astype(x.dtype)
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


def _bfloat16(x):
    """`x / 2**120` of a float8_e4m3fn `x`, in a third of the instructions of a conversion, which
    the copies would outrun.

    s eeee mmm is widened to 16 bits with its sign and shifted left by 4; freed of the copies of the
    sign, that reads s 0000eeee mmm0000 as bfloat16. What was subnormal (below 2**-6, the largest
    being 448) still is, and may count as 0.
    """
    # As words of 32 bits: not every chip shifts 16.
    words = pltpu.bitcast(pltpu.bitcast(x, jnp.int8).astype(jnp.int16), jnp.int32)
    # The mask is 0x87F0, twice.
    return pltpu.bitcast((words << 4) & jnp.int32(-0x780F7810), jnp.bfloat16)
