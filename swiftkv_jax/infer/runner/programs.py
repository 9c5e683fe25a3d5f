"""The compiled programs of serving: fill the cache with prompt tokens, decode, and score.

    every token:                 embed -> lower layers -> keys and values of the upper groups     `fill`
    decoded and scored tokens:                         -> upper layers -> logits

A prompt token stops after `fill`: that is SwiftKV. The last token of a prompt goes into the first
decode step, so prefill needs no upper layer, no head and no logits, ever.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from ...attention import Attention
from ...cache import (
    KVCache,
    Pool,
    cache_sharding,
    gather_pages,
    keys_carry_nan,
    row_sharding,
    write_pages,
    write_token,
)
from ...config import Config
from ...layers import embed, rope_table, unembed
from ...params import Leaf
from ...sharding import replicated
from ...transformer import DEFAULT, cross_layer, head_major, project_fused_kv, self_layer
from ..sampling.logprobs import report
from ..sampling.sampler import SamplerOutput, count, sample
from .decode_state import DecodeBatch
from .prefill_chunk import INVALID_PAGE, PrefillChunk, QueryTiles, Scored, pack, unpack
from .weights import Weights

Write = Callable[[Pool, Float[Array, "A K T H"]], Pool]
Read = Callable[[Float[Array, "A T N H"], Pool, Pool], Float[Array, "A T N H"]]

HEAD_ROWS = 256
"""Scored tokens whose logits exist at the same time."""


# Layers over the cache --------------------------------------------------------


def fill(
    config: Config,
    weights: Weights,
    tokens: Int[Array, "A T"],
    positions: Int[Array, "A T"],
    cache: KVCache,
    write: Write,
    read: Read,
) -> tuple[Float[Array, "A T D"], Float[Array, "2 A T H_half"], KVCache]:
    """What every token needs: (hidden state at the boundary, rotary table, cache with the tokens'
    keys and values)."""
    x, rope = embed(weights, tokens), rope_table(config, positions)
    pools = list(zip(cache.k, cache.v, strict=True))

    def store(pools, k, v):
        k, v = keys_carry_nan(k, v)
        return write(pools[0], k), write(pools[1], v)

    def attend_own(pools):
        def attend(q, k, v):
            kv = store(pools, head_major(k), head_major(v))
            return read(q, *kv), kv

        return attend

    for i, (block, qkv) in enumerate(zip(weights.lower, weights.lower_qkv, strict=True)):
        x, pools[i] = self_layer(config, block, qkv, x, rope, attend_own(pools[i]))
    if weights.upper:
        k, v = project_fused_kv(config, weights.norm_swiftkv, weights.kv, weights.kv_bias, x, rope)
        for i, group in enumerate(range(config.num_kv_groups), start=config.num_lower_layers):
            pools[i] = store(pools[i], k[group], v[group])
    return x, rope, KVCache(tuple(k for k, _ in pools), tuple(v for _, v in pools))


def finish(
    config: Config, weights: Weights, x: Float[Array, "A T D"], rope, cache: KVCache, read: Read
) -> Float[Array, "A T D"]:
    """The upper layers, for tokens whose own keys and values are in the cache: hidden state before
    the final norm."""
    for i, (block, q_weight, q_bias) in enumerate(
        zip(weights.upper, weights.upper_q, weights.upper_q_bias, strict=True)
    ):
        layer = config.num_lower_layers + i // config.key_value_group_size
        x = cross_layer(
            config,
            block,
            q_weight,
            q_bias,
            x,
            rope,
            lambda q, layer=layer: read(q, cache.k[layer], cache.v[layer]),
        )
    return x


# Prefill ----------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def prefill_chunk(
    config: Config,
    weights: Weights,
    chunk: PrefillChunk,
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
) -> tuple[KVCache, Int[Array, ""]]:
    """Put the tokens of a chunk into the cache (`packed` draws one). Their requests' earlier tokens
    must be there.

    Also returns a number to wait for: the cache itself is donated to the next call before it is
    there.
    """
    _, _, cache = _fill_chunk(config, weights, chunk, cache, attention)
    return _keep_cache_sharding(config, cache, attention), _whole(chunk.pieces.end.max(), attention)


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def score_chunk(
    config: Config,
    weights: Weights,
    chunk: PrefillChunk,
    scored: Scored,
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
) -> tuple[KVCache, SamplerOutput]:
    """`prefill_chunk`, and the log-probabilities (A M) of the targets of some of its tokens, which
    alone run through the upper layers. `token` of the result is the likeliest one."""
    x, rope, cache = _fill_chunk(config, weights, chunk, cache, attention)
    x = jax.vmap(lambda x, index: x[index])(x, scored.index)
    rope = jax.vmap(lambda rope, index: rope[:, index], (1, 0), 1)(rope, scored.index)
    x = finish(
        config, weights, x, rope, cache, _reader(config, scored.pieces, chunk.context, attention)
    )

    def head(block):
        x, target, asked = block
        logits = unembed(config, weights, x[None])[0]
        return SamplerOutput(
            jnp.argmax(logits, axis=-1).astype(jnp.int32), *report(logits, target, asked)
        )

    size = scored.target.size
    rows = min(size, HEAD_ROWS)

    def in_blocks(leaf):
        leaf = leaf.reshape(size, *leaf.shape[2:])
        padded = jnp.pad(leaf, ((0, -size % rows), *((0, 0),) * (leaf.ndim - 1)))
        return padded.reshape(-1, rows, *leaf.shape[1:])

    def whole(leaf):
        return leaf.reshape(-1, *leaf.shape[2:])[:size].reshape(
            *scored.target.shape, *leaf.shape[2:]
        )

    result = jax.tree.map(
        whole, jax.lax.map(head, jax.tree.map(in_blocks, (x, scored.target, scored.asked)))
    )
    return _keep_cache_sharding(config, cache, attention), _whole(result, attention)


def _fill_chunk(
    config: Config, weights: Weights, chunk: PrefillChunk, cache: KVCache, attention: Attention
):
    pieces, sharding = chunk.pieces, _sharding(config, attention)
    page_size = cache.k[0].values.shape[2]
    place = jnp.arange(page_size)
    written = (place >= pieces.first[:, None]) & (place < pieces.end[:, None])

    def write(pool: Pool, new):
        return write_pages(
            pool,
            head_major(unpack(head_major(new), pieces, page_size)),
            pieces.page,
            written,
            sharding,
        )

    return fill(
        config,
        weights,
        chunk.tokens,
        chunk.positions,
        cache,
        write,
        _reader(config, pieces, chunk.context, attention),
    )


def _reader(config: Config, pieces: QueryTiles, context, attention: Attention) -> Read:
    """Attention of packed queries to their requests' pages."""
    sharding = _sharding(config, attention)

    def read(q, k: Pool, v: Pool):
        page_size = k.values.shape[2]
        if (
            context is not None
        ):  # a device kernel widens all of what it is given, so it is given what the chunk reads
            k, v = gather_pages(k, context, sharding), gather_pages(v, context, sharding)
        out = attention.prefill(
            unpack(q, pieces, page_size),
            k.values,
            v.values,
            q_offset=pieces.start,
            lengths=pieces.end,
            page_table=pieces.table,
            k_scale=k.scale,
            v_scale=v.scale,
        )
        return pack(out, pieces)

    return read


