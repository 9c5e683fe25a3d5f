"""The weights in serving form: one tuple entry per layer, and only what serving reads.

model -> heads in the order of the cache's (`mix`) -> copies of heads (`kv_heads`)
      -> `serving_weights`
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...model.boundary import prompt_projections
from ...model.config import Config, GeneratedKV
from ...model.cut import choose_generated_kv
from ...model.decoder_layers import delta_queries, with_queries
from ...model.low_rank import LayerAdapters
from ...model.model import Model
from ...model.params import (
    QKV,
    Block,
    Leaf,
    Llama,
    PromptMLP,
    ServingBlock,
    ServingQKV,
    SwiftKV,
    llama_shapes,
    require_teacher,
    require_upper_kv,
    swiftkv_shapes,
)
from ...model.quantization import Quantized, Scheme, as_matrix, quantized_shapes, scheme_of
from ...model.sharding import llama_shardings, swiftkv_shardings
from ...model.speculator import Speculator
from ...model.stacks import unstack
from .kv_heads import copy_kv_heads, with_kv_head_copies
from .mix import fold_mix, order_heads


@struct.dataclass
class Weights:
    """Weights of a student, or of a teacher, which is served as a model without upper layers.
    Matrices may be `Quantized`."""

    embed: Leaf  # V D
    lower: tuple[ServingBlock, ...]
    lower_qkv: tuple[ServingQKV, ...]
    """The queries of a teacher's last layer are apart: prefill needs only its keys and values."""
    final_norm: Leaf  # D
    lm_head: Leaf  # V D; None when tied to `embed`
    norm_swiftkv: Leaf = None  # D; this and the next are None in a teacher
    kv: Leaf = None  # 2 P K H D; all projected keys and values are one product
    kv_bias: Leaf = None  # 2 P K H, with `qkv_bias` only
    k_norm_swiftkv: Leaf = None  # P Kq, with `qk_norm` only
    upper: tuple[ServingBlock, ...] = ()  # empty in a teacher
    upper_q: tuple[QKV, ...] = ()
    """The student's queries, without k and v, of tokens that attend to keys and values from the
    boundary; empty if all keep their own alone."""
    upper_qkv: tuple[ServingQKV, ...] = ()
    """Projections of tokens that keep their own: the teacher's, with the student's queries unless
    layers attend to two caches. With an exact head alone `upper_q` has the queries too."""
    upper_mix: tuple[Leaf, ...] = ()  # K H H, where layers attend to two caches and mix values
    prompt_qkv: tuple[ServingQKV, ...] = ()
    """Projections of `Config.prompt_attention_layers`; no queries where `upper_q` has them. A
    decode step multiplies those alone, so joined here they would be in memory twice. XLA for GPUs
    joins them in each chunk: for Llama-3.1-8B a copy of 50 MB, 34 microseconds a layer."""
    prompt_mlp: tuple[PromptMLP, ...] = ()  # of the same layers
    k_tap: Leaf = None  # P K H D, with `Config.boundary_taps` only
    adapters: tuple[LayerAdapters, ...] = ()  # of all layers, with `enable_lora` only
    speculator: Speculator | None = None


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
    return with_kv_head_copies(dataclasses.replace(config, shared_kv_heads=heads), mesh)


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
    return serving_weights(llama, delta, served, donate=donate)


def serving_weights(
    llama: Llama, delta: SwiftKV | None, served: Config, *, donate: bool = False
) -> Weights:
    """The weights of a student (with `delta`) or a teacher (without), in the architecture `served`.
    Copies the layers and shares embedding and head.

    With `donate` the stacks are deleted one after the other, so that memory holds the model once.
    Raises `ValueError` for a model whose upper projections were dropped and are needed: by a
    teacher, and by tokens that keep their own keys and values.
    """
    if delta is None:
        require_teacher(llama, "run it as a plain Llama")
    elif served.has_two_caches:
        require_teacher(llama, "keep tokens' own")
    elif served.keeps_own:
        require_upper_kv(llama, "keep tokens' own")
    weights = _weights(functools.partial(_unstack, donate=donate), llama, delta, served)
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
    return _weights(_unstack, llama, delta if swiftkv else None, config)


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


_Unstack = Callable[[Any], tuple[Any, ...]]
"""Takes an array of a stack, or its shape, apart into those of the layers."""


def _weights(apart: _Unstack, llama: Llama, delta: SwiftKV | None, served: Config) -> Weights:
    lower = _blocks(apart, llama.lower)
    upper = _blocks(apart, llama.upper)
    whole = functools.partial(
        Weights, embed=llama.embed, final_norm=llama.final_norm, lm_head=llama.lm_head
    )
    if delta is None:
        qkv = _qkv(apart, llama.lower_qkv, last_apart=not upper)
        qkv += _qkv(apart, llama.upper_qkv, last_apart=True)
        return whole(lower=lower + upper, lower_qkv=qkv)
    queries = unstack(delta_queries(delta), apart)
    own: tuple[ServingQKV, ...] = ()
    if served.has_two_caches:
        own = _qkv(apart, llama.upper_qkv)
    elif served.keeps_own:
        own = _qkv(apart, _kv(llama.upper_qkv), queries)
    prompt_kv, projected = _prompt_and_projected(delta)
    attends_to_boundary = served.generated_kv == "boundary" or served.has_two_caches
    return whole(
        lower=lower,
        lower_qkv=_qkv(apart, llama.lower_qkv),
        norm_swiftkv=delta.norm,
        kv=_joined(projected.k, projected.v),
        kv_bias=_joined(projected.k_bias, projected.v_bias),
        k_norm_swiftkv=projected.k_norm,
        upper=upper,
        upper_q=queries if attends_to_boundary else (),
        upper_qkv=own,
        upper_mix=unstack(delta.mix, apart),
        prompt_qkv=_qkv(apart, prompt_kv, () if attends_to_boundary else queries),
        prompt_mlp=unstack(delta.prompt_mlp, apart),
        k_tap=delta.k_tap,
    )


