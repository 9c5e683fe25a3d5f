"""Layers over the cache: those that run for every token, and those that predict the next one.

    every token:                `run_lower_layers`  embed, lower layers, upper keys and values
    decoded and scored tokens:  `run_upper_layers`  upper layers; then the logits

Tokens that keep their own upper keys and values (`Config.generated_kv`) run through
`run_upper_layers_own` instead, which writes those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxtyping import Array, Float, Int

from ...cache import KVCache, Pool, keys_carry_nan
from ...config import Config
from ...layers import embed, rope_table
from ...transformer import Attend, cross_layer, head_major, project_fused_kv, self_layer
from .weights import Weights

Write = Callable[[Pool, Float[Array, "A K T H"]], Pool]
Read = Callable[[Float[Array, "A T N H"], Pool, Pool], Float[Array, "A T N H"]]


def run_lower_layers(
    config: Config,
    weights: Weights,
    tokens: Int[Array, "A T"],
    positions: Int[Array, "A T"],
    cache: KVCache,
    write: Write,
    read: Read,
    *,
    boundary_kv: bool = True,
) -> tuple[Float[Array, "A T D"], Float[Array, "2 A T H_half"], KVCache]:
    """What runs for every token: (hidden state at the SwiftKV layer, rotary table, cache with the
    tokens' keys and values). `boundary_kv` False leaves out those of the upper layers."""
    x, rope = embed(weights, tokens), rope_table(config, positions)
    pools = list(zip(cache.k, cache.v, strict=True))
    for i, (block, qkv) in enumerate(zip(weights.lower, weights.lower_qkv, strict=True)):
        x, pools[i] = self_layer(config, block, qkv, x, rope, _attend_own(pools[i], write, read))
    if weights.upper and boundary_kv:
        k, v = project_fused_kv(config, weights.norm_swiftkv, weights.kv, weights.kv_bias, x, rope)
        for i, group in enumerate(range(config.num_kv_groups), start=config.num_lower_layers):
            pools[i] = _store(pools[i], write, k[group], v[group])
    return x, rope, _cache(pools)


def run_upper_layers(
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


def run_upper_layers_own(
    config: Config,
    weights: Weights,
    x: Float[Array, "A T D"],
    rope,
    cache: KVCache,
    write: Write,
    read: Read,
) -> tuple[Float[Array, "A T D"], KVCache]:
    """The upper layers, for tokens whose keys and values come from their own hidden state before
    each: (hidden state before the final norm, cache with the keys and values that `write` takes).
    A token whose keys and values it leaves out attends to its boundary ones."""
    pools = list(zip(cache.k, cache.v, strict=True))
    layers = zip(
        weights.upper, weights.upper_q, weights.upper_q_bias, weights.upper_kv, strict=True
    )
    for i, (block, q, q_bias, kv) in enumerate(layers, start=config.num_lower_layers):
        qkv = dataclasses.replace(kv, q=q, q_bias=q_bias)
        x, pools[i] = self_layer(config, block, qkv, x, rope, _attend_own(pools[i], write, read))
    return x, _cache(pools)


def _attend_own(pools: tuple[Pool, Pool], write: Write, read: Read) -> Attend:
    """Attention of tokens that first write their keys and values."""

    def attend(q, k, v):
        kv = _store(pools, write, head_major(k), head_major(v))
        return read(q, *kv), kv

    return attend


def _store(pools: tuple[Pool, Pool], write: Write, k, v) -> tuple[Pool, Pool]:
    k, v = keys_carry_nan(k, v)
    return write(pools[0], k), write(pools[1], v)


def _cache(pools: list[tuple[Pool, Pool]]) -> KVCache:
    return KVCache(tuple(k for k, _ in pools), tuple(v for _, v in pools))
