"""Second moments of the teacher's upper layers over calibration tokens, in one pass per batch.

Letters as in `params` and `solve`. Tokens count with the weights of `token_weights`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from ..model.attention import Attention
from ..model.batch import Batch
from ..model.boundary import first_tokens, previous_tokens, run_prompt_layer
from ..model.config import Config
from ..model.decoder_layers import kv_projections, project_q, self_layer
from ..model.layers import norm, project_heads
from ..model.mesh import FSDP, MODEL
from ..model.packed_attention import packed_attention, score_options
from ..model.params import QKV, Block, Leaf, Llama, PromptMLP, SwiftKV, require_teacher
from ..model.rope import scanned_kinds
from ..model.sharding import all_gather_fsdp, constrain_activations
from ..model.transformer import run_lower_layers, run_upper_layers_teacher
from .token_weights import counted_queries, received_attention, token_weights


@struct.dataclass
class Moments:
    """Weighted sums over tokens, float32; E as in `solve`, P keys and values, U upper layers
    except `Config.prompt_attention_layers`, whose keys and values are not fitted."""

    inputs: Leaf  # f32[U, E, E]: s s'
    cross: Leaf  # f32[U, E, P, K, H]: s y', y before rotation
    energy: Leaf  # f32[U, P, K]: |y|^2
    query_energy: Leaf  # f32[U, N, H/2]: |q|^2 of each pair, every token counted once
    tokens: Leaf  # f32[]


def moment_shapes(config: Config, layers: int | None = None) -> Moments:
    """Shapes of the moments of `layers` layers; None: all that are fitted."""
    u = config.num_layers - config.first_projected_layer if layers is None else layers
    n = config.num_heads
    k = config.num_kv_heads
    h = config.head_dim
    e = num_inputs(config)
    return float32_shapes(Moments((u, e, e), (u, e, 2, k, h), (u, 2, k), (u, n, h // 2), ()))


def float32_shapes[Tree](shapes: Tree) -> Tree:
    """A tree of tuples as one of float32 arrays of these shapes."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def zeros(shapes: Any, where: Any = None) -> Any:
    """Zeros of these shapes on the shardings `where`; on the default device without any."""

    def make():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(make, out_shardings=where)()


def num_inputs(config: Config) -> int:
    """E: entries of the hidden state, once more for the token before where there are taps, and a
    constant where there are biases."""
    return config.embed_dim * (1 + config.boundary_taps) + config.qkv_bias


def inputs_of_values(config: Config) -> Int[np.ndarray, " E"]:
    """The inputs that values are fitted to: not those of the token before."""
    size = config.embed_dim
    return np.delete(np.arange(num_inputs(config)), slice(size, size * (1 + config.boundary_taps)))


def split_rows(mesh: Mesh, size: int, *axes: str) -> tuple[str, ...] | None:
    """Return those of `axes` that `mesh` has, for a `PartitionSpec`; None where their product
    does not divide `size`."""
    axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    return axes if axes and size % shards == 0 else None


def moment_shardings(config: Config, mesh: Mesh) -> Moments:
    """Rows of the large products over `fsdp` and `model`, where those divide them."""
    rows = num_inputs(config)
    heads = config.num_kv_heads
    specs = Moments(
        P(None, split_rows(mesh, rows, FSDP, MODEL)),
        P(None, split_rows(mesh, rows, FSDP), None, split_rows(mesh, heads, MODEL)),
        P(),
        P(),
        P(),
    )
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def zero_moments(config: Config, mesh: Mesh | None, layers: int | None = None) -> Moments:
    """The moments of no tokens, of as many layers as in `moment_shapes`."""
    where = None if mesh is None else moment_shardings(config, mesh)
    return zeros(moment_shapes(config, layers), where)


