"""The two compiled programs of serving: fill the cache with prompt tokens, and decode.

    every token:     embed -> lower layers -> keys and values of the upper groups     `fill`
    decoded tokens:                        -> upper layers -> logits -> next token    `decode`

A prompt token stops after `fill`: that is SwiftKV. The last token of a prompt goes into the first decode step, so
prefill needs no upper layer, no head and no logits, ever.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ..attention import Attention
from ..cache import KVCache, cache_sharding, row_sharding, write_chunk, write_token
from ..config import Config
from ..layers import embed, rope_table, unembed
from ..model import DEFAULT, cross_layer, head_major, project_fused_kv, self_layer
from ..params import Leaf
from .sampling import Sampling, sample
from .weights import Weights


@struct.dataclass
class DecodeState:
    """All that decoding carries from step to step. Donated: the old state is gone after each call."""

    cache: KVCache
    token: Leaf  # i32[B]; the last token of each row: known, but not in the cache yet
    length: Leaf  # i32[B]; valid positions of the cache row, and so the position of `token`
    budget: Leaf  # i32[B]; tokens the row may still emit; 0 once it is finished


Write = Callable[[Float[Array, "B K S H"], Float[Array, "B K T H"]], Float[Array, "B K S H"]]
Read = Callable[[Float[Array, "B T N H"], Float[Array, "B K S H"], Float[Array, "B K S H"]], Float[Array, "B T N H"]]


def fill(
    config: Config, weights: Weights, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache, write: Write, read: Read
) -> tuple[Float[Array, "B T D"], Float[Array, "2 B T H_half"], KVCache]:
    """What every token needs: (hidden state at the boundary, rotary table, cache with the tokens' keys and values)."""
    x, rope = embed(weights, tokens), rope_table(config, positions)
    buffers = list(zip(cache.k, cache.v, strict=True))

    def attend_own(buffers):
        def attend(q, k, v):
            kv = write(buffers[0], head_major(k)), write(buffers[1], head_major(v))
            return read(q, *kv), kv

        return attend

    for i, (block, qkv) in enumerate(zip(weights.lower, weights.lower_qkv, strict=True)):
        x, buffers[i] = self_layer(config, block, qkv, x, rope, attend_own(buffers[i]))
    if weights.upper:
        k, v = project_fused_kv(config, weights.boundary_norm, weights.kv, weights.kv_bias, x, rope)
        for i, group in enumerate(range(config.num_kv_groups), start=config.num_lower_layers):
            buffers[i] = write(buffers[i][0], k[group]), write(buffers[i][1], v[group])
    return x, rope, KVCache(tuple(k for k, _ in buffers), tuple(v for _, v in buffers))


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def prefill_chunk(
    config: Config,
    weights: Weights,
    tokens: Int[Array, "B T"],
    offset: Int[Array, ""],
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
) -> KVCache:
    """Put T tokens of every row into the cache, from position `offset`. `offset + T` must not exceed the cache.

    Rows are left-aligned, so short rows bring padding. With prompts of 6, 3, 1 and 8 tokens, two chunks of 4 write

        position  0 1 2 3 | 4 5 6 7
        row 0     a b c d | e . . .     a..g: all but the last prompt token
        row 1     a b . . | . . . .     .: the keys and values of padding
        row 2     . . . . | . . . .
        row 3     a b c d | e f g .

    and decoding starts at positions 5, 2, 0 and 7, on the first dot of each row. A dot is never read: queries see
    positions up to their own only, and decoding overwrites each dot before its position counts as valid.
    """
    positions = jnp.broadcast_to(offset + jnp.arange(tokens.shape[1]), tokens.shape)
    _, _, cache = fill(
        config,
        weights,
        tokens,
        positions,
        cache,
        write=lambda buffer, new: write_chunk(buffer, new, offset),
        read=lambda q, k, v: attention.prefill(q, k, v, q_offset=offset),
    )
    return _keep_cache_sharding(config, cache, attention.mesh)


def decode_logits(
    config: Config,
    weights: Weights,
    token: Int[Array, " B"],
    length: Int[Array, " B"],
    cache: KVCache,
    *,
    attention: Attention = DEFAULT,
) -> tuple[Float[Array, "B V"], KVCache]:
    """One token per row through all layers: float32 logits of what follows, and the cache with the token in it."""

    def read(q, k, v):
        return attention.decode(q, k, v, length + 1)

    sharding = attention.mesh and cache_sharding(config, attention.mesh)
    x, rope, cache = fill(
        config,
        weights,
        token[:, None],
        length[:, None],
        cache,
        write=lambda buffer, new: write_token(buffer, new, length, sharding),
        read=read,
    )
    for i, (block, q_weight, q_bias) in enumerate(zip(weights.upper, weights.upper_q, weights.upper_q_bias, strict=True)):
        layer = config.num_lower_layers + i // config.key_value_group_size
        x = cross_layer(config, block, q_weight, q_bias, x, rope, lambda q, layer=layer: read(q, cache.k[layer], cache.v[layer]))
    return unembed(config, weights, x)[:, 0], cache


@functools.partial(jax.jit, static_argnames=("config", "steps", "attention"), donate_argnames="state")
def decode(
    config: Config, weights: Weights, sampling: Sampling, state: DecodeState, *, steps: int, attention: Attention = DEFAULT
) -> tuple[DecodeState, Int[Array, "B M"]]:
    """Emit up to `steps` (M) tokens per row, -1 where a row is finished. An end token is emitted and finishes its row."""

    def step(state: DecodeState, _):
        logits, cache = decode_logits(config, weights, state.token, state.length, state.cache, attention=attention)
        token = sample(logits, sampling, state.length)
        active = state.budget > 0
        ended = jnp.any(token[:, None] == sampling.end_ids, axis=-1)
        state = DecodeState(
            cache=_keep_cache_sharding(config, cache, attention.mesh),
            token=jnp.where(active, token, state.token),
            # A finished row stays where it is and rewrites that one position: it never reaches the end of the cache.
            length=state.length + active,
            budget=jnp.where(active & ~ended, state.budget - 1, 0),
        )
        return state, jnp.where(active, token, -1)

    state, tokens = jax.lax.scan(step, state, length=steps)
    if attention.mesh is not None:
        rows = row_sharding(attention.mesh)
        state = dataclasses.replace(
            state, **{name: jax.lax.with_sharding_constraint(getattr(state, name), rows) for name in ("token", "length", "budget")}
        )
    return state, tokens.T


def _keep_cache_sharding(config: Config, cache: KVCache, mesh: Mesh | None) -> KVCache:
    """Leave a call as it was entered: donated buffers can only be reused, and calls only be repeated, if that holds."""
    return cache if mesh is None else jax.lax.with_sharding_constraint(cache, cache_sharding(config, mesh))
