"""The compiled programs of decoding, and copies of pages.

every token:  `run_lower_layers`  embed, lower layers
              `run_boundary`      upper keys and values
              `run_upper_layers`  upper layers; then the logits
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16, UInt32

from ...model.attention import DEFAULT, Attention
from ...model.cache import KVCache, Pool, cache_sharding, map_cache, row_sharding, write_token
from ...model.config import Config
from ...model.layers import norm, unembed
from ...model.packed_attention import score_options
from ..engine.constrained import HostDrafts
from ..engine.sampler_output import SamplerOutput
from ..engine.shapes import kv_programs
from ..sampling.metadata import SamplingMetadata
from ..sampling.penalties import update_token_counts, update_token_counts_of_blocks
from ..sampling.sampler import apply_masks, sample, sample_greedy
from .adapters import with_adapters, with_one_place
from .cached_layers import (
    OwnCache,
    Write,
    run_boundary,
    run_lower_layers,
    run_upper_layers,
    run_upper_layers_own,
    run_upper_layers_two_caches,
)
from .decode_state import DecodeBatch, DecodeState
from .drafts import (
    Block,
    Drafting,
    FoldedQueries,
    SeparateQueries,
    accepted,
    draft,
    extend_history,
    given,
    mark_rejected,
    one_token_rows,
    repeated,
)
from .layout import (
    keep_cache_sharding,
    pool_sharding,
    replicate,
    split_rows,
    state_sharding,
)
from .prefill_chunk import INVALID_PAGE
from .serving_form import Weights
from .taps import decode_before


@functools.partial(jax.jit, static_argnames=("config", "attention"), inline=True)
def decode_logits(
    config: Config,
    weights: Weights,
    batch: DecodeBatch,
    cache: KVCache,
    *,
    block: Block | None = None,
    attention: Attention = DEFAULT,
) -> tuple[Float[Array, "B T V"], Float[Array, "B T D"] | None, KVCache]:
    """The last token of each sequence, or the T of its row in `block`, through all layers: float32
    logits of the next ones, their hidden states after the final norm (None without a speculator),
    and the cache with the tokens' keys and values.

    Sequences that have ended write nothing. Where `kv_programs` is both, tokens from
    `batch.own_start` on keep their own upper keys and values; where it is own, all of them.
    """
    kv = kv_programs(config)
    weights = with_adapters(config, weights, batch.adapter)
    sharding = pool_sharding(config, attention)
    page_size = cache.k[0].values.shape[2]
    active = batch.remaining > 0
    if block is None:
        width, rows, last = 1, batch, batch.length
        length, real = batch.length, active
    else:
        width = block.tokens.shape[1]
        rows, last = repeated(batch, width), block.position[:, -1]
        length, real = block.position.reshape(-1), block.real.reshape(-1)

    def page_of(table, position, written):
        """The pages that hold `position`, or `INVALID_PAGE` where nothing is written."""
        page = jnp.take_along_axis(table, (position // page_size)[:, None], axis=1)[:, 0]
        return jnp.where(written, page, INVALID_PAGE)

    def writer(page, offset) -> Write:
        def write(pool, new):
            return write_token(pool, one_token_rows(new), page, offset, sharding)

        return write

    def reader(table, lengths, **options: Any):
        return pool_reader(
            config, weights, cache, table, lengths, width=width, attention=attention, **options
        )

    written = real
    if config.exact_head and kv != "own":  # prefill has written what position 0 keeps
        written &= length > 0
    page = page_of(rows.page_table, length, written)
    lengths = jnp.where(active, last + 1, 0)
    write = writer(page, length % page_size)
    read = reader(batch.page_table, lengths)
    if block is None:
        tokens, positions = batch.token[:, None], batch.length[:, None]
    else:
        tokens, positions = block.tokens, block.position
    x, tables, cache = run_lower_layers(
        config, weights, tokens, positions, cache, write, read, attention
    )
    if weights.upper and kv != "own":
        before = None
        if cache.tap is not None:
            page_before = page_of(batch.page_table, jnp.maximum(length - 1, 0), True)
            before = decode_before(page, page_before, length, state_sharding(attention))
        cache = run_boundary(
            config, weights, x, tables, cache, write, read, attention, before=before
        )
    if kv == "boundary":
        x = run_upper_layers(config, weights, x, tables, cache, read, attention)
    elif config.key_value_group_size > 1:
        position = length - rows.own_start  # among the tokens that keep their own
        own_last = position if width == 1 else last - batch.own_start
        own_lengths = jnp.where(active, jnp.maximum(own_last + 1, 0), 0)
        own = []
        for part in range(config.pages_per_own_page):
            table = batch.own_page_table[:, :, part]
            of_tokens = table if width == 1 else repeated(table, width)
            own_page = page_of(of_tokens, jnp.maximum(position, 0), real & (position >= 0))
            own_read = reader(table, own_lengths, return_lse=True)
            own.append(OwnCache(writer(own_page, position % page_size), own_read))
        shared = jnp.minimum(lengths, batch.own_start)
        read = reader(batch.page_table, shared, folded=True, return_lse=True)
        x, cache = run_upper_layers_two_caches(
            config, weights, x, tables, cache, own, read, attention
        )
    else:
        own_page = page if kv == "own" else jnp.where(length >= rows.own_start, page, INVALID_PAGE)
        write = writer(own_page, length % page_size)
        x, cache = run_upper_layers_own(config, weights, x, tables, cache, write, read, attention)
    hidden = None
    if weights.speculator is not None:
        hidden = norm(config, x, weights.final_norm).astype(jnp.float32)
    return unembed(config, weights, x), hidden, cache


def pool_reader(
    config: Config,
    weights: Weights,
    cache: KVCache,
    table: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    *,
    width: int = 1,
    folded: bool = False,
    attention: Attention = DEFAULT,
    **options: Any,
):
    """Attention of rows of `width` queries to the pages in `table`; with `folded` all queries of a
    row see the same positions."""
    query = (lengths.shape[0], width, config.num_heads, config.head_dim)
    query = jax.ShapeDtypeStruct(query, weights.embed.dtype)
    fold: SeparateQueries | FoldedQueries = SeparateQueries()
    if folded and width > 1:
        fold = FoldedQueries(config.num_kv_heads, width)
    plans = {  # the same for all layers with a window
        window: attention.plan_decode(
            jax.eval_shape(fold.fold, query),
            cache.k[0].values,
            lengths,
            page_table=table,
            window=window,
            score_options=score_options(config),
        )
        for window in dict.fromkeys(kind.window for kind in config.kinds)
    }

    def read(q, k: Pool, v: Pool, window: int | None) -> Any:
        read = attention.decode(
            fold.fold(q),
            k.values,
            v.values,
            lengths,
            k_scale=k.scale,
            v_scale=v.scale,
            page_table=table,
            plan=plans[window],
            window=window,
            score_options=score_options(config),
            **options,
        )
        return jax.tree.map(fold.unfold, read)

    return read


def emit(
    logits: Float[Array, "B V"],
    batch: DecodeBatch,
    slots: Int[Array, " B"],
    token_counts: UInt16[Array, "S V"],
    masks: UInt32[Array, "B _"] | None = None,
) -> tuple[SamplerOutput, UInt16[Array, "S V"]]:
    """The next token of each sequence, of those that `masks` allow, and the counts with it."""
    allowed = logits if masks is None else apply_masks(logits, masks)
    sampled = _sample(
        allowed, logits, batch.sampling, batch.length, _counts_of_rows, token_counts, slots
    )
    return sampled, update_token_counts(token_counts, slots, sampled.token, batch.remaining > 0)


@functools.partial(jax.jit, static_argnames="counts", inline=True)
def _sample(
    allowed: Float[Array, "B V"],
    logits: Float[Array, "B V"],
    sampling: SamplingMetadata,
    position: Int[Array, " B"],
    counts: Callable[..., UInt16[Array, "B V"]],
    *of_counts: Any,
) -> SamplerOutput:
    """`sample` of the `allowed` logits, with `counts(*of_counts)`."""
    counted = functools.partial(counts, *of_counts)
    return sample(allowed, sampling, counted, position, reported=logits)


def _counts_of_rows(
    token_counts: UInt16[Array, "S V"], slots: Int[Array, " B"]
) -> UInt16[Array, "B V"]:
    return token_counts.at[slots].get(mode="clip")


def _counts_of_blocks(
    token_counts: UInt16[Array, "S V"], slots: Int[Array, " B"], block: Block
) -> UInt16[Array, "BT V"]:
    """Token counts before each place of `block`: with the drafts up to it."""
    width = block.tokens.shape[1]
    new = repeated(_counts_of_rows(token_counts, slots), width)
    tokens, drafted = repeated((block.tokens, block.drafted), width)
    place = jnp.tile(jnp.arange(width), block.tokens.shape[0])[:, None]
    counted = drafted & (jnp.arange(width) <= place)
    return update_token_counts_of_blocks(new, jnp.arange(len(new)), tokens, counted)


@functools.partial(
    jax.jit,
    static_argnames=("config", "steps", "attention", "greedy", "drafting"),
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
    masks: UInt32[Array, "B *_"] | None = None,
    drafting: Drafting | None = None,
    drafts: HostDrafts | None = None,
) -> tuple[DecodeState, SamplerOutput]:
    """Emit up to `steps` (M) tokens for each sequence in `slots`: `SamplerOutput` of B M, token -1
    where a sequence has ended. With `drafting` a step emits one token or more, at most T: B M T.

    An end token is emitted and ends its sequence. A slot past the last is empty. `greedy` is for
    sequences that all ask for the likeliest token and nothing else (`is_plain_greedy`): without the
    branches of the sampler, at which the host waits for a GPU, and without counts of tokens.
    `masks` have the tokens that each sequence may emit, as `Matcher.fill_masks` writes them; None
    is all. With `drafts`, which the host has made, for each place of its block: B T _.
    """

    def step(carry, _):
        cache, batch, token_counts, history = carry
        logits, hidden, cache = decode_logits(config, weights, batch, cache, attention=attention)
        logits = logits[:, 0]
        active = batch.remaining > 0
        if greedy:
            sampled = sample_greedy(logits)
        else:
            sampled, token_counts = emit(logits, batch, slots, token_counts, masks)
        cache = keep_cache_sharding(config, cache, attention)
        if hidden is not None:
            hidden = jnp.where(active[:, None], hidden[:, 0], batch.hidden)
            batch = dataclasses.replace(batch, hidden=hidden)
        carry = cache, batch.advance(sampled.token), token_counts, history
        return carry, sampled._replace(token=jnp.where(active, sampled.token, -1))

    def verify(drafting: Drafting, carry, _):
        cache, batch, token_counts, history = carry
        if drafts is None:
            rows = history.at[slots].get(mode="clip")
            block = draft(rows, batch, drafting, weights.speculator)
        else:
            block = given(drafts, batch)
        logits, hidden, cache = decode_logits(
            config, weights, batch, cache, block=block, attention=attention
        )
        width = drafting.width
        logits = logits.reshape(-1, logits.shape[-1])
        if greedy:
            sampled = sample_greedy(logits)
        else:
            allowed, sampling = logits, repeated(batch.sampling, width)
            if masks is not None:
                allowed = apply_masks(logits, masks.reshape(len(logits), -1))
            position = block.position.reshape(-1)
            sampled = _sample(
                allowed, logits, sampling, position, _counts_of_blocks, token_counts, slots, block
            )
        token = sampled.token.reshape(block.tokens.shape)
        after, emitted = accepted(block, token, batch, hidden)
        if not greedy:
            token_counts = update_token_counts_of_blocks(token_counts, slots, token, emitted)
        history = extend_history(history, slots, batch, block.position, token, emitted)
        cache = keep_cache_sharding(config, cache, attention)
        sampled = sampled._replace(
            token=mark_rejected(block, token, emitted).reshape(-1),
            draft_source=block.source.reshape(-1),
        )
        sampled = jax.tree.map(lambda leaf: leaf.reshape(-1, width, *leaf.shape[1:]), sampled)
        return (cache, after, token_counts, history), sampled

    batch = split_rows(state.batch.gather(slots), attention)
    weights = with_one_place(weights, batch.adapter)
    carry = state.cache, batch, state.token_counts, state.history
    run = step if drafting is None else functools.partial(verify, drafting)
    (cache, batch, token_counts, history), sampled = jax.lax.scan(run, carry, length=steps)
    sampled = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), sampled)
    if drafting is not None:
        sampled = jax.tree.map(
            lambda leaf: leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:]), sampled
        )
    elif history is not None:
        before = state.batch.gather(slots)
        position = before.length[:, None] + jnp.arange(steps)
        emitted = sampled.token >= 0
        history = extend_history(history, slots, before, position, sampled.token, emitted)
    state = DecodeState(
        cache,
        replicate(state.batch.scatter(slots, batch), attention),
        replicate(token_counts, attention),
        replicate(history, attention),
    )
    return state, replicate(sampled, attention)


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
    pages = cache_sharding(config, mesh).spec
    rows = row_sharding(mesh).spec
    specs = map_cache(cache, lambda _: pages, lambda _: rows)
    return jax.shard_map(copy, mesh=mesh, in_specs=(specs, rows, rows), out_specs=specs)(
        cache, source, target
    )
