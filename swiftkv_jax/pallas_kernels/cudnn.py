"""Attention in NVIDIA's cuDNN, through `jax.nn.dot_product_attention`: a baseline for the kernels,
run only by name.

cuDNN masks by causality and by lengths, both counted from position 0, so it takes neither documents
nor a chunk's offset (an explicit mask would be a T x S array, which is what these ops avoid).
Through JAX it also wants keys and values position-major: what the cache holds is transposed first,
a copy of as much as is read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def prefill(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention of whole rows, differentiable in q, k and v. Queries from `lengths[b]` on
    yield zeros."""
    _check_supported(q, k)
    queries = q.shape[1]
    # Without an offset no query sees the keys from T on.
    k, v = (x[:, :, :queries].transpose(0, 2, 1, 3) for x in (k, v))
    if lengths is None:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    lengths = lengths.astype(jnp.int32)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return jnp.where((jnp.arange(queries) < lengths[:, None])[:, :, None, None], out, 0)


def decode(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    length: Int[Array, " B"],
) -> Float[Array, "B 1 N H"]:
    """Attention of one token a row to the first `length[b]` keys. A row of length 0 yields
    zeros."""
    _check_supported(q, k)
    if q.shape[1] != 1:
        raise NotImplementedError(
            f"implementation='cudnn' decodes one query a row (T = 1), got {q.shape=}"
        )
    length = length.astype(jnp.int32)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=length, implementation="cudnn"
    )
    return jnp.where((length > 0)[:, None, None, None], out, 0)


def _check_supported(q, k):
    """Raise `NotImplementedError` for dtypes and head dims that cuDNN does not take. Before Hopper,
    JAX refuses H > 128."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype:
        raise NotImplementedError(
            f"implementation='cudnn' takes bfloat16 or float16 operands of one dtype, got "
            f"{q.dtype=} and {k.dtype=}"
        )
    head_dim = q.shape[3]
    if head_dim % 8 or head_dim > 256:
        raise NotImplementedError(
            f"implementation='cudnn' takes head dims that are multiples of 8 up to 256, got "
            f"{head_dim=}"
        )
