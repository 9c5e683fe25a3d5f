"""The compiled programs of serving: prefill of a chunk of prompt tokens, decoding, and scoring.

    every token:                `run_lower_layers`  embed, lower layers, upper keys and values
    decoded and scored tokens:  `run_upper_layers`  upper layers; then the logits

A prompt token stops after `run_lower_layers`: that is SwiftKV. The last token of a prompt is the
input of the first decode step, so prefill runs no upper layer and computes no logits; with
`Config.exact_tail`, upper layers of the prompt's last tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from ...attention import DEFAULT, Attention
from ...cache import (
    KVCache,
    Pool,
    cache_sharding,
    gather_pages,
    row_sharding,
    write_pages,
    write_token,
)
from ...config import Config
from ...layers import unembed
from ...packed_attention import head_major
from ...rope import Tables
from ...sharding import replicated
from ..engine.sampler_output import SamplerOutput
from ..sampling.logprobs import gather_logprobs
from ..sampling.penalties import update_token_counts
from ..sampling.sampler import apply_masks, sample, sample_greedy
from .cached_layers import (
    Read,
    Write,
    run_lower_layers,
    run_upper_layers,
    run_upper_layers_own,
)
from .decode_state import DecodeBatch, DecodeState
from .prefill_chunk import INVALID_PAGE, PrefillChunk, QueryTiles, UpperTokens, pack, unpack
from .shapes import KVPrograms
from .weights import Weights

HEAD_ROWS = 256
"""Scored tokens whose logits are in memory at the same time."""


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
    """Write the keys and values of a chunk's tokens into the cache (`prefill_chunk` draws a chunk).
    The earlier tokens of their requests must be cached.

    Also returns a number to wait for: the cache itself is donated to the next call before this one
    has ended.
    """
    _, _, cache = _prefill(config, weights, chunk, cache, attention)
    done = chunk.tiles.query_end.max()
    return _keep_cache_sharding(config, cache, attention), _replicate(done, attention)


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def prefill_tail(
    config: Config,
    weights: Weights,
    chunk: PrefillChunk,
    upper: UpperTokens,
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
) -> tuple[KVCache, Int[Array, ""]]:
    """`prefill_chunk` in which some tokens run through the upper layers too, and keep their own
    keys and values there."""
    x, tables, cache = _prefill(config, weights, chunk, cache, attention)
    _, cache = _run_upper_own(config, weights, chunk, upper, x, tables, cache, attention)
    done = chunk.tiles.query_end.max()
    return _keep_cache_sharding(config, cache, attention), _replicate(done, attention)


@functools.partial(
    jax.jit, static_argnames=("config", "attention", "kv", "head_rows"), donate_argnames="cache"
)
def score_chunk(
    config: Config,
    weights: Weights,
    chunk: PrefillChunk,
    scored: UpperTokens,
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
    kv: KVPrograms = "boundary",
    head_rows: int = HEAD_ROWS,
) -> tuple[KVCache, SamplerOutput]:
    """`prefill_chunk`, and the log-probabilities (A M) of the targets of some of its tokens, which
    alone run through the upper layers. `token` of the result is the likeliest one. Logits are
    computed for `head_rows` tokens at a time."""
    x, tables, cache = _prefill(config, weights, chunk, cache, attention)
    if kv == "boundary":
        x, tables = _upper_input(x, tables, scored)
        read = _reader(config, scored.tiles, chunk.gathered_pages, attention)
        x = run_upper_layers(config, weights, x, tables, cache, read, attention)
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
    return _keep_cache_sharding(config, cache, attention), _replicate(result, attention)


def _prefill(
    config: Config, weights: Weights, chunk: PrefillChunk, cache: KVCache, attention: Attention
):
    write = _writer(config, chunk.tiles, cache, attention)
    read = _reader(config, chunk.tiles, chunk.gathered_pages, attention)
    return run_lower_layers(
        config, weights, chunk.tokens, chunk.positions, cache, write, read, attention
    )


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
    x, tables = _upper_input(x, tables, upper)
    write = _writer(config, upper.tiles, cache, attention, upper.own_start)
    read = _reader(config, upper.tiles, chunk.gathered_pages, attention)
    return run_upper_layers_own(config, weights, x, tables, cache, write, read, attention)


def _upper_input(x: Float[Array, "A T D"], tables: Tables, upper: UpperTokens):
    """Hidden states and rotary tables of the tokens that run through the upper layers."""
    x = jax.vmap(lambda x, index: x[index])(x, upper.index)
    of_tokens = jax.vmap(lambda table, index: table[:, index], (1, 0), 1)
    return x, tuple(of_tokens(table, upper.index) for table in tables)


def _writer(
    config: Config, tiles: QueryTiles, cache: KVCache, attention: Attention, own_start=None
) -> Write:
    """Write packed keys or values to the pages of their requests; with `own_start` (i32[W]) those
    of positions from there on."""
    sharding, page_size = _sharding(config, attention), cache.k[0].values.shape[2]
    offset = jnp.arange(page_size)
    written = (offset >= tiles.query_start[:, None]) & (offset < tiles.query_end[:, None])
    if own_start is not None:
        written &= tiles.page_start[:, None] + offset >= own_start[:, None]

    def write(pool: Pool, new):
        new = head_major(unpack(head_major(new), tiles, page_size))
        return write_pages(pool, new, tiles.page, written, sharding)

    return write


def _reader(config: Config, tiles: QueryTiles, gathered_pages, attention: Attention) -> Read:
    """Attention of packed queries to the pages of their requests."""
    sharding = _sharding(config, attention)

    def read(q, k: Pool, v: Pool, window: int | None):
        page_size = k.values.shape[2]
        if gathered_pages is not None:
            # Attention widens the whole pool that it is given: so only what the chunk reads.
            k = gather_pages(k, gathered_pages, sharding)
            v = gather_pages(v, gathered_pages, sharding)
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
            score_cap=config.score_cap,
        )
        return pack(out, tiles)

    return read


# Decoding ---------------------------------------------------------------------


def decode_logits(
    config: Config,
    weights: Weights,
    batch: DecodeBatch,
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
    kv: KVPrograms = "boundary",
) -> tuple[Float[Array, "B V"], KVCache]:
    """One token of each sequence through all layers: float32 logits of the next one, and the cache
    with the token's keys and values.

    Sequences that have ended write nothing. With `kv` both, tokens from `batch.own_start` on keep
    their own upper keys and values; with own, all of them.
    """
    sharding = _sharding(config, attention)
    page_size = cache.k[0].values.shape[2]
    active, length = batch.remaining > 0, batch.length
    page = jnp.take_along_axis(batch.page_table, (length // page_size)[:, None], axis=1)[:, 0]
    page, offset = jnp.where(active, page, INVALID_PAGE), length % page_size
    lengths = jnp.where(active, length + 1, 0)
    plans = {  # the same for all layers with a window
        window: attention.plan_decode(
            jax.ShapeDtypeStruct(
                (length.shape[0], 1, config.num_heads, config.head_dim), weights.embed.dtype
            ),
            cache.k[0].values,
            lengths,
            page_table=batch.page_table,
            window=window,
            score_cap=config.score_cap,
        )
        for window in dict.fromkeys(kind.window for kind in config.kinds)
    }

    def read(q, k: Pool, v: Pool, window: int | None):
        return attention.decode(
            q,
            k.values,
            v.values,
            lengths,
            k_scale=k.scale,
            v_scale=v.scale,
            page_table=batch.page_table,
            plan=plans[window],
            window=window,
            score_cap=config.score_cap,
        )

    def writer(page) -> Write:
        return lambda pool, new: write_token(pool, new, page, offset, sharding)

    inputs, boundary_kv = (batch.token[:, None], length[:, None]), kv != "own"
    x, tables, cache = run_lower_layers(
        config, weights, *inputs, cache, writer(page), read, attention, boundary_kv=boundary_kv
    )
    if kv == "boundary":
        x = run_upper_layers(config, weights, x, tables, cache, read, attention)
    else:
        own_page = page if kv == "own" else jnp.where(length >= batch.own_start, page, INVALID_PAGE)
        write = writer(own_page)
        x, cache = run_upper_layers_own(config, weights, x, tables, cache, write, read, attention)
    return unembed(config, weights, x)[:, 0], cache


@functools.partial(
    jax.jit,
    static_argnames=("config", "steps", "attention", "greedy", "kv"),
    donate_argnames="state",
)
def decode(
    config: Config,
    weights: Weights,
    slots: Int[Array, " B"],
    state: DecodeState,
    *,
    steps: int,
    attention: Attention = DEFAULT,
    greedy: bool = False,
    kv: KVPrograms = "boundary",
    masks: UInt32[Array, "B _"] | None = None,
) -> tuple[DecodeState, SamplerOutput]:
    """Emit up to `steps` (M) tokens for each sequence in `slots`: `SamplerOutput` of B M, token -1
    where a sequence has ended.

    An end token is emitted and ends its sequence. A slot past the last is empty. `greedy` is for
    sequences that all ask for the likeliest token and nothing else (`is_plain_greedy`): without the
    branches of the sampler, at which the host waits for a GPU, and without counts of tokens. `kv`
    as in `decode_logits`. `masks` have the tokens that each sequence may emit, as
    `Matcher.fill_masks` writes them; None is all.
    """

    def step(carry, _):
        cache, batch, token_counts = carry
        logits, cache = decode_logits(config, weights, batch, cache, attention=attention, kv=kv)
        active = batch.remaining > 0
        if greedy:
            sampled = sample_greedy(logits)
        else:
            allowed = logits if masks is None else apply_masks(logits, masks)
            sampled = sample(
                allowed, batch.sampling, token_counts, slots, batch.length, reported=logits
            )
            token_counts = update_token_counts(token_counts, slots, sampled.token, active)
        cache = _keep_cache_sharding(config, cache, attention)
        carry = cache, batch.advance(sampled.token), token_counts
        return carry, sampled._replace(token=jnp.where(active, sampled.token, -1))

    batch = _split_rows(state.batch.gather(slots), attention)
    carry = state.cache, batch, state.token_counts
    (cache, batch, token_counts), sampled = jax.lax.scan(step, carry, length=steps)
    sampled = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), sampled)
    state = DecodeState(
        cache,
        _replicate(state.batch.scatter(slots, batch), attention),
        _replicate(token_counts, attention),
    )
    return state, _replicate(sampled, attention)


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


# Shardings --------------------------------------------------------------------


def _sharding(config: Config, attention: Attention):
    return None if attention.mesh is None else cache_sharding(config, attention.mesh)


def _keep_cache_sharding(config: Config, cache: KVCache, attention: Attention) -> KVCache:
    """Give the cache the sharding that it had before the call: only then are donated buffers
    reused, and the compiled program fits the next call."""
    if attention.mesh is None:
        return cache
    return jax.lax.with_sharding_constraint(cache, cache_sharding(config, attention.mesh))


def _split_rows(batch: DecodeBatch, attention: Attention) -> DecodeBatch:
    """Split the rows of a batch over the devices that decode them."""
    if attention.mesh is None:
        return batch
    return jax.lax.with_sharding_constraint(batch, row_sharding(attention.mesh))


def _replicate[Tree](tree: Tree, attention: Attention) -> Tree:
    """Put what the host reads or writes on every device, so that each process can."""
    if attention.mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(attention.mesh))
