"""A student whose layers mix shared values, in the form in which it is served."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ...model.config import Config
from ...model.params import Llama, SwiftKV, require_teacher
from ...model.quantization import Quantized, dequantize, quantize


def fold_mix(config: Config, llama: Llama, delta: SwiftKV) -> tuple[Llama, SwiftKV]:
    """The same student without `mix`: its upper layers' query heads in the order of the cache's
    heads, and their output projections times `mix`. (The teacher is no longer the same.)

    Quantised output projections are quantised anew.
    """
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


def order_heads(config: Config, llama: Llama, delta: SwiftKV) -> tuple[Llama, SwiftKV]:
    """The same student and teacher with the heads of their upper layers in the order of the cache's
    heads, so that on a mesh each device has what goes together. `mix` stays.

    Where tokens keep their own values too, the output projection cannot hold it.
    """
    teachers = require_teacher(llama, "keep the own keys and values of tokens")
    kv_order = jnp.asarray(np.argsort(np.asarray(config.shared_kv_heads), axis=1))
    order = jnp.asarray(_query_order(config))

    def ordered(tree, order):
        return jax.tree.map(lambda leaf: jax.vmap(lambda x, i: x[i])(leaf, order), tree)

    def order_output(o, order):  # D N H
        if isinstance(o, Quantized):  # scales are of output channels
            return dataclasses.replace(o, values=o.values[:, order])
        return o[:, order]

    o = jax.lax.map(lambda layer: order_output(*layer), (llama.upper.o, order))
    teachers = dataclasses.replace(
        teachers,
        q=ordered(teachers.q, order),
        q_bias=ordered(teachers.q_bias, order),
        k=ordered(teachers.k, kv_order),
        v=ordered(teachers.v, kv_order),
        k_bias=ordered(teachers.k_bias, kv_order),
        v_bias=ordered(teachers.v_bias, kv_order),
    )
    llama = dataclasses.replace(
        llama, upper=dataclasses.replace(llama.upper, o=o), upper_qkv=teachers
    )
    delta = dataclasses.replace(
        delta,
        q=ordered(delta.q, order),
        q_bias=ordered(delta.q_bias, order),
        mix=ordered(delta.mix, kv_order),
    )
    return llama, delta


def _query_order(config: Config) -> np.ndarray:
    """[U, N]: the query heads of each upper layer in the order of the cache's heads."""
    inverse = np.argsort(np.asarray(config.shared_kv_heads), axis=1)
    per_head = config.num_heads // config.num_kv_heads
    return (inverse[..., None] * per_head + np.arange(per_head)).reshape(len(inverse), -1)
