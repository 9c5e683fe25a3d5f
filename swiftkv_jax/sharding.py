"""Meshes and where each parameter lives on them.

A mesh has three axes. Batches are split over `data` and `fsdp`; heads, MLP width and vocabulary over `model` (tensor
parallelism); and each matrix is also stored in pieces over `fsdp`, put together layer by layer where it is used. A
dimension that its axis does not divide is replicated (two key/value heads on four devices, for example).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .config import Config
from .errors import UsageError
from .params import QKV, Block, Llama, SwiftKV, llama_shapes, swiftkv_shapes
from .quantization import SCALE, VALUES, Scheme, quantized_shapes

DATA, FSDP, MODEL = "data", "fsdp", "model"


class MeshShape(NamedTuple):
    """Devices along each axis; one of them may be -1, the rest of the devices."""

    data: int = 1
    fsdp: int = 1
    model: int = 1

    @property
    def rows(self) -> int:
        """Devices that a batch is split over."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        return f"{self.data}x{self.model}" if self.fsdp == 1 else f"data={self.data},fsdp={self.fsdp},model={self.model}"


def parse_mesh(spec: str) -> MeshShape:
    """`"4x1"` is data x model; `"data=2,fsdp=4,model=2"` names the axes, in any order, those left out being 1.

    One number may be -1, the rest of the devices. Raises `UsageError` for anything else.
    """
    pair = re.fullmatch(r"(-1|[1-9]\d{0,5})[xX](-1|[1-9]\d{0,5})", spec.strip())
    named = re.fullmatch(r"(\w+=(-1|[1-9]\d{0,5}))(,\w+=(-1|[1-9]\d{0,5}))*", spec.replace(" ", ""))
    if pair:
        shape = MeshShape(data=int(pair[1]), model=int(pair[2]))
    elif named:
        sizes = [part.split("=") for part in named[0].split(",")]
        names = [name for name, _ in sizes]
        if len(set(names)) < len(names) or not set(names) <= set(MeshShape._fields):
            raise UsageError(f"--mesh {spec!r}: the axes are data, fsdp and model, each at most once")
        shape = MeshShape(**{name: int(size) for name, size in sizes})
    else:
        raise UsageError(f"--mesh {spec!r}: expected DATAxMODEL, for example 4x1, or named axes, for example data=2,fsdp=4,model=2")
    if shape.count(-1) > 1:
        raise UsageError(f"--mesh {spec!r}: only one axis can take the rest of the devices, -1")
    return shape


def emulate_cpu_devices(count: int) -> bool:
    """Ask for `count` CPU devices, for machines without an accelerator. True if that changes what this process sees.

    Must run before JAX touches a device, and does nothing where an accelerator is the default device. XLA's CPU runtime
    takes its thread count from the number of cores; collectives between more devices than threads would wait for each
    other for ever, so it is told to start two threads a device.
    """
    if count > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(2 * count, os.cpu_count() or 1)))
        with contextlib.suppress(RuntimeError):  # JAX has started: `make_mesh` will say what it sees
            jax.config.update("jax_num_cpu_devices", count)
    return count > 1 and jax.default_backend() == "cpu"


def make_mesh(shape: MeshShape | tuple[int, int]) -> Mesh:
    """A mesh over the first devices; a pair is (data, model). Raises `UsageError` if there are too few."""
    return mesh_over(jax.devices(), shape, "this process sees")


