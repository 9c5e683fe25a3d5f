"""The compiled programs of prefill: a chunk of prompt tokens, and scoring.

    every token:                `run_lower_layers`  embed, lower layers
                                `run_boundary`      upper keys and values
    scored and own tokens:      `run_upper_layers`  upper layers; for scores the logits

A prompt token stops after `run_boundary`: that is SwiftKV. The last token of a prompt is the
input of the first decode step, or of `first_token`, so prefill runs no upper layer and computes no
logits; with `Config.exact_tail`, upper layers of the prompt's last tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...model.attention import DEFAULT, Attention
from ...model.cache import KVCache, Pool, gather_pages, write_pages
from ...model.config import Config
from ...model.layers import unembed
from ...model.packed_attention import head_major, score_options
from ...model.rope import Tables
from ..engine.sampler_output import SamplerOutput
from ..engine.shapes import kv_programs
from ..sampling.logprobs import gather_logprobs
from .adapters import with_adapters
from .cached_layers import (
    OwnCache,
    Write,
    run_boundary,
    run_lower_layers,
    run_upper_layers,
    run_upper_layers_own,
    run_upper_layers_two_caches,
)
from .first_tokens import FirstTokens
from .layout import keep_cache_sharding, pool_sharding, replicate, state_sharding
from .prefill_chunk import Joined, PrefillChunk, QueryTiles, UpperTokens, pack, unpack
from .serving_form import Weights
from .taps import chunk_before

HEAD_ROWS = 256
"""Scored tokens whose logits are in memory at the same time."""


@functools.partial(
    jax.jit, static_argnames=("config", "attention", "last_token"), donate_argnames="cache"
)
def prefill_chunk(
    config: Config,
    weights: Weights,
    tokens: Joined[PrefillChunk],
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
    last_token: bool = False,
) -> tuple[KVCache, Int[Array, ""] | Float[Array, "A D"]]:
    """Write the keys and values of a chunk's tokens into the cache (see module `prefill_chunk`).
    The earlier tokens of their requests must be cached.

    Also returns a number to wait for: the cache itself is donated to the next call before this one
    has ended. With `last_token` that is the hidden state of each shard's last token at the SwiftKV
    layer, for `first_token`.
    """
    chunk = tokens.split()
    x, _, cache = _prefill(config, weights, chunk, cache, attention)
    done = chunk.tiles.query_end.max()
    if last_token:
        tiles = chunk.tiles
        stop = (tiles.source + tiles.query_end - tiles.query_start).reshape(x.shape[0], -1)
        last = jnp.maximum(stop.max(axis=1) - 1, 0)
        done = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return keep_cache_sharding(config, cache, attention), replicate(done, attention)


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def prefill_tail(
    config: Config,
    weights: Weights,
    tokens: Joined[tuple[PrefillChunk, UpperTokens]],
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
) -> tuple[KVCache, Int[Array, ""]]:
    """`prefill_chunk` in which some tokens run through the upper layers too, and keep their own
    keys and values there."""
    chunk, upper = tokens.split()
    x, tables, cache = _prefill(config, weights, chunk, cache, attention)
    _, cache = _run_upper_own(config, weights, chunk, upper, x, tables, cache, attention)
    done = chunk.tiles.query_end.max()
    return keep_cache_sharding(config, cache, attention), replicate(done, attention)


@functools.partial(
    jax.jit, static_argnames=("config", "attention", "head_rows"), donate_argnames="cache"
)
def score_chunk(
    config: Config,
    weights: Weights,
    tokens: Joined[tuple[PrefillChunk, UpperTokens]],
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
    head_rows: int = HEAD_ROWS,
) -> tuple[KVCache, SamplerOutput]:
    """`prefill_chunk`, and the log-probabilities (A M) of the targets of some of its tokens, which
    alone run through the upper layers. `token` of the result is the likeliest one. Logits are
    computed for `head_rows` tokens at a time."""
    chunk, scored = tokens.split()
    x, tables, cache = _prefill(config, weights, chunk, cache, attention)
    if kv_programs(config) == "boundary":
        x, tables = _upper_input(x, tables, scored)
        read = _reader(config, scored.tiles, chunk.gathered_pages, attention)
        adapted = with_adapters(config, weights, scored.adapter)
        x = run_upper_layers(config, adapted, x, tables, cache, read, attention)
    else:
        x, cache = _run_upper_own(config, weights, chunk, scored, x, tables, cache, attention)

    def head(block):
        x, target, num_logprobs = block
        logits = unembed(config, weights, x[None])[0]
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return SamplerOutput(likeliest, *gather_logprobs(logits, target, num_logprobs))

    size = scored.target.size
    rows = min(size, head_rows)

    def in_blocks(leaf):
        leaf = leaf.reshape(size, *leaf.shape[2:])
        padded = jnp.pad(leaf, ((0, -size % rows), *((0, 0),) * (leaf.ndim - 1)))
        return padded.reshape(-1, rows, *leaf.shape[1:])

    def joined(leaf):
        leaf = leaf.reshape(-1, *leaf.shape[2:])[:size]
        return leaf.reshape(*scored.target.shape, *leaf.shape[1:])

    blocks = jax.tree.map(in_blocks, (x, scored.target, scored.num_logprobs))
    result = jax.tree.map(joined, jax.lax.map(head, blocks))
    return keep_cache_sharding(config, cache, attention), replicate(result, attention)


def _prefill(
    config: Config, weights: Weights, chunk: PrefillChunk, cache: KVCache, attention: Attention
):
    weights = with_adapters(config, weights, chunk.adapter)
    write = _writer(config, chunk.tiles, cache, attention)
    read = _reader(config, chunk.tiles, chunk.gathered_pages, attention)
    x, tables, cache = run_lower_layers(
        config, weights, chunk.tokens, chunk.positions, cache, write, read, attention
    )
    if not weights.upper:
        return x, tables, cache
    before = None
    if cache.tap is not None:
        page_size = cache.k[0].values.shape[2]
        sharding = state_sharding(attention)
        before = chunk_before(chunk.tiles, chunk.gathered_pages, page_size, sharding)
    first = None
    if config.exact_head:
        first = FirstTokens.of(chunk.tiles, x.shape[1], chunk.adapter)
    cache = run_boundary(
        config, weights, x, tables, cache, write, read, attention, before=before, first=first
    )
    return x, tables, cache


def _run_upper_own(
    config: Config,
    weights: Weights,
    chunk: PrefillChunk,
    upper: UpperTokens,
    x: Float[Array, "A T D"],
    tables: Tables,
    cache: KVCache,
    attention: Attention,
) -> tuple[Float[Array, "A M D"], KVCache]:
    """Run some tokens of a chunk through the upper layers; they keep their own keys and values."""
    weights = with_adapters(config, weights, upper.adapter)
    x, tables = _upper_input(x, tables, upper)
    read = _reader(config, upper.tiles, chunk.gathered_pages, attention)
    if upper.own_tiles is None:
        write = _writer(config, upper.tiles, cache, attention, upper.own_start)
        return run_upper_layers_own(config, weights, x, tables, cache, write, read, attention)
    assert upper.own_start is not None
    read_shared = functools.partial(read, kv_lengths=upper.own_start, return_lse=True)
    own = [
        _own_cache(config, upper.own_tiles, part, chunk.gathered_pages, cache, attention)
        for part in range(config.pages_per_own_page)
    ]
    return run_upper_layers_two_caches(
        config, weights, x, tables, cache, own, read_shared, attention
    )


def _own_cache(
    config: Config,
    tiles: QueryTiles,
    part: int,
    gathered_pages,
    cache: KVCache,
    attention: Attention,
) -> OwnCache:
    """The pages of number `part` among those of each tile."""
    is_own = tiles.tile_index >= 0
    tiles = dataclasses.replace(
        tiles,
        page=tiles.page[:, part],
        page_table=tiles.page_table[:, :, part],
        tile_index=jnp.maximum(tiles.tile_index, 0),
    )
    read = _reader(config, tiles, gathered_pages, attention)

    def read_own(q, k: Pool, v: Pool, window: int | None):
        # Other tokens see none of these keys, and `pack` gives them the row of some other token.
        out, lse = read(q, k, v, window, return_lse=True)
        out = jnp.where(is_own[..., None, None], out, 0)
        return out, jnp.where(is_own[..., None], lse, -jnp.inf)

    return OwnCache(_writer(config, tiles, cache, attention), read_own)


def _upper_input(x: Float[Array, "A T D"], tables: Tables, upper: UpperTokens):
    """Hidden states and rotary tables of the tokens that run through the upper layers."""
    if x.shape[0] == 1:
        # For a gather with a batch axis XLA's TPU compiler computes `x` a second time, as the sum
        # of what every lower layer has added to it, and keeps all of that until then.
        x = jnp.squeeze(x, 0)[upper.index[0]][None]
    else:
        x = jax.vmap(lambda x, index: x[index])(x, upper.index)
    of_tokens = jax.vmap(lambda table, index: table[:, index], (1, 0), 1)
    return x, tuple(of_tokens(table, upper.index) for table in tables)


def _writer(
    config: Config, tiles: QueryTiles, cache: KVCache, attention: Attention, own_start=None
) -> Write:
    """Write packed keys or values to the pages of their requests; with `own_start` (i32[W]) those
    of positions from there on."""
    sharding = pool_sharding(config, attention)
    page_size = cache.k[0].values.shape[2]
    offset = jnp.arange(page_size)
    written = (offset >= tiles.query_start[:, None]) & (offset < tiles.query_end[:, None])
    if own_start is not None:
        written &= tiles.page_start[:, None] + offset >= own_start[:, None]

    def write(pool: Pool, new):
        new = head_major(unpack(head_major(new), tiles, page_size))
        return write_pages(pool, new, tiles.page, written, sharding)

    return write


def _reader(
    config: Config, tiles: QueryTiles, gathered_pages, attention: Attention
) -> Callable[..., Any]:
    """Attention of packed queries to the pages of their requests. With `kv_lengths` (i32[W]) they
    see no position from there on; `return_lse` as in the op."""
    sharding = pool_sharding(config, attention)

    def read(q, k: Pool, v: Pool, window: int | None, *, kv_lengths=None, return_lse=False):
        page_size = k.values.shape[2]
        if gathered_pages is not None:
            # Attention widens the whole pool that it is given, so it gets only what the chunk
            # reads.
            k = gather_pages(k, gathered_pages, sharding)
            v = gather_pages(v, gathered_pages, sharding)
        if kv_lengths is not None:
            kv_lengths = jnp.minimum(kv_lengths, tiles.page_table.shape[1] * page_size)
        out = attention.prefill(
            unpack(q, tiles, page_size),
            k.values,
            v.values,
            q_offset=tiles.page_start,
            lengths=tiles.query_end,
            page_table=tiles.page_table,
            k_scale=k.scale,
            v_scale=v.scale,
            window=window,
            score_options=score_options(config),
            kv_lengths=kv_lengths,
            return_lse=return_lse,
        )
        return jax.tree.map(lambda packed: pack(packed, tiles), out)

    return read
