"""Keys and values of prompt tokens in the upper layers, from the hidden state that enters layer K.

    x -> attention of layers K .. K+M-1, maps in place of their MLPs -> y    (M may be 0: y is x)
                     |                                                  |
                     +-> their own k, v                                 +-> s = RMSNorm(y)
                                                                            -> k, v of all groups

With a tap, keys come from s of a token and of the one before it. Letters as in `params`; B batch, T
positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .attention import DEFAULT, Attention
from .config import Config
from .decoder_layers import attention_layer, kv_projections, self_layer
from .layers import norm, norm_heads
from .packed_attention import head_major, mixed, packed_reader
from .params import QKV, Llama, SwiftKV, require_upper_kv
from .quantization import Quantized, product
from .rope import Tables, apply_rope, group_table, table_of
from .sharding import all_gather_fsdp, all_gather_mix, constrain_activations


def boundary_kv(
    config: Config,
    llama: Llama,
    delta: SwiftKV,
    x,
    tables: Tables,
    segment_ids: Int[Array, "B T"],
    *,
    attention: Attention = DEFAULT,
) -> tuple[Float[Array, "J B K T H"], Float[Array, "J B K T H"]]:
    """Keys and values of every upper group as prompt tokens have them, from the hidden state that
    enters layer K: those of `Config.prompt_attention_layers` one after the other, then of all other
    groups at once. Keys are rotated."""
    mesh = attention.mesh
    alone = []
    for index in range(config.prompt_attention_layers):
        x, kv = run_prompt_layer(
            config, llama, delta, index, x, tables, segment_ids, attention=attention
        )
        alone.append(kv)
    projections = dataclasses.replace(delta, q=None, q_bias=None, q_norm=None)
    projections = projections.with_prompt_mlp(None)
    kv = project_kv(
        config,
        all_gather_fsdp(mesh, projections, layer=False),
        x,
        group_table(config, tables),
        segment_ids,
    )
    if not alone:
        return kv
    k, v = (
        jnp.concatenate([jnp.stack(first), rest])
        for first, rest in zip(zip(*alone, strict=True), kv, strict=True)
    )
    return k, v


def run_prompt_layer(
    config: Config,
    llama: Llama,
    delta: SwiftKV,
    index: int,
    x,
    tables: Tables,
    segment_ids: Int[Array, "B T"],
    *,
    attention: Attention = DEFAULT,
    mapped: bool = True,
):
    """One of `Config.prompt_attention_layers`: (hidden state after it, its keys and values, B K T
    H). `mapped` False leaves out the map. With `Config.exact_head` the first token of a segment
    runs through the whole layer, with the teacher's keys and values."""
    mesh = attention.mesh
    kind = config.kind(config.num_lower_layers + index)

    def layer_of(stack):
        return all_gather_fsdp(mesh, jax.tree.map(lambda leaf: leaf[index], stack), layer=True)

    block = layer_of(llama.upper)
    qkv = layer_of(prompt_projections(delta))
    rope = table_of(config, tables, kind)
    mix = None if delta.mix is None else all_gather_mix(mesh, delta.mix[index])
    read = packed_reader(config, attention, segment_ids, kind.window)
    mlp = jax.tree.map(lambda leaf: leaf[index], delta.prompt_mlp) if mapped else None
    mlp = None if mlp is None else all_gather_fsdp(mesh, mlp, layer=True)

    def attend(q, k, v):
        k = head_major(k)
        v = head_major(v)
        if config.shared_kv_heads is None:
            return read(q, k, v), (k, v)
        heads = jnp.asarray(config.shared_kv_heads[index])
        return mixed(read(q, k[:, heads], v[:, heads]), mix), (k, v)

    if not config.exact_head:
        x, kv = attention_layer(config, block, qkv, mlp, x, rope, attend)
        return constrain_activations(mesh, x, sequence=attention.shard_sequence), kv

    first = first_tokens(segment_ids)
    teachers = layer_of(require_upper_kv(llama, "keep the keys and values of first tokens"))
    own = kv_projections(config, teachers, norm(config, x, block.attn_norm), rope)

    def attend_own(q, k, v):
        keep = first[:, :, None, None]
        k, v = (jnp.where(keep, one, other) for one, other in zip(own, (k, v), strict=True))
        return attend(q, k, v)

    mapped_x, kv = attention_layer(config, block, qkv, mlp, x, rope, attend_own)
    whole, _ = self_layer(config, block, qkv, x, rope, attend_own, attention)
    x = jnp.where(first[..., None], whole, mapped_x)
    return constrain_activations(mesh, x, sequence=attention.shard_sequence), kv


