"""Every array's name in our tree, and the tensors of a Hugging Face checkpoint that it holds: the
table in `params`, for one config. Used to read and to write.

A leaf of our tree stacks the tensors of several layers on its leading axis and keeps heads as an
axis of their own; a checkpoint has one matrix per layer, heads merged into the rows (q, k, v) or
columns (o) of the matrix. A quantised matrix is two leaves, its values and its scale.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..errors import CheckpointError
from ..model.config import Config
from ..model.param_rows import EXPERT
from ..model.params import (
    BLOCK_PARAMS,
    QKV_PARAMS,
    Llama,
    Param,
    SwiftKV,
    llama_params,
    llama_shapes,
    swiftkv_params,
    swiftkv_shapes,
)
from ..model.quantization import SCALE, VALUES, Format, Scheme, quantized_shapes
from .families import FAMILIES
from .interleaved import Interleaved

_SCALE_SUFFIX = "_scale"
"""Suffix that turns the name of a weight into that of its scale."""
_ROTATED = frozenset("q k q_bias k_bias q_norm k_norm k_tap".split())
"""Fields of `params` with a row for each dimension of a head that rotates."""


@dataclasses.dataclass(frozen=True)
class MappedLeaf:
    """One array of our tree and the tensors of a Hugging Face checkpoint that it holds."""

    name: str
    """Path in the tree: `embed`, `lower_qkv.q`, `swiftkv.k`; of a quantised matrix
    `lower_qkv.q.values`, `lower_qkv.q.scale`."""
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    """Checkpoint names along the first `tensor_axes` axes, the last of them fastest; a single one
    if there are none."""
    param: Param
    """The leaf's row in the table of `params`."""
    rows: tuple[int, int, int] | None = None
    """(first, one past the last, number of all) rows of the tensors that are the leaf's, where a
    tensor joins several leaves; None where it is one."""
    interleaved: Interleaved | None = None
    """The order of the tensors' rows, where it is not that of the leaf's."""

    @property
    def is_delta(self) -> bool:
        return self.name.startswith("swiftkv.")

    @property
    def is_teacher_qkv(self) -> bool:
        """Among the upper projections that only the teacher uses."""
        return self.name.startswith("upper_qkv.")

    @property
    def stacked(self) -> bool:
        """True if the leading axis counts layers, or groups of layers."""
        return self.param.stacked

    @property
    def tensor_axes(self) -> int:
        """How many of the first axes count tensors: layers, and experts."""
        return self.param.tensor_axes

    @property
    def counts(self) -> tuple[int, ...]:
        """Sizes of those axes."""
        return self.shape[: self.tensor_axes]

    def tensor_at(self, entry: Sequence[int]) -> str:
        """The tensor at a place of the first `tensor_axes` axes."""
        index = 0
        for place, count in zip(entry, self.counts, strict=True):
            index = index * count + place
        return self.tensors[index]

    @property
    def head_axis(self) -> int | None:
        """Axis of one tensor's array that merges with the next one in the checkpoint."""
        axis = self.param.head_axis
        # A scale has the axes of the output channels only: heads among them, or not.
        merged = axis is None or len(self.shape) - self.tensor_axes >= axis + 2
        return axis if merged else None

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
        shape = self.shape[self.tensor_axes :]
        axis = self.head_axis
        if axis is not None:
            shape = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
        return (*shape, 1) if self.part == SCALE else shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of each whole tensor, of which `tensor_shape` is the leaf's part."""
        shape = self.tensor_shape
        return shape if self.rows is None else (self.rows[2], *shape[1:])

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
) -> tuple[MappedLeaf, ...]:
    """Every leaf of a model with this cut, in tree order.

    `teacher_qkv` False leaves out the upper layers' own q, k, v; `delta` False leaves out the
    delta, as does a cut without upper layers.
    """
    scheme = quantization and Scheme(quantization)
    rows = by_name(llama_params(config)) | by_name(swiftkv_params(config))
    shapes: dict[str, Any] = by_name(quantized_shapes(llama_shapes(config), scheme))
    if delta and config.num_upper_layers:
        shapes |= by_name(quantized_shapes(swiftkv_shapes(config), scheme))
    found = []
    for name, shape in shapes.items():
        row = rows[name.removesuffix(f".{VALUES}").removesuffix(f".{SCALE}")]
        tensor, joined = _tensor_of(config, name, row)
        tensors = _tensor_names(config, row, tensor, name.endswith(f".{SCALE}"))
        order = _interleaved(config, name)
        found.append(MappedLeaf(name, shape.shape, tensors, row, joined, order))
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
    if not any(name.startswith("swiftkv.") for name in values):
        return llama, None
    shapes = quantized_shapes(swiftkv_shapes(config), scheme)
    delta = jax.tree_util.tree_map_with_path(
        lambda path, _: values["swiftkv." + _name(path)], shapes
    )
    return llama, delta


def check_no_problems(path: Path, problems: Mapping[str, Sequence[str]]) -> None:
    """Raise `CheckpointError` if there are problems: kind -> where. It is one line, whatever their
    number."""
    if found := [f"{kind}: {first_of(where)}" for kind, where in problems.items() if where]:
        raise CheckpointError(f"{path}: {'; '.join(found)}")


