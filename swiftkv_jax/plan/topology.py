"""Meshes of machines that are only described, to compile for them and read the compiler's figures.

    mesh = topology_mesh("h200:8", (1, 8))
    lower_decode(config, batch=64, max_model_len=8192, mesh=mesh).compile().memory_analysis()

GPUs need the wheels `jax-cuda13-plugin`, `jax-cuda13-pjrt`, `nvidia-cuda-nvcc` and `nvidia-nvvm`,
TPUs `libtpu`, in the versions that go with the installed JAX. Without the hardware, `ENVIRONMENT`
must be set before JAX looks for devices.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jax.experimental import topologies
from jax.sharding import Mesh

from ..errors import UsageError
from ..model.mesh import MeshShape, mesh_over
from .hardware import hardware_of

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # several processes may compile at a time: none of them holds a chip
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class _Chip(NamedTuple):
    """Properties of a GPU's chip that XLA's compiler needs. Bytes, threads and registers are those
    that CUDA reports; a core is a streaming multiprocessor."""

    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    l2_cache: int
    clock_ghz: float


# As in XLA's own descriptions (xla/backends/gpu/target_config/specs). It has none of L4, whose
# figures are NVIDIA's: the data sheet of AD104, and the CUDA programming guide's of capability 8.9.
_AMPERE = _Chip((8, 0), 108, 64, 2048, 167936, 166912, 41943040, 1.41)
_ADA = _Chip((8, 9), 58, 128, 1536, 102400, 101376, 50331648, 2.04)
_HOPPER = _Chip((9, 0), 132, 128, 2048, 233472, 232448, 52428800, 1.98)
_BLACKWELL = _Chip((10, 0), 148, 128, 2048, 233472, 232448, 132644864, 1.965)

_GPUS = {  # device kinds
    "a100": ("NVIDIA A100-SXM4-80GB", _AMPERE),
    "l4": ("NVIDIA L4", _ADA),
    "h100": ("NVIDIA H100 80GB HBM3", _HOPPER),
    "h200": ("NVIDIA H200", _HOPPER),
    "b200": ("NVIDIA B200", _BLACKWELL),
}
_TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")

# XLA's description of a GPU (stream_executor/device_description.proto). Without a driver's version
# it leaves branches, loops and custom calls out of command buffers.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  threads_per_core_limit: {chip.threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {chip.shared_memory_per_block}
  shared_memory_per_core: {chip.shared_memory_per_core}
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  core_count: {chip.cores} fpus_per_core: {chip.fpus_per_core} clock_rate_ghz: {chip.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  l2_cache_size: {chip.l2_cache} memory_bandwidth: {bandwidth} device_memory_size: {memory}
  cuda_compute_capability {{ major: {chip.capability[0]} minor: {chip.capability[1]} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA" device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 20 patch: 0 }} runtime_version {{ major: 13 minor: 0 patch: 0 }}
"""


def topology_mesh(name: str, shape: MeshShape | tuple[int, int]) -> Mesh:
    """A mesh over the first devices of a described machine; a pair is (data, model).

    `name` is a100, l4, h100, h200 or b200 with a device count (`h200:8`), or v4, v5e, v5p, v6e or
    tpu7x with its chips (`v5p:4x4x4`, `v6e:2x4`). Raises `UsageError` for an unknown name, too few
    devices, or a compiler that is not installed.
    """
    return mesh_over(_devices(name), shape, f"`topology`={name} has")


def _devices(name: str) -> list:
    machine, _, chips = name.partition(":")
    try:
        if machine in _GPUS and re.fullmatch(r"[1-9]\d*", chips):
            kind, chip = _GPUS[machine]
            hardware = hardware_of(kind)
            assert hardware is not None
            config = _DESCRIPTION.format(
                kind=kind,
                chip=chip,
                memory=hardware.memory_bytes,
                bandwidth=int(hardware.bandwidth),
            )
            hosts, per_host = (int(chips) // 8, 8) if int(chips) % 8 == 0 else (1, int(chips))
            layout = f"1x{hosts}x{per_host}"  # slices x hosts x devices
            return topologies.get_topology_desc(
                platform="cuda", target_config=config, topology=layout
            ).devices
        if machine in _TPUS and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", chips):
            return topologies.get_topology_desc(name, platform="tpu").devices
    except (RuntimeError, ValueError, KeyError) as error:
        raise UsageError(
            f"`topology`={name}: its compiler is not available ({str(error).splitlines()[0]})"
        ) from error
    raise UsageError(
        f"`topology`={name!r}: expected {', '.join(_GPUS)} with a count like h200:8, or "
        f"{', '.join(_TPUS)} with chips like 2x4 or 4x4x4"
    )
