"""Attention in NVIDIA's cuDNN, as JAX calls it: prefill on GPUs that have no kernels of their own.

cuDNN masks by causality and by lengths, both counted from position 0 of its operands, and takes
keys and values position-major. So prefill attends in two ways, and `decode` to rows without pages:

- `prefill`: whole rows, one call, keys and values transposed first, a copy of as much as is read.
  Differentiable.
- `chunk`: rows that begin at an offset, their keys in rows or in pages. A call takes consecutive
  rows of one prompt, at most `QUERIES`. Their own keys are causal; those before them are all seen,
  and are attended in blocks of `CONTEXT`. What a call reads is gathered first, and the parts are
  joined by their log-sum-exps.

A chunk of 4 rows of 128 queries, of prompt a from position 1024 on and of prompt b from 0 on, is
two calls, of which the first has one block of context:

    rows               a 1024, a 1152 | b 0, b 128
    own keys (causal)  1024 .. 1279   | 0 .. 255
    context (all seen) 0 .. 1023      |

The steps of these loops are launched one by one, about ten kernels each: many prompts of a page or
two in one chunk cost more in launches than in arithmetic. Documents packed in a row are refused:
JAX passes their bounds to cuDNN only from Hopper on, through no public function, and an explicit
mask would be a T x T array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .operands import AttentionOperands, AttentionSpec

QUERIES = 2048
"""Most queries of a call, an engine's chunk: more calls would gather a context more often. Read and
written once, it is about 3 % of the time of their attention to it, by an A100's bytes and
operations per second."""
FEW_QUERIES = 256
"""Queries of a short prompt. Its calls have operands of this size: what surrounds a call of 2048
queries of 32 heads writes 76 MB, which takes longer than the attention of a short prompt."""
CONTEXT = 8192
"""Most positions before them in one call: 32 MiB of keys and values for 8 heads of 128 in 16 bits.
Attention of 2048 queries of 32 heads to them is 275 GFLOP, over a millisecond on an A100; the
launches of a step are some 50 us."""

type Part = tuple[Float[Array, "1 M N H"], Float[Array, "1 M N"]]
"""Output, and the logarithm of the sum of each query's exponentials in float32."""


def unsupported_reason(spec: AttentionSpec, *, wide_heads: bool, version: int | None) -> str | None:
    """Why cuDNN cannot run such a call; None if it can. `wide_heads`: whether the GPU takes head
    dims up to 256, `version`: that of cuDNN, None without it."""
    op = spec.op
    q = spec.q
    k = spec.k
    if spec.packed:
        return "takes no segment_ids (only a mask of T x S)"
    if op == "decode" and spec.page_table is not None:
        return "takes no page_table in decode"
    if op == "decode" and q.shape[1] != 1:
        return f"decodes one query a row (T = 1), got {q.shape=}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 or float16, got {q.dtype=}"
    if k.dtype != q.dtype and (op == "decode" or k.dtype.itemsize > 1):
        return f"takes operands of one dtype, got {q.dtype=} and {k.dtype=}"
    head_dim = q.shape[3]
    most = 256 if wide_heads else 128
    if head_dim % 8 or head_dim > most:
        return f"takes head dims that are multiples of 8 up to {most} here, got {q.shape=}"
    return "needs cuDNN, which JAX does not find" if version is None else None


def prefill(operands: AttentionOperands) -> Float[Array, "B T N H"]:
    """Causal attention of whole rows, differentiable in q, k and v. Queries from `lengths[b]` on
    yield zeros."""
    q = operands.q
    k = operands.k
    v = operands.v
    lengths = operands.lengths
    queries = q.shape[1]
    # Without an offset no query sees the keys from T on.
    k, v = (x[:, :, :queries].transpose(0, 2, 1, 3) for x in (k, v))
    if lengths is None:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    lengths = lengths.astype(jnp.int32)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return jnp.where((jnp.arange(queries) < lengths[:, None])[:, :, None, None], out, 0)


def decode(operands: AttentionOperands) -> Float[Array, "B 1 N H"]:
    """Attention of one token a row to the first `length[b]` keys. A row of length 0 yields
    zeros."""
    q = operands.q
    length = operands.length.astype(jnp.int32)
    k, v = (x.transpose(0, 2, 1, 3) for x in (operands.k, operands.v))
    out = jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=length, implementation="cudnn"
    )
    return jnp.where((length > 0)[:, None, None, None], out, 0)


# Chunks -----------------------------------------------------------------------


