"""The compiled programs of decoding, and copies of pages.

every token:  `run_lower_layers`  embed, lower layers
              `run_boundary`      upper keys and values
              `run_upper_layers`  upper layers; then the logits
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from ...model.attention import DEFAULT, Attention
from ...model.cache import KVCache, Pool, cache_sharding, map_cache, row_sharding, write_token
from ...model.config import Config
from ...model.layers import unembed
from ..engine.sampler_output import SamplerOutput
from ..sampling.penalties import update_token_counts
from ..sampling.sampler import apply_masks, sample, sample_greedy
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
from .layout import (
    keep_cache_sharding,
    pool_sharding,
    replicate,
    split_rows,
    state_sharding,
)
from .prefill_chunk import INVALID_PAGE
from .serving_form import Weights
from .shapes import kv_programs
from .taps import decode_before


def decode_logits(
    config: Config,
    weights: Weights,
    batch: DecodeBatch,
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
) -> tuple[Float[Array, "B V"], KVCache]:
    """One token of each sequence through all layers: float32 logits of the next one, and the cache
    with the token's keys and values.

    Sequences that have ended write nothing. Where `kv_programs` is both, tokens from
    `batch.own_start` on keep their own upper keys and values; where it is own, all of them.
    """
    kv = kv_programs(config)
    sharding = pool_sharding(config, attention)
    page_size = cache.k[0].values.shape[2]
    active = batch.remaining > 0
    length = batch.length

    def page_of(table, position, written):
        """The pages that hold `position`, or `INVALID_PAGE` where nothing is written."""
        page = jnp.take_along_axis(table, (position // page_size)[:, None], axis=1)[:, 0]
        return jnp.where(written, page, INVALID_PAGE)

    def writer(page, offset) -> Write:
        return lambda pool, new: write_token(pool, new, page, offset, sharding)

    def reader(table, lengths, **options: Any):
        query = (length.shape[0], 1, config.num_heads, config.head_dim)
        plans = {  # the same for all layers with a window
            window: attention.plan_decode(
                jax.ShapeDtypeStruct(query, weights.embed.dtype),
                cache.k[0].values,
                lengths,
                page_table=table,
                window=window,
                score_cap=config.score_cap,
            )
            for window in dict.fromkeys(kind.window for kind in config.kinds)
        }

        def read(q, k: Pool, v: Pool, window: int | None) -> Any:
            return attention.decode(
                q,
                k.values,
                v.values,
                lengths,
                k_scale=k.scale,
                v_scale=v.scale,
                page_table=table,
                plan=plans[window],
                window=window,
                score_cap=config.score_cap,
                **options,
            )

        return read

    written = active
    if config.exact_head and kv != "own":  # prefill has written what position 0 keeps
        written &= length > 0
    page = page_of(batch.page_table, length, written)
    lengths = jnp.where(active, length + 1, 0)
    write = writer(page, length % page_size)
    read = reader(batch.page_table, lengths)
    x, tables, cache = run_lower_layers(
        config, weights, batch.token[:, None], length[:, None], cache, write, read, attention
    )
    if weights.upper and kv != "own":
        before = None
        if cache.tap is not None:
            last = page_of(batch.page_table, jnp.maximum(length - 1, 0), True)
            before = decode_before(page, last, length, state_sharding(attention))
        cache = run_boundary(
            config, weights, x, tables, cache, write, read, attention, before=before
        )
    if kv == "boundary":
        x = run_upper_layers(config, weights, x, tables, cache, read, attention)
    elif config.key_value_group_size > 1:
        position = length - batch.own_start  # among the tokens that keep their own
        own_lengths = jnp.where(active, jnp.maximum(position + 1, 0), 0)
        own = []
        for part in range(config.pages_per_own_page):
            table = batch.own_page_table[:, :, part]
            own_page = page_of(table, jnp.maximum(position, 0), active & (position >= 0))
            own_read = reader(table, own_lengths, return_lse=True)
            own.append(OwnCache(writer(own_page, position % page_size), own_read))
        shared = jnp.minimum(lengths, batch.own_start)
        read = reader(batch.page_table, shared, return_lse=True)
        x, cache = run_upper_layers_two_caches(
            config, weights, x, tables, cache, own, read, attention
        )
    else:
        own_page = page if kv == "own" else jnp.where(length >= batch.own_start, page, INVALID_PAGE)
        write = writer(own_page, length % page_size)
        x, cache = run_upper_layers_own(config, weights, x, tables, cache, write, read, attention)
    return unembed(config, weights, x)[:, 0], cache


@functools.partial(
    jax.jit,
    static_argnames=("config", "steps", "attention", "greedy"),
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
    masks: UInt32[Array, "B _"] | None = None,
) -> tuple[DecodeState, SamplerOutput]:
    """Emit up to `steps` (M) tokens for each sequence in `slots`: `SamplerOutput` of B M, token -1
    where a sequence has ended.

    An end token is emitted and ends its sequence. A slot past the last is empty. `greedy` is for
    sequences that all ask for the likeliest token and nothing else (`is_plain_greedy`): without the
    branches of the sampler, at which the host waits for a GPU, and without counts of tokens.
    `masks` have the tokens that each sequence may emit, as `Matcher.fill_masks` writes them; None
    is all.
    """

    def step(carry, _):
        cache, batch, token_counts = carry
        logits, cache = decode_logits(config, weights, batch, cache, attention=attention)
        active = batch.remaining > 0
        if greedy:
            sampled = sample_greedy(logits)
        else:
            allowed = logits if masks is None else apply_masks(logits, masks)
            sampled = sample(
                allowed, batch.sampling, token_counts, slots, batch.length, reported=logits
            )
            token_counts = update_token_counts(token_counts, slots, sampled.token, active)
        cache = keep_cache_sharding(config, cache, attention)
        carry = cache, batch.advance(sampled.token), token_counts
        return carry, sampled._replace(token=jnp.where(active, sampled.token, -1))

    batch = split_rows(state.batch.gather(slots), attention)
    carry = state.cache, batch, state.token_counts
    (cache, batch, token_counts), sampled = jax.lax.scan(step, carry, length=steps)
    sampled = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), sampled)
    state = DecodeState(
        cache,
        replicate(state.batch.scatter(slots, batch), attention),
        replicate(token_counts, attention),
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
