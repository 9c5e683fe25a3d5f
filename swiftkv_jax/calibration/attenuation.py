"""Scales the queries for shared keys where tokens also keep their own keys.

Shared keys are fitted, and a score with a fitted key is on average closer to the mean than the
teacher's score is ("attenuation", Spearman 1904; `solve` says the same of keys). Beside exact
keys that takes attention away from the prompt. So for each layer and key/value head the student's
scores s of prompt tokens are compared with the teacher's t: with sums over queries and over the
tokens that each sees, weighted by the teacher's attention p, and with p's means removed,

    slope = sum p (t - mean t) s / sum p (t - mean t)^2

is the student's score difference where the teacher's is one, and its queries are divided by it.
Unlike the R2 of keys this counts errors where attention is.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ..model.attention import Attention
from ..model.batch import Batch
from ..model.boundary import boundary_kv
from ..model.config import Config
from ..model.decoder_layers import delta_queries, two_cache_layer
from ..model.packed_attention import head_major, packed_reader
from ..model.params import Llama, SwiftKV, require_teacher
from ..model.rope import scanned_kinds
from ..model.sharding import all_gather_fsdp, constrain_activations, to_host
from ..model.transformer import run_lower_layers
from .token_weights import attention_scores, fold_queries

logger = logging.getLogger(__name__)

MIN_SLOPE = 0.5
"""The smallest slope that is corrected: below it a score is mostly error."""


def scale_delta_queries(
    config: Config,
    llama: Llama,
    delta: SwiftKV,
    batches: Iterable[Batch],
    *,
    attention: Attention,
) -> SwiftKV:
    """The delta with the queries of each layer and key/value head divided by its slope, from
    `MIN_SLOPE` to 1; those of `Config.prompt_attention_layers` stay. The slopes are measured on the
    tokens of `batches`, all of which count as prompt tokens. Queries must not have norms
    (`calibration.check_groups`).

    Costs a forward pass of the teacher with three products of scores instead of one. Raises
    `ValueError` if the teacher's upper projections were dropped.
    """
    products = (score_products(config, attention, llama, delta, batch) for batch in batches)
    sums = np.sum([to_host(each).astype(np.float64) for each in products], axis=0)  # U 2 K
    slopes = sums[:, 0] / np.maximum(sums[:, 1], np.finfo(float).tiny)  # U K
    if (limited := int((slopes < MIN_SLOPE).sum())) > 0:
        logger.info(
            "%d of %d key/value heads: scores are below %g of the teacher's; queries are scaled by "
            "%g at most",
            limited,
            slopes.size,
            MIN_SLOPE,
            1 / MIN_SLOPE,
        )
    slopes = np.clip(slopes, MIN_SLOPE, 1)
    slopes[: config.prompt_attention_layers] = 1  # their keys are not fitted
    scales = 1 / slopes
    logger.info(
        "queries of the shared caches are scaled by %.2f to %.2f, %.2f on average",
        scales.min(),
        scales.max(),
        scales.mean(),
    )
    return _divided(config, delta, jnp.asarray(slopes, jnp.float32))


@functools.partial(jax.jit, static_argnums=0)
def _divided(config: Config, delta: SwiftKV, slopes: Float[Array, "U K"]) -> SwiftKV:
    each = jnp.repeat(slopes, config.num_heads // config.num_kv_heads, axis=1)  # U N

    def divided(leaf):
        if leaf is None:
            return None
        return (leaf / each.reshape(*each.shape, *[1] * (leaf.ndim - 2))).astype(leaf.dtype)

    return dataclasses.replace(delta, q=divided(delta.q), q_bias=divided(delta.q_bias))


@functools.partial(jax.jit, static_argnums=(0, 1))
def score_products(
    config: Config, attention: Attention, llama: Llama, delta: SwiftKV, batch: Batch
) -> Float[Array, "U 2 K"]:
    """The two sums of the module's formula, of each upper layer and key/value head. All states are
    the teacher's."""
    config = config.at_length(batch.tokens.shape[1])
    mesh = attention.mesh
    segment_ids = batch.segment_ids
    x, tables = run_lower_layers(config, llama, batch, attention=attention)
    kinds, kind_of = scanned_kinds(
        config, tables, range(config.num_lower_layers, config.num_layers)
    )
    shared, _ = boundary_kv(config, llama, delta, x, tables, segment_ids, attention=attention)
    shared = shared.transpose(0, 1, 3, 2, 4)  # J B T K H
    upper = range(config.num_lower_layers, config.num_layers)
    groups = jnp.array([config.kv_group(layer) for layer in upper])
    every = (tuple(range(config.num_kv_heads)),) * config.num_upper_layers
    heads = jnp.asarray(config.shared_kv_heads or every)  # U K

    def step(x, layer):
        *weights, (group, order), kind = layer
        shared_k = shared[group][:, :, order]
        block, qkv, queries = (all_gather_fsdp(mesh, part, layer=True) for part in weights)
        rope, window = kind_of(kind)
        read = packed_reader(config, attention, segment_ids, window)

        def attend(shared_q, q, k, v):
            found = layer_products(
                (shared_q, q), (shared_k, k), segment_ids, window=window, mesh=mesh
            )
            return read(q, head_major(k), head_major(v)), found

        x, found = two_cache_layer(config, block, qkv, queries, x, rope, attend, attention)
        return constrain_activations(mesh, x), found

    teachers = require_teacher(llama, "calibrate")
    layers = llama.upper, teachers, delta_queries(delta), (groups, heads), kinds
    return jax.lax.scan(step, x, layers)[1]


def layer_products(
    queries: tuple[Float[Array, "B T N H"], Float[Array, "B T N H"]],
    keys: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]],
    segment_ids: Int[Array, "B T"],
    *,
    window: Any = None,
    mesh: Mesh | None = None,
) -> Float[Array, "2 K"]:
    """The two sums of one layer, from rotated queries and keys: the student's, then the
    teacher's."""

    def add(total, queries, visible, real):
        student, teacher = map(attention_scores, queries, keys)
        seen = visible[:, None, None]
        weights = jax.nn.softmax(jnp.where(seen, teacher, -1e30), axis=-1)
        weights = jnp.where(seen, weights, 0) * real[:, None, None, :, None]
        centred = (teacher - (teacher * weights).sum(-1, keepdims=True)) * weights
        return total + jnp.stack([(centred * s).sum((0, 2, 3, 4)) for s in (student, teacher)])

    zero = jnp.zeros((2, keys[0].shape[2]))
    return fold_queries(add, zero, queries, segment_ids, window=window, mesh=mesh)