def attend(
    q: Float[Array, "1 M N H"],
    k: Float[Array, "1 S K H"],
    v: Float[Array, "1 S K H"],
    queries: Int[Array, " 1"],
    keys: Int[Array, " 1"],
    *,
    causal: bool,
) -> Part:
    """Attention of the first `queries` queries to the first `keys` keys; other queries yield
    anything.

    `jax.nn.dot_product_attention(return_residual=True)` calls this same function, and rounds the
    log-sum-exp to the dtype of `q`: at 10 bfloat16 is off by up to 0.03, which is 3 % of a weight.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    part: Any = cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=queries,
        kv_seqlen=keys,
        scale=q.shape[-1] ** -0.5,
        mask_type=mask,
        return_residual=True,
    )
    return part[0], part[1].swapaxes(1, 2)


def chunk(
    operands: AttentionOperands,
    *,
    attend: Callable[..., Part] = attend,
    most_queries: int = QUERIES,
    few_queries: int = FEW_QUERIES,
    most_context: int = CONTEXT,
) -> Float[Array, "B T N H"]:
    """Causal attention of rows from `q_offset[b]` on. Scaled keys and values are widened as they
    are gathered."""
    q = operands.q
    offset = operands.q_offset
    lengths = operands.lengths
    page_table = operands.page_table
    (batch, queries), page = q.shape[:2], operands.k.shape[2]
    if page_table is None:
        page_table = jnp.arange(batch, dtype=jnp.int32)[:, None]  # a row is one page
    if lengths is None:
        lengths = jnp.full(batch, queries, jnp.int32)
    rows, offset, lengths, table = _short_rows(q, offset, lengths, page_table, most_queries)
    most, few = (
        min(max(count // rows.shape[1], 1), rows.shape[0]) for count in (most_queries, few_queries)
    )
    size, following = _calls(rows.shape[1], page, offset, lengths, table, most)
    kv = (operands.k, operands.k_scale), (operands.v, operands.v_scale)
    context = min(most_context, table.shape[1] * page)

    def call(count: int, row, out):
        last = row + size[row] - 1  # its table has the pages of all
        q = rows.at[row + jnp.arange(count)].get(mode="clip")
        read = functools.partial(_read, kv, table[last], q.dtype)
        real = (size[row] - 1) * rows.shape[1] + lengths[last]
        found = _one_call(q.reshape(1, -1, *q.shape[2:]), read, offset[row], real, context, attend)
        # The rows after those of this call are zeros, until a later call writes them.
        out = lax.dynamic_update_slice_in_dim(out, found.reshape(q.shape), row, 0)
        return following[last + 1], out

    def next_call(carry):
        if few >= most:
            return call(most, *carry)
        calls = functools.partial(call, few), functools.partial(call, most)
        return lax.cond(size[carry[0]] <= few, *calls, *carry)

    out = jnp.zeros((rows.shape[0] + most - 1, *rows.shape[1:]), q.dtype)
    out = lax.while_loop(lambda carry: carry[0] < rows.shape[0], next_call, (following[0], out))[1]
    return out[: rows.shape[0]].reshape(batch, -1, *q.shape[2:])[:, :queries]


def _short_rows(q, offset, lengths, table, most: int):
    """Rows of more than `most` queries, cut into several."""
    batch, queries = q.shape[:2]
    if queries <= most:
        return q, offset, lengths, table
    cuts = -(-queries // most)
    q = jnp.pad(q, ((0, 0), (0, cuts * most - queries), (0, 0), (0, 0)))
    start = jnp.arange(cuts, dtype=jnp.int32) * most
    return (
        q.reshape(batch * cuts, most, *q.shape[2:]),
        (offset[:, None] + start).reshape(-1),
        jnp.clip(lengths[:, None] - start, 0, most).reshape(-1),
        jnp.repeat(table, cuts, axis=0),
    )


def _calls(queries: int, page: int, offset, lengths, table, most: int):
    """(rows of the call that begins with each row, at most `most`: those that continue its prompt;
    the first row with queries from each row on, as many as there are rows if there is none).

    Minima over masks are fusions of the GPU compiler; cumulative ones are loops of kernels.
    """
    rows = offset.shape[0]
    unseen = jnp.arange(table.shape[1]) * page >= (offset + lengths)[:-1, None]
    continues = (
        ((table[1:] == table[:-1]) | unseen).all(axis=1)
        & (offset[1:] == offset[:-1] + queries)
        & (lengths[:-1] == queries)
        & (lengths[1:] > 0)
    )
    ahead = jnp.arange(1, most, dtype=jnp.int32)
    row = jnp.arange(rows, dtype=jnp.int32)
    continues = jnp.pad(continues, (0, most))[row[:, None] + ahead - 1]
    size = jnp.where(continues, most, ahead).min(axis=1, initial=most)
    after = (row >= jnp.arange(rows + 1, dtype=jnp.int32)[:, None]) & (lengths > 0)
    return size, jnp.where(after, row, rows).min(axis=1)


def _read(kv, pages, dtype, start, count: int, seen):
    """Keys and values in `dtype`, 1 S K H, of `count` positions from `start` on of the prompt with
    these pages. Those from `seen` on are zeros: nothing that may stand there, NaN included, gets
    into a product."""
    index = jnp.arange(count, dtype=jnp.int32)
    page = kv[0][0].shape[2]
    position = jnp.minimum(start + index, pages.shape[0] * page - 1)
    page_index = pages[position // page]
    offset = position % page
    found = []
    for x, scale in kv:
        x = x.at[page_index, :, offset].get(mode="clip")
        if scale is not None:
            scale = scale.at[page_index, :, offset].get(mode="clip")
            x = x.astype(jnp.float32) * scale[..., None]
        found.append(jnp.where((index < seen)[:, None, None], x, 0).astype(dtype)[None])
    return found


def _one_call(q, read, start, queries, context: int, attend):
    """The output, 1 M N H, of `queries` that stand at `start` and after it; zeros after these."""

    def part(at, count: int, seen, *, causal: bool) -> Part:
        return attend(q, *read(at, count, seen), queries[None], seen[None], causal=causal)

    def with_block(j, before: Part) -> Part:
        seen = jnp.minimum(start - j * context, context)
        return _join(before, part(j * context, context, seen, causal=False))

    own, lse = part(start, q.shape[1], queries, causal=True)
    blocks = (start + context - 1) // context
    out, _ = lax.fori_loop(0, blocks, with_block, (own.astype(jnp.float32), lse))
    real = (jnp.arange(q.shape[1]) < queries)[:, None, None]
    return jnp.where(real, out, 0).astype(q.dtype)


def _join(a: Part, b: Part) -> Part:
    """Attention to the keys of both parts."""
    lse = jnp.logaddexp(a[1], b[1])
    a_share, b_share = (jnp.exp(part[1] - lse)[..., None] for part in (a, b))
    return a[0] * a_share + b[0].astype(jnp.float32) * b_share, lse
