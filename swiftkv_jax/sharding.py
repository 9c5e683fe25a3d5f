"""Meshes and where each parameter lives on them.

A mesh is `data x model`: batches are split over `data`, and heads, MLP width and vocabulary over `model`. A dimension
that the axis does not divide is replicated (two key/value heads on four devices, for example).
"""

from __future__ import annotations

import contextlib
import math
import os
import re

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .config import Config
from .errors import UsageError
from .params import QKV, Block, Llama, SwiftKV, llama_shapes, swiftkv_shapes

DATA, MODEL = "data", "model"


def parse_mesh(spec: str) -> tuple[int, int]:
    """`"4x1"` -> (data=4, model=1). Raises `UsageError` for anything but DATAxMODEL with positive numbers."""
    match = re.fullmatch(r"([1-9]\d{0,5})[xX]([1-9]\d{0,5})", spec.strip())
    if not match:
        raise UsageError(f"--mesh {spec!r}: expected DATAxMODEL with two positive numbers, for example 4x1")
    return int(match[1]), int(match[2])


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


def make_mesh(shape: tuple[int, int]) -> Mesh:
    """A data x model mesh over the first devices. Raises `UsageError` if there are too few."""
    devices, needed = jax.devices(), math.prod(shape)
    if needed > len(devices):
        seen = f"{len(devices)} ({devices[0].device_kind})"
        raise UsageError(f"--mesh {shape[0]}x{shape[1]} needs {needed} devices; this process sees {seen}")
    return Mesh(np.array(devices[:needed]).reshape(shape), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def mesh_of(array: jax.Array) -> Mesh | None:
    """The mesh that `array` lives on; None on a single device, and for arrays that are being traced."""
    sharding = None if isinstance(array, Tracer) else array.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


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


def llama_shardings(config: Config, mesh: Mesh) -> Llama:
    """A `NamedSharding` for every weight that `config` has."""
    return _fit(_LLAMA, llama_shapes(config), mesh)


def swiftkv_shardings(config: Config, mesh: Mesh) -> SwiftKV:
    """A `NamedSharding` for every tensor of the delta that `config` has."""
    return _fit(_SWIFTKV, swiftkv_shapes(config), mesh)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data`."""
    return NamedSharding(mesh, P(DATA))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def _fit(specs, shapes, mesh: Mesh):
    def fit(path, shape):
        spec = specs
        for key in path:
            spec = getattr(spec, key.name)
        axes = [axis if axis is None or size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, shape.shape, strict=False)]
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(fit, shapes)