# The output matrix, which is not used, stays an argument: it is in memory, and the compiler's
# figures say so.
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2, keep_unused=True)
def add_batch(
    config: Config,
    attention: Attention,
    moments: Moments,
    llama: Llama,
    batch: Batch,
    mlps: PromptMLP | None = None,
) -> Moments:
    """Add one more batch of packed rows to `moments`. `mlps` stand in for the MLPs of
    `Config.prompt_attention_layers`."""
    config = config.at_length(batch.tokens.shape[1])
    mesh = attention.mesh
    segment_ids = batch.segment_ids
    x, tables = run_lower_layers(config, llama, batch, attention=attention)
    kinds, kind_of = scanned_kinds(
        config, tables, range(config.num_lower_layers, config.num_layers)
    )
    alone = config.prompt_attention_layers
    y = x
    prompt = prompt_delta(llama, mlps)
    for layer in range(alone):
        y, _ = run_prompt_layer(
            config, llama, prompt, layer, y, tables, segment_ids, attention=attention
        )
    s = regressors(config, y, first_fitted_norm(config, llama), segment_ids)
    x, _ = run_upper_layers_teacher(
        config, llama, x, tables, segment_ids, attention=attention, count=alone
    )

    def step(carry, indexed_layer):
        x, moments = carry
        index, (*weights, kind) = indexed_layer
        block, qkv = (all_gather_fsdp(mesh, part, layer=True) for part in weights)
        rope, window = kind_of(kind)
        queries = layer_queries(
            config,
            block,
            qkv,
            x,
            (rope, window),
            segment_ids,
            tails=(config.exact_tail,),
            mesh=mesh,
        )
        received = queries.received[0], queries.counted[0]
        added = layer_moments(config, block, qkv, x, s, segment_ids, *received, queries.energy)
        attend = packed_attention(config, attention, segment_ids, window)
        x, _ = self_layer(config, block, qkv, x, rope, attend, attention)
        return (
            constrain_activations(mesh, x),
            add_layer(config, mesh, moments, added, index),
        ), None

    layers = (llama.upper, require_teacher(llama, "calibrate"), kinds)
    if alone:
        layers = jax.tree.map(lambda stack: stack[alone:], layers)
    (_, moments), _ = jax.lax.scan(
        step, (x, moments), (jnp.arange(config.num_upper_layers - alone), layers)
    )
    count = fitted_tokens(config, segment_ids).sum()
    return dataclasses.replace(moments, tokens=moments.tokens + count)


def prompt_delta(llama: Llama, mlps: PromptMLP | None) -> SwiftKV:
    """Make the delta that prompts need in `Config.prompt_attention_layers`: the teacher's
    projections, and what stands in for their MLPs."""
    qkv = require_teacher(llama, "calibrate")
    projections = {field.name: getattr(qkv, field.name) for field in dataclasses.fields(qkv)}
    return SwiftKV(**{"norm": None, **projections}).with_prompt_mlp(mlps)


def first_fitted_norm(config: Config, llama: Llama) -> Float[Array, " D"] | None:
    """The norm of the first layer whose keys and values are fitted."""
    first = config.prompt_attention_layers
    return jax.tree.map(lambda scales: scales[first], llama.upper.attn_norm)


def regressors(
    config: Config,
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"] | None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T E"]:
    """s of every token from the boundary state and the norm of that name; with taps then that of
    the token before, for which `segment_ids` are needed; with biases then a one."""
    s = norm(config, x, scale)
    parts = [s]
    if config.boundary_taps:
        assert segment_ids is not None
        parts.append(previous_tokens(s, segment_ids))
    parts.append(jnp.ones((*s.shape[:2], int(config.qkv_bias)), s.dtype))
    return jnp.concatenate(parts, -1)


@struct.dataclass
class LayerQueries:
    """Figures of a layer's queries about the tokens of a batch, the same for every cut."""

    received: Leaf  # f32[S, B, T]: the attention that each token receives, for each exact tail
    counted: Leaf  # bool[S, B, T]: the tokens that count
    energy: Leaf  # f32[N, H/2]: `Moments.query_energy`


def layer_queries(
    config: Config,
    block: Block,
    qkv: QKV,
    x: Float[Array, "B T D"],
    kind: tuple[Float[Array, "2 B T F"] | None, Any],
    segment_ids: Int[Array, "B T"],
    *,
    tails: Sequence[int],
    mesh: Mesh | None = None,
) -> LayerQueries:
    """The queries of a layer that `x` enters, for students with each of `tails`. `kind` is the
    layer's rotary table and window."""
    # As in `self_layer`: where that runs too, the compiler keeps only one of them.
    h, (rope, window) = norm(config, x, block.attn_norm), kind
    q, (k, _) = project_q(config, qkv, h, rope), kv_projections(config, qkv, h, rope)
    distances, counted = zip(
        *(counted_queries(tail, segment_ids, window) for tail in tails), strict=True
    )
    received = received_attention(
        q,
        k,
        segment_ids,
        distances=distances,
        window=window,
        score_options=score_options(config),
        mesh=mesh,
    )
    real = (segment_ids > 0).astype(jnp.float32)
    return LayerQueries(received, jnp.stack(counted), pair_energy(q, real, config.rotated_dims))