def _blocks(apart: _Unstack, stack: Block) -> tuple[ServingBlock, ...]:
    """The layers of a stack.

    A TPU tiles the last two axes: to read D N H as a matrix it would copy each layer's `o` in every
    decode step, and so it would matrices of experts with axes E out in. Gate and up joined are one
    product instead of two.
    """
    blocks: list[Any] = list(unstack(stack, apart))
    for i, block in enumerate(blocks):  # one by one: a layer's separate matrices are then freed
        blocks[i] = ServingBlock(
            attn_norm=block.attn_norm,
            o=_values(_merge_inputs, block.o),
            mlp_norm=block.mlp_norm,
            gate_up=_joined(block.gate, block.up),
            down=block.down,
            o_bias=block.o_bias,
            attn_post=block.attn_post,
            mlp_post=block.mlp_post,
            router=block.router,
            expert_gate=_values(_swap_inputs, block.expert_gate),
            expert_up=_values(_swap_inputs, block.expert_up),
            expert_down=_values(_swap_inputs, block.expert_down),
        )
    return tuple(blocks)


def _values(change: Any, weight: Any) -> Any:
    """A changed matrix, plain or quantised, whose scales stay; None stays None."""
    if isinstance(weight, Quantized):
        return dataclasses.replace(weight, values=change(weight.values))
    return jax.tree.map(change, weight)


def _joined(*parts: Any) -> Any:
    """Matrices of one shape, plain or quantised, as one with a leading axis."""
    return jax.tree.map(_stack, *parts)


def _qkv(
    apart: _Unstack, stack: QKV | None, queries: Sequence[QKV] = (), *, last_apart: bool = False
):
    """The projections of a stack's layers, joined, as a GPU's compiler would in every call. A stack
    without queries gets `queries`, from the same first layer on."""
    joined: list[Any] = list(unstack(stack, apart))
    for i, layer in enumerate(joined):  # one by one, as in `_blocks`
        qkv = with_queries(layer, queries[i]) if queries else layer
        queries_apart = last_apart and i == len(joined) - 1
        q, q_bias = (None, None) if queries_apart else (qkv.q, qkv.q_bias)
        joined[i] = ServingQKV(
            heads=_joined_heads(q, qkv.k, qkv.v),
            bias=_joined_heads(q_bias, qkv.k_bias, qkv.v_bias),
            q=qkv.q if queries_apart else None,
            q_bias=qkv.q_bias if queries_apart else None,
            q_norm=qkv.q_norm,
            k_norm=qkv.k_norm,
        )
    return tuple(joined)


def _joined_heads(q: Any, *kv: Any) -> Any:
    return jax.tree.map(_join_heads, *kv, *([] if q is None else [q]))


def _kv(qkv: Any) -> Any:
    """A `QKV` without its queries."""
    return dataclasses.replace(qkv, q=None, q_bias=None, q_norm=None)


def _prompt_and_projected(delta: SwiftKV) -> tuple[QKV | None, QKV]:
    """The delta's keys and values, without queries, in two stacks: those of
    `Config.prompt_attention_layers`, and those that are projected."""
    every = _kv(prompt_projections(delta))
    if delta.mlp_map is None:
        return None, every
    count = delta.mlp_map.shape[0]
    first, rest = (
        jax.tree.map(functools.partial(_slice, part), every)
        for part in (slice(count), slice(count, None))
    )
    return first, rest


# Arrays, or their shapes with the places of each ---------------------------------


def _unstack(leaf: Any, *, donate: bool = False) -> tuple[Any, ...]:
    """Each array of a stack on the devices it is split over: `tuple(array)` would take it through
    the host to the first one. With `donate` the stack is deleted once it is apart: there is one
    more copy of one array."""
    parts = _made(jnp.unstack, lambda axes: axes[1:], leaf)
    if donate:
        leaf.delete()
    return parts


def _stack(*leaves: Any) -> Any:
    return _made(lambda *leaves: jnp.stack(leaves), lambda axes: (None, *axes), *leaves)


def _slice(part: slice, leaf: Any) -> Any:
    return _made(lambda leaf: leaf[part], lambda axes: axes, leaf)


def _merge_inputs(leaf: Any) -> Any:
    return _made(as_matrix, lambda axes: axes[:2], leaf)


def _swap_inputs(leaf: Any) -> Any:
    """Swap the last two axes. Only the experts are split."""
    return _made(lambda leaf: leaf.swapaxes(1, 2), lambda axes: axes[:1], leaf)


def _join_heads(*kv_and_q: Any) -> Any:
    def join(k, v, q=None):
        queries = [] if q is None else [q.reshape(len(k), -1, *q.shape[1:])]
        return jnp.concatenate([*queries, k[:, None], v[:, None]], axis=1)

    return _made(join, lambda axes: (*axes[:1], None, *axes[1:]), *kv_and_q)


def _made(change: Callable[..., Any], split: Callable[[tuple], tuple], *leaves: Any) -> Any:
    """The result of `change` for arrays; for shapes the shapes of it, split over the mesh axes that
    `split` makes of those of the first."""
    first = leaves[0]
    if isinstance(first, jax.Array):
        return change(*leaves)
    made = jax.eval_shape(change, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))
    if first.sharding is None:
        return made
    place = NamedSharding(first.sharding.mesh, P(*split(tuple(first.sharding.spec))))
    return jax.tree.map(lambda leaf: _placed(leaf, place), made)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
