"""Attention in plain XLA, in blocks: any platform, any shape, any floating dtype, and never a T x S
array.

Queries are walked in blocks, and for each the key blocks between the first and the last that any of
its rows can see: the bounds are computed, so a prompt's upper triangle, other documents and the
unused end of a cache cost nothing. A block's weights are exponentials relative to the largest score
so far; when a larger one appears, sums and output are scaled down ("online softmax", float32). The
forward pass saves the output and the log of each query's sum, from which the backward pass
recomputes a block's weights: five products a block to the forward's two.

What fits in one block is computed directly, and differentiated by JAX.

A block here is a tile of queries or keys; a part of a cache is a page.

Letters: B batch rows, T queries, S key positions, N query heads, K key/value heads, H head dim, I
query blocks, X pages of a pool, P pages of a row. The T * N/K queries that share a key/value head
are the R rows of its products. XLA's CPU backend decides their form: it has no bfloat16 product
with float32 sums that must transpose its result, nor in general one with more than one free axis an
operand; and one that contracts the major axis of an operand first makes a transposed copy.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .device import current_device
from .gradients import SCALED_OR_PAGED, checkpoint_names
from .operands import AttentionOperands, page_size
from .score_options import PLAIN_SCORES, ScoreOptions
from .xla_blocks import decode_keys, prefill_blocks
from .xla_keys import (
    Keys,
    add_block,
    even,
    join,
    load,
    restrict,
    scalar,
    split,
    visible_blocks,
    visible_rows,
)

FULL_SHARE = 4
"""One product over the whole cache takes a third of the time of all its blocks, which are copied
first: blocks are walked only if at most a quarter of the positions is valid."""


def prefill(
    operands: AttentionOperands,
    *,
    window: Int[Array, ""] | int | None = None,
    score_options: ScoreOptions = PLAIN_SCORES,
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attention of these operands, with `window` of each query to the last so many positions; with
    `return_lse` also the logarithm of each query's sum of exponentials, not differentiable. Pages
    and scales are read one block at a time; only without them is this differentiable.
    """
    q = operands.q
    lengths = operands.lengths
    kv_lengths = operands.kv_lengths
    page_table = operands.page_table
    page = operands.k.shape[2]
    start = operands.q_offset[:, None]
    index = jnp.arange(q.shape[1], dtype=jnp.int32)
    last = position = start + index  # the last position each query sees; -1 for none
    if lengths is not None:
        last = jnp.where(index < lengths[:, None], last, -1)
    window = scalar(window)
    first = None
    if kv_lengths is not None:
        last, window, first = restrict(last, position, window, kv_lengths)
    keys = Keys.of(operands, window, first)
    platform, (batch, queries, heads, _) = current_device()[0], q.shape
    most = prefill_blocks(platform, batch, queries, heads)
    if queries <= most.queries and keys.length <= most.keys:
        return _direct(q, keys, last, score_options, return_lse)
    if page_table is None:
        blocks = even(queries, most.queries), even(keys.length, most.keys)
        return _in_blocks(q, keys, last, *blocks, score_options, return_lse)
    most = prefill_blocks(platform, 1, queries, heads)
    blocks = even(queries, most.queries), even(keys.length, most.keys, page=page)

    def row(q, table, last, first):
        q, table, first = jax.tree.map(lambda x: x[None], (q, table, first))
        of_row = keys._replace(page_table=table, first=first)
        found = _in_blocks(q, of_row, last[None], *blocks, score_options, return_lse)
        return jax.tree.map(lambda x: jnp.squeeze(x, 0), found)

    # Rows one after the other: they are chunks of prompts, some long, some idle, and each walks its
    # own blocks only.
    return lax.map(lambda operands: row(*operands), (q, page_table, last, first))


