"""Padding of arrays to whole blocks."""

from __future__ import annotations

import jax.numpy as jnp


def pad(x, axis: int, multiple: int, *, value: float | None = 0):
    """`x` with `axis` padded to a multiple of `multiple` with `value`, or with None with the last
    entry; `x` itself if it is one already."""
    width = [(0, -size % multiple if i == axis else 0) for i, size in enumerate(x.shape)]
    if not width[axis][1]:
        return x
    if value is None:
        return jnp.pad(x, width, mode="edge")
    return jnp.pad(x, width, constant_values=value)
