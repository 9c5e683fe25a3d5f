"""Rows in FP8, quantised as they are made: the operand of the product that follows.

A row's scale is its largest magnitude, so XLA makes each row twice: once for the scale, once to
quantise it. The kernels for Hopper hold the row in registers between the two, and read memory once.
They run where `fp8_product` has a kernel too: there XLA cannot fuse into the products what comes
before and after them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .choice import kernels_of
from .eight_bits import to_eight_bits


class NormOptions(NamedTuple):
    """Arguments of a root-mean-square norm, as `model.layers.rms_norm` has them."""

    eps: float
    offset: bool
    wide: bool


@functools.partial(jax.jit, static_argnums=1)  # compiled once for all layers
def fp8_swiglu(
    gate_up: Float[Array, "R M"], implementation: str
) -> tuple[Float[Array, "R F"], Float[Array, " R"]]:
    """SiLU(gate) up of rows that have both side by side: (float8_e4m3fn values, float32 scale of
    each row), by 'xla' or 'hopper'."""
    if implementation == "hopper":
        return kernels_of("hopper").fp8_rows.fp8_swiglu(gate_up)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return to_eight_bits(jax.nn.silu(gate) * up, (1,), jnp.float8_e4m3fn)


@functools.partial(jax.jit, static_argnums=(3, 4))
def fp8_norm(
    x: Float[Array, "R D"],
    added: Float[Array, "R D"] | None,
    weight: Float[Array, " D"],
    options: NormOptions,
    implementation: str,
) -> tuple[Float[Array, "R D"] | None, Float[Array, "R D"], Float[Array, " R"]]:
    """The root-mean-square norm of x + `added`: (that sum, values, scale of each row); of x where
    `added` is None, and then the first is None."""
    if implementation == "hopper":
        return kernels_of("hopper").fp8_rows.fp8_norm(x, added, weight, *options)
    total = None if added is None else x + added
    wide = (x if total is None else total).astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + options.eps)
    if not options.wide:
        wide = wide.astype(x.dtype).astype(jnp.float32)
    normed = (wide * (weight.astype(jnp.float32) + options.offset)).astype(x.dtype)
    return total, *to_eight_bits(normed, (1,), jnp.float8_e4m3fn)
