"""The device that the code being traced will run on, and the compiler of its kernels."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import jax

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Head dims that the device kernels are built and tested for. XLA takes any."""


_BEFORE_AMPERE = re.compile(r"\b(Tesla|Quadro|TITAN|GTX|RTX 20\d\d|[KMPTV]\d+\w*)\b")
"""Products: GeForce, workstation and data centre GPUs of Kepler to Turing."""


class Device(NamedTuple):
    """A kind of device, as JAX names it."""

    platform: str
    kind: str

    @classmethod
    def of(cls, device: Any) -> Device:
        """Return the kind of a `jax.Device`, or of what says the same of itself."""
        return cls(device.platform, device.device_kind)

    def __str__(self) -> str:
        return f"{self.platform} ({self.kind})"

    @property
    def is_hopper(self) -> bool:
        """True if its compute capability is 9.0, by its product name."""
        return self._is_gpu and re.search(r"\bG?H(20|100|200|800)\b", self.kind) is not None

    @property
    def is_nvidia(self) -> bool:
        """True if it is a GPU by NVIDIA, by its product name, from Ampere on, as cuDNN's attention
        needs. JAX calls those of others 'gpu' too."""
        named = self._is_gpu and self.kind.startswith("NVIDIA ")
        return named and not _BEFORE_AMPERE.search(self.kind)

    @property
    def kernels(self) -> str | None:
        """The implementation with kernels for it: 'hopper', 'tpu', or for other NVIDIA GPUs
        'cudnn', which has one for prefill; None if there is none.

        A Hopper GPU under a CUDA that miscompiles its kernels is one of the others.
        """
        if self.is_hopper and self.hopper_refused_reason is None:
            return "hopper"
        if self.is_nvidia:
            return "cudnn"
        return "tpu" if self.platform == "tpu" else None

    @property
    def hopper_refused_reason(self) -> str | None:
        """Why a Hopper GPU does without the Hopper kernels; None if it has them, and for others."""
        return cuda_unsupported_reason(cuda_runtime_version()) if self.is_hopper else None

    @property
    def _is_gpu(self) -> bool:
        return self.platform in ("gpu", "cuda")


def current_device() -> Device:
    """The device of the mesh that tracing happens under, or else the default device.

    The devices of the mesh need not exist, as when compiling ahead of time for a described machine.
    """
    return Device.of(_current_device())


def num_multiprocessors() -> int:
    """Streaming multiprocessors of the current device, a GPU; 132, those of an H100 or H200, where
    it does not say."""
    device = _current_device()
    abstract = isinstance(device, jax.sharding.AbstractDevice)
    return (device.num_cores if abstract else getattr(device, "core_count", None)) or 132


def _current_device() -> Any:
    device = (
        jax.sharding.get_abstract_mesh().abstract_device
        or jax.config.jax_default_device
        or jax.devices()[0]
    )
    return jax.devices(device)[0] if isinstance(device, str) else device


@functools.cache
def cuda_runtime_version() -> int | None:
    """CUDA's version as JAX has it, 1000 x major + 10 x minor + patch; None without CUDA."""
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return None
    return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()


@functools.cache
def cudnn_version() -> int | None:
    """cuDNN's version as JAX has it, 10000 x major + 100 x minor + patch; None where JAX finds no
    cuDNN."""
    try:
        from jax._src.lib import cuda_versions

        return None if cuda_versions is None else cuda_versions.cudnn_get_version()
    except (ImportError, RuntimeError):
        return None


def cuda_unsupported_reason(version: int | None) -> str | None:
    """Why this version of CUDA cannot compile the Hopper kernels; None if it can, and without CUDA.

    From 12.8.0 to before 12.9.1 ptxas miscompiles causal masking. Source: JAX's own kernel, which
    refuses the same versions (jax/experimental/pallas/ops/gpu/attention_mgpu.py,
    `_attention_forward`).
    """
    if version is None or not 12080 <= version < 12091:
        return None
    return (
        f"needs CUDA below 12.8 or from 13.0 on, because 12.8 and 12.9.0 miscompile it and 12.9.1 "
        f"reports itself as 12.9.0; this is {version // 1000}.{version % 1000 // 10}"
    )
