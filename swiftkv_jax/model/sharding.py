"""Shardings and sharding constraints of parameters and activations on a mesh.

Batches are split over `data` and `fsdp`; heads, MLP width and vocabulary over `model` (tensor
parallelism), as the table in `params` says; each matrix is also sharded over `fsdp`, and gathered
layer by layer where it is used. A dimension that its axis does not divide is replicated (two
key/value heads on four devices, for example; `infer.runner.kv_heads` splits them for serving).
"""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from .config import Config
from .mesh import FSDP, MODEL, row_axes
from .params import (
    LLAMA_PARAMS,
    QKV,
    SWIFTKV_PARAMS,
    Block,
    Llama,
    Param,
    PromptMLP,
    SwiftKV,
    llama_shapes,
    map_params,
    swiftkv_shapes,
)
from .quantization import Quantized, Scheme, is_quantized, quantized_shapes

# For each axis of an array the mesh axis that it is split over, or None.
Axes = tuple[str | None, ...]


def llama_shardings(config: Config, mesh: Mesh, quantization: Scheme | None = None) -> Llama:
    """A `NamedSharding` for every weight that `config` has."""
    return _fit(quantized_shapes(llama_shapes(config), quantization), mesh)


def swiftkv_shardings(config: Config, mesh: Mesh, quantization: Scheme | None = None) -> SwiftKV:
    """A `NamedSharding` for every tensor of the delta that `config` has."""
    return _fit(quantized_shapes(swiftkv_shapes(config), quantization), mesh)


def param_sharding(mesh: Mesh, row: Param, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of one parameter of this shape."""
    return NamedSharding(mesh, _spec(mesh, row.model_axes, shape, int(row.stacked)))


def scale_sharding(mesh: Mesh, row: Param, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of a quantised parameter's scale: the scale has the first axes of its
    matrix and is split as they are, but not over `fsdp`."""
    return NamedSharding(mesh, _spec(mesh, row.model_axes, shape, int(row.stacked), fsdp=False))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data` and `fsdp`."""
    return NamedSharding(mesh, P(row_axes(mesh)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def replicate[Tree](mesh: Mesh | None, tree: Tree) -> Tree:
    """`tree` on every device of the mesh, so that each process can read it; as it is without
    one."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def all_gather_fsdp[Tree: Block | QKV | SwiftKV | PromptMLP](
    mesh: Mesh | None, weights: Tree, *, layer: bool
) -> Tree:
    """All-gather weights over `fsdp`; they stay split over `model`. `layer` says whether they are
    one layer of a stack or the whole stack.

    Called where each layer is used, inside the scan, so that a device holds one gathered layer at a
    time. The gradient is reduce-scattered at once.
    """
    if not _has_fsdp(mesh):
        return weights

    def gather(row: Param, weight):
        spec = row.model_axes
        stack_axes = int(row.stacked)
        if layer:
            spec = spec[stack_axes:]
            stack_axes = 0
        return jax.tree.map(lambda leaf: _gather(mesh, spec, leaf, stack_axes), weight)

    return map_params(gather, weights, is_leaf=is_quantized)


def all_gather_mix(mesh: Mesh | None, mix: jax.Array | None) -> jax.Array | None:
    """`all_gather_fsdp` for the value mix of one layer, K H H; None stays None."""
    if mix is None or not _has_fsdp(mesh):
        return mix
    return _gather(mesh, SWIFTKV_PARAMS.mix.model_axes[1:], mix, 0)


def all_gather_vocabulary(mesh: Mesh | None, matrix: jax.Array) -> jax.Array:
    """`all_gather_fsdp` for the embedding and the output matrix, V D."""
    if mesh is None:
        return matrix
    return _gather(mesh, LLAMA_PARAMS.embed.model_axes, matrix, 0)


def _has_fsdp(mesh: Mesh | None) -> TypeGuard[Mesh]:
    return mesh is not None and mesh.shape.get(FSDP, 1) > 1


def constrain_activations(mesh: Mesh | None, x: jax.Array, *, sequence: bool = False) -> jax.Array:
    """Constrain hidden states, B T D, to one sharding: B over data and fsdp, and with `sequence` T
    over model."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, P(row_axes(mesh), MODEL if sequence else None))
    )


def to_host(array: jax.Array, *index: int) -> np.ndarray:
    """All of an array, or entry `index` of its leading axes, in NumPy. If the array is spread over
    processes, each of them gets the result."""
    if array.is_fully_addressable:
        return np.asarray(array[index] if index else array)
    assert isinstance(array.sharding, NamedSharding)
    everywhere = NamedSharding(array.sharding.mesh, P())
    return np.asarray(_entry(array, index, everywhere) if index else _replicate(array, everywhere))


def from_host(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """An array that every process has, on its sharding."""
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


@functools.partial(jax.jit, static_argnums=1)
def _replicate(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(array, sharding)


@functools.partial(jax.jit, static_argnums=2)
def _entry(array: jax.Array, index: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    for entry in index:
        array = jax.lax.dynamic_index_in_dim(array, entry, keepdims=False)
    return jax.lax.with_sharding_constraint(array, sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 3))
def _gather(mesh: Mesh, model_spec: Axes, leaf, stack_axes: int):
    return jax.lax.with_sharding_constraint(
        leaf, NamedSharding(mesh, _spec(mesh, model_spec, leaf.shape, stack_axes, fsdp=False))
    )


def _reduce_scatter(mesh: Mesh, model_spec: Axes, stack_axes: int, _, gradient):
    # Without the constraint XLA keeps gathered gradients of all layers until the loop over them
    # ends.
    sharding = NamedSharding(mesh, _spec(mesh, model_spec, gradient.shape, stack_axes))
    return (jax.lax.with_sharding_constraint(gradient, sharding),)


_gather.defvjp(
    lambda mesh, model_spec, leaf, stack_axes: (_gather(mesh, model_spec, leaf, stack_axes), None),
    _reduce_scatter,
)


def _fit[Tree: Llama | SwiftKV](shapes: Tree, mesh: Mesh) -> Tree:
    def fit(row: Param, shape):
        if not isinstance(shape, Quantized):
            return param_sharding(mesh, row, shape.shape)
        values = param_sharding(mesh, row, shape.values.shape)
        return Quantized(values, scale_sharding(mesh, row, shape.scale.shape), shape.scheme)

    return map_params(fit, shapes, is_leaf=is_quantized)


def _spec(
    mesh: Mesh, model_spec: Axes, shape: tuple[int, ...], stack_axes: int, *, fsdp: bool = True
) -> P:
    """The `PartitionSpec` of a leaf: over `model` as `model_spec` says, where that divides, and
    with `fsdp` over that axis too.

    `fsdp` splits the first dimension of a layer's matrix that it divides, so that gathered shards
    are consecutive in memory. Vectors are not split over it.
    """
    axes: list[Any] = [
        axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(model_spec, shape, strict=False)
    ]
    axes += [None] * (len(shape) - len(axes))
    num_shards = mesh.shape.get(FSDP, 1)
    if fsdp and num_shards > 1 and len(shape) - stack_axes > 1:
        for i in range(stack_axes, len(shape)):
            split = 1 if axes[i] is None else mesh.shape[axes[i]]
            if shape[i] % (split * num_shards) == 0:
                axes[i] = FSDP if axes[i] is None else (axes[i], FSDP)
                break
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)
