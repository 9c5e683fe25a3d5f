"""Merge an adapter of `peft` into a model while its leaves are read.

A matrix becomes what it was plus what the adapter adds, computed in float32, one tensor of the
checkpoint at a time, and rounded once, to the dtype that is read.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ..errors import CheckpointError
from ..model.config import Config
from ..model.param_rows import EXPERT
from .peft import LowRank, read_adapter
from .source import Source
from .tensor_map import MappedLeaf, check_no_problems, leaves
from .tensor_reader import TensorReader

_NO_PLACE = (
    "without a place under SwiftKV, where upper layers share other keys and values (merge the "
    "adapter into the teacher, calibrate that, and serve the result)"
)
_NO_SUM = "not supported (matrices of attention and of dense MLPs are)"


def with_adapter(base: Source, path: Path) -> Source:
    """The model with the adapter in `path` merged.

    An upper layer's q_proj is added to the teacher's queries and to the student's, for which it is
    an approximation. Raises `CheckpointError` for an adapter that does not fit the model, and for a
    model in 8 bits.
    """
    if base.quantization is not None:
        raise CheckpointError(
            f"{base.path}: its matrices are {base.quantization}, and a sum would be rounded to "
            f"that again: merge the adapter into the model that it was quantised from"
        )
    matrices = placed_terms(base.config, path, has_delta=base.has_delta)
    deltas = TensorReader(matrices)

    def read(leaf: MappedLeaf, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        if matrices.keys().isdisjoint(leaf.tensors):
            return base.reader(leaf, dtype, sharding)
        wide = np.dtype(jnp.promote_types(base.dtypes[leaf.name], dtype))
        stored = {
            _ranges(leaf, shard.index): shard.data
            for shard in base.reader(leaf, wide, sharding).addressable_shards
        }

        @functools.cache
        def merged(ranges: tuple[range, ...]) -> np.ndarray:
            return _sum(leaf, ranges, np.asarray(stored[ranges]), dtype, deltas)

        return jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: merged(_ranges(leaf, index))
        )

    return dataclasses.replace(base, reader=read)


def _ranges(leaf: MappedLeaf, index: Iterable[slice] | None) -> tuple[range, ...]:
    assert index is not None
    return tuple(range(*part.indices(size)) for part, size in zip(index, leaf.shape, strict=True))


def _sum(
    leaf: MappedLeaf,
    ranges: tuple[range, ...],
    values: np.ndarray,
    dtype: np.dtype,
    deltas: TensorReader,
) -> np.ndarray:
    """The part of a leaf within `ranges`, of which the base has `values`, merged."""
    with np.errstate(over="ignore"):
        out = values.astype(dtype)
    axes = leaf.tensor_axes
    for place in np.ndindex(values.shape[:axes]):
        entry = [part[i] for part, i in zip(ranges[:axes], place, strict=True)]
        tensor = leaf.tensor_at(entry)
        if tensor not in deltas.tensors:
            continue
        one = (*(range(i, i + 1) for i in entry), *ranges[axes:])
        delta = deltas.read_ranges(leaf, one, np.dtype(np.float32), set())
        with np.errstate(over="ignore"):
            out[place] = values[place].astype(np.float32) + delta.reshape(values.shape[axes:])
        if not np.isfinite(out[place]).all():
            raise CheckpointError(
                f"{deltas.tensors[tensor].file}: {tensor} has values beyond {dtype} when it is "
                f"merged; load it as bfloat16 or float32"
            )
    return out


def placed_terms(config: Config, path: Path, *, has_delta: bool) -> Mapping[str, LowRank]:
    """Tensor of a checkpoint of this architecture -> what the adapter in `path` adds to it. Raises
    `CheckpointError` for a module without a place."""
    found = read_adapter(path)
    holders: dict[str, list[MappedLeaf]] = collections.defaultdict(list)
    for leaf in leaves(config, delta=has_delta):
        for tensor in leaf.tensors:
            holders[tensor].append(leaf)
    placed: dict[str, LowRank] = {}
    problems: dict[str, list[str]] = collections.defaultdict(list)
    for module, matrix in found.items():
        tensor = f"{module}.weight"
        parts = holders[tensor]
        upper = has_delta and any(leaf.is_teacher_qkv for leaf in parts)
        queries = {leaf.name for leaf in parts} == {"upper_qkv.q"} and not config.shared_kv_heads
        if not parts:
            problems["not in the model"].append(module)
        elif any(leaf.param.in_axes is None or EXPERT in leaf.param.tensor for leaf in parts):
            problems[_NO_SUM].append(module)
        elif upper and not queries:
            problems[_NO_PLACE].append(module)
        elif matrix.shape != (shape := parts[0].stored_shape):
            problems["wrong shape"].append(f"{module} {list(matrix.shape)}, expected {list(shape)}")
        else:
            placed[tensor] = matrix
            if upper and f"{module}_swiftkv" not in found:
                placed[f"{module}_swiftkv.weight"] = matrix
    check_no_problems(path, problems)
    return placed
