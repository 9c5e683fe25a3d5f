"""Layers over the cache: those that run for every token, and those that predict the next one.

    every token:                `run_lower_layers`  embed, lower layers
                                `run_boundary`      upper keys and values
    decoded and scored tokens:  `run_upper_layers`  upper layers; then the logits

Tokens that keep their own upper keys and values (`Config.generated_kv`) run through
`run_upper_layers_own` instead, which writes those; where layers share caches, through
`run_upper_layers_two_caches`.

A program calls one function for all layers of a kind, so it is traced and lowered once: for the 80
layers of Llama-3.1-70B in a fifth of the time. XLA inlines the calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from ...model.attention import Attention, merge_attention
from ...model.boundary import project_fused_kv
from ...model.cache import KVCache, Pool, keys_carry_nan
from ...model.config import Config
from ...model.decoder_layers import (
    attention_layer,
    cross_layer,
    self_layer,
    two_cache_layer,
    with_queries,
)
from ...model.layers import embed, norm
from ...model.packed_attention import head_major, mixed
from ...model.rope import Tables, group_table, rope_tables, table_of
from .first_tokens import FirstKV, FirstTokens
from .serving_form import Weights
from .taps import TokenBefore

Write = Callable[[Pool, Float[Array, "A K T H"]], Pool]
Read = Callable[[Float[Array, "A T N H"], Pool, Pool, int | None], Float[Array, "A T N H"]]
"""Attention of queries to a pool, within the layer's window."""
ReadWithLse = Callable[
    [Float[Array, "A T N H"], Pool, Pool, int | None],
    tuple[Float[Array, "A T N H"], Float[Array, "A T N"]],
]
"""The same, and the log-sum-exp of the scores."""


def run_lower_layers(
    config: Config,
    weights: Weights,
    tokens: Int[Array, "A T"],
    positions: Int[Array, "A T"],
    cache: KVCache,
    write: Write,
    read: Read,
    attention: Attention,
) -> tuple[Float[Array, "A T D"], Tables, KVCache]:
    """Run all tokens through the lower layers. Return (hidden state at the SwiftKV layer, rotary
    tables, cache with the tokens' keys and values in the lower layers)."""
    x = embed(config, weights.embed, tokens)
    tables = rope_tables(config, positions)
    pools = list(zip(cache.k, cache.v, strict=True))
    layer = _self_layer(config, write, read, attention)
    for i, (block, qkv) in enumerate(zip(weights.lower, weights.lower_qkv, strict=True)):
        x, pools[i] = layer(config.kind(i), block, qkv, x, tables, pools[i])
    return x, tables, _with_pools(cache, pools)


def run_boundary(
    config: Config,
    weights: Weights,
    x: Float[Array, "A T D"],
    tables: Tables,
    cache: KVCache,
    write: Write,
    read: Read,
    attention: Attention,
    *,
    before: TokenBefore | None = None,
    first: FirstTokens | None = None,
) -> KVCache:
    """The cache with the upper keys and values of tokens from their hidden states at the SwiftKV
    layer, as module `boundary` defines them. `before` is needed where there are taps; `first` are
    the tokens that keep their own (`Config.exact_head`)."""

    @functools.partial(jax.jit, static_argnums=0)
    def prompt_layer(kind, weights, x, tables, pools, own):
        block, qkv, mlp, mix = weights

        def attend(q, k, v):
            if first is not None and own is not None:
                k = first.put(k, own.k)
                v = first.put(v, own.v)
            kv = _store(pools, write, head_major(k), head_major(v))
            return mixed(read(q, *kv, kind.window), mix), kv

        rope = table_of(config, tables, kind)
        return attention_layer(config, block, qkv, mlp, x, rope, attend)

    @functools.partial(jax.jit, inline=True)
    def store(pools, k, v):
        return _store(pools, write, k, v)

    pools = list(zip(cache.k, cache.v, strict=True))
    states = cache.tap
    owns: tuple[FirstKV | None, ...] = (None,) * len(weights.upper)
    if first is not None:
        owns = first.run(config, weights, x, attention)
    for i, (qkv, mlp) in enumerate(zip(weights.prompt_qkv, weights.prompt_mlp, strict=True)):
        layer = config.num_lower_layers + i
        if weights.upper_q:  # a decode step computes what the first of these have in common once
            qkv = with_queries(qkv, weights.upper_q[i])
        mix = weights.upper_mix[i] if weights.upper_mix else None
        of_layer = weights.upper[i], qkv, mlp, mix
        kind = config.kind(layer)
        own = owns[i]
        x, pools[layer] = prompt_layer(kind, of_layer, x, tables, pools[layer], own)
        if first is not None and own is not None:
            x = first.put(x, own.x)
    rope = group_table(config, tables)
    s = norm(config, x, weights.norm_swiftkv)
    boundary = cache.boundary
    if boundary is not None:
        boundary = write(boundary, head_major(s.reshape(*s.shape[:2], config.num_kv_heads, -1)))
    s_before = None
    if weights.k_tap is not None:
        assert before is not None
        s_before, states = before(states, s)
    k, v = project_fused_kv(
        config,
        weights.kv,
        weights.kv_bias,
        weights.k_norm_swiftkv,
        s,
        rope,
        k_tap=weights.k_tap,
        before=s_before,
    )
    for group in range(config.num_projected_groups):
        i = config.first_projected_layer + group
        own = owns[config.prompt_attention_layers + group]
        of_group = k[group], v[group]
        if first is not None and own is not None:
            of_group = first.put_heads(k[group], own.k), first.put_heads(v[group], own.v)
        pools[i] = store(pools[i], *of_group)
    return dataclasses.replace(_with_pools(cache, pools), tap=states, boundary=boundary)


