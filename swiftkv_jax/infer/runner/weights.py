"""The weights in serving form: one tuple entry per layer, and only what serving reads."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

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
from ...model.quantization import (
    Quantized,
    Scheme,
    as_matrix,
    quantized_shapes,
    scheme_of,
)
from ...model.sharding import llama_shardings, swiftkv_shardings
from ...model.stacks import unstack
from .kv_heads import with_kv_head_copies
from .shapes import kv_programs, serves_two_caches


@struct.dataclass
class Weights:
    """Weights of a student, or of a teacher, which is served as a model without upper layers.
    Matrices may be `Quantized`."""

    embed: Leaf  # V D
    lower: tuple[ServingBlock, ...]
    lower_qkv: tuple[QKV, ...]
    norm_swiftkv: Leaf  # D; this and the next two are None in a teacher
    kv: Leaf  # 2 P K H D; all projected keys and values are one product
    kv_bias: Leaf  # 2 P K H, with `qkv_bias` only
    k_norm_swiftkv: Leaf  # P Kq, with `qk_norm` only
    upper: tuple[ServingBlock, ...]  # empty in a teacher
    upper_q: tuple[QKV, ...]  # the student's queries, without k and v
    final_norm: Leaf  # D
    lm_head: Leaf  # V D; None when tied to `embed`
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
    heads are in the order of its cache's (`mix.fold_mix`), and on a `mesh` there are copies of
    key/value heads where it has more devices (`kv_heads`). `generated_kv` and `exact_tail` replace
    those of `config` unless they are None. Raises `UsageError` if the student cannot have them."""
    if not swiftkv:
        return with_kv_head_copies(config.cut(config.num_layers), mesh)
    config = choose_generated_kv(config, generated_kv, exact_tail)
    heads = None  # mixes are folded into output projections, unless layers attend to two caches
    two_caches = serves_two_caches(config, kv_programs(config))
    if two_caches and config.shared_kv_heads is not None:
        heads = (tuple(range(config.num_kv_heads)),) * config.num_upper_layers
    config = dataclasses.replace(config, shared_kv_heads=heads)
    return with_kv_head_copies(config, mesh)


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
    lower, upper = _blocks(llama.lower, donate), _blocks(llama.upper, donate)
    lower_qkv = unstack(llama.lower_qkv, donate=donate)
    if delta is None:
        if upper and llama.upper_qkv is not None:
            lower_qkv += unstack(llama.upper_qkv, donate=donate)
        return _teacher(llama, lower + upper, lower_qkv)
    upper_kv: tuple[QKV, ...] = ()
    if two_caches:
        upper_kv = unstack(require_teacher(llama, "keep tokens' own"), donate=donate)
    elif own_kv:
        upper_kv = unstack(_kv(require_upper_kv(llama, "keep tokens' own")), donate=donate)
    prompt, projected = _prompt_and_projected(delta)
    weights = Weights(
        embed=llama.embed,
        lower=lower,
        lower_qkv=lower_qkv,
        norm_swiftkv=delta.norm,
        kv=_joined(projected.k, projected.v),
        kv_bias=None
        if projected.k_bias is None
        else jnp.stack([projected.k_bias, projected.v_bias]),
        k_norm_swiftkv=projected.k_norm,
        upper=upper,
        upper_q=unstack(delta_queries(delta), donate=donate),
        final_norm=llama.final_norm,
        lm_head=llama.lm_head,
        upper_kv=upper_kv,
        upper_mix=() if delta.mix is None else unstack(delta.mix, donate=donate),
        prompt_kv=prompt,
        prompt_mlp=() if delta.prompt_mlp is None else unstack(delta.prompt_mlp, donate=donate),
        k_tap=delta.k_tap,
    )
    if donate:
        for leaf in jax.tree.leaves((delta.k, delta.v, llama.upper_qkv)):
            if not leaf.is_deleted():
                leaf.delete()
    return weights


def _kv(qkv):
    """A `QKV` without its queries."""
    return dataclasses.replace(qkv, q=None, q_bias=None, q_norm=None)


def _prompt_and_projected(delta: SwiftKV) -> tuple[tuple[QKV, ...], QKV]:
    """The delta's keys and values, without queries: one by one those of
    `Config.prompt_attention_layers`, and the stack of those that are projected."""
    every = _kv(prompt_projections(delta))
    if delta.mlp_map is None:
        return (), every
    count = delta.mlp_map.shape[0]
    first, rest = (
        jax.tree.map(lambda leaf, part=part: leaf[part], every)
        for part in (slice(count), slice(count, None))
    )
    return unstack(first), rest


def _teacher(llama: Llama, layers: tuple[ServingBlock, ...], qkv: tuple[QKV, ...]) -> Weights:
    return Weights(
        embed=llama.embed,
        lower=layers,
        lower_qkv=qkv,
        norm_swiftkv=None,
        kv=None,
        kv_bias=None,
        k_norm_swiftkv=None,
        upper=(),
        upper_q=(),
        final_norm=llama.final_norm,
        lm_head=llama.lm_head,
    )


def _blocks(stack: Block, donate: bool) -> tuple[ServingBlock, ...]:
    """The layers of a stack.

    A TPU tiles the last two axes: to read D N H as a matrix it would copy each layer's `o` in every
    decode step. Gate and up joined are one product instead of two.
    """
    blocks: list[Any] = list(unstack(stack, donate=donate))
    for i, block in enumerate(blocks):  # one by one: a layer's separate matrices are then freed
        experts = (_inputs_first(part) for part in _experts(block))
        gate_up = _joined(block.gate, block.up)
        blocks[i] = _serving_block(block, as_matrix(block.o), gate_up, *experts)
    return tuple(blocks)


