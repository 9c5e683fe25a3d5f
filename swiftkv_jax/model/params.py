"""The parameters: one table that shapes, initial values, shardings, quantisation and names read.

Letters: V vocabulary, D model width, F MLP width, N query heads, K key/value heads, H head dim, L
lower layers, U upper layers, J key/value groups of the upper layers (`Config.kv_groups`): M of
layers of which prompts run the attention, P projected from the boundary state.
E experts of an MLP, each F wide, or S neurons of one that run beside a map. Nq and Kq are the
scales of the norms of queries and keys: H, or N H and K H.

Matrices keep the checkpoints' orientation (output features first), so import and export only split
or merge the head axis. The same dataclasses hold arrays, `ShapeDtypeStruct`s, `PartitionSpec`s,
shardings and gradients.

The delta is a set of *replacement projections*, not a difference: where the student runs, the
delta's q, k, v stand in the place of the teacher's, and nothing is added to the frozen weights.

What a family of models lacks is None: a layer without a norm has None in its place, and computes
nothing there.

How to add a parameter, as the query norm was:

1.  a field of the class that it belongs to, here of `QKV`, with its row of the table:
        q_norm: Annotated[Leaf, norm_scale("? Nq", "self_attn.q_norm.weight", when=...)] = None
    Shapes, initial values, shardings, quantisation and names in checkpoints follow from it;
2.  its use in `transformer` (`project_q`, which `self_layer` and `cross_layer` share);
3.  if the student trains its own, the same field of `SwiftKV`, and in `init_swiftkv` what it starts
    from.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import struct

from .config import Config
from .param_rows import (
    Param,
    bias,
    dense,
    expert,
    head_norm,
    matrix,
    mixture,
    norm_after,
    norm_before,
    norm_scale,
    prompt_neuron,
    tap,
    untied,
    value_mix,
)

# A leaf is whatever the tree holds at the moment: an array, its abstract value, its sharding, its
# gradient. After `unstack` a stacked leaf has become one tuple entry per layer.
Leaf = Any


def _summary(self: Any) -> str:
    """`Llama(15 arrays, 2,354,944 entries)`: the `repr` of a tree, from shapes alone."""
    sizes = [getattr(leaf, "size", 0) for leaf in jax.tree.leaves(self)]
    return f"{type(self).__name__}({len(sizes)} arrays, {sum(sizes):,} entries)"


@struct.dataclass
class Block:
    """The parameters of a layer other than its query, key and value projections. `?` is L or U."""

    attn_norm: Annotated[Leaf, norm_scale("? D", "input_layernorm.weight", when=norm_before)]
    o: Annotated[Leaf, matrix("? D N H", "self_attn.o_proj.weight", split="N", in_axes=2)]
    mlp_norm: Annotated[
        Leaf, norm_scale("? D", "post_attention_layernorm.weight", when=norm_before)
    ]
    gate: Annotated[Leaf, matrix("? F D", "mlp.gate_proj.weight", split="F", when=dense)]
    up: Annotated[Leaf, matrix("? F D", "mlp.up_proj.weight", split="F", when=dense)]
    down: Annotated[Leaf, matrix("? D F", "mlp.down_proj.weight", split="F", when=dense)]
    o_bias: Annotated[
        Leaf,
        Param("? D", "self_attn.o_proj.bias", init="zeros", when=lambda config: config.o_bias),
    ] = None
    attn_post: Annotated[
        Leaf, norm_scale("? D", "post_attention_layernorm.weight", when=norm_after)
    ] = None
    """Norm of what attention adds to the residual; `mlp_post` of what the MLP adds."""
    mlp_post: Annotated[
        Leaf, norm_scale("? D", "post_feedforward_layernorm.weight", when=norm_after)
    ] = None
    router: Annotated[Leaf, Param("? E D", "mlp.gate.weight", when=mixture)] = None
    expert_gate: Annotated[Leaf, expert("? E F D", "gate_proj")] = None
    expert_up: Annotated[Leaf, expert("? E F D", "up_proj")] = None
    expert_down: Annotated[Leaf, expert("? E D F", "down_proj")] = None


@struct.dataclass
class ServingBlock:
    """The `Block` of one layer as serving holds it: `o` is a matrix, gate and up are one array, and
    experts have their inputs first."""

    attn_norm: Leaf  # D
    o: Leaf  # D M; M = N H
    mlp_norm: Leaf  # D
    gate_up: Leaf  # 2 F D
    down: Leaf  # D F
    o_bias: Leaf = None  # D
    attn_post: Leaf = None  # D
    mlp_post: Leaf = None  # D
    router: Leaf = None  # E D
    expert_gate: Leaf = None  # E D F
    expert_up: Leaf = None  # E D F
    expert_down: Leaf = None  # E F D


@struct.dataclass
class ServingQKV:
    """The `QKV` of one layer as serving holds it: one matrix, of each key/value head its G = N / K
    queries, its key and its value; or without the queries, which `q` has then, or gets from others
    before use."""

    heads: Leaf  # K G+2 H D
    bias: Leaf = None  # K G+2 H
    q: Leaf = None  # N H D
    q_bias: Leaf = None  # N H
    q_norm: Leaf = None  # Nq
    k_norm: Leaf = None  # Kq


@struct.dataclass
class PromptMLP:
    """Stand-in for the MLP of a prompt attention layer, or for those of a stack: a map, and with
    `Config.prompt_mlp_neurons` some neurons."""

    map: Leaf  # D D
    gate: Leaf = None  # S D
    up: Leaf = None  # S D
    down: Leaf = None  # D S


@struct.dataclass
class QKV:
    """Query, key and value projections of a layer. `?` is L or U."""

    q: Annotated[Leaf, matrix("? N H D", "self_attn.q_proj.weight", split="N")]
    k: Annotated[Leaf, matrix("? K H D", "self_attn.k_proj.weight", split="K")]
    v: Annotated[Leaf, matrix("? K H D", "self_attn.v_proj.weight", split="K")]
    q_bias: Annotated[Leaf, bias("? N H", "self_attn.q_proj.bias", split="N")] = None
    k_bias: Annotated[Leaf, bias("? K H", "self_attn.k_proj.bias", split="K")] = None
    v_bias: Annotated[Leaf, bias("? K H", "self_attn.v_proj.bias", split="K")] = None
    q_norm: Annotated[Leaf, head_norm("? Nq", "self_attn.q_norm.weight")] = None
    k_norm: Annotated[Leaf, head_norm("? Kq", "self_attn.k_norm.weight")] = None


@struct.dataclass
class Llama:
    """The frozen weights, shared by teacher and student.

    `upper_qkv` is the teacher's, and None where it was dropped to serve a student; one whose tokens
    keep their own keys and values needs its k and v (`Config.generated_kv`), and its q may be None.
    `lm_head` is None when tied to `embed`.
    """

    embed: Annotated[Leaf, Param("V D", "model.embed_tokens.weight", split="V")]
    lower: Block  # L
    lower_qkv: QKV  # L
    upper: Block  # U
    upper_qkv: QKV | None  # U
    final_norm: Annotated[Leaf, norm_scale("D", "model.norm.weight")]
    lm_head: Annotated[Leaf, Param("V D", "lm_head.weight", split="V", when=untied)] = None

    __repr__ = _summary


@struct.dataclass
class SwiftKV:
    """The delta: all that distillation trains, saves and optimises."""

    norm: Annotated[Leaf, norm_scale("D", "model.norm_swiftkv.weight", when=norm_before)]
    q: Annotated[Leaf, matrix("U N H D", "self_attn.q_proj_swiftkv.weight", split="N")]
    k: Annotated[Leaf, matrix("J K H D", "self_attn.k_proj_swiftkv.weight", split="K")]
    v: Annotated[Leaf, matrix("J K H D", "self_attn.v_proj_swiftkv.weight", split="K")]
    q_bias: Annotated[Leaf, bias("U N H", "self_attn.q_proj_swiftkv.bias", split="N")] = None
    k_bias: Annotated[Leaf, bias("J K H", "self_attn.k_proj_swiftkv.bias", split="K")] = None
    v_bias: Annotated[Leaf, bias("J K H", "self_attn.v_proj_swiftkv.bias", split="K")] = None
    q_norm: Annotated[Leaf, head_norm("U Nq", "self_attn.q_norm_swiftkv.weight")] = None
    k_norm: Annotated[Leaf, head_norm("J Kq", "self_attn.k_norm_swiftkv.weight")] = None
    mix: Annotated[Leaf, value_mix("U K H H", "self_attn.mix_swiftkv.weight")] = None
    """A layer's values are `mix` times those of its group, per key/value head: exact wherever it is
    applied, so it is applied to what attention returns."""
    k_tap: Annotated[Leaf, tap("P K H D", "self_attn.k_tap_swiftkv.weight")] = None
    mlp_map: Annotated[
        Leaf,
        Param(
            "M D D",
            "mlp.map_swiftkv.weight",
            init="zeros",
            when=lambda config: config.prompt_attention_layers > 0,
        ),
    ] = None
    """Map in place of the MLP of a prompt attention layer: it gives what is added to the residual,
    from the state after the norm before the MLP. The neurons beside it are rows of the MLP's gate
    and up, with output weights that are fitted together with the map."""
    mlp_gate: Annotated[Leaf, prompt_neuron("M S D", "mlp.gate_swiftkv.weight")] = None
    mlp_up: Annotated[Leaf, prompt_neuron("M S D", "mlp.up_swiftkv.weight")] = None
    mlp_down: Annotated[Leaf, prompt_neuron("M D S", "mlp.down_swiftkv.weight", "zeros")] = None

    __repr__ = _summary

    @property
    def prompt_mlp(self) -> PromptMLP | None:
        """Stand-ins for the MLPs of `Config.prompt_attention_layers`, as stacks; None without
        any."""
        if self.mlp_map is None:
            return None
        return PromptMLP(self.mlp_map, self.mlp_gate, self.mlp_up, self.mlp_down)

    def with_prompt_mlp(self, mlp: PromptMLP | None) -> SwiftKV:
        """The same with these stacks in the place of its own."""
        mlp = mlp or PromptMLP(None)
        return dataclasses.replace(
            self, mlp_map=mlp.map, mlp_gate=mlp.gate, mlp_up=mlp.up, mlp_down=mlp.down
        )


def _rows(cls: type, stack: str = "?") -> dict[str, Any]:
    """Field -> row of the table, for every parameter of a class; its `?` is `stack`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    rows = {
        field: typing.get_args(hint)[1]
        for field, hint in hints.items()
        if typing.get_origin(hint) is Annotated
    }
    return {
        field: dataclasses.replace(row, dims=row.dims.replace("?", stack))
        for field, row in rows.items()
    }


