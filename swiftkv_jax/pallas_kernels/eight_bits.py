"""Rounding to 8 bits with a scale."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def largest_of(dtype: Any) -> float:
    """The largest magnitude that values of float8 or int8 are given."""
    if jnp.issubdtype(dtype, jnp.integer):
        return float(jnp.iinfo(dtype).max)
    return float(jnp.finfo(dtype).max)


def to_eight_bits(
    x: Float[Array, "*shape"], axes: tuple[int, ...], dtype: Any
) -> tuple[Array, Array]:
    """(values of `dtype`, scale without `axes`): the largest magnitude along `axes` becomes the
    largest number of float8_e4m3fn or int8."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / largest_of(dtype)
    # Rows of zeros, and of numbers that devices flush to zero, have no scale. NaN stays NaN.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    wide = wide / scale
    if jnp.issubdtype(dtype, jnp.integer):
        wide = jnp.round(wide)
    return wide.astype(dtype), jnp.squeeze(scale, axes)
