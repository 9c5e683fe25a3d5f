"""Whole blocks out of arrays of any length."""

from __future__ import annotations

import jax.numpy as jnp


def pad(x, axis: int, multiple: int, *, value: float | None = 0):
    """`x` with `axis` lengthened to a multiple of `multiple`, by `value`, or with None by its last
    entry; as it is if it is one."""
    width = [(0, -size % multiple if i == axis else 0) for i, size in enumerate(x.shape)]
    if not width[axis][1]:
        return x
    return (
        jnp.pad(x, width, mode="edge")
        if value is None
        else jnp.pad(x, width, constant_values=value)
    )