def decode(
    operands: AttentionOperands,
    *,
    window: Int[Array, ""] | int | None = None,
    score_options: ScoreOptions = PLAIN_SCORES,
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The same for `decode_attention`. What lies beyond the longest row's block is not read, unless
    reading it all is faster."""
    q = operands.q
    k = operands.k
    length = operands.length
    batch, queries, _, head_dim = q.shape
    most = decode_keys(current_device()[0], batch * k.shape[1] * head_dim * q.dtype.itemsize)
    last = length.astype(jnp.int32)[:, None] - queries + jnp.arange(queries, dtype=jnp.int32)
    keys = Keys.of(operands, scalar(window))
    in_place = operands.page_table is None and operands.k_scale is None
    if keys.length <= most * (FULL_SHARE if in_place else 1):
        return _direct(q, keys, last, score_options, return_lse)
    block = even(keys.length, most, page=page_size(operands) or 1)
    if not in_place:
        return _in_blocks(q, keys, last, queries, block, score_options, return_lse)
    short = length.max() <= keys.length // FULL_SHARE
    return lax.cond(
        short,
        lambda: _in_blocks(q, keys, last, queries, block, score_options, return_lse),
        lambda: _direct(q, keys, last, score_options, return_lse),
    )


# One block --------------------------------------------------------------------


def _direct(q, keys: Keys, last, changes: ScoreOptions, return_lse: bool) -> Any:
    rows = _rows(q, keys)
    visible = visible_rows(q, keys, last)
    k, v, k_scale, v_scale, mask = load(keys, 0, keys.length, rows.dtype, visible)
    # The smallest finite number, not -inf: a query that sees nothing must not be NaN before it is
    # zero, nor its gradient.
    scores = jnp.where(mask, changes.applied(_scores(rows, k, k_scale)), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    out = _heads(_attend(weights, v, v_scale), q).astype(q.dtype)
    out = jnp.where((last >= 0)[:, :, None, None], out, 0)
    if not return_lse:
        return out
    lse = _heads(jax.nn.logsumexp(scores, axis=-1)[..., None], q[..., :1])[..., 0]
    return out, jnp.where((last >= 0)[:, :, None], lse, -jnp.inf)


# Many blocks ------------------------------------------------------------------


def _in_blocks(
    q, keys: Keys, last, block_q: int, block_kv: int, changes: ScoreOptions, return_lse: bool
) -> Any:
    if not return_lse:
        return _blocked(q, keys, last, block_q, block_kv, changes)
    out, lse = _forward(q, keys, last, block_q, block_kv, changes)
    # I B K R -> I B K T N/K -> B T N
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse)
    lse = lse.reshape(*lse.shape[:3], block_q, -1).transpose(1, 0, 3, 2, 4)
    return out, lse.reshape(q.shape[0], -1, q.shape[2])[:, : q.shape[1]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _blocked(q, keys: Keys, last, block_q: int, block_kv: int, changes: ScoreOptions):
    return _forward(q, keys, last, block_q, block_kv, changes)[0]


def _forward(q, keys: Keys, last, block_q: int, block_kv: int, changes: ScoreOptions):
    """The output, and the logarithm of each row's sum of exponentials (I B K R), +inf for rows that
    see nothing."""

    def query_block(block):
        q, visible, first, end = block
        rows = _rows(q, keys)

        def key_block(j, carry):
            out, largest, total = carry
            k, v, k_scale, v_scale, mask = load(keys, j, block_kv, rows.dtype, visible)
            scores = jnp.where(mask, changes.applied(_scores(rows, k, k_scale)), -jnp.inf)
            new_largest = jnp.maximum(largest, scores.max(axis=-1))
            weights = jnp.exp(scores - new_largest[..., None])
            shrink = jnp.exp(largest - new_largest)
            out = out * shrink[..., None] + _attend(weights, v, v_scale)
            return out, new_largest, total * shrink + weights.sum(axis=-1)

        # Made from the rows, zeros vary over the same mesh axes. The largest score begins finite:
        # -inf less -inf is NaN.
        zeros = jnp.zeros_like(rows, dtype=jnp.float32)
        nothing = zeros, jnp.full_like(zeros[..., 0], jnp.finfo(jnp.float32).min), zeros[..., 0]
        out, largest, total = lax.fori_loop(first, end, key_block, nothing)
        lse = jnp.where(total > 0, largest + jnp.log(total), jnp.inf)
        return _heads(out / jnp.where(total > 0, total, 1)[..., None], q).astype(q.dtype), lse

    out, lse = lax.map(
        query_block, (split(q, block_q), *visible_blocks(q, keys, last, block_q, block_kv))
    )
    return join(out, q.shape[1]), lse


def _forward_rule(q, keys: Keys, last, block_q: int, block_kv: int, changes: ScoreOptions):
    if keys.k_scale is not None or keys.page_table is not None:
        raise NotImplementedError(SCALED_OR_PAGED)
    q, out, lse = checkpoint_names(q, *_forward(q, keys, last, block_q, block_kv, changes))
    return out, (q, keys, last, out, lse)


def _backward_rule(block_q: int, block_kv: int, changes: ScoreOptions, residuals, d_out):
    q, keys, last, out, lse = residuals
    scale = q.shape[-1] ** -0.5

    def query_block(carry, block):
        q, out, d_out, lse, visible, first, end = block
        rows = _rows(q, keys)
        d_rows = _rows(d_out, keys)
        delta = jnp.sum(out.astype(jnp.float32) * d_out, axis=-1, keepdims=True)
        delta = _rows(delta, keys)[..., 0]

        def key_block(j, carry):
            # Keys first, S x R: of the operands only the two narrow ones, k and the rows, are ever
            # transposed.
            dq, dk, dv = carry
            k, v, _, _, mask = load(keys, j, block_kv, rows.dtype, visible)
            mask = mask.swapaxes(2, 3)
            scores = changes.applied(_scores(k, rows))
            weights = jnp.where(mask, jnp.exp(scores - lse[:, :, None]), 0)
            d_weights = _product("BKSH,BKRH->BKSR", v, d_rows)
            # Masked again: an unseen value can have made d_weights infinite, and zero times that is
            # not zero.
            d_scores = jnp.where(mask, weights * (d_weights - delta[:, :, None]), 0)
            d_scores = changes.gradient(d_scores, scores).astype(rows.dtype)
            dq += _product("BKSH,BKSR->BKHR", k, d_scores)
            dk = add_block(dk, j, _product("BKSR,BKRH->BKSH", d_scores, rows))
            dv = add_block(dv, j, _product("BKSR,BKRH->BKSH", weights.astype(rows.dtype), d_rows))
            return dq, dk, dv

        dq, dk, dv = lax.fori_loop(
            first, end, key_block, (jnp.zeros_like(rows, dtype=jnp.float32).swapaxes(2, 3), *carry)
        )
        return (dk, dv), _heads(dq.swapaxes(2, 3) * scale, q).astype(q.dtype)

    zeros = jnp.zeros_like(keys.k, dtype=jnp.float32), jnp.zeros_like(keys.v, dtype=jnp.float32)
    blocks = (
        *(split(x, block_q) for x in (q, out, d_out)),
        lse,
        *visible_blocks(q, keys, last, block_q, block_kv),
    )
    (dk, dv), dq = lax.scan(query_block, zeros, blocks)
    return (
        join(dq, q.shape[1]),
        Keys((dk * scale).astype(keys.k.dtype), dv.astype(keys.v.dtype)),
        None,
    )


_blocked.defvjp(_forward_rule, _backward_rule)


# Products ---------------------------------------------------------------------


def _rows(x, keys: Keys):
    """B T N H -> B K R H, the group's heads of a query next to each other."""
    batch, queries, _, head_dim = x.shape
    x = x.reshape(batch, queries, keys.k.shape[1], -1, head_dim).transpose(0, 2, 1, 3, 4)
    return x.reshape(batch, keys.k.shape[1], -1, head_dim)


def _heads(rows, q):
    """B K R H -> B T N H, as `q` is."""
    return (
        rows.reshape(*rows.shape[:2], q.shape[1], -1, q.shape[3])
        .transpose(0, 2, 1, 3, 4)
        .reshape(q.shape)
    )


def _scores(rows, k, k_scale=None):
    scores = _product("BKRH,BKSH->BKRS", rows, k) * rows.shape[-1] ** -0.5
    return _scaled(scores, k_scale)


def _attend(weights, v, v_scale):
    return _product("BKRS,BKSH->BKRH", _scaled(weights, v_scale).astype(v.dtype), v)


def _scaled(x, scale):
    if scale is None:
        return x
    return x * scale[:, :, None]


def _product(axes: str, a, b):
    # By default GPUs and TPUs round float32 operands.
    precision = lax.Precision.HIGHEST if a.dtype == b.dtype == jnp.float32 else None
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=jnp.float32)
