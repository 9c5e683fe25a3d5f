"""The weights in serving form: one tuple entry per layer, and only what serving reads.

model -> heads in the order of the cache's (`mix`) -> copies of heads (`kv_heads`)
      -> `serving_weights`
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...model.boundary import prompt_projections
from ...model.config import Config, GeneratedKV
from ...model.cut import choose_generated_kv
from ...model.decoder_layers import delta_queries
from ...model.model import Model
from ...model.params import (
    QKV,
    Block,
    Leaf,
    Llama,
    PromptMLP,
    ServingBlock,
    SwiftKV,
    llama_shapes,
    require_teacher,
    require_upper_kv,
    swiftkv_shapes,
)
from ...model.quantization import Quantized, Scheme, as_matrix, quantized_shapes, scheme_of
from ...model.sharding import llama_shardings, swiftkv_shardings
from ...model.stacks import unstack
from .kv_heads import copy_kv_heads, with_kv_head_copies
from .mix import fold_mix, order_heads


@struct.dataclass
class Weights:
    """Weights of a student, or of a teacher, which is served as a model without upper layers.
    Matrices may be `Quantized`."""

    embed: Leaf  # V D
    lower: tuple[ServingBlock, ...]
    lower_qkv: tuple[QKV, ...]
    final_norm: Leaf  # D
    lm_head: Leaf  # V D; None when tied to `embed`
    norm_swiftkv: Leaf = None  # D; this and the next are None in a teacher
    kv: Leaf = None  # 2 P K H D; all projected keys and values are one product
    kv_bias: Leaf = None  # 2 P K H, with `qkv_bias` only
    k_norm_swiftkv: Leaf = None  # P Kq, with `qk_norm` only
    upper: tuple[ServingBlock, ...] = ()  # empty in a teacher
    upper_q: tuple[QKV, ...] = ()  # the student's queries, without k and v
    upper_kv: tuple[QKV, ...] = ()
    """The teacher's projections of the upper layers, without q unless layers attend to two caches;
    empty unless tokens keep their own."""
    upper_mix: tuple[Leaf, ...] = ()  # K H H, where layers attend to two caches and mix values
    prompt_kv: tuple[QKV, ...] = ()
    """Projections of `Config.prompt_attention_layers`, without q: those of `upper_q` serve."""
    prompt_mlp: tuple[PromptMLP, ...] = ()  # of the same layers
    k_tap: Leaf = None  # P K H D, with `Config.boundary_taps` only


def served_config(
    config: Config,
    swiftkv: bool,
    generated_kv: GeneratedKV | None = None,
    exact_tail: int | None = None,
    *,
    mesh: Mesh | None = None,
) -> Config:
    """The architecture that is served: the teacher is the cut above the last layer, a student's
    heads are in the order of its cache's, and on a `mesh` there are copies of key/value heads where
    it has more devices (`kv_heads`). `generated_kv` and `exact_tail` replace those of `config`
    unless they are None. Raises `UsageError` if the student cannot have them."""
    if not swiftkv:
        return with_kv_head_copies(config.cut(config.num_layers), mesh)
    config = choose_generated_kv(config, generated_kv, exact_tail)
    heads = None
    if config.has_two_caches and config.shared_kv_heads is not None:
        heads = (tuple(range(config.num_kv_heads)),) * config.num_upper_layers
    config = dataclasses.replace(config, shared_kv_heads=heads)
    return with_kv_head_copies(config, mesh)


def serve_model(
    model: Model, served: Config, swiftkv: bool, mesh: Mesh | None, *, donate: bool
) -> Weights:
    """The weights of a model, which is on `mesh` already, as `serving_weights` has them, in the
    architecture `served` (`served_config`)."""
    llama = model.llama
    delta = model.swiftkv if swiftkv else None
    if delta is not None and model.config.shared_kv_heads is not None:
        in_order = order_heads if served.has_two_caches else fold_mix
        llama, delta = in_order(model.config, llama, delta)
    if mesh is not None:
        upper_kv = delta is None or served.keeps_own
        llama, delta = copy_kv_heads(
            model.config, llama, delta, mesh, upper_kv=upper_kv, donate=donate
        )
    return serving_weights(
        llama, delta, own_kv=served.keeps_own, two_caches=served.has_two_caches, donate=donate
    )


def serving_weights(
    llama: Llama,
    delta: SwiftKV | None,
    *,
    own_kv: bool = False,
    two_caches: bool = False,
    donate: bool = False,
) -> Weights:
    """The weights of a student (with `delta`) or a teacher (without). Copies the layers and shares
    embedding and head. With `own_kv` a student has the teacher's upper keys and values too, and for
    `two_caches` the queries.

    With `donate` the stacks are deleted one after the other, so that memory holds the model once.
    Raises `ValueError` for the teacher of a model whose upper projections were dropped, and with
    `own_kv`.
    """
    if delta is None:
        require_teacher(llama, "run it as a plain Llama")
    elif two_caches:
        require_teacher(llama, "keep tokens' own")
    elif own_kv:
        require_upper_kv(llama, "keep tokens' own")
    weights = _weights(_Arrays(donate), llama, delta, own_kv=own_kv, two_caches=two_caches)
    if donate and delta is not None:
        for leaf in jax.tree.leaves((delta.k, delta.v, llama.upper_qkv)):
            if not leaf.is_deleted():
                leaf.delete()
    return weights


def weight_shapes(
    config: Config,
    swiftkv: bool,
    dtype: Any,
    quantization: Scheme | None = None,
    mesh: Mesh | None = None,
) -> Weights:
    """The `ShapeDtypeStruct` of every served weight, for compiling without a checkpoint. `dtype` is
    that of the weights that are not quantised. On a `mesh` they have the shardings of a model that
    was loaded there."""
    llama, delta = model_shapes(config, dtype, quantization, mesh)
    if not config.has_two_caches:
        delta = dataclasses.replace(delta, mix=None)
    return _weights(
        _Shapes(),
        llama,
        delta if swiftkv else None,
        own_kv=config.keeps_own,
        two_caches=config.has_two_caches,
    )


def model_shapes(
    config: Config, dtype: Any, quantization: Scheme | None = None, mesh: Mesh | None = None
) -> tuple[Any, Any]:
    """The `ShapeDtypeStruct` of every weight of a whole model, (teacher, delta), with arguments as
    those of `weight_shapes`."""
    llama = quantized_shapes(llama_shapes(config, dtype), quantization)
    delta = quantized_shapes(swiftkv_shapes(config, dtype), quantization)
    if mesh is None:
        return llama, delta
    return (
        jax.tree.map(_placed, llama, llama_shardings(config, mesh, quantization)),
        jax.tree.map(_placed, delta, swiftkv_shardings(config, mesh, quantization)),
    )


def num_bytes(weights: Any) -> int:
    """Bytes of `Weights` or a part of them, arrays or shapes, on all devices together."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))


