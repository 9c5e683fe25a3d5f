"""Meshes and where each parameter lives on them.

A mesh has three axes. Batches are split over `data` and `fsdp`; heads, MLP width and vocabulary
over `model` (tensor parallelism); and each matrix is also stored in pieces over `fsdp`, put
together layer by layer where it is used. A dimension that its axis does not divide is replicated
(two key/value heads on four devices, for example).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .config import Config
from .mesh import FSDP, MODEL, row_axes
from .params import QKV, Block, Llama, SwiftKV, llama_shapes, swiftkv_shapes
from .quantization import SCALE, VALUES, Scheme, quantized_shapes

# Where tensor parallelism splits each leaf, the layers of a stack first. `fsdp` follows from the
# shape: see `_spec`. The scale of a quantised matrix has the matrix's first axes, and lies as they
# do.
_BLOCK = Block(
    attn_norm=P(),
    o=P(None, None, MODEL),
    mlp_norm=P(),
    gate=P(None, MODEL),
    up=P(None, MODEL),
    down=P(None, None, MODEL),
    o_bias=P(),
)
_HEADS = P(None, MODEL)
_QKV = QKV(q=_HEADS, k=_HEADS, v=_HEADS, q_bias=_HEADS, k_bias=_HEADS, v_bias=_HEADS)
_LLAMA = Llama(
    embed=P(MODEL),
    lower=_BLOCK,
    lower_qkv=_QKV,
    upper=_BLOCK,
    upper_qkv=_QKV,
    final_norm=P(),
    lm_head=P(MODEL),
)
_SWIFTKV = SwiftKV(
    norm=P(), q=_HEADS, k=_HEADS, v=_HEADS, q_bias=_HEADS, k_bias=_HEADS, v_bias=_HEADS
)


def llama_shardings(config: Config, mesh: Mesh, quantization: Scheme | None = None) -> Llama:
    """A `NamedSharding` for every weight that `config` has."""
    return _fit(_LLAMA, quantized_shapes(llama_shapes(config), quantization), mesh)


def swiftkv_shardings(config: Config, mesh: Mesh, quantization: Scheme | None = None) -> SwiftKV:
    """A `NamedSharding` for every tensor of the delta that `config` has."""
    return _fit(_SWIFTKV, quantized_shapes(swiftkv_shapes(config), quantization), mesh)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data` and `fsdp`."""
    return NamedSharding(mesh, P(row_axes(mesh)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def all_gather_fsdp[Tree: Block | QKV | SwiftKV](
    mesh: Mesh | None, weights: Tree, *, layer: bool
) -> Tree:
    """Weights put together from their pieces over `fsdp`, still split over `model`; `layer` for one
    layer out of a stack.

    Said where each layer is used, inside the scan, so that one layer at a time is whole on a
    device. A gradient goes back to its pieces at once.
    """
    if mesh is None or mesh.shape.get(FSDP, 1) == 1:
        return weights
    specs: Any = {Block: _BLOCK, QKV: _QKV, SwiftKV: _SWIFTKV}[type(weights)]

    def gather(path, leaf):
        name = path[0].name
        if layer:
            return _gather(mesh, getattr(specs, name)[1:], leaf, 0)
        return _gather(mesh, getattr(specs, name), leaf, _stack_axes(name))

    return jax.tree_util.tree_map_with_path(gather, weights)


def all_gather_vocabulary(mesh: Mesh | None, matrix: jax.Array) -> jax.Array:
    """`all_gather_fsdp` for the embedding and the output matrix, V D."""
    return matrix if mesh is None else _gather(mesh, P(MODEL), matrix, 0)


def constrain_activations(mesh: Mesh | None, x: jax.Array, *, sequence: bool = False) -> jax.Array:
    """Hold XLA to one layout of the hidden states, B T D: rows split over data and fsdp, and with
    `sequence` T over model."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, P(row_axes(mesh), MODEL if sequence else None))
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 3))
def _gather(mesh: Mesh, model_spec: P, leaf, stack_axes: int):
    return jax.lax.with_sharding_constraint(
        leaf, NamedSharding(mesh, _spec(mesh, model_spec, leaf.shape, stack_axes, pieces=False))
    )


def _reduce_scatter(mesh: Mesh, model_spec: P, stack_axes: int, _, gradient):
    # Said for the gradient too: XLA would otherwise keep it whole, for all layers, until the loop
    # over them ends.
    pieces = NamedSharding(mesh, _spec(mesh, model_spec, gradient.shape, stack_axes))
    return (jax.lax.with_sharding_constraint(gradient, pieces),)


_gather.defvjp(
    lambda mesh, model_spec, leaf, stack_axes: (_gather(mesh, model_spec, leaf, stack_axes), None),
    _reduce_scatter,
)


def _fit(specs, shapes, mesh: Mesh):
    def fit(path, shape):
        spec = specs
        names = [key.name for key in path]
        for name in names:
            spec = spec if name in (VALUES, SCALE) else getattr(spec, name)
        return NamedSharding(
            mesh, _spec(mesh, spec, shape.shape, _stack_axes(names[-1]), pieces=names[-1] != SCALE)
        )

    return jax.tree_util.tree_map_with_path(fit, shapes)


def _stack_axes(name: str) -> int:
    """Leading axes that count layers or groups: those of every leaf but the ends' and the boundary
    norm."""
    return 0 if name in ("embed", "lm_head", "final_norm", "norm") else 1


def _spec(
    mesh: Mesh, model_spec: P, shape: tuple[int, ...], stack_axes: int, *, pieces: bool = True
) -> P:
    """Where a leaf lives: over `model` as `model_spec` says, where that divides, and its `pieces`
    over `fsdp`.

    `fsdp` takes the first dimension of a layer's matrix that it divides, so that the pieces are put
    together in the order in which they lie in memory. Vectors stay whole.
    """
    axes = [
        axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(model_spec, shape, strict=False)
    ]
    axes += [None] * (len(shape) - len(axes))
    fsdp = mesh.shape.get(FSDP, 1)
    if pieces and fsdp > 1 and len(shape) - stack_axes > 1:
        for i in range(stack_axes, len(shape)):
            split = 1 if axes[i] is None else mesh.shape[axes[i]]
            if shape[i] % (split * fsdp) == 0:
                axes[i] = FSDP if axes[i] is None else (axes[i], FSDP)
                break
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)
