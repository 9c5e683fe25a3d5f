"""A student whose layers mix shared values, as one that does not: for serving."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ...config import Config
from ...params import Llama, SwiftKV
from ...quantization import Quantized, dequantize, quantize


def fold_mix(config: Config, llama: Llama, delta: SwiftKV) -> tuple[Llama, SwiftKV]:
    """The same student without `mix`: its upper layers' query heads in the order of the cache's
    heads, and their output projections times `mix`. (The teacher is no longer the same.)

    Quantised output projections are quantised anew.
    """
    if config.shared_kv_heads is None:
        return llama, delta
    mix = delta.mix

    def folded(o, mix):  # D N H, K H H
        heads = o.reshape(o.shape[0], mix.shape[0], -1, o.shape[-1])
        wide = jnp.einsum("DKRG,KGH->DKRH", heads, mix, preferred_element_type=jnp.float32)
        return wide.reshape(o.shape)

    def fold_layer(o, mix, order):
        if isinstance(o, Quantized):
            wide = folded(dequantize(o, jnp.float32), mix.astype(jnp.float32))
            return quantize(wide[:, order], 2, o.scheme)
        return folded(o, mix).astype(o.dtype)[:, order]

    order = jnp.asarray(_query_order(config))
    o = jax.lax.map(lambda layer: fold_layer(*layer), (llama.upper.o, mix, order))
    q, q_bias = (
        jax.tree.map(lambda leaf: jax.vmap(lambda x, i: x[i])(leaf, order), part)
        for part in (delta.q, delta.q_bias)
    )
    upper = dataclasses.replace(llama.upper, o=o)
    return (
        dataclasses.replace(llama, upper=upper),
        dataclasses.replace(delta, q=q, q_bias=q_bias, mix=None),
    )


def _query_order(config: Config) -> np.ndarray:
    """[U, N]: the query heads of each upper layer in the order of the cache's heads."""
    inverse = np.argsort(np.asarray(config.shared_kv_heads), axis=1)
    per_head = config.num_heads // config.num_kv_heads
    return (inverse[..., None] * per_head + np.arange(per_head)).reshape(len(inverse), -1)
