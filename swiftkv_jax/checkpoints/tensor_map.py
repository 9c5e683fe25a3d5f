"""Every parameter's name: in our tree, and in a Hugging Face checkpoint. One table, used to read
and to write.

A leaf of our tree stacks the tensors of several layers on its leading axis and keeps heads as an
axis of their own; a checkpoint has one matrix per layer, heads merged into the rows (q, k, v) or
columns (o) of the matrix. A quantised matrix is two leaves, its values and its scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from ..config import Config
from ..params import Llama, SwiftKV, llama_shapes, swiftkv_shapes
from ..quantization import SCALE, VALUES, Format, Scheme, quantized_shapes
from .compressed_tensors import SCALE_SUFFIX

# Field -> name within a layer, and the axis of the layer's array at which (heads, head dim) merge,
# if any.
_LAYER_FIELDS: dict[str, tuple[str, int | None]] = {
    "attn_norm": ("input_layernorm.weight", None),
    "mlp_norm": ("post_attention_layernorm.weight", None),
    "gate": ("mlp.gate_proj.weight", None),
    "up": ("mlp.up_proj.weight", None),
    "down": ("mlp.down_proj.weight", None),
    "o": ("self_attn.o_proj.weight", 1),
    "o_bias": ("self_attn.o_proj.bias", None),
    "q": ("self_attn.q_proj{swiftkv}.weight", 0),
    "k": ("self_attn.k_proj{swiftkv}.weight", 0),
    "v": ("self_attn.v_proj{swiftkv}.weight", 0),
    "q_bias": ("self_attn.q_proj{swiftkv}.bias", 0),
    "k_bias": ("self_attn.k_proj{swiftkv}.bias", 0),
    "v_bias": ("self_attn.v_proj{swiftkv}.bias", 0),
}
_SINGLE = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "swiftkv.norm": "model.norm_swiftkv.weight",
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of our tree and the tensors of a Hugging Face checkpoint that it holds."""

    name: str
    """Path in the tree: `embed`, `lower_qkv.q`, `swiftkv.k`; of a quantised matrix
    `lower_qkv.q.values`, `lower_qkv.q.scale`."""
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    """Checkpoint names along the leading axis; a single one if the leaf is not stacked."""
    stacked: bool
    head_axis: int | None
    """Axis of one layer's array that merges with the next one in the checkpoint."""

    @property
    def is_delta(self) -> bool:
        return self.name.startswith("swiftkv.")

    @property
    def is_teacher_qkv(self) -> bool:
        """Among the upper projections that only the teacher uses."""
        return self.name.startswith("upper_qkv.")

    @property
    def part(self) -> str | None:
        """`values` or `scale` of a quantised matrix; None for an array that is not quantised."""
        last = self.name.rpartition(".")[2]
        return last if last in (VALUES, SCALE) else None

    @property
    def matrix(self) -> str:
        """The name without its part: that of the same array, not quantised."""
        return self.name if self.part is None else self.name.rpartition(".")[0]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor in the checkpoint."""
        shape, axis = self.shape[1:] if self.stacked else self.shape, self.head_axis
        if axis is not None:
            shape = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
        return (*shape, 1) if self.part == SCALE else shape

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def leaves(
    config: Config,
    *,
    teacher_qkv: bool = True,
    delta: bool = True,
    quantization: Format | None = None,
) -> tuple[Leaf, ...]:
    """Every leaf of a model with this cut, in tree order.

    `teacher_qkv` False leaves out the upper layers' own q, k, v; `delta` False leaves out the
    delta, as does a cut without upper layers.
    """
    scheme = quantization and Scheme(quantization)
    shapes: dict[str, Any] = by_name(quantized_shapes(llama_shapes(config), scheme))
    if delta and config.num_upper_layers:
        shapes |= by_name(quantized_shapes(swiftkv_shapes(config), scheme))
    found = (_leaf(config, name, shape.shape) for name, shape in shapes.items())
    return tuple(leaf for leaf in found if teacher_qkv or not leaf.is_teacher_qkv)


def by_name(tree: Llama | SwiftKV) -> dict[str, Any]:
    """The tree's leaves, whatever they are, under their names."""
    prefix = "swiftkv." if isinstance(tree, SwiftKV) else ""
    return {prefix + _name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def to_trees(
    config: Config, values: Mapping[str, Any], scheme: Scheme | None = None
) -> tuple[Llama, SwiftKV | None]:
    """The inverse of `by_name`: frozen weights, and the delta if its leaves are among `values`."""
    shapes = llama_shapes(config)
    if not any(name.startswith("upper_qkv.") for name in values):
        shapes = dataclasses.replace(shapes, upper_qkv=None)
    llama = jax.tree_util.tree_map_with_path(
        lambda path, _: values[_name(path)], quantized_shapes(shapes, scheme)
    )
    if "swiftkv.norm" not in values:
        return llama, None
    shapes = quantized_shapes(swiftkv_shapes(config), scheme)
    delta = jax.tree_util.tree_map_with_path(
        lambda path, _: values["swiftkv." + _name(path)], shapes
    )
    return llama, delta


def repeat_groups(config: Config, leaf: Leaf) -> tuple[tuple[int, str], ...]:
    """(index on the leading axis, tensor name) of every tensor, keys and values of a group once per
    layer of the group."""
    if not (leaf.is_delta and leaf.stacked and leaf.shape[0] == config.num_kv_groups):
        return tuple(enumerate(leaf.tensors))
    field = leaf.name.removeprefix("swiftkv.")
    names = _layer_names(field, range(config.num_lower_layers, config.num_layers), "_swiftkv")
    repeats = len(names) // len(leaf.tensors)
    return tuple((i // repeats, name) for i, name in enumerate(names))


def _leaf(config: Config, name: str, shape: tuple[int, ...]) -> Leaf:
    if name in _SINGLE:
        return Leaf(name, shape, (_SINGLE[name],), stacked=False, head_axis=None)
    stack, field = name.split(".", 1)
    first, stop = (
        (0, config.num_lower_layers)
        if stack.startswith("lower")
        else (config.num_lower_layers, config.num_layers)
    )
    step = config.key_value_group_size if stack == "swiftkv" and field[0] in "kv" else 1
    tensors = _layer_names(
        field, range(first, stop, step), "_swiftkv" if stack == "swiftkv" else ""
    )
    field, _, part = field.partition(".")
    merged = _LAYER_FIELDS[field][1]
    # A scale has the axes of the output channels only: heads among them, or not.
    head_axis = (
        None if merged is None or (part == SCALE and merged + 2 > len(shape) - 1) else merged
    )
    return Leaf(name, shape, tensors, stacked=True, head_axis=head_axis)


def _layer_names(field: str, layers: Iterable[int], swiftkv: str) -> tuple[str, ...]:
    field, _, part = field.partition(".")
    suffix = _LAYER_FIELDS[field][0].format(swiftkv=swiftkv) + (
        SCALE_SUFFIX if part == SCALE else ""
    )
    return tuple(f"model.layers.{layer}.{suffix}" for layer in layers)


def _name(path) -> str:
    return ".".join(key.name for key in path)
