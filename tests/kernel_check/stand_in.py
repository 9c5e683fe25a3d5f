"""A child process that checks kernels on the CPU as the shipped one does on a device.

    python -m tests.kernel_check.stand_in MODE STARTS [KIND]

The kernels are XLA's in the place of a device's, some with a mistake, or a device's own in the
interpreter. Each start adds a line to the file STARTS. KIND is the kind of the device, an H100's by
default.
"""

import contextlib
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def gpu(version: str = "cuda 13000", kind: str = H100) -> Any:
    """A device that is not here: what a `jax.Device` says of itself."""
    return SimpleNamespace(
        platform="gpu",
        device_kind=kind,
        client=SimpleNamespace(platform_version=version),
    )


def tpu() -> Any:
    return SimpleNamespace(
        platform="tpu",
        device_kind="TPU v5 lite",
        client=SimpleNamespace(platform_version="libtpu 1"),
    )


class Kernels:
    """The two ops by XLA; decoding with the mistake of a mode."""

    def __init__(self, mode: str):
        self._mode = mode

    def prefill_attention(self, *operands, implementation, **options):
        from swiftkv_jax import pallas_kernels

        return pallas_kernels.prefill_attention(*operands, **options, implementation="xla")

    def plan_decode(self, *operands, **options):
        return None

    def decode_attention(self, q, k, v, length, *, implementation, **options):
        from swiftkv_jax import pallas_kernels

        if self._mode == "crashes":
            os.abort()
        if self._mode == "hangs":
            time.sleep(3600)
        if self._mode == "raises":
            raise RuntimeError("ptxas exited with 255\nand a long trace")
        if self._mode == "is wrong":
            length = length - (length > 1)  # the last position is not seen
        out = pallas_kernels.decode_attention(q, k, v, length, **options, implementation="xla")
        return out / 0 if self._mode == "is not finite" else out


class Cudnn(Kernels):
    """Prefill as it is put together from calls of cuDNN, with XLA in the place of cuDNN."""

    def prefill_attention(self, q, k, v, *, implementation, **options):
        from swiftkv_jax.pallas_kernels import AttentionOperands, cudnn
        from tests.pallas_kernels.cudnn_stand_in import attend

        def in_base_two(*operands, **options):
            out, lse = attend(*operands, **options)
            return out, lse * math.log2(math.e)

        call = in_base_two if self._mode == "has other logs" else attend
        operands = AttentionOperands(q, k, v, **options)
        return cudnn.chunk(operands, most_queries=64, most_context=70, attend=call)


def main(mode: str, starts: str, kind: str = H100) -> int:
    with Path(starts).open("a") as file:
        file.write(f"{mode}\n")
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mode == "does not start":
        print("no device left", file=sys.stderr)
        return 3
    from swiftkv_jax.kernel_check import child

    options: dict[str, Any] = {"positions": 150, "runs": 1, "device": gpu(kind=kind)}
    if mode == "interpreted":
        from tests.pallas_kernels.interpreted import device_of

        with device_of("hopper"):
            return child.main(**options)
    return child.main(ops=(Kernels if kind == H100 else Cudnn)(mode), **options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
