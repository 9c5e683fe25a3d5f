"""What the device can do at most: the two rates that every measurement is held against."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .timing import Plan, jax_program, measure


@dataclasses.dataclass(frozen=True)
class Floors:
    """Measured in the same run, on random data: products of zeros are faster."""

    matmul_tflops: float
    """bfloat16 product of square matrices."""
    copy_gbps: float
    """Bytes read and written by the faster of two copies: the device's own, and an elementwise
    kernel."""
    details: dict[str, Any]

    def of(self, unit: str) -> float:
        return self.matmul_tflops if unit == "TFLOP/s" else self.copy_gbps


def measure_floors(
    key: jax.Array, plan: Plan, *, size: int = 8192, copied_bytes: int = 2**32
) -> Floors:
    """`size`^3 products, and copies that read `copied_bytes` and write as many."""
    normal = jax.jit(lambda key: jax.random.normal(key, (size, size), jnp.bfloat16))
    pairs = [tuple(normal(jax.random.fold_in(key, 2 * i + j)) for j in range(2)) for i in range(4)]
    products, failed = measure({"matmul": jax_program(lambda pair: pair[0] @ pair[1], pairs)}, plan)
    del pairs
    buffer = jax.jit(lambda key: jax.random.bits(key, (copied_bytes // 4,), jnp.uint32))(key)
    copies, not_copied = measure(
        {"copy": jax_program(jnp.copy, [buffer]), "elementwise": jax_program(jnp.invert, [buffer])},
        plan,
    )
    for error in (failed | not_copied).values():
        raise error
    return Floors(
        matmul_tflops=2 * size**3 / products["matmul"].seconds / 1e12,
        copy_gbps=max(2 * buffer.nbytes / timing.seconds / 1e9 for timing in copies.values()),
        details={
            "matmul_size": size,
            "copied_bytes": 2 * buffer.nbytes,
            "timings": {
                name: dataclasses.asdict(timing) for name, timing in (products | copies).items()
            },
        },
    )


def floors_for(table: str, key: jax.Array, plan: Plan) -> Floors:
    """At full size, or at a size for a CPU."""
    return (
        measure_floors(key, plan)
        if table == "full"
        else measure_floors(key, plan, size=256, copied_bytes=2**22)
    )
