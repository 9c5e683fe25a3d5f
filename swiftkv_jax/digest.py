"""A digest of an array's bits that does not depend on how the array is sharded.

Array formats on disk carry no checksum of their payload, so a flipped bit would load silently. The digest is one fused
reduction on the devices that hold the array: nothing is gathered or copied. It detects every single flipped bit (each
element's weight is odd) and, up to chance, exchanged rows and larger damage. It is not cryptographic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest(array: jax.Array) -> int:
    """32 bits that identify the array's bits in order. Same for every sharding; shape and dtype are not part of it.

    Elements may be 1, 2 or 4 bytes wide; give random keys as `jax.random.key_data`. Positions are counted modulo 2^32.
    """
    return int(_digest(array))


@jax.jit
def _digest(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)
    weight = _mix(_positions(array.shape)) | jnp.uint32(1)
    return jnp.sum(bits * weight, dtype=jnp.uint32)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Row-major position of every element, modulo 2^32."""
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        position += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return position


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit integers that scatters neighbours (multiply and xor-shift, twice)."""
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(multiplier)
    return x ^ (x >> 16)