LLAMA_PARAMS = Llama(
    lower=Block(**_rows(Block, "L")),
    lower_qkv=QKV(**_rows(QKV, "L")),
    upper=Block(**_rows(Block, "U")),
    upper_qkv=QKV(**_rows(QKV, "U")),
    **_rows(Llama),
)
"""The table of the frozen weights: a `Param` in the place of each leaf."""
SWIFTKV_PARAMS = SwiftKV(**_rows(SwiftKV))
"""The table of the delta."""
BLOCK_PARAMS = Block(**_rows(Block))
QKV_PARAMS = QKV(**_rows(QKV))
"""The tables of one stack of layers, whose first axis is `?`."""
_TABLES: dict[type, Any] = {
    Llama: LLAMA_PARAMS,
    SwiftKV: SWIFTKV_PARAMS,
    Block: BLOCK_PARAMS,
    QKV: QKV_PARAMS,
    PromptMLP: SWIFTKV_PARAMS.prompt_mlp,
}


def map_params[Tree: Llama | SwiftKV | Block | QKV | PromptMLP](
    function: Callable[[Param, Any], Any],
    tree: Tree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Tree:
    """`jax.tree.map` of `function(row of the table, leaf)` over a tree of parameters."""

    def apply(path, leaf):
        row = _TABLES[type(tree)]
        for key in path:
            row = getattr(row, key.name)
        return function(row, leaf)

    return jax.tree_util.tree_map_with_path(apply, tree, is_leaf=is_leaf)


def llama_params(config: Config) -> Llama:
    """The rows of the table that a model of this config has; None in the place of the others."""
    return _rows_of(config, LLAMA_PARAMS)


def swiftkv_params(config: Config) -> SwiftKV:
    """`llama_params` of the delta."""
    return _rows_of(config, SWIFTKV_PARAMS)


def _rows_of[Tree](config: Config, table: Tree) -> Tree:
    return jax.tree.map(lambda row: row if row.when(config) else None, table)


# Shapes -----------------------------------------------------------------------


def llama_shapes(config: Config, dtype=jnp.float32) -> Llama:
    """The `ShapeDtypeStruct` of every weight of the plain Llama, split at
    `num_key_value_layers`."""
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct(row.shape(config), dtype), llama_params(config)
    )


def swiftkv_shapes(config: Config, dtype=jnp.float32) -> SwiftKV:
    """The `ShapeDtypeStruct` of every tensor of the delta."""
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct(row.shape(config), dtype), swiftkv_params(config)
    )


def require_teacher(llama: Llama, purpose: str) -> QKV:
    """The teacher's upper q, k, v. Raises `ValueError` if they were dropped: `purpose`, an
    infinitive, needs them."""
    if llama.upper_qkv is None or llama.upper_qkv.q is None:
        raise ValueError(
            f"the teacher's upper q, k, v were dropped: load the model with them to {purpose}"
        )
    return llama.upper_qkv


def require_upper_kv(llama: Llama, purpose: str) -> QKV:
    """`require_teacher` where only the upper k, v are needed: their q may have been dropped."""
    if llama.upper_qkv is None:
        raise ValueError(
            f"the teacher's upper k, v were dropped: load the model with them to {purpose}"
        )
    return llama.upper_qkv
