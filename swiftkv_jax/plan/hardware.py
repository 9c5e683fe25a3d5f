"""Published figures of the devices that this package is meant for: the upper limits in plans of
time and memory."""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device, as JAX counts devices."""

    name: str
    flops: float
    """Peak FLOP/s of dense bfloat16 matrix products; a multiply-add is two."""
    memory_bytes: int
    bandwidth: float
    """Bytes a second between the device and its memory."""

    @property
    def ridge_tokens(self) -> float:
        """Tokens from which a product with bfloat16 weights takes longer to compute than its
        weights take to read."""
        return (self.flops / 2) / (self.bandwidth / 2)


# NVIDIA's data sheets give bfloat16 with sparsity, which doubles it: 1,979 TFLOP/s for H100 SXM and
# H200 SXM, 242 for L4, 4,500 for B200. The PCIe and NVL cards are slower and call themselves
# otherwise. Memory is what CUDA reports of the nominal 80, 141 and 192 GB; of L4 it is the nominal.
_A100 = Hardware("A100 SXM 80 GB", 312e12, 85_100_068_864, 2.039e12)
_L4 = Hardware("L4", 121e12, 24_000_000_000, 0.3e12)
_H100 = Hardware("H100 SXM", 989.4e12, 84_942_979_072, 3.35e12)
_H200 = Hardware("H200 SXM", 989.4e12, 150_754_820_096, 4.8e12)
_B200 = Hardware("B200", 2250e12, 191_514_411_008, 8e12)

# https://cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, per chip.
_V4 = Hardware("TPU v4", 275e12, 32 * GIB, 1.2e12)
_V5E = Hardware("TPU v5e", 197e12, 16 * GIB, 0.819e12)
_V5P = Hardware("TPU v5p", 459e12, 95 * GIB, 2.765e12)
_V6E = Hardware("TPU v6e", 918e12, 32 * GIB, 1.638e12)
# A TPU7x chip (2307 TFLOP/s, 192 GiB, 7.38 TB/s) is two devices: unlike v4 and v5p it does not join
# its two TensorCores.
_TPU7X = Hardware("TPU7x, half a chip", 2307e12 / 2, 96 * GIB, 7.38e12 / 2)

HARDWARE = (_A100, _L4, _H100, _H200, _B200, _V4, _V5E, _V5P, _V6E, _TPU7X)

_BY_KIND = {
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA L4": _L4,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H200,
    "NVIDIA B200": _B200,
    "TPU v4": _V4,
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _TPU7X,
}


def hardware_of(device_kind: str) -> Hardware | None:
    """The published figures for a `jax.Device.device_kind`; None for a device that is not in the
    table."""
    return _BY_KIND.get(device_kind)
