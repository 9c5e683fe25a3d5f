"""The oracle: attention in float32 by its formula, without regard for speed. Tests compare every
implementation with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    score_cap: float | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | Any:
    """softmax(q k^T / sqrt(H)) v over the positions where `mask` is True, in float32: f32[B, T, N,
    H].

    With `score_cap` c, c tanh(s / c) in the place of each score s. Query head n reads key/value
    head n // (N / K). A row with nothing to attend to yields zeros. With `return_lse` (the same,
    f32[B, T, N]): the logarithm of the sum of the exponentials of each query's scores, -inf for a
    row with nothing to attend to.
    """
    groups = q.shape[2] // k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k = jnp.repeat(k, groups, axis=1)
    v = jnp.repeat(v, groups, axis=1)
    scores = jnp.einsum("BTNH,BNSH->BNTS", q, k, precision="highest") / jnp.sqrt(
        jnp.float32(q.shape[-1])
    )
    if score_cap is not None:
        scores = score_cap * jnp.tanh(scores / score_cap)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    weights = jnp.where(mask[:, None], weights, 0.0)
    out = jnp.einsum("BNTS,BNSH->BTNH", weights, v, precision="highest")
    if not return_lse:
        return out
    lse = jax.nn.logsumexp(scores, axis=-1, where=mask[:, None])
    return out, lse.swapaxes(1, 2)
