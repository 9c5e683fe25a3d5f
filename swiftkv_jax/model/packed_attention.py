"""Attention of packed rows, as the layers of `transformer` call it: `attend` callables that return
(attended, None)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .attention import Attention, ScoreOptions
from .config import Config
from .layers import mix_values

Attend = Callable[..., Any]
Heads = Float[Array, "B T N H"]
KV = Float[Array, "B K T H"]
Reader = Callable[[Heads, KV, KV], Heads]


def head_major(x: Float[Array, "B T K H"]) -> Float[Array, "B K T H"]:
    """The layout of the cache and of the attention ops."""
    return x.transpose(0, 2, 1, 3)


def score_options(config: Config) -> ScoreOptions:
    """The options of scores, which are fields of the architecture too."""
    names = (field.name for field in dataclasses.fields(ScoreOptions))
    return ScoreOptions(**{name: getattr(config, name) for name in names})


def packed_reader(
    config: Config, attention: Attention, segment_ids: Int[Array, "B T"], window
) -> Reader:
    """Causal attention within each packed document."""
    return functools.partial(
        attention.prefill,
        segment_ids=segment_ids,
        window=window,
        score_options=score_options(config),
    )


def packed_attention(
    config: Config, attention: Attention, segment_ids: Int[Array, "B T"], window
) -> Attend:
    """Causal attention within each packed document; keys and values come as the projections leave
    them."""
    read = packed_reader(config, attention, segment_ids, window)
    return lambda q, k, v: (read(q, head_major(k), head_major(v)), None)


def mixed(attended: Heads, mix: Float[Array, "K H H"] | None) -> Heads:
    """Turn attention to the values of a group into attention to the layer's own values."""
    return attended if mix is None else mix_values(attended, mix)


def own_attention(read: Reader, own: Bool[Array, "B T"], k: KV, v: KV) -> Attend:
    """`packed_attention` in which `k` and `v` are the keys and values of all tokens but those in
    `own`."""

    def attend(q, own_k, own_v):
        keep = own[:, None, :, None]
        merged = (
            jnp.where(keep, head_major(mine), other) for mine, other in ((own_k, k), (own_v, v))
        )
        return read(q, *merged), None

    return attend


def two_cache_attention(
    read: Reader, own: Bool[Array, "B T"], k: KV, v: KV, mix: Float[Array, "K H H"] | None
) -> Attend:
    """`attend(shared_q, q, own_k, own_v)`: one softmax over two kinds of tokens. Those in `own` are
    attended to with `q`, `own_k` and `own_v`, the others with `shared_q`, `k`, and `v` times `mix`.

    Queries and keys of both kinds are concatenated; of each pair of keys one is zero, so that only
    the other counts. Scores cost twice as much as with one kind. Differentiable as `read` is.
    """

    def attend(shared_q, q, own_k, own_v):
        head_dim = q.shape[-1]
        keep = own[:, None, :, None]
        shared_v = v if mix is None else jnp.einsum("KGH,BKTH->BKTG", mix, v)
        # Attention divides scores by the root of a head's size, which is twice the model's here.
        both_q = math.sqrt(2) * jnp.concatenate([shared_q, q], -1)
        both_k = [jnp.where(keep, 0, k), jnp.where(keep, head_major(own_k), 0)]
        values = jnp.where(keep, head_major(own_v), shared_v)
        padded = jnp.concatenate([values, jnp.zeros_like(values)], -1)
        return read(both_q, jnp.concatenate(both_k, -1), padded)[..., :head_dim], None

    return attend
