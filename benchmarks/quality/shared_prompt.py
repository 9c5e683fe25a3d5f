"""Students whose prompt tokens share caches while later tokens keep keys and values of their own.

`Config` refuses `generated_kv` own with AcrossKV, so no engine serves this: here it is computed, to
know what it is worth. Every layer attends to two kinds of tokens in one softmax. A prompt token is
read from its group's cache, with the student's queries, which are turned for the shared keys, and
through its mix of the shared values. A token that keeps its own is read with the teacher's queries,
keys and values.

Models are plain Llamas: all layers of one kind, without biases and norms of keys.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from swiftkv_jax.attention import Attention
from swiftkv_jax.config import Config
from swiftkv_jax.layers import norm, output_and_mlp
from swiftkv_jax.model import Model
from swiftkv_jax.params import Llama, SwiftKV, require_teacher
from swiftkv_jax.rope import group_table, rope_tables
from swiftkv_jax.transformer import (
    Batch,
    delta_queries,
    project_kv,
    project_q,
    run_lower_layers,
)

MOST = 2.0
"""Largest factor of `unattenuated`."""
_HIDDEN = -1e30


def run_upper_layers(
    config: Config,
    attention: Attention,
    llama: Llama,
    delta: SwiftKV,
    batch: Batch,
    x: Float[Array, "B T D"],
    own: Bool[Array, "B T"],
    own_values: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """The output of the last layer from `x`, which enters layer K. `own_values` are the tokens that
    keep values of their own, if they are others than those that keep keys."""
    shared = project_kv(config, delta, x, _rope(config, batch))
    keep = own[:, None, :, None]
    keep_values = keep if own_values is None else own_values[:, None, :, None]
    for layer in range(config.num_upper_layers):
        (own_q, own_k, own_v), q = _projected(config, llama, delta, batch, x, layer)
        k, v = _read_by(config, delta, layer, *shared)
        # Queries and keys of both kinds side by side: where a key is zero the other one counts.
        both_q = math.sqrt(2) * jnp.concatenate([q, own_q], -1)
        both_k = jnp.concatenate([jnp.where(keep, 0, k), jnp.where(keep, own_k, 0)], -1)
        values = jnp.where(keep_values, own_v, v)
        padded = jnp.concatenate([values, jnp.zeros_like(values)], -1)
        attended = attention.prefill(both_q, both_k, padded, segment_ids=batch.segment_ids)
        x = _output(config, llama, layer, x, attended[..., : config.head_dim], attention)
    return x


def unattenuated(model: Model, attention: Attention, batches: Iterable[Batch]) -> Model:
    """The model with its queries times the inverse of what its scores of prompt tokens shrink by.

    That is the slope of the regression of the student's scores on the teacher's, for each layer and
    key/value head: scores of a query are centred, and a token counts by the teacher's attention to
    it. Beside exact keys, smaller scores of the prompt would take attention away from it.
    """
    config, delta = model.config, model.swiftkv
    assert delta is not None
    products = [
        np.asarray(_products(config, attention, model.llama, delta, batch)) for batch in batches
    ]
    with_teacher, with_itself = np.sum(products, axis=0)
    factors = np.clip(with_itself / with_teacher, 1, MOST)  # U K
    heads = np.repeat(factors, config.num_heads // config.num_kv_heads, axis=1)
    scaled = delta.q * jnp.asarray(heads, delta.q.dtype)[:, :, None, None]
    return dataclasses.replace(model, swiftkv=dataclasses.replace(delta, q=scaled))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _products(
    config: Config, attention: Attention, llama: Llama, delta: SwiftKV, batch: Batch
) -> Float[Array, "2 U K"]:
    """Sums of the products of the teacher's scores with the student's and with themselves, for
    states and attention of the teacher."""
    x, _ = run_lower_layers(config, llama, batch, attention=attention)
    shared, found = project_kv(config, delta, x, _rope(config, batch)), []
    position = jnp.arange(batch.tokens.shape[1])
    ids = batch.segment_ids
    seen = (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None] & (position <= position[:, None])
    seen = seen[:, None, None]
    for layer in range(config.num_upper_layers):
        (own_q, own_k, own_v), q = _projected(config, llama, delta, batch, x, layer)
        k, _ = _read_by(config, delta, layer, *shared)
        exact, served = _scores(own_q, own_k), _scores(q, k)
        weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, exact, _HIDDEN)), 0)
        mean = (exact * weights).sum(-1, keepdims=True)
        centred = (exact - mean) * weights
        found.append([(centred * scores).sum((0, 2, 3, 4)) for scores in (served, exact)])
        attended = attention.prefill(own_q, own_k, own_v, segment_ids=batch.segment_ids)
        x = _output(config, llama, layer, x, attended, attention)
    return jnp.stack([jnp.stack(sums) for sums in found], 1)


def _scores(q: Float[Array, "B T N H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K R T S"]:
    grouped = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[-1])
    return jnp.einsum("BTKRH,BKSH->BKRTS", grouped, k) / math.sqrt(q.shape[-1])


def _rope(config: Config, batch: Batch):
    return group_table(config, rope_tables(config, batch.positions))


def _projected(config: Config, llama: Llama, delta: SwiftKV, batch: Batch, x, layer: int):
    """The teacher's queries, keys and values of a layer, and the student's queries."""
    qkv, queries, block = (
        jax.tree.map(lambda leaf: leaf[layer], tree)
        for tree in (require_teacher(llama, "measure"), delta_queries(delta), llama.upper)
    )
    h, rope = norm(config, x, block.attn_norm), _rope(config, batch)
    own = SwiftKV(block.attn_norm, None, qkv.k[None], qkv.v[None])
    (k,), (v,) = project_kv(config, own, x, rope)
    return (project_q(config, qkv, h, rope), k, v), project_q(config, queries, h, rope)


def _read_by(config: Config, delta: SwiftKV, layer: int, k, v):
    """A layer's keys and values B K T H, of those of the groups."""
    group = layer // config.key_value_group_size
    if config.shared_kv_heads is None:
        return k[group], v[group]
    heads = jnp.asarray(config.shared_kv_heads[layer])
    return k[group][:, heads], jnp.einsum("KGH,BKTH->BKTG", delta.mix[layer], v[group][:, heads])


def _output(config: Config, llama: Llama, layer: int, x, attended, attention: Attention):
    block = jax.tree.map(lambda leaf: leaf[layer], llama.upper)
    return output_and_mlp(config, block, x, attended, attention)
