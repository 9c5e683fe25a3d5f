"""The roofline of the current devices, measured: the highest rates of matrix products and of
copies. Speeds are reported as shares of them."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .hardware import Hardware, hardware_of

LONG = 0.02
"""Seconds of one call from which larger sizes are not tried."""
MATRICES = (512, 1024, 2048, 4096, 8192)
BYTES = (2**24, 2**26, 2**28, 2**30)
ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Rates of `devices` devices together: one device's, multiplied."""

    flops: float
    """FLOP/s of the fastest product of square matrices in `dtype`."""
    bandwidth: float
    """Bytes a second of the fastest copy, read and written."""
    devices: int
    dtype: str
    tried: dict[str, float]
    """Rate of each product and copy on one device."""
    published: Hardware | None
    """Published peaks of one device, where they are known."""

    def best(self, other: Roofline) -> Roofline:
        """The higher rates of two measurements of the same devices."""
        tried = {
            name: max(rate, other.tried.get(name, rate))
            for name, rate in (other.tried | self.tried).items()
        }
        flops = max(self.flops, other.flops)
        bandwidth = max(self.bandwidth, other.bandwidth)
        return dataclasses.replace(self, flops=flops, bandwidth=bandwidth, tried=tried)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        text = (
            f"{self.flops / 1e12:.3g} TFLOP/s ({self.dtype} products), "
            f"{self.bandwidth / 1e9:.4g} GB/s (copies), measured"
        )
        if self.published is None:
            return text
        flops = self.published.flops * self.devices / 1e12
        bandwidth = self.published.bandwidth * self.devices / 1e9
        return f"{text}; published: {flops:.4g} TFLOP/s bfloat16, {bandwidth:.4g} GB/s"


def measure_roofline(dtype, devices: int, *, long: float = LONG) -> Roofline:
    """The roofline of `devices` devices like this process's first, on which nothing else may run
    meanwhile. Takes about a second, and 3 GiB at most.

    Sizes grow until a call takes `long` seconds.
    """
    device = jax.local_devices()[0]
    products = matmul_rates(dtype, long=long)
    copies = _best(_copy, BYTES, lambda size: 2 * size, dtype, long)
    return Roofline(
        flops=max(products.values()) * devices,
        bandwidth=max(copies.values()) * devices,
        devices=devices,
        dtype=str(jnp.dtype(dtype)),
        tried={f"product of {size}": rate for size, rate in products.items()}
        | {f"copy of {size}": rate for size, rate in copies.items()},
        published=hardware_of(device.device_kind),
    )


def matmul_rates(dtype, *, long: float = LONG) -> dict[int, float]:
    """FLOP/s of products of square matrices on one device, by their size, up to the first that
    takes `long` seconds."""
    return _best(_product, MATRICES, lambda size: 2 * size**3, dtype, long)


@functools.cache
def matmul_rate(dtype) -> float:
    """FLOP/s of a large product on one device, measured once a process."""
    return max(matmul_rates(dtype).values())


def _best(
    make: Callable[[int, Any], Callable[[], jax.Array]],
    sizes,
    work: Callable[[int], int],
    dtype,
    long: float,
) -> dict[int, float]:
    """Work a second at each size, up to the first whose calls are `long`."""
    rates = {}
    for size in sizes:
        seconds = _seconds(make(size, dtype))
        rates[size] = work(size) / seconds
        if seconds >= long:
            break
    return rates


def _seconds(call: Callable[[], jax.Array]) -> float:
    """Seconds of one call in the best round. A round has enough calls in a row to hide the one wait
    at its end."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, min(20, round(LONG / (time.perf_counter() - start))))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        out = None
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def _product(size: int, dtype) -> Callable[[], jax.Array]:
    """A product of random matrices: devices multiply zeros faster."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(a, b)


def _copy(size: int, dtype) -> Callable[[], jax.Array]:
    """A copy of `size` bytes by an elementwise kernel, which reads as decoding does."""
    source = jnp.arange(size // 4, dtype=jnp.uint32)
    invert = jax.jit(jnp.invert)
    return lambda: invert(source)
