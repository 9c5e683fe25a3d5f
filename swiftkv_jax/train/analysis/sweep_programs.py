"""The compiled programs of a sweep over cuts: where the upper layers begin is an argument of each,
not a shape. `llama` has all its layers in the lower stack, and K and M are scalars; letters as in
`params`, B batch, T positions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ...model.attention import Attention
from ...model.batch import Batch
from ...model.boundary import first_tokens, project_kv
from ...model.config import Config
from ...model.decoder_layers import attention_layer, cross_layer, kv_projections, self_layer
from ...model.layers import embed, finish_logits, head_weights, norm
from ...model.packed_attention import head_major, packed_attention, packed_reader
from ...model.params import Llama, PromptMLP, SwiftKV
from ...model.rope import apply_rope, rope_tables, scanned_kinds
from ...model.sharding import (
    all_gather_fsdp,
    all_gather_vocabulary,
    constrain_activations,
    replicate,
)
from ..loss.distill import chunk_length, nll, same_first, split_chunks
from ..loss.divergence import divergence_and_gradient


class PromptLayers(NamedTuple):
    """The upper layers of which prompts run only the attention."""

    mlps: PromptMLP
    """Stacks of what stands in for their MLPs, with at least as many entries."""
    number: Int[Array, ""]
    """M."""


class Explained(NamedTuple):
    """Sums over tokens of the keys y (before they rotate) and values that the teacher computes in
    each layer, and of those that a student reads, ŷ. Letters as in `params`; P keys and values."""

    means: Float[Array, "2 L P K H"]
    """y, ŷ"""
    products: Float[Array, "3 L P K"]
    """|y|^2, |ŷ|^2, y . ŷ"""
    tokens: Float[Array, ""]


def layer_of(stack: Any, index) -> Any:
    """One layer out of a tree of stacks."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def teacher_states(
    config: Config, attention: Attention, llama: Llama, batch: Batch
) -> tuple[Float[Array, "L B T D"], Float[Array, "B T D"]]:
    """The hidden state that enters each layer, and the output of the last one."""
    config = config.at_length(batch.tokens.shape[1])
    mesh = attention.mesh
    tables = rope_tables(config, batch.positions)
    kinds, kind_of = scanned_kinds(config, tables, range(config.num_layers))

    def step(x, layer):
        *weights, kind = layer
        block, qkv = (all_gather_fsdp(mesh, part, layer=True) for part in weights)
        rope, window = kind_of(kind)
        attend = packed_attention(config, attention, batch.segment_ids, window)
        following, _ = self_layer(config, block, qkv, x, rope, attend, attention)
        return constrain_activations(mesh, following), x

    embedding = all_gather_vocabulary(mesh, llama.embed)
    x = constrain_activations(mesh, embed(config, embedding, batch.tokens))
    last, inputs = jax.lax.scan(step, x, (llama.lower, llama.lower_qkv, kinds))
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
    return replicate(attention.mesh, sums)


def boundary_states(
    config: Config,
    attention: Attention,
    llama: Llama,
    batch: Batch,
    inputs: Float[Array, "L B T D"],
    first_upper: Int[Array, ""],
    prompt: PromptLayers,
) -> Float[Array, "S+1 B T D"]:
    """The hidden states of a prompt that enter each of the prompt layers, and the one after the
    last, from the teacher's `inputs` of layer K; zeros behind it. An exact head has the
    teacher's."""
    x = layer_of(inputs, first_upper)
    first = first_tokens(batch.segment_ids)[..., None]
    states = jnp.zeros((len(prompt.mlps.map) + 1, *x.shape), x.dtype).at[0].set(x)

    def step(index, states):
        args = config, attention, llama, batch, layer_of(states, index), first_upper + index
        y = prompt_layer(*args, layer_of(prompt.mlps, index))
        if config.exact_head:
            y = jnp.where(first, layer_of(inputs, first_upper + index + 1), y)
        return jax.lax.dynamic_update_index_in_dim(states, y, index + 1, 0)

    return jax.lax.fori_loop(0, prompt.number, step, states)