def shard_model(model: Model, mesh: Mesh) -> Model:
    """The model with its weights on `mesh`. Weights that are already there are not moved."""
    scheme = scheme_of(model.llama)
    shardings = llama_shardings(model.config, mesh, scheme)
    if model.llama.upper_qkv is None:
        shardings = dataclasses.replace(shardings, upper_qkv=None)
    elif model.llama.upper_qkv.q is None:
        shardings = dataclasses.replace(shardings, upper_qkv=_kv(shardings.upper_qkv))
    llama = jax.device_put(model.llama, shardings)
    delta = model.swiftkv
    if delta is not None:
        delta = jax.device_put(delta, swiftkv_shardings(model.config, mesh, scheme))
    return dataclasses.replace(model, llama=llama, swiftkv=delta)


# The form ----------------------------------------------------------------------


class _Leaves(Protocol):
    """Operations on what the form is made of: arrays, or their shapes with the places of each."""

    def unstack(self, leaf: Any) -> Any: ...
    def stack(self, *leaves: Any) -> Any: ...
    def slice(self, leaf: Any, part: slice) -> Any: ...
    def merge_inputs(self, leaf: Any) -> Any: ...
    def swap_inputs(self, leaf: Any) -> Any: ...


def _weights(
    leaves: _Leaves, llama: Llama, delta: SwiftKV | None, *, own_kv: bool, two_caches: bool
) -> Weights:
    lower = _blocks(leaves, llama.lower)
    upper = _blocks(leaves, llama.upper)
    lower_qkv = unstack(llama.lower_qkv, leaves.unstack)
    whole = functools.partial(
        Weights, embed=llama.embed, final_norm=llama.final_norm, lm_head=llama.lm_head
    )
    if delta is None:
        lower_qkv += unstack(llama.upper_qkv, leaves.unstack)
        return whole(lower=lower + upper, lower_qkv=lower_qkv)
    upper_kv: tuple[QKV, ...] = ()
    if own_kv or two_caches:
        upper_kv = unstack(llama.upper_qkv if two_caches else _kv(llama.upper_qkv), leaves.unstack)
    prompt_kv, projected = _prompt_and_projected(leaves, delta)
    return whole(
        lower=lower,
        lower_qkv=lower_qkv,
        norm_swiftkv=delta.norm,
        kv=_joined(leaves, projected.k, projected.v),
        kv_bias=_joined(leaves, projected.k_bias, projected.v_bias),
        k_norm_swiftkv=projected.k_norm,
        upper=upper,
        upper_q=unstack(delta_queries(delta), leaves.unstack),
        upper_kv=upper_kv,
        upper_mix=unstack(delta.mix, leaves.unstack),
        prompt_kv=prompt_kv,
        prompt_mlp=unstack(delta.prompt_mlp, leaves.unstack),
        k_tap=delta.k_tap,
    )