# Decoding ---------------------------------------------------------------------


@struct.dataclass
class DecodeState:
    """All that decoding carries from call to call. Donated: the old state is gone after each."""

    cache: KVCache
    rows: DecodeBatch
    seen: Leaf  # u16[B, V]; see `sampler`


def decode_logits(
    config: Config,
    weights: Weights,
    rows: DecodeBatch,
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
) -> tuple[Float[Array, "B V"], KVCache]:
    """One token per row through all layers: float32 logits of what follows, and the cache with the
    token in it.

    Rows without a budget write nothing.
    """
    sharding = _sharding(config, attention)
    page_size = cache.k[0].values.shape[2]
    active = rows.budget > 0
    page = jnp.take_along_axis(rows.table, (rows.length // page_size)[:, None], axis=1)[:, 0]
    page, place = jnp.where(active, page, INVALID_PAGE), rows.length % page_size
    length = jnp.where(active, rows.length + 1, 0)

    def read(q, k: Pool, v: Pool):
        return attention.decode(
            q, k.values, v.values, length, k_scale=k.scale, v_scale=v.scale, page_table=rows.table
        )

    def write(pool: Pool, new):
        return write_token(pool, new, page, place, sharding)

    x, rope, cache = fill(
        config, weights, rows.token[:, None], rows.length[:, None], cache, write, read
    )
    x = finish(config, weights, x, rope, cache, read)
    return unembed(config, weights, x)[:, 0], cache


@functools.partial(
    jax.jit, static_argnames=("config", "steps", "attention"), donate_argnames="state"
)
def decode(
    config: Config,
    weights: Weights,
    slots: Int[Array, " B"],
    state: DecodeState,
    *,
    steps: int,
    attention: Attention = DEFAULT,
) -> tuple[DecodeState, SamplerOutput]:
    """Emit up to `steps` (M) tokens for each of the rows in `slots`: `SamplerOutput` of B M, token -1
    where a row is finished.

    An end token is emitted and finishes its row. A slot past the last is no row.
    """
    rows = _split_rows(state.rows.take(slots), attention)

    def step(carry, _):
        cache, rows, seen = carry
        logits, cache = decode_logits(config, weights, rows, cache, attention=attention)
        sampled = sample(logits, rows.sampling, seen.at[slots].get(mode="clip"), rows.length)
        active = rows.budget > 0
        carry = (
            _keep_cache_sharding(config, cache, attention),
            rows.after(sampled.token),
            count(seen, slots, sampled.token, active),
        )
        return carry, dataclasses.replace(sampled, token=jnp.where(active, sampled.token, -1))

    (cache, rows, seen), sampled = jax.lax.scan(step, (state.cache, rows, state.seen), length=steps)
    sampled = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), sampled)
    return DecodeState(
        cache, _whole(state.rows.put(slots, rows), attention), _whole(seen, attention)
    ), _whole(sampled, attention)


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def copy_pages(
    config: Config,
    source: Int[Array, " X"],
    target: Int[Array, " X"],
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
) -> KVCache:
    """Pages `source` copied to pages `target`, in every layer. Numbers past the pool copy
    nothing."""

    def copy(cache, source, target):
        return jax.tree.map(
            lambda leaf: leaf.at[target].set(leaf.at[source].get(mode="clip"), mode="drop"), cache
        )

    if (mesh := attention.mesh) is None:
        return copy(cache, source, target)
    pages, rows = cache_sharding(config, mesh).spec, row_sharding(mesh).spec
    return jax.shard_map(copy, mesh=mesh, in_specs=(pages, rows, rows), out_specs=pages)(
        cache, source, target
    )


# Places -----------------------------------------------------------------------


def _sharding(config: Config, attention: Attention):
    return None if attention.mesh is None else cache_sharding(config, attention.mesh)


def _keep_cache_sharding(config: Config, cache: KVCache, attention: Attention) -> KVCache:
    """Leave a call as it was entered: donated buffers can only be reused, and calls only be
    repeated, if that holds."""
    return (
        cache
        if attention.mesh is None
        else jax.lax.with_sharding_constraint(cache, cache_sharding(config, attention.mesh))
    )


def _split_rows(rows: DecodeBatch, attention: Attention) -> DecodeBatch:
    """Each device computes its own rows."""
    return (
        rows
        if attention.mesh is None
        else jax.lax.with_sharding_constraint(rows, row_sharding(attention.mesh))
    )


def _whole[Tree](tree: Tree, attention: Attention) -> Tree:
    """What the host reads or writes, on every device: any process can."""
    return (
        tree
        if attention.mesh is None
        else jax.lax.with_sharding_constraint(tree, replicated(attention.mesh))
    )