def prompt_layer(
    config: Config,
    attention: Attention,
    llama: Llama,
    batch: Batch,
    x: Float[Array, "B T D"],
    index: Int[Array, ""],
    mlp: PromptMLP | None,
) -> Float[Array, "B T D"]:
    """Layer `index` with `mlp` in place of its MLP, or without either."""
    config = config.at_length(batch.tokens.shape[1])
    mesh = attention.mesh
    tables = rope_tables(config, batch.positions)
    kinds, kind_of = scanned_kinds(config, tables, range(config.num_layers))
    block, qkv = (
        all_gather_fsdp(mesh, layer_of(stack, index), layer=True)
        for stack in (llama.lower, llama.lower_qkv)
    )
    rope, window = kind_of(layer_of(kinds, index))
    attend = packed_attention(config, attention, batch.segment_ids, window)
    x, _ = attention_layer(config, block, qkv, mlp, x, rope, attend)
    return constrain_activations(mesh, x)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def cut_sums(
    config: Config,
    attention: Attention,
    own_from: int | None,
    llama: Llama,
    batch: Batch,
    far: Float[Array, "B T"],
    inputs: Float[Array, "L B T D"],
    last: Float[Array, "B T D"],
    first_upper: Int[Array, ""],
    kv: SwiftKV,
    prompt: PromptLayers | None = None,
) -> tuple[Float[Array, "5 B"], Explained]:
    """For each row the sums over its predictions of KL(teacher || student), of where both rank the
    same token first, and of the cross-entropies of teacher and student; and the nats that the
    student loses on the predictions that `far` leaves.

    The teacher is `last`. The upper layers' keys and values of the student are projected by the
    entries of `kv` in turn. From position `own_from` on tokens keep their own; what comes before
    is then a prompt, whose predictions do not count and are not computed. None: no token does, but
    an exact head, where `config` has one. `Explained` is of all tokens but the first of each text.
    """
    config = config.at_length(batch.tokens.shape[1])
    mesh = attention.mesh
    tables = rope_tables(config, batch.positions)
    kinds, kind_of = scanned_kinds(config, tables, range(config.num_layers))
    first = own_from or 0
    segment_ids = batch.segment_ids
    is_first = first_tokens(segment_ids)
    counted = ((segment_ids > 0) & ~is_first).astype(jnp.float32)
    is_first = is_first[..., None, None]
    states = layer_of(inputs, first_upper)[None]
    if prompt is not None:
        states = boundary_states(config, attention, llama, batch, inputs, first_upper, prompt)

    def padded(q):
        return jnp.pad(q, ((0, 0), (first, 0), (0, 0), (0, 0))) if first else q

    def run_layer(index, carry):
        x, explained = carry
        block, qkv, own = (
            all_gather_fsdp(mesh, layer_of(stack, at), layer=True)
            for stack, at in (
                (llama.lower, index),
                (llama.lower_qkv, index),
                (kv, index - first_upper),
            )
        )
        at = 0 if prompt is None else jnp.minimum(index - first_upper, prompt.number)
        delta = dataclasses.replace(
            jax.tree.map(lambda leaf: leaf[None], own),
            norm=layer_of(llama.lower.attn_norm, first_upper + at),
        )
        rope, window = kind_of(layer_of(kinds, index))
        projected = project_kv(config, delta, layer_of(states, at), None, segment_ids)
        k, v = (heads[0].transpose(0, 2, 1, 3) for heads in projected)
        h = norm(config, layer_of(inputs, index), block.attn_norm)
        exact = kv_projections(config, qkv, h, None)
        explained = _add_explained(explained, index, exact, (k, v), counted)
        if config.exact_head:
            k, v = (jnp.where(is_first, *both) for both in zip(exact, (k, v), strict=True))
        k = head_major(apply_rope(k, rope))
        v = head_major(v)
        read = packed_reader(config, attention, segment_ids, window)
        if own_from is None:
            x = cross_layer(config, block, qkv, x, rope, lambda q: read(q, k, v), attention)
            return constrain_activations(mesh, x), explained

        def attend(q, own_k, own_v):
            merged = (
                jnp.concatenate([shared[:, :, :first], head_major(mine)], 2)
                for shared, mine in ((k, own_k), (v, own_v))
            )
            return read(padded(q), *merged)[:, first:], None

        rope = jax.tree.map(lambda table: table[:, :, first:], rope)
        x, _ = self_layer(config, block, qkv, x, rope, attend, attention)
        return constrain_activations(mesh, x), explained

    heads = config.num_layers, 2, config.num_kv_heads
    nothing = Explained(
        jnp.zeros((2, *heads, config.head_dim)), jnp.zeros((3, *heads)), counted.sum()
    )
    start = layer_of(inputs, first_upper)[:, first:], nothing
    student, explained = jax.lax.fori_loop(first_upper, config.num_layers, run_layer, start)
    targets = jnp.roll(batch.tokens, -1, axis=1)
    masks = jnp.stack([batch.loss_mask, far], -1)
    parts = (student, last[:, first:], targets[:, first:], masks[:, first:])
    return replicate(mesh, (_row_sums(config, mesh, llama, *parts), explained))


def _add_explained(
    explained: Explained,
    index: Int[Array, ""],
    exact: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]],
    projected: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]],
    counted: Float[Array, "B T"],
) -> Explained:
    """`explained` with the sums of layer `index`."""
    y, ours = (jnp.stack(heads).astype(jnp.float32) for heads in (exact, projected))  # P B T K H
    means = jnp.stack([jnp.einsum("PBTKH,BT->PKH", x, counted) for x in (y, ours)])
    products = jnp.stack(
        [
            jnp.einsum("PBTKH,PBTKH,BT->PK", a, b, counted)
            for a, b in ((y, y), (ours, ours), (y, ours))
        ]
    )
    return explained._replace(
        means=explained.means.at[:, index].set(means),
        products=explained.products.at[:, index].set(products),
    )


def _row_sums(
    config: Config, mesh: Mesh | None, llama: Llama, student_x, teacher_x, targets, masks
) -> Float[Array, "5 B"]:
    """The sums of `cut_sums` from the hidden states before the final norm; a chunk of positions has
    logits at a time."""
    rows, length, _ = student_x.shape
    head = all_gather_vocabulary(mesh, head_weights(llama))
    chunk = chunk_length(rows, length, head.shape[0], mesh)

    def step(sums, part):
        student_x, teacher_x, targets, masks = part
        student, teacher = (
            finish_logits(
                config,
                jnp.einsum(
                    "BTD,VD->BTV",
                    norm(config, x, llama.final_norm),
                    head,
                    preferred_element_type=jnp.float32,
                ),
            )
            for x in (student_x, teacher_x)
        )
        divergence, _ = divergence_and_gradient("forward", student, teacher, 1.0)
        of_teacher = nll(teacher, targets)
        of_student = nll(student, targets)
        of_all = jnp.stack([divergence, same_first(student, teacher), of_teacher, of_student])
        counted, far = jnp.moveaxis(masks, -1, 0)
        found = [of_all * counted, ((of_student - of_teacher) * far)[None]]
        return sums + jnp.concatenate(found).sum(-1), None

    split = [split_chunks(x, chunk) for x in (student_x, teacher_x, targets, masks)]
    return jax.lax.scan(step, jnp.zeros((5, rows), jnp.float32), tuple(split))[0]