def run_upper_layers(
    config: Config,
    weights: Weights,
    x: Float[Array, "A T D"],
    tables: Tables,
    cache: KVCache,
    read: Read,
    attention: Attention,
) -> Float[Array, "A T D"]:
    """The upper layers, for tokens whose own keys and values are in the cache: hidden state before
    the final norm."""

    @functools.partial(jax.jit, static_argnums=0)
    def layer(kind, block, queries, x, tables, k, v):
        def attend(q):
            return read(q, k, v, kind.window)

        rope = table_of(config, tables, kind)
        return cross_layer(config, block, queries, x, rope, attend, attention)

    for i, (block, queries) in enumerate(zip(weights.upper, weights.upper_q, strict=True)):
        kind = config.kind(config.num_lower_layers + i)
        entry = _group_pool(config, i)
        x = layer(kind, block, queries, x, tables, cache.k[entry], cache.v[entry])
    return x


def run_upper_layers_own(
    config: Config,
    weights: Weights,
    x: Float[Array, "A T D"],
    tables: Tables,
    cache: KVCache,
    write: Write,
    read: Read,
    attention: Attention,
) -> tuple[Float[Array, "A T D"], KVCache]:
    """The upper layers for tokens that keep their own keys and values: (hidden state before the
    final norm, cache with the keys and values that `write` takes). Tokens whose keys and values
    `write` does not take attend to those from the boundary."""
    pools = list(zip(cache.k, cache.v, strict=True))
    layer = _self_layer(config, write, read, attention)
    layers = zip(weights.upper, weights.upper_qkv, strict=True)
    for i, (block, qkv) in enumerate(layers, start=config.num_lower_layers):
        x, pools[i] = layer(config.kind(i), block, qkv, x, tables, pools[i])
    return x, _with_pools(cache, pools)


class OwnCache(NamedTuple):
    """Own pages of tokens, beside the caches that layers share."""

    write: Write
    read: ReadWithLse


def run_upper_layers_two_caches(
    config: Config,
    weights: Weights,
    x: Float[Array, "A T D"],
    tables: Tables,
    cache: KVCache,
    own: Sequence[OwnCache],
    read_shared: ReadWithLse,
    attention: Attention,
) -> tuple[Float[Array, "A T D"], KVCache]:
    """The upper layers where layers share caches and some tokens keep their own keys and values:
    (hidden state before the final norm, cache with those that `own` writes).

    Two softmaxes are merged: one over the positions that `read_shared` sees, in the pool of the
    layer's group, with the student's queries; and one over tokens' own keys, with the teacher's.
    The own keys and values of upper layer u are in pool u modulo C of the C cache layers, in pages
    of `own[u // C]`.
    """

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def layer(kind, part, weights, x, tables, group, pools):
        """`group` are the pools of the layer's group if they are not `pools`, which the layer
        writes."""
        block, queries, qkv, mix = weights

        def attend(shared_q, q, k, v):
            kv = _store(pools, own[part].write, head_major(k), head_major(v))
            shared_k, shared_v = group or kv
            shared, shared_lse = read_shared(shared_q, shared_k, shared_v, None)
            mine, lse = own[part].read(q, *kv, None)
            return merge_attention(mixed(shared, mix), shared_lse, mine, lse), kv

        rope = table_of(config, tables, kind)
        return two_cache_layer(config, block, qkv, queries, x, rope, attend, attention)

    pools = list(zip(cache.k, cache.v, strict=True))
    mixes = weights.upper_mix or (None,) * len(weights.upper)
    layers = zip(weights.upper, weights.upper_q, weights.upper_qkv, mixes, strict=True)
    for i, of_layer in enumerate(layers):
        kind = config.kind(config.num_lower_layers + i)
        group = _group_pool(config, i)
        part, pool = divmod(i, config.num_cache_layers)
        shared = pools[group] if group != pool else None
        x, pools[pool] = layer(kind, part, of_layer, x, tables, shared, pools[pool])
    return x, _with_pools(cache, pools)


def _group_pool(config: Config, upper: int) -> int:
    """Number of the pool of an upper layer's group."""
    return config.num_lower_layers + config.kv_group(config.num_lower_layers + upper)


def _self_layer(config: Config, write: Write, read: Read, attention: Attention):
    """`self_layer` for tokens whose keys and values are written first."""

    @functools.partial(jax.jit, static_argnums=0)
    def layer(kind, block, qkv, x, tables, pools):
        def attend(q, k, v):
            kv = _store(pools, write, head_major(k), head_major(v))
            return read(q, *kv, kind.window), kv

        rope = table_of(config, tables, kind)
        return self_layer(config, block, qkv, x, rope, attend, attention)

    return layer


def _store(pools: tuple[Pool, Pool], write: Write, k, v) -> tuple[Pool, Pool]:
    k, v = keys_carry_nan(k, v)
    return write(pools[0], k), write(pools[1], v)


def _with_pools(cache: KVCache, pools: list[tuple[Pool, Pool]]) -> KVCache:
    return dataclasses.replace(cache, k=tuple(k for k, _ in pools), v=tuple(v for _, v in pools))
