"""Rows in FP8, quantised as they are made: the operand of the product that follows.

A row's scale is its largest magnitude, so XLA makes each row twice: once for the scale, once to
quantise it. The kernel for Hopper holds the row in registers between the two, and reads memory
once. It runs where `fp8_product` has a kernel too: there XLA cannot fuse into the products what
comes before and after them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .choice import Choice, kernels_of
from .eight_bits import to_eight_bits
from .fp8_product import FROM_ROWS


def choose_fp8_rows(kernels: str | None, rows: int, width: int, dtype) -> Choice:
    """The implementation that makes `rows` of `width` FP8 values from `dtype`, on a device with
    `kernels` (`Device.kernels`), and why not its kernel."""
    if kernels != "hopper":
        return Choice("xla", reason="has no kernel for FP8 rows")
    if rows < FROM_ROWS:
        return Choice("xla", reason=f"makes FP8 rows from {FROM_ROWS} on")
    reason = kernels_of("hopper").fp8_rows.unsupported_reason(width, dtype)
    return Choice("xla", reason=reason) if reason else Choice("hopper")


@functools.partial(jax.jit, static_argnums=1)  # compiled once for all layers
def fp8_swiglu(
    gate_up: Float[Array, "R 2F"], implementation: str
) -> tuple[Float[Array, "R F"], Float[Array, " R"]]:
    """SiLU(gate) up of rows that have both side by side: (float8_e4m3fn values, float32 scale of
    each row), by 'xla' or 'hopper'."""
    if implementation == "hopper":
        return kernels_of("hopper").fp8_rows.fp8_swiglu(gate_up)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return to_eight_bits(jax.nn.silu(gate) * up, (1,), jnp.float8_e4m3fn)
