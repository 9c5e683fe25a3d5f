"""The quality of every SwiftKV cut of a model before distillation, in three compiled programs.

The weights are one stack of all layers. The teacher runs once per batch and keeps the hidden state
that enters each layer. From those states the student of any cut starts: where its upper layers
begin and how many share a projection are arguments of one program, not shapes, so a model of 126
layers compiles as quickly as one of 8.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..attention import Attention
from ..cache import bytes_per_token
from ..config import Config
from ..cost import prefill_flops
from ..layers import head_weights, rms_norm, rope_table
from ..params import QKV, Llama, SwiftKV
from ..sharding import all_gather_fsdp, all_gather_vocabulary, constrain_activations, replicated
from ..transformer import Batch, cross_layer, packed_attention, project_kv, self_layer
from .distill import linear_kl


@dataclasses.dataclass(frozen=True)
class CutResult:
    """Measurements of one cut, with the delta as `initialization.init_swiftkv` makes it. Means are
    per predicted token."""

    num_key_value_layers: int
    key_value_group_size: int
    kl: float
    """KL(teacher || student) at temperature 1, nats."""
    agreement: float
    """Share of positions where teacher and student rank the same token first."""
    student_perplexity: float
    prefill_flops_share: float
    """FLOPs of a prefill as a share of the teacher's."""
    kv_bytes_per_token: int
    kv_bytes_share: float
    """Bytes of the KV cache as a share of the teacher's."""


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Measurements on one text."""

    tokens: int
    """Number of predicted tokens."""
    teacher_perplexity: float
    similarity: list[list[float]]
    """[L+1][L+1]: mean cosine between the hidden states that enter layers i and j; L is the output
    of the last layer."""
    cuts: list[CutResult]


def possible_cuts(
    num_layers: int, lower: Iterable[int], groups: Iterable[int]
) -> list[tuple[int, int]]:
    """(K, g) for every K and each g that divides the other layers, sorted."""
    groups = sorted(set(groups))
    return [(k, g) for k in sorted(set(lower)) for g in groups if (num_layers - k) % g == 0]


def analyze_cuts(
    config: Config,
    llama: Llama,
    batches: Iterable[Batch],
    cuts: Sequence[tuple[int, int]],
    *,
    prompt_length: int,
    attention: Attention,
) -> Analysis:
    """Run teacher and students over `batches`, of one shape. `llama` has all its layers in the
    lower stack.

    `prompt_length` is the number of tokens of the prefill whose FLOPs are counted.
    """
    cosines, real = np.zeros((config.num_layers + 1,) * 2), 0.0
    sums, targets = np.zeros((len(cuts), 4)), 0.0
    for batch in batches:
        inputs, last = teacher_states(config, attention, llama, batch)
        results = [
            cut_sums(config, attention, llama, batch, inputs, last, jnp.int32(k), jnp.int32(g))
            for k, g in cuts
        ]
        cosines += np.asarray(cosine_sums(attention, inputs, last, batch.segment_ids))
        real, targets = (
            real + float((batch.segment_ids > 0).sum()),
            targets + float(batch.loss_mask.sum()),
        )
        sums += np.array(jax.device_get(results))
    means = sums / targets
    return Analysis(
        tokens=int(targets),
        teacher_perplexity=float(np.exp(means[0, 2])),
        similarity=(cosines / real).tolist(),
        cuts=[
            _cut(config, k, g, row, prompt_length, llama.embed.dtype)
            for (k, g), row in zip(cuts, means, strict=True)
        ],
    )


def _cut(config: Config, k: int, g: int, means, prompt_length: int, dtype) -> CutResult:
    kl, agreement, _, student_nll = map(float, means)
    cut = config.cut(k, g)
    kv_bytes = bytes_per_token(cut, dtype)
    return CutResult(
        num_key_value_layers=k,
        key_value_group_size=g,
        kl=max(kl, 0.0),  # K = L-1 changes nothing: rounding may then fall below 0
        agreement=agreement,
        student_perplexity=float(np.exp(student_nll)),
        prefill_flops_share=prefill_flops(cut, prompt_length, swiftkv=True)
        / prefill_flops(cut, prompt_length, swiftkv=False),
        kv_bytes_per_token=kv_bytes,
        kv_bytes_share=kv_bytes / bytes_per_token(cut, dtype, swiftkv=False),
    )


# The programs -----------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1))
def teacher_states(
    config: Config, attention: Attention, llama: Llama, batch: Batch
) -> tuple[Float[Array, "L B T D"], Float[Array, "B T D"]]:
    """The hidden state that enters each layer, and the output of the last one."""
    mesh, rope = attention.mesh, rope_table(config, batch.positions)
    attend = packed_attention(attention, batch.segment_ids)

    def step(x, layer):
        block, qkv = (all_gather_fsdp(mesh, weights, layer=True) for weights in layer)
        following, _ = self_layer(config, block, qkv, x, rope, attend)
        return constrain_activations(mesh, following), x

    x = constrain_activations(mesh, all_gather_vocabulary(mesh, llama.embed)[batch.tokens])
    last, inputs = jax.lax.scan(step, x, (llama.lower, llama.lower_qkv))
    return inputs, last


@functools.partial(jax.jit, static_argnums=0)
def cosine_sums(
    attention: Attention,
    inputs: Float[Array, "L B T D"],
    last: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "L+1 L+1"]:
    """Sum over real tokens of the cosine between the hidden states of any two layers."""
    real = (segment_ids > 0)[..., None]

    def unit(x):
        length = jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)
        return jnp.where(real, x / length, 0).astype(x.dtype)

    states = jnp.concatenate([unit(inputs), unit(last)[None]])
    sums = jnp.einsum("iBTD,jBTD->ij", states, states, preferred_element_type=jnp.float32)
    return (
        sums
        if attention.mesh is None
        else jax.lax.with_sharding_constraint(sums, replicated(attention.mesh))
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def cut_sums(
    config: Config,
    attention: Attention,
    llama: Llama,
    batch: Batch,
    inputs: Float[Array, "L B T D"],
    last: Float[Array, "B T D"],
    first_upper: Int[Array, ""],
    group_size: Int[Array, ""],
) -> tuple[Array, Array, Array, Array]:
    """`linear_kl` at temperature 1 between the teacher, which is `last`, and the student of one
    cut."""
    mesh, rope = attention.mesh, rope_table(config, batch.positions)
    first_x = layer_of(inputs, first_upper)
    norm = layer_of(llama.lower.attn_norm, first_upper)

    def run_group(group, x):
        start = first_upper + group * group_size
        delta = all_gather_fsdp(
            mesh, group_delta(norm, llama.lower_qkv, start, group_size), layer=False
        )
        k, v = (heads[0] for heads in project_kv(config, delta, first_x, rope))

        def run_layer(index, x):
            block, qkv = (
                all_gather_fsdp(mesh, layer_of(stack, index), layer=True)
                for stack in (llama.lower, llama.lower_qkv)
            )
            attend = functools.partial(attention.prefill, k=k, v=v, segment_ids=batch.segment_ids)
            return constrain_activations(
                mesh, cross_layer(config, block, qkv.q, qkv.q_bias, x, rope, attend)
            )

        return jax.lax.fori_loop(start, start + group_size, run_layer, x)

    student_x = jax.lax.fori_loop(
        0, (config.num_layers - first_upper) // group_size, run_group, first_x
    )
    student_x, teacher_x = (
        rms_norm(x, llama.final_norm, config.norm_eps) for x in (student_x, last)
    )
    next_tokens = jnp.roll(batch.tokens, -1, axis=1)
    return linear_kl(
        1.0, student_x, teacher_x, head_weights(llama), next_tokens, batch.loss_mask, mesh=mesh
    )


def group_delta(norm: Float[Array, " D"], qkv: QKV, start, size) -> SwiftKV:
    """The delta of one group, without its queries: the mean of `size` layers' projections, taken in
    float32."""

    def mean(stack):
        if stack is None:
            return None
        zero = jnp.zeros(stack.shape[1:], jnp.float32)
        total = jax.lax.fori_loop(
            start, start + size, lambda index, total: total + layer_of(stack, index), zero
        )
        return (total / size).astype(stack.dtype)[None]

    return SwiftKV(
        norm=norm,
        q=None,
        k=mean(qkv.k),
        v=mean(qkv.v),
        k_bias=mean(qkv.k_bias),
        v_bias=mean(qkv.v_bias),
    )


def layer_of(stack: Any, index) -> Any:
    """One layer out of a tree of stacks."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack
    )
