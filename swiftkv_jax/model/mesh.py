"""Device meshes: the axes, and how a mesh is made; `mesh_shape` says how it is written.

A mesh has three axes. Batches are split over `data` and `fsdp`; heads, MLP width and vocabulary
over `model` (tensor parallelism); `fsdp` also shards every matrix.
"""

from __future__ import annotations

import contextlib
import math
import os

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from ..errors import UsageError
from .mesh_shape import MeshShape, parse_mesh

DATA = "data"
FSDP = "fsdp"
MODEL = "model"


def emulate_cpu_devices(count: int) -> bool:
    """Request `count` CPU devices, for machines without an accelerator. Returns whether that
    changes the devices of this process.

    Must run before JAX touches a device, and does nothing where an accelerator is the default
    device. XLA's CPU runtime takes its thread count from the number of cores; collectives between
    more devices than threads would deadlock, so two threads a device are asked for.
    """
    if count > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(2 * count, os.cpu_count() or 1)))
        # An error says that JAX has started: `make_mesh` will say what it sees.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    return count > 1 and jax.default_backend() == "cpu"


def make_mesh(shape: str | MeshShape | tuple[int, int]) -> Mesh:
    """A mesh over the first devices; a pair is (data, model), a text what `parse_mesh` takes.
    Raises `UsageError` for what is no mesh, and if there are too few devices."""
    shape = parse_mesh(shape) if isinstance(shape, str) else shape
    return mesh_over(jax.devices(), shape, "this process sees")


def mesh_over(devices: list, shape: MeshShape | tuple[int, int], owner: str) -> Mesh:
    """`make_mesh` over these devices, in the order in which their interconnect serves `model` best;
    `owner` is for the error."""
    shape = _checked(shape)
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape:
        shape = MeshShape(
            *(max(1, len(devices) // known) if size == -1 else size for size in shape)
        )
    needed = math.prod(shape)
    if needed > len(devices):
        raise UsageError(
            f"`mesh`={shape} needs {needed} devices; {owner} {len(devices)} "
            f"({devices[0].device_kind})"
        )
    types = (AxisType.Auto,) * len(shape)
    if needed == len(devices) and devices[0].platform == "tpu":
        return jax.make_mesh(shape, MeshShape._fields, axis_types=types, devices=devices)
    return Mesh(np.array(devices[:needed]).reshape(shape), MeshShape._fields, axis_types=types)


def _checked(shape: object) -> MeshShape:
    """A `MeshShape`, or a pair as one. Raises `UsageError` for anything else."""
    given = shape
    if not isinstance(shape, MeshShape) and isinstance(shape, tuple | list) and len(shape) == 2:
        shape = MeshShape(data=shape[0], model=shape[1])
    if (
        not isinstance(shape, MeshShape)
        or any(isinstance(size, bool) or not isinstance(size, int | np.integer) for size in shape)
        or any(size < 1 and size != -1 for size in shape)
        or shape.count(-1) > 1
    ):
        raise UsageError(
            f"`mesh`={given!r}: expected a text, for example '4x1', or a pair (data, model) of "
            f"whole numbers from 1, of which one may be -1, the rest of the devices"
        )
    return shape


def check_mesh(mesh: object) -> None:
    """Raise `UsageError` unless `mesh` is a `Mesh` or None."""
    if not isinstance(mesh, Mesh | None):
        raise UsageError(
            f"`mesh` must be a Mesh, as make_mesh returns it, got {type(mesh).__name__}"
        )


def mesh_of(array: jax.Array) -> Mesh | None:
    """The mesh of `array`; None on a single device, and for arrays that are being
    traced."""
    if isinstance(array, Tracer) or not isinstance(array.sharding, NamedSharding):
        return None
    mesh = array.sharding.mesh
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def row_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that rows of a batch are split over: an entry of a `PartitionSpec`."""
    return tuple(axis for axis in (DATA, FSDP) if axis in mesh.shape)


def num_devices(mesh: Mesh | None) -> int:
    """Number of devices of a mesh; 1 without one."""
    return 1 if mesh is None else mesh.size


def dp_size(mesh: Mesh | None) -> int:
    """Number of devices that the rows of a batch are split over; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in row_axes(mesh))