type Expected = tuple[tuple[int, ...], Sequence[str]]
"""Shape of an array, and the dtypes that it may have; none of them named: any."""


def differences(
    expected: Mapping[str, Expected], found: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, list[str]]:
    """Kind -> where the arrays of a file, name -> (shape, dtype), are not those that are expected:
    for `check_no_problems`."""
    both = [(name, *found[name], *expected[name]) for name in expected if name in found]
    return {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "wrong shape": [
            f"{name} {list(shape)}, expected {list(wanted)}"
            for name, shape, _, wanted, _ in both
            if shape != wanted
        ],
        "dtype not supported yet": [
            f"{name} {dtype} (supported: {', '.join(dtypes)})"
            for name, _, dtype, _, dtypes in both
            if dtypes and dtype not in dtypes
        ],
    }


def first_of(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are, for a line that people read."""
    count = 5
    shown = [
        name if len(name) <= 120 else f"{name[:80]}... ({len(name)} characters)" for name in names
    ]
    if len(names) <= count + 1:
        return ", ".join(shown)
    return f"{', '.join(shown[:count])} and {len(names) - count:,} more"


def _tensor_of(config: Config, name: str, row: Param) -> tuple[str, tuple[int, int, int] | None]:
    """The tensor that holds leaf `name`, within its layer, and `MappedLeaf.rows`."""
    family = FAMILIES[config.family]
    stack, _, field = name.partition(".")
    if stack not in ("lower", "upper", "lower_qkv", "upper_qkv"):
        return row.tensor, None
    field = field.partition(".")[0]
    for tensor, fields in family.fused.items():
        if field in fields:
            table = QKV_PARAMS if stack.endswith("qkv") else BLOCK_PARAMS
            sizes = [_num_rows(config, getattr(table, part)) for part in fields]
            first = sum(sizes[: fields.index(field)])
            return tensor, (first, first + sizes[fields.index(field)], sum(sizes))
    return family.names.get(field, row.tensor), None


def _interleaved(config: Config, name: str) -> Interleaved | None:
    """`MappedLeaf.interleaved` of leaf `name`, of the delta too: its file is the family's."""
    stack, _, field = name.partition(".")
    rotates = stack.endswith(("qkv", "swiftkv")) and field.partition(".")[0] in _ROTATED
    if not rotates or not FAMILIES[config.family].interleaved:
        return None
    return Interleaved(config.head_dim, config.rotated_dims)


def _num_rows(config: Config, row: Param) -> int:
    """Rows of a matrix of one layer, heads merged."""
    shape = dataclasses.replace(row, dims=row.dims.replace("? ", "")).shape(config)
    return math.prod(shape[: len(shape) - (row.in_axes or 0)])


def _tensor_names(config: Config, row: Param, name: str, scale: bool) -> tuple[str, ...]:
    """`MappedLeaf.tensors` of a parameter whose tensors are called `name` within a layer; `scale`
    for those of its scales."""
    name = name + _SCALE_SUFFIX if scale else name
    if not row.stacked:
        return (name,)
    experts = range(config.num_experts if EXPERT in name else 1)
    within = [name.replace(EXPERT, str(expert)) for expert in experts]
    return tuple(f"model.layers.{i}.{name}" for i in row.layers(config) for name in within)


def _name(path) -> str:
    return ".".join(key.name for key in path)


# Names in files ---------------------------------------------------------------

_MODEL = "model."
_HEAD = "lm_head"
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """How the files name the text model's tensors. Those of a model that takes images too have a
    prefix, which is one before transformers 4.52 and in what later versions write for
    compatibility, and another in their modules and in what some tools write."""

    model: str = _MODEL
    """Prefix that the files have in the place of `model.`."""
    head: str = _HEAD
    """Name that the files have in the place of `lm_head`."""
    listed: tuple[TensorNames, ...] = ()
    """How a `quantization_config` may name its modules besides."""

    def in_file(self, name: str) -> str:
        """The file's name of the tensor or module that the text model by itself calls `name`."""
        for ours, theirs in ((_MODEL, self.model), (_HEAD, self.head)):
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def in_lists(self, name: str) -> tuple[str, ...]:
        """The names by which lists of modules may mean `name`, the text model's own."""
        return tuple(names.in_file(name) for names in (self, *self.listed))


BY_ITSELF = TensorNames()
_IN_FILES = TensorNames("language_model.model.", "language_model.lm_head")
_IN_MODULES = TensorNames("model.language_model.", "lm_head")


def tensor_names(found: list[str]) -> TensorNames:
    """How the files of a model that takes images name its tensors, of which they have `found`."""
    counts = {
        names: sum(name.startswith(names.model) for name in found)
        for names in (_IN_FILES, _IN_MODULES)
    }
    one, other = sorted(counts, key=lambda names: -counts[names])
    return dataclasses.replace(one, listed=(other,))


def is_vision(tensor: str) -> bool:
    """True if a tensor of a model that takes images is not of its text model."""
    return _VISION.match(tensor) is not None
