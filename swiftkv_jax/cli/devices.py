"""The devices of a command: joining processes, emulated CPUs, GPU memory and the compile cache.

All of it comes before JAX touches a device.
"""

from __future__ import annotations

import math
import os

import jax
from jax.sharding import Mesh

from ..errors import UsageError
from ..model import mesh as meshes
from ..model.mesh import MeshShape
from ..process.distributed import check_all_take_part, join_processes
from ..process.files import PROGRAMS, private_directory

GPU_MEMORY_FRACTION = 0.95
"""Share of a GPU's memory that JAX allocates. The rest is for what JAX does not count: CUDA's
context and libraries."""


def setup_devices(
    shape: MeshShape,
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    compile_cache: str | os.PathLike[str] | None = None,
) -> Mesh | None:
    """Devices for inference over `shape`; None for a single device of a single process.

    Joins the other processes, if any (`distributed.join_processes` describes the arguments),
    emulates CPU devices where there is no accelerator, and keeps compiled programs in
    `compile_cache` if it is given. Raises `UsageError` if that cannot be had, and for a mesh with
    fsdp.
    """
    if shape.fsdp != 1:
        raise UsageError(
            f"`mesh`={shape}: fsdp is for training; inference replicates its weights, or splits "
            f"them over model"
        )
    set_gpu_memory_fraction()
    join_and_emulate(shape, coordinator_address, num_processes, process_id)
    if compile_cache is not None:
        enable_compilation_cache(compile_cache)
    if math.prod(shape) == 1 and jax.process_count() == 1:
        return None
    mesh = meshes.make_mesh(shape)
    check_all_take_part(mesh)
    return mesh


def join_and_emulate(
    shape: MeshShape,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Join the other processes, if any, and emulate this one's share of the devices of `shape`
    where there is no accelerator. Raises `UsageError`."""
    processes = join_processes(coordinator_address, num_processes, process_id)
    meshes.emulate_cpu_devices(math.prod(shape) // processes)


def refuse_x64() -> None:
    """Raise `UsageError` if JAX computes in 64 bits by default: programs of training have types of
    their own."""
    if jax.config.read("jax_enable_x64"):
        raise UsageError("JAX_ENABLE_X64 in the environment: training has no 64-bit programs")


def set_gpu_memory_fraction() -> None:
    """Let JAX take `GPU_MEMORY_FRACTION` of each GPU's memory, not three quarters, unless the
    environment says how much."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not any(os.environ.get(name) for name in names):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(GPU_MEMORY_FRACTION)


def enable_compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Keep what is compiled from now on in `folder`, and look there first.

    A compiled program is code: who can write the folder can run code in this process. So it is made
    for its owner alone, and one that others own or can write is refused with `UsageError`.
    """
    folder = private_directory("compile_cache", folder)
    (folder / PROGRAMS).mkdir(exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
