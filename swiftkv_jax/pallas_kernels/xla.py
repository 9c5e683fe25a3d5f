"""Attention in plain XLA: runs everywhere, any shape, any floating dtype. Scores are float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S H"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T N H"]:
    """Masked grouped-query attention; every query must have at least one key. Returns the dtype of `q`."""
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("BTKGH,BKSH->BKGTS", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    # Transposed by hand: XLA's CPU backend has no bfloat16 product with float32 sums that also permutes its batch axes.
    out = jnp.einsum("BKGTS,BKSH->BKGTH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, head_dim).astype(q.dtype)
