"""The kinds of decoder layers, for one layer's weights.

`self_layer` computes its own keys and values, `cross_layer` only queries. `two_cache_layer` does
both, where layers share caches and tokens also keep their own keys and values; `attention_layer` is
a `self_layer` with a linear map in place of its MLP. All take an `attend` callable, so training,
prefill and decode run the same layer on keys and values that are stored differently. Letters as in
`params`; B batch, T positions.
"""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from .attention import DEFAULT, Attention
from .config import Config
from .layers import (
    add_mapped,
    attention_output,
    norm,
    norm_heads,
    norm_of_sum,
    output_and_mlp,
    project_heads,
)
from .packed_attention import Attend, Heads
from .params import QKV, Block, PromptMLP, ServingBlock, ServingQKV, SwiftKV
from .quantization import QuantizedRows
from .rope import apply_rope


def self_layer(
    config: Config,
    block: Block | ServingBlock,
    qkv: QKV | ServingQKV,
    x,
    rope,
    attend: Attend,
    attention: Attention = DEFAULT,
):
    """A layer with its own keys and values: (x, state), where `attend(q, k, v)` returns (attended,
    state). `rope` is the table of its kind, or None; experts run on the mesh of `attention`."""
    attended, state = _attend_to_own(config, block, qkv, x, rope, attend)
    return output_and_mlp(config, block, x, attended, attention), state


def cross_layer(
    config: Config,
    block: Block | ServingBlock,
    queries: QKV,
    x,
    rope,
    attend: Attend,
    attention: Attention = DEFAULT,
):
    """An upper layer of the student, which computes only queries: x. `attend(q)` attends to the
    keys and values of its group. Only the parameters of q in `queries` are used."""
    with jax.named_scope("q"):
        q = project_q(config, queries, norm(config, x, block.attn_norm), rope)
    with jax.named_scope("attention"):
        attended = attend(q)
    return output_and_mlp(config, block, x, attended, attention)


def two_cache_layer(
    config: Config,
    block: Block | ServingBlock,
    qkv: QKV | ServingQKV,
    queries: QKV,
    x,
    rope,
    attend: Attend,
    attention: Attention = DEFAULT,
):
    """An upper layer of the student that attends to its group's keys and values with the student's
    `queries`, and to tokens' own keys and values with the teacher's `qkv`: (x, state), where
    `attend(shared_q, q, k, v)` returns (attended, state)."""
    with jax.named_scope("qkv"):
        h = norm(config, x, block.attn_norm)
        shared_q = project_q(config, queries, h, rope)
        q, k, v = _project_qkv(config, qkv, h, rope)
    with jax.named_scope("attention"):
        attended, state = attend(shared_q, q, k, v)
    return output_and_mlp(config, block, x, attended, attention), state


def attention_layer(
    config: Config,
    block: Block | ServingBlock,
    qkv: QKV | ServingQKV,
    mlp: PromptMLP | None,
    x,
    rope,
    attend: Attend,
):
    """A `self_layer` with `mlp` in place of its MLP, or nothing: (x, state). See
    `Config.prompt_attention_layers`."""
    attended, state = _attend_to_own(config, block, qkv, x, rope, attend)
    x = x + attention_output(config, block, attended)
    return x if mlp is None else add_mapped(config, block, x, mlp), state


def _attend_to_own(
    config: Config, block: Block | ServingBlock, qkv: QKV | ServingQKV, x, rope, attend: Attend
):
    with jax.named_scope("qkv"):
        heads = qkv.heads if isinstance(qkv, ServingQKV) else None
        _, h = norm_of_sum(config, x, None, block.attn_norm, heads)
        q, k, v = _project_qkv(config, qkv, h, rope)
    with jax.named_scope("attention"):
        return attend(q, k, v)


def _project_qkv(
    config: Config, qkv: QKV | ServingQKV, h: Float[Array, "B T D"] | QuantizedRows, rope
):
    """Rotated queries and keys, and values, of a layer with its own."""
    if isinstance(qkv, QKV):
        assert not isinstance(h, QuantizedRows)
        return project_q(config, qkv, h, rope), *kv_projections(config, qkv, h, rope)
    heads = project_heads(h, qkv.heads, qkv.bias)
    if qkv.q is None:
        assert heads.shape[-2] > 2, "without queries"
        q = heads[..., :-2, :].reshape(*h.shape[:2], -1, config.head_dim)
    else:
        q = project_heads(h, qkv.q, qkv.q_bias)
    k, v = heads[..., -2, :], heads[..., -1, :]
    return _query(config, q, qkv.q_norm, rope), _key(config, k, qkv.k_norm, rope), v


def kv_projections(
    config: Config, qkv: QKV, h: Float[Array, "B T D"], rope
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Rotated keys, and values, of a layer with its own. The parameters of q are not used."""
    k = _key(config, project_heads(h, qkv.k, qkv.k_bias), qkv.k_norm, rope)
    return k, project_heads(h, qkv.v, qkv.v_bias)


def project_q(config: Config, queries: QKV, h: Float[Array, "B T D"], rope) -> Heads:
    """Rotated queries."""
    return _query(config, project_heads(h, queries.q, queries.q_bias), queries.q_norm, rope)


def _query(config: Config, q: Heads, scale, rope) -> Heads:
    """Attention multiplies scores by 1 / sqrt(head_dim), so the queries are multiplied by the rest
    of `query_scale`."""
    rest = 1.0 if config.query_scale is None else config.query_scale * config.head_dim**0.5
    return apply_rope(norm_heads(config, q, scale), rope, rest)


def _key(config: Config, k: Heads, scale, rope) -> Heads:
    return apply_rope(norm_heads(config, k, scale), rope)


def delta_queries(delta: SwiftKV) -> QKV:
    """The student's queries, without keys and values."""
    return QKV(delta.q, None, None, q_bias=delta.q_bias, q_norm=delta.q_norm)


def with_queries[T: QKV | ServingQKV](kv: T, queries: QKV) -> T:
    """The keys and values of one layer, or stack, with the queries of another."""
    return dataclasses.replace(kv, q=queries.q, q_bias=queries.q_bias, q_norm=queries.q_norm)