def layer_moments(
    config: Config,
    block: Block,
    qkv: QKV,
    x: Float[Array, "B T D"],
    s: Float[Array, "B T E"],
    segment_ids: Int[Array, "B T"],
    received: Float[Array, "B T"],
    counted: Bool[Array, "B T"],
    query_energy: Float[Array, "N H_half"],
) -> Moments:
    """The sums of one layer over a batch, without its number of tokens: fields as in `Moments` but
    for the first axis. `x` enters the layer; what follows `segment_ids` is of `LayerQueries`, for
    one tail. Keys are taken before their norm, which the student has too."""
    h = norm(config, x, block.attn_norm)
    k = project_heads(h, qkv.k, qkv.k_bias)
    v = project_heads(h, qkv.v, qkv.v_bias)
    y = jnp.stack([k, v], axis=2)
    counted &= fitted_tokens(config, segment_ids)
    weight = token_weights(received, counted.astype(jnp.float32))
    weighted = s.astype(jnp.float32) * weight[..., None]
    return Moments(
        inputs=products("BTD,BTE->DE", weighted, s),
        cross=products("BTE,BTPKH->EPKH", weighted, y),
        energy=products("BT,BTPKH->PK", weight, jnp.square(y.astype(jnp.float32))),
        query_energy=query_energy,
        tokens=jnp.zeros(()),
    )


def fitted_tokens(config: Config, segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where keys and values of a token are to be fitted: not padding, nor a first token that
    keeps its own (`Config.exact_head`)."""
    real = segment_ids > 0
    return real & ~first_tokens(segment_ids) if config.exact_head else real


def add_layer(
    config: Config, mesh: Mesh | None, moments: Moments, added: Moments, index: Int[Array, ""]
) -> Moments:
    """Add those of a layer, `added`, to entry `index` of `moments`. The number of tokens stays."""

    def add(total, part):
        if total.ndim == 0:
            return total
        part += jax.lax.dynamic_index_in_dim(total, index, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, part, index, 0)

    moments = jax.tree.map(add, moments, added)
    return moments if mesh is None else _constrain(config, mesh, moments)


def _constrain(config: Config, mesh: Mesh, moments: Moments) -> Moments:
    return jax.lax.with_sharding_constraint(moments, moment_shardings(config, mesh))


def products(spec: str, weighted: Float[Array, "B T E"], other: Array) -> Array:
    """Sums of products in float32. Where `other` is bfloat16, as matrix products in bfloat16 of the
    upper and of the lower eight bits of `weighted`: to 2^-17 of each term, where rounding
    `weighted` would leave 2^-9 and float32 takes eight times as long or more."""
    if other.dtype != jnp.bfloat16:
        other = other.astype(jnp.float32)
        return jnp.einsum(spec, weighted, other, precision=jax.lax.Precision.HIGHEST)
    # Not a cast to bfloat16 and back, which XLA may remove.
    high = jax.lax.reduce_precision(weighted, exponent_bits=8, mantissa_bits=7)
    parts = (part.astype(jnp.bfloat16) for part in (high, weighted - high))
    high, low = (
        jnp.einsum(spec, part, other, preferred_element_type=jnp.float32) for part in parts
    )
    return high + low


def pair_energy(
    q: Float[Array, "B T N H"], real: Float[Array, "B T"], rotated: int
) -> Float[Array, "N H_half"]:
    """Sum of |q|^2 over real tokens for each pair of `rope.paired_dims`, taken as slices: of the
    `rotated` entries, and of the others."""
    squares = jnp.square(q.astype(jnp.float32))
    parts = (part for part in jnp.split(squares, [rotated], axis=-1) if part.shape[-1])
    pairs = [a + b for a, b in (jnp.split(part, 2, axis=-1) for part in parts)]
    return jnp.einsum("BTNF,BT->NF", jnp.concatenate(pairs, axis=-1), real)