def _blocks(leaves: _Leaves, stack: Block) -> tuple[ServingBlock, ...]:
    """The layers of a stack.

    A TPU tiles the last two axes: to read D N H as a matrix it would copy each layer's `o` in every
    decode step, and so it would matrices of experts with axes E out in. Gate and up joined are one
    product instead of two.
    """
    blocks: list[Any] = list(unstack(stack, leaves.unstack))
    for i, block in enumerate(blocks):  # one by one: a layer's separate matrices are then freed
        blocks[i] = ServingBlock(
            attn_norm=block.attn_norm,
            o=_values(leaves.merge_inputs, block.o),
            mlp_norm=block.mlp_norm,
            gate_up=_joined(leaves, block.gate, block.up),
            down=block.down,
            o_bias=block.o_bias,
            attn_post=block.attn_post,
            mlp_post=block.mlp_post,
            router=block.router,
            expert_gate=_values(leaves.swap_inputs, block.expert_gate),
            expert_up=_values(leaves.swap_inputs, block.expert_up),
            expert_down=_values(leaves.swap_inputs, block.expert_down),
        )
    return tuple(blocks)


def _values(change: Any, weight: Any) -> Any:
    """A changed matrix, plain or quantised, whose scales stay; None stays None."""
    if isinstance(weight, Quantized):
        return dataclasses.replace(weight, values=change(weight.values))
    return None if weight is None else change(weight)


def _joined(leaves: _Leaves, *parts: Any) -> Any:
    """Matrices of one shape, plain or quantised, as one with a leading axis."""
    return jax.tree.map(leaves.stack, *parts)


def _kv(qkv: Any) -> Any:
    """A `QKV` without its queries."""
    return dataclasses.replace(qkv, q=None, q_bias=None, q_norm=None)


def _prompt_and_projected(leaves: _Leaves, delta: SwiftKV) -> tuple[tuple[QKV, ...], QKV]:
    """The delta's keys and values, without queries: one by one those of
    `Config.prompt_attention_layers`, and the stack of those that are projected."""
    every = _kv(prompt_projections(delta))
    if delta.mlp_map is None:
        return (), every
    count = delta.mlp_map.shape[0]
    first, rest = (
        jax.tree.map(lambda leaf, part=part: leaves.slice(leaf, part), every)
        for part in (slice(count), slice(count, None))
    )
    return unstack(first, leaves.unstack), rest


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """Arrays. Each stays on the devices it is split over: `tuple(array)` would take it through the
    host to the first one."""

    donate: bool
    """Delete each array of a stack once it is apart: there is one more copy of one of them."""

    def unstack(self, leaf):
        parts = jnp.unstack(leaf)
        if self.donate:
            leaf.delete()
        return parts

    def stack(self, *leaves):
        return jnp.stack(leaves)

    def slice(self, leaf, part: slice):
        return leaf[part]

    def merge_inputs(self, leaf):
        return as_matrix(leaf)

    def swap_inputs(self, leaf):
        return leaf.swapaxes(1, 2)


class _Shapes:
    """`ShapeDtypeStruct` with the shardings that the arrays have."""

    def unstack(self, leaf):
        count, *shape = leaf.shape
        return (_moved(leaf, shape, slice(1, None)),) * count

    def stack(self, *leaves):
        first = leaves[0]
        made = _moved(first, (len(leaves), *first.shape), slice(0))
        if first.sharding is None:
            return made
        sharding = NamedSharding(first.sharding.mesh, P(None, *first.sharding.spec))
        return _placed(made, sharding)

    def slice(self, leaf, part: slice):
        count = len(range(leaf.shape[0])[part])
        return _moved(leaf, (count, *leaf.shape[1:]), slice(None))

    def merge_inputs(self, leaf):
        return _moved(leaf, (leaf.shape[0], math.prod(leaf.shape[1:])), slice(2))

    def swap_inputs(self, leaf):
        """Swap the last two axes. Only the experts are split."""
        first, second, third = leaf.shape
        return _moved(leaf, (first, third, second), slice(1))


def _moved(leaf: jax.ShapeDtypeStruct, shape: Any, axes: slice) -> jax.ShapeDtypeStruct:
    """The same in another shape, split as some of its `axes` are."""
    moved = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
    sharding = leaf.sharding
    if sharding is None:
        return moved
    assert isinstance(sharding, NamedSharding)
    return _placed(moved, NamedSharding(sharding.mesh, P(*sharding.spec[axes])))


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