def _experts(block: Block) -> tuple[Any, Any, Any]:
    return block.expert_gate, block.expert_up, block.expert_down


def _inputs_first(weight: Any) -> Any:
    """Matrices of experts (plain, quantised or None) with axes E in out: a TPU would copy matrices
    with axes E out in, in every step."""
    if isinstance(weight, Quantized):
        return dataclasses.replace(weight, values=_inputs_first(weight.values))
    return None if weight is None else weight.swapaxes(1, 2)


def _serving_block(
    block: Block, o: Any, gate_up: Any, expert_gate: Any, expert_up: Any, expert_down: Any
) -> ServingBlock:
    return ServingBlock(
        attn_norm=block.attn_norm,
        o=o,
        mlp_norm=block.mlp_norm,
        gate_up=gate_up,
        down=block.down,
        o_bias=block.o_bias,
        attn_post=block.attn_post,
        mlp_post=block.mlp_post,
        router=block.router,
        expert_gate=expert_gate,
        expert_up=expert_up,
        expert_down=expert_down,
    )


def _joined(*parts):
    """Matrices of one shape, plain or quantised, as one with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def weight_shapes(
    config: Config, swiftkv: bool, dtype, quantization: Scheme | None = None
) -> Weights:
    """The `ShapeDtypeStruct` of every served weight, for compiling without a checkpoint. `dtype` is
    that of the weights that are not quantised."""
    if not config.has_two_caches:
        config = dataclasses.replace(config, shared_kv_heads=None)
    llama = quantized_shapes(llama_shapes(config, dtype), quantization)
    delta = quantized_shapes(swiftkv_shapes(config, dtype), quantization) if swiftkv else None
    own_kv = config.keeps_own
    make = functools.partial(serving_weights, own_kv=own_kv, two_caches=config.has_two_caches)
    return jax.eval_shape(make, llama, delta)


def num_bytes(weights: Any) -> int:
    """Bytes of `Weights` or a part of them, arrays or shapes, on all devices together."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))


def weight_shardings(
    config: Config, swiftkv: bool, mesh: Mesh, quantization: Scheme | None = None
) -> Weights:
    """Shardings of the `serving_weights` of a model loaded on `mesh`."""
    llama, delta = (
        llama_shardings(config, mesh, quantization),
        swiftkv_shardings(config, mesh, quantization),
    )

    def joined(tree) -> Any:
        """Shardings of `_joined` leaves."""
        return jax.tree.map(lambda sharding: NamedSharding(mesh, P(None, *sharding.spec)), tree)

    def swapped(tree) -> Any:
        """Shardings of `_inputs_first` leaves, of which only the experts are split."""
        return jax.tree.map(lambda sharding: NamedSharding(mesh, P(*sharding.spec[:1])), tree)

    def blocks(stacked: Block, count: int) -> tuple[ServingBlock, ...]:
        return tuple(
            _serving_block(block, block.o, joined(block.gate), *map(swapped, _experts(block)))
            for block in layers(stacked, count)
        )

    def layers(stacked, count: int) -> tuple:
        """Shardings of the layers of one stack: without the leading axis."""
        return (
            jax.tree.map(lambda sharding: NamedSharding(mesh, P(*sharding.spec[1:])), stacked),
        ) * count

    lower, upper = (
        blocks(llama.lower, config.num_lower_layers),
        blocks(llama.upper, config.num_upper_layers),
    )
    lower_qkv = layers(llama.lower_qkv, config.num_lower_layers)
    if not swiftkv:
        lower_qkv += layers(llama.upper_qkv, config.num_upper_layers)
        return _teacher(llama, lower + upper, lower_qkv)
    return Weights(
        embed=llama.embed,
        lower=lower,
        lower_qkv=lower_qkv,
        norm_swiftkv=delta.norm,
        kv=joined(delta.k),
        kv_bias=joined(delta.k_bias),
        k_norm_swiftkv=delta.k_norm,
        upper=upper,
        upper_q=layers(delta_queries(delta), config.num_upper_layers),
        final_norm=llama.final_norm,
        lm_head=llama.lm_head,
        upper_kv=layers(
            llama.upper_qkv if config.has_two_caches else _kv(llama.upper_qkv),
            config.num_upper_layers,
        )
        if config.keeps_own
        else (),
        upper_mix=layers(delta.mix, config.num_upper_layers) if delta.mix is not None else (),
        prompt_kv=layers(_kv(prompt_projections(delta)), config.prompt_attention_layers),
        prompt_mlp=layers(delta.prompt_mlp, config.prompt_attention_layers),
        k_tap=delta.k_tap,
    )


def shard_model(model: Model, mesh: Mesh) -> Model:
    """The model with its weights on `mesh`. Weights that are already there are not moved."""
    scheme = scheme_of(model.llama)
    shardings = llama_shardings(model.config, mesh, scheme)
    if model.llama.upper_qkv is None:
        shardings = dataclasses.replace(shardings, upper_qkv=None)
    elif model.llama.upper_qkv.q is None:
        shardings = dataclasses.replace(shardings, upper_qkv=_kv(shardings.upper_qkv))
    llama = jax.device_put(model.llama, shardings)
    delta = (
        None
        if model.swiftkv is None
        else jax.device_put(model.swiftkv, swiftkv_shardings(model.config, mesh, scheme))
    )
    return dataclasses.replace(model, llama=llama, swiftkv=delta)
