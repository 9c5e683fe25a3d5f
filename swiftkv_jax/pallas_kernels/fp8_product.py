"""Products of FP8 rows with an FP8 matrix: out = (x weight^T) x_scale weight_scale, with scales
of rows and of outputs.

XLA runs them as one product and a pass over its result, or scales where the result is read. The
kernel for Hopper applies the scales itself; it is as fast as measured from `choice.FROM_ROWS` rows
on. As part of a program it was compiled for an H100 and run in JAX's interpreter. Sums in two
levels, as blocks of 128 x 128 weights with a scale each would need, it does not have: they reached
1,050 to 1,078 TFLOP/s on an H100, no more than cuBLASLt.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .choice import kernels_of


@functools.partial(jax.jit, static_argnums=(4, 5))  # compiled once for all layers
def fp8_product(
    x: Float[Array, "R I"],
    weight: Float[Array, "O I"],
    x_scale: Float[Array, " R"],
    weight_scale: Float[Array, " O"],
    dtype: jnp.dtype,
    implementation: str,
) -> Float[Array, "R O"]:
    """The product of float8_e4m3fn operands, in `dtype`, by 'xla' or 'hopper'."""
    if implementation == "hopper":
        kernel = kernels_of("hopper").fp8_product.fp8_product
        return kernel(x, weight, x_scale, weight_scale, dtype)
    sums = jnp.einsum("RI,OI->RO", x, weight, preferred_element_type=jnp.float32)
    return (sums * x_scale[:, None] * weight_scale).astype(dtype)
