"""Second moments of the teacher's upper layers over calibration tokens, in one pass per batch.

Letters as in `params` and `solve`. Every token counts with the attention that it receives: in layer
j its weight is the sum over query heads and later tokens m of p_jm^2, where p are the attention
probabilities, scaled so that a batch's weights sum to its tokens. An error in the keys or values of
a token that is not attended to costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ..attention import Attention
from ..config import Config
from ..layers import project_heads, rms_norm
from ..mesh import FSDP, MODEL
from ..params import Leaf, Llama, require_teacher
from ..sharding import all_gather_fsdp, constrain_activations
from ..transformer import Batch, head_major, run_lower_layers, self_layer

PROBABILITIES_PER_CHUNK = 2**26
"""Entries of the attention probabilities that exist at a time, 256 MiB in float32, over all
devices that share the rows."""


@struct.dataclass
class Moments:
    """Weighted sums over tokens, float32; E as in `solve`, P keys and values."""

    inputs: Leaf  # f32[U, E, E]: s s'
    cross: Leaf  # f32[U, E, P, K, H]: s y', y before rotation
    energy: Leaf  # f32[U, P, K]: |y|^2
    query_energy: Leaf  # f32[U, N, H/2]: |q|^2 of each rotary pair, every token counted once
    tokens: Leaf  # f32[]


def moment_shapes(config: Config) -> Moments:
    u, n, k, h = (
        config.num_upper_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    e = config.embed_dim + config.attention_bias
    shapes = Moments((u, e, e), (u, e, 2, k, h), (u, 2, k), (u, n, h // 2), ())
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def moment_shardings(config: Config, mesh: Mesh) -> Moments:
    """Rows of the large products over `fsdp` and `model`, where those divide them."""

    def split(size: int, *axes: str) -> tuple[str, ...] | None:
        axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
        shards = 1
        for axis in axes:
            shards *= mesh.shape[axis]
        return axes if axes and size % shards == 0 else None

    rows = config.embed_dim + config.attention_bias
    specs = Moments(
        P(None, split(rows, FSDP, MODEL)),
        P(None, split(rows, FSDP), None, split(config.num_kv_heads, MODEL)),
        P(),
        P(),
        P(),
    )
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def zero_moments(config: Config, mesh: Mesh | None) -> Moments:
    """The moments of no tokens; on the default device without a mesh."""

    def zeros():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), moment_shapes(config))

    where = None if mesh is None else moment_shardings(config, mesh)
    return jax.jit(zeros, out_shardings=where)()


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def add_batch(
    config: Config, attention: Attention, moments: Moments, llama: Llama, batch: Batch
) -> Moments:
    """`moments` with those of one more batch of packed rows."""
    mesh, real = attention.mesh, (batch.segment_ids > 0).astype(jnp.float32)
    tokens = real.sum()
    x, rope = run_lower_layers(config, llama, batch, attention=attention)
    s = rms_norm(x, llama.upper.attn_norm[0], config.norm_eps)
    if config.attention_bias:
        s = jnp.concatenate([s, jnp.ones((*s.shape[:2], 1), s.dtype)], -1)
    constrain = (lambda tree: tree) if mesh is None else functools.partial(_constrain, config, mesh)

    def attend(q, k, v):
        out = attention.prefill(q, head_major(k), head_major(v), segment_ids=batch.segment_ids)
        return out, (received_attention(q, k, batch.segment_ids), pair_energy(q, real))

    def step(carry, indexed_layer):
        x, moments = carry
        index, layer = indexed_layer
        block, qkv = (all_gather_fsdp(mesh, weights, layer=True) for weights in layer)
        following, (weight, query_energy) = self_layer(config, block, qkv, x, rope, attend)
        weight = weight * real
        weight = weight * (tokens / jnp.maximum(weight.sum(), jnp.finfo(jnp.float32).tiny))
        h = rms_norm(x, block.attn_norm, config.norm_eps)  # as in the layer: compiled once
        y = jnp.stack(
            [project_heads(h, qkv.k, qkv.k_bias), project_heads(h, qkv.v, qkv.v_bias)], axis=2
        )
        weighted = (s * weight[..., None]).astype(jnp.float32)
        added = Moments(
            inputs=_products("BTD,BTE->DE", weighted, s),
            cross=_products("BTE,BTPKH->EPKH", weighted, y),
            energy=_products("BT,BTPKH->PK", weight, jnp.square(y.astype(jnp.float32))),
            query_energy=query_energy,
            tokens=jnp.zeros(()),
        )
        moments = jax.tree.map(
            lambda total, part: total if total.ndim == 0 else total.at[index].add(part),
            moments,
            added,
        )
        return (constrain_activations(mesh, following), constrain(moments)), None

    layers = (llama.upper, require_teacher(llama, "calibrate"))
    (_, moments), _ = jax.lax.scan(
        step, (x, moments), (jnp.arange(config.num_upper_layers), layers)
    )
    return dataclasses.replace(moments, tokens=moments.tokens + tokens)


def _constrain(config: Config, mesh: Mesh, moments: Moments) -> Moments:
    return jax.lax.with_sharding_constraint(moments, moment_shardings(config, mesh))


def _products(spec: str, a, b) -> Any:
    return jnp.einsum(
        spec,
        a,
        b.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def pair_energy(q: Float[Array, "B T N H"], real: Float[Array, "B T"]) -> Float[Array, "N H_half"]:
    a, b = jnp.split(jnp.square(q.astype(jnp.float32)), 2, axis=-1)
    return jnp.einsum("BTNF,BT->NF", a + b, real)


def received_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Sum over heads and queries of the squared attention probability of each key, for rotated
    `q` and `k` in packed causal rows; of padding, whatever it is."""
    rows, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    chunk = max(1, min(length, PROBABILITIES_PER_CHUNK // (rows * heads * length)))
    chunks = -(-length // chunk)
    padding = chunks * chunk - length

    def split(x):  # B T ... -> chunks B chunk ...
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, chunks, chunk, *x.shape[2:]), 1, 0)

    def add(total, part):
        q, segments, index = part
        q = q.reshape(rows, chunk, kv_heads, heads // kv_heads, head_dim)
        scores = jnp.einsum("BCKRH,BTKH->BKRCT", q, k, preferred_element_type=jnp.float32)
        position = index * chunk + jnp.arange(chunk)
        visible = (segments[:, :, None] == segment_ids[:, None]) & (
            position[:, None] >= jnp.arange(length)
        )
        scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, -1e30)
        probabilities = jax.nn.softmax(scores, axis=-1) * (segments > 0)[:, None, None, :, None]
        return total + jnp.square(probabilities).sum((1, 2, 3)), None

    zero = jnp.zeros((rows, length), jnp.float32)
    parts = (split(q), split(segment_ids), jnp.arange(chunks))
    return jax.lax.scan(add, zero, parts)[0]