def project_kv(
    config: Config,
    delta: SwiftKV,
    x: Float[Array, "B T D"],
    rope,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "P B K T H"], Float[Array, "P B K T H"]]:
    """Keys and values of every projected group from the boundary state.

    A prompt token needs nothing else from those layers. Keys are returned rotated, by the
    `group_table`, once per group: the layers of a group share positions, so they share the rotated
    keys. `segment_ids` are needed where there are taps.
    """
    alone = config.prompt_attention_layers

    def projected(leaf) -> Any:
        return jax.tree.map(lambda stack: stack[alone:], leaf) if alone else leaf

    with jax.named_scope("project_kv"):
        s = norm(config, x, delta.norm)
        k = product("BTD,JKHD->BTJKH", s, projected(delta.k))
        v = product("BTD,JKHD->BTJKH", s, projected(delta.v))
        if delta.k_tap is not None:
            assert segment_ids is not None
            before = previous_tokens(s, segment_ids)
            k = k + product("BTD,JKHD->BTJKH", before, delta.k_tap)
        if delta.k_bias is not None:
            k = k + projected(delta.k_bias)
            v = v + projected(delta.v_bias)
        k = apply_rope(norm_heads(config, k, projected(delta.k_norm)), rope)
        return k.transpose(2, 0, 3, 1, 4), v.transpose(2, 0, 3, 1, 4)


def project_fused_kv(
    config: Config,
    kv: Float[Array, "2 P K H D"] | Quantized,
    bias: Float[Array, "2 P K H"] | None,
    k_norm: Float[Array, "P Kq"] | None,
    s: Float[Array, "B T D"],
    rope,
    *,
    k_tap: Float[Array, "P K H D"] | Quantized | None = None,
    before: Float[Array, "B T D"] | None = None,
) -> tuple[Float[Array, "P B K T H"], Float[Array, "P B K T H"]]:
    """`project_kv` from the normed state `s`, with the weights of keys and values joined in one
    array, so that there is one product for all groups. Serving joins them once. `before` are the
    normed states of the tokens before, which `k_tap` reads."""
    with jax.named_scope("project_kv"):
        out = product("BTD,PJKHD->PBTJKH", s, kv)
        if k_tap is not None:
            assert before is not None
            out = out.at[0].add(product("BTD,JKHD->BTJKH", before, k_tap))
        if bias is not None:
            out = out + bias[:, None, None]
        k = apply_rope(norm_heads(config, out[0], k_norm), rope)
        v = out[1]
        return k.transpose(2, 0, 3, 1, 4), v.transpose(2, 0, 3, 1, 4)


def prompt_projections(delta: SwiftKV) -> QKV:
    """Queries, keys and values of `Config.prompt_attention_layers`, the first entries of the
    stacks: those of the student's layers."""
    return QKV(
        delta.q,
        delta.k,
        delta.v,
        delta.q_bias,
        delta.k_bias,
        delta.v_bias,
        delta.q_norm,
        delta.k_norm,
    )


def previous_tokens(
    x: Float[Array, "B T *D"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T *D"]:
    """The entry of the token before each; zeros at the start of a segment."""
    first = first_tokens(segment_ids)
    before = jnp.roll(x, 1, axis=1)
    return jnp.where(first.reshape(*first.shape, *(1,) * (x.ndim - 2)), 0, before)


def first_tokens(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Mark the first token of each segment."""
    return (segment_ids != jnp.roll(segment_ids, 1, axis=1)).at[:, 0].set(True)