def mesh_over(devices: list, shape: MeshShape | tuple[int, int], owner: str) -> Mesh:
    """`make_mesh` over these devices, in the order in which their interconnect serves `model` best; `owner` is for the error."""
    shape = shape if isinstance(shape, MeshShape) else MeshShape(data=shape[0], model=shape[1])
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape:
        shape = MeshShape(*(max(1, len(devices) // known) if size == -1 else size for size in shape))
    needed = math.prod(shape)
    if needed > len(devices):
        raise UsageError(f"--mesh {shape} needs {needed} devices; {owner} {len(devices)} ({devices[0].device_kind})")
    types = (AxisType.Auto,) * len(shape)
    if needed == len(devices) and devices[0].platform == "tpu":
        return jax.make_mesh(shape, MeshShape._fields, axis_types=types, devices=devices)
    return Mesh(np.array(devices[:needed]).reshape(shape), MeshShape._fields, axis_types=types)


def mesh_of(array: jax.Array) -> Mesh | None:
    """The mesh that `array` lives on; None on a single device, and for arrays that are being traced."""
    sharding = None if isinstance(array, Tracer) else array.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def row_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that rows of a batch are split over: an entry of a `PartitionSpec`."""
    return tuple(axis for axis in (DATA, FSDP) if axis in mesh.shape)


def num_row_devices(mesh: Mesh) -> int:
    """Devices that rows of a batch are split over."""
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh))


# Where tensor parallelism splits each leaf, the layers of a stack first. `fsdp` follows from the shape: see `_spec`. The scale
# of a quantised matrix has the matrix's first axes, and lies as they do.
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
    embed=P(MODEL), lower=_BLOCK, lower_qkv=_QKV, upper=_BLOCK, upper_qkv=_QKV, final_norm=P(), lm_head=P(MODEL)
)
_SWIFTKV = SwiftKV(norm=P(), q=_HEADS, k=_HEADS, v=_HEADS, q_bias=_HEADS, k_bias=_HEADS, v_bias=_HEADS)


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


def whole[Tree: Block | QKV | SwiftKV](mesh: Mesh | None, weights: Tree, *, layer: bool) -> Tree:
    """Weights put together from their pieces over `fsdp`, still split over `model`; `layer` for one layer out of a stack.

    Said where each layer is used, inside the scan, so that one layer at a time is whole on a device. A gradient goes back
    to its pieces at once.
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


def whole_vocabulary(mesh: Mesh | None, matrix: jax.Array) -> jax.Array:
    """`whole` for the embedding and the output matrix, V D."""
    return matrix if mesh is None else _gather(mesh, P(MODEL), matrix, 0)


def lay_out(mesh: Mesh | None, x: jax.Array, *, sequence: bool = False) -> jax.Array:
    """Hold XLA to one layout of the hidden states, B T D: rows split over data and fsdp, and with `sequence` T over model."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(row_axes(mesh), MODEL if sequence else None)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 3))
def _gather(mesh: Mesh, model_spec: P, leaf, stack_axes: int):
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, _spec(mesh, model_spec, leaf.shape, stack_axes, pieces=False)))


def _to_pieces(mesh: Mesh, model_spec: P, stack_axes: int, _, gradient):
    # Said for the gradient too: XLA would otherwise keep it whole, for all layers, until the loop over them ends.
    pieces = NamedSharding(mesh, _spec(mesh, model_spec, gradient.shape, stack_axes))
    return (jax.lax.with_sharding_constraint(gradient, pieces),)


_gather.defvjp(lambda mesh, model_spec, leaf, stack_axes: (_gather(mesh, model_spec, leaf, stack_axes), None), _to_pieces)


def _fit(specs, shapes, mesh: Mesh):
    def fit(path, shape):
        spec = specs
        names = [key.name for key in path]
        for name in names:
            spec = spec if name in (VALUES, SCALE) else getattr(spec, name)
        return NamedSharding(mesh, _spec(mesh, spec, shape.shape, _stack_axes(names[-1]), pieces=names[-1] != SCALE))

    return jax.tree_util.tree_map_with_path(fit, shapes)


def _stack_axes(name: str) -> int:
    """Leading axes that count layers or groups: those of every leaf but the ends' and the boundary norm."""
    return 0 if name in ("embed", "lm_head", "final_norm", "norm") else 1


def _spec(mesh: Mesh, model_spec: P, shape: tuple[int, ...], stack_axes: int, *, pieces: bool = True) -> P:
    """Where a leaf lives: over `model` as `model_spec` says, where that divides, and its `pieces` over `fsdp`.

    `fsdp` takes the first dimension of a layer's matrix that it divides, so that the pieces are put together in the order
    in which they lie in memory. Vectors stay whole.
    """
    axes = [axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None for axis, size in zip(model_spec, shape, strict=False)]
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
