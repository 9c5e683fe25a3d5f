"""The weights of calibration tokens: the attention that they receive.

In layer j the weight of a token is the sum over query heads and later tokens m of p_jm^2, where p
are the attention probabilities, up to `MAX_WEIGHT`, and scaled so that a row's weights sum to its
tokens: sums over tokens do not depend on how rows are divided into batches. An error in the keys or
values of a token that is not attended to costs nothing. With `Config.exact_tail` only those queries
count that read fitted keys and values when the student is served: see `counted_queries`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..model.attention import PLAIN_SCORES, ScoreOptions
from ..model.mesh import num_devices

MAX_WEIGHT = 1000.0
"""The largest weight of a token, in medians of its row and layer. Where queries attend to the
first token of a text for want of another (attention sinks: Xiao et al. 2023, arXiv 2309.17453),
that token would have most of the weight, and R2 would be its R2."""
PROBABILITIES_PER_CHUNK = 2**26
"""Attention probabilities that a device holds at a time, 256 MiB in float32."""


def counted_queries(
    exact_tail: int, segment_ids: Int[Array, "B T"], window: Any
) -> tuple[Int[Array, " B"] | None, Bool[Array, "B T"]]:
    """Distances behind a token, one for each row, at which the queries begin that its weight
    counts, and which tokens have such queries. None: with the token itself.

    With a tail of n tokens a query reads the fitted keys and values of the tokens that are n or
    more before it; it reads those nearer ones that generated tokens and the tail keep. So the last
    n tokens of a text get no weight. Where nothing is read from so far, in a row whose texts have
    at most n tokens and in layers with windows of at most n, all queries count.
    """
    real = segment_ids > 0
    if not exact_tail:
        return None, real
    missing = min(exact_tail, segment_ids.shape[1])
    following = jnp.pad(segment_ids[:, exact_tail:], ((0, 0), (0, missing)))
    seen = real & (following == segment_ids)
    far = seen.any(axis=1)
    if window is not None:
        far &= window > exact_tail
    return jnp.where(far, exact_tail, 0), jnp.where(far[:, None], seen, real)


def token_weights(received: Float[Array, "B T"], real: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`received` up to the limit, scaled to a sum in each row of as many as are `real`; 0 where
    they are not."""
    median = jnp.nanmedian(jnp.where(real > 0, received, jnp.nan), axis=1, keepdims=True)
    weight = real * jnp.fmin(received, MAX_WEIGHT * median)  # without a token, the median is NaN
    total = jnp.maximum(weight.sum(axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return weight * real.sum(axis=1, keepdims=True) / total


def received_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    *,
    distances: Sequence[Int[Array, " B"] | None] = (None,),
    window: Any = None,
    score_options: ScoreOptions = PLAIN_SCORES,
    mesh: Mesh | None = None,
) -> Float[Array, "S B T"]:
    """For each of `distances` the sum over heads and queries, in each row those that are at least
    so far behind a key, of the squared attention probability of each key, for rotated `q` and `k`
    in packed causal rows; padding may get any value."""
    at = jnp.arange(q.shape[1])

    def add(total, queries, visible, real):
        scores = score_options.applied(attention_scores(queries[0], k))
        scores = jnp.where(visible[:, None, None], scores, -1e30)
        probabilities = jax.nn.softmax(scores, axis=-1) * real[:, None, None, :, None]
        squares = jnp.square(probabilities)

        def of(distance):
            if distance is None:
                return squares.sum((1, 2, 3))
            far = queries[1][:, :, None] - at >= distance[:, None, None]
            return jnp.where(far[:, None, None], squares, 0).sum((1, 2, 3))

        return total + jnp.stack([of(distance) for distance in distances])

    zero = jnp.zeros((len(distances), *q.shape[:2]), jnp.float32)
    queries = q, jnp.broadcast_to(at, q.shape[:2])
    return fold_queries(add, zero, queries, segment_ids, window=window, mesh=mesh)


def attention_scores(
    q: Float[Array, "B C N H"], k: Float[Array, "B T K H"]
) -> Float[Array, "B K R C T"]:
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("BCKRH,BTKH->BKRCT", q, k, preferred_element_type=jnp.float32)
    return scores * k.shape[-1] ** -0.5


def fold_queries(
    add: Callable[..., Any],
    total: Any,
    queries: tuple[Shaped[Array, "B T ..."], ...],
    segment_ids: Int[Array, "B T"],
    *,
    window: Any = None,
    mesh: Mesh | None = None,
) -> Any:
    """`total = add(total, queries, visible, real)` for one chunk of C query positions after the
    other: `queries` B C ..., the first of them B T N H, the keys `visible` to each, bool[B, C, T],
    and whether it is `real`, bool[B, C]. Chunks are such that one array of scores has
    `PROBABILITIES_PER_CHUNK` entries."""
    rows, length, heads, _ = queries[0].shape
    entries = -(-rows * heads * length // num_devices(mesh))  # of one query position, on a device
    chunk = max(1, min(length, PROBABILITIES_PER_CHUNK // entries))
    chunks = -(-length // chunk)
    padding = chunks * chunk - length

    def split(x):  # B T ... -> chunks B chunk ...
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, chunks, chunk, *x.shape[2:]), 1, 0)

    def step(total, part):
        queries, segments, index = part
        position = index * chunk + jnp.arange(chunk)
        visible = (segments[:, :, None] == segment_ids[:, None]) & (
            position[:, None] >= jnp.arange(length)
        )
        if window is not None:
            visible &= position[:, None] - jnp.arange(length) < window
        return add(total, queries, visible, segments > 0), None

    parts = (tuple(map(split, queries)), split(segment_ids), jnp.arange(chunks))
    return jax.lax.scan(step, total, parts)[0]
