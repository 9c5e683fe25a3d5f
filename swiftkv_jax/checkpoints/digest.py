"""A digest of an array's bits that does not depend on how the array is sharded.

Array formats on disk carry no checksum of their payload, so a flipped bit would load silently. The
digest is a sum over the elements of their bits times a hash of their position, so each device sums
what it holds: nothing is gathered, and blocks keep the working memory small. It detects every
single flipped bit (the weights are odd) and, up to chance, exchanged rows and larger damage. It is
not cryptographic.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_BLOCK_ELEMENTS = 2**20


def digest(array: jax.Array) -> int:
    """32 bits that identify the array's bits in order. Same for every sharding; shape and dtype are
    not part of it.

    Elements may be 1, 2 or 4 bytes wide; give random keys as `jax.random.key_data`. Positions are
    counted modulo 2^32. With several processes, all of them call this.
    """
    strides = tuple(math.prod(array.shape[axis + 1 :]) % 2**32 for axis in range(array.ndim))
    sums = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0 and shard.data.size:
            first = sum(
                (part.start or 0) * stride
                for part, stride in zip(shard.index, strides, strict=True)
            )
            sums.append(_shard_sum(shard.data, np.uint32(first % 2**32), strides))
    total = sum(map(int, sums)) % 2**32
    if jax.process_count() > 1:
        total = (
            int(np.sum(multihost_utils.process_allgather(np.uint32(total)), dtype=np.uint64))
            % 2**32
        )
    return total


def digest_all(arrays: Iterable[jax.Array]) -> str:
    """One digest of many arrays in order, as eight hexadecimal digits. They are taken one at a
    time.

    The digest of a model's weights is the same on every mesh; in another dtype or cut the same
    weights have another digest.
    """
    total = 0
    for array in arrays:
        total = zlib.crc32(digest(array).to_bytes(4, "little"), total)
    return f"{total:08x}"


def _shard_sum(data: jax.Array, first: np.uint32, strides: tuple[int, ...]) -> Any:
    """The sum over one device's part, whose first element has position `first` in the whole. Few
    elements are summed on the host, in less time than a program for their shape is compiled in."""
    if data.size > _BLOCK_ELEMENTS:
        return _sum_in_blocks(data, first, strides)
    block = np.ascontiguousarray(data)  # of one axis at least
    bits = block.view(_UNSIGNED[block.dtype.itemsize])
    return _sum_of_bits(np, bits, first, strides or (1,))


@functools.partial(jax.jit, static_argnames="strides")
def _sum_in_blocks(data: jax.Array, first: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    """`_shard_sum` on the device, a block of rows at a time."""
    rows = min(data.shape[0], max(1, _BLOCK_ELEMENTS // math.prod(data.shape[1:])))
    blocks, rest = divmod(data.shape[0], rows)

    def part(start, count):
        block = jax.lax.dynamic_slice_in_dim(data, start, count)
        return _block_sum(
            block, first + jnp.asarray(start, jnp.uint32) * np.uint32(strides[0]), strides
        )

    total = jax.lax.fori_loop(
        0, blocks, lambda i, total: total + part(i * rows, rows), jnp.uint32(0)
    )
    return total + part(blocks * rows, rest) if rest else total


def _block_sum(block: jax.Array, first: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    if block.dtype == jnp.bool_:
        block = block.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(block, _UNSIGNED[block.dtype.itemsize])
    return _sum_of_bits(jnp, bits, first, strides)


def _sum_of_bits(xp: Any, bits: Any, first: Any, strides: tuple[int, ...]) -> Any:
    position = first
    for axis, stride in enumerate(strides):
        index = xp.arange(bits.shape[axis], dtype=xp.uint32) * np.uint32(stride)
        position = position + index.reshape(-1, *(1,) * (bits.ndim - axis - 1))
    return xp.sum(bits * (_mix(position) | np.uint32(1)), dtype=xp.uint32)


def _mix(x: Any) -> Any:
    """A bijection of 32-bit integers that scatters neighbours (multiply and xor-shift, twice)."""
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * np.uint32(multiplier)
    return x ^ (x >> 16)
