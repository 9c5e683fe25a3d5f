"""Matrix products of groups of rows, each group with a matrix of its own.

    out[r] = x[r] weight[g]     for the rows r of group g

`rows_product` takes rows in order of their groups, and a TPU runs it: `jax.lax.ragged_dot`, which
XLA compiles to a kernel there. (On GPUs and CPUs it multiplies every row by every matrix.)
`block_product` takes rows in blocks of one group each, at most the rows of one block more for each
group: by a kernel on Hopper, elsewhere by XLA, which gathers every block's matrix.

The kernel was compiled for an H200 and run in JAX's interpreter; it has not run on a GPU.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from .choice import choose_product, kernels_of
from .device import current_device

Inputs = Literal["first", "last"]
"""Place of a matrix's inputs: before its outputs, as a TPU reads them without a copy, or after
them, as checkpoints store them."""

_MOST_ROWS = 128
_BLOCKS_AT_ONCE = 32
"""Blocks whose matrices XLA gathers at the same time."""


def choose_grouped(sizes: tuple[int, int], dtype) -> str:
    """The implementation on the current device for matrices of these sizes and their transposes.
    On a TPU that is XLA's own kernel, under the name 'tpu'."""
    kernels = current_device().kernels
    if kernels == "tpu":
        return kernels
    calls = (*sizes, dtype), (*sizes[::-1], dtype)
    return choose_product(kernels, "grouped", *calls).implementation


def rows_product(
    x: Float[Array, "R I"],
    weight: Float[Array, "G I O"] | Float[Array, "G O I"],
    group_sizes: Int[Array, " G"],
    inputs: Inputs,
    dtype: jnp.dtype,
) -> Float[Array, "R O"]:
    """Products of rows in order of their groups, of which `group_sizes` counts each one's, in
    `dtype`. What rows after the last group's hold is not defined, nor is their gradient."""
    contracted = {"first": 1, "last": 2}[inputs]
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (contracted,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return jax.lax.ragged_dot_general(x, weight, group_sizes, numbers, preferred_element_type=dtype)


class Blocks(NamedTuple):
    """Rows laid out in blocks, each with rows of one group."""

    group: Int[Array, " N"]
    """The group of each block."""
    used: Int[Array, " 1"]
    """Number of blocks that have rows: the first ones."""
    row: Int[Array, "N M"]
    """The row in each place; R where there is none."""
    place: Int[Array, " R"]
    """Place of each row, counted over all blocks; N M for rows of no group."""


def blocks_of_groups(
    group: Int[Array, " R"], num_groups: int, implementation: Literal["xla", "hopper"]
) -> Blocks:
    """Lay out rows, of which `group` says each one's; from `num_groups` on it says none. M is close
    to the mean of a group's rows, and N is for the worst case."""
    rows = group.shape[0]
    mean = 1 << (-(-rows // num_groups) - 1).bit_length()
    least = 1 if implementation == "xla" else _MOST_ROWS // 2
    size = min(max(mean, least), _MOST_ROWS)
    count = rows if size == 1 else rows // size + min(num_groups, rows)

    order = jnp.argsort(group)
    of_sorted = jnp.minimum(group[order], num_groups - 1)
    sizes = jnp.bincount(group, length=num_groups)
    blocks = -(-sizes // size)
    ends = jnp.cumsum(blocks)
    first_row = jnp.cumsum(sizes) - sizes
    first_block = ends - blocks
    place = (first_block * size - first_row)[of_sorted] + jnp.arange(rows)
    place = jnp.where(group[order] < num_groups, place, count * size)
    return Blocks(
        group=jnp.minimum(
            jnp.searchsorted(ends, jnp.arange(count), side="right"), num_groups - 1
        ).astype(jnp.int32),
        used=ends[-1:].astype(jnp.int32),
        row=jnp.full(count * size, rows).at[place].set(order, mode="drop").reshape(count, size),
        place=jnp.zeros_like(place).at[order].set(place),
    )


def block_product(
    x: Float[Array, "N M I"],
    weight: Num[Array, "G I O"] | Num[Array, "G O I"],
    blocks: Blocks,
    inputs: Inputs,
    implementation: Literal["xla", "hopper"],
    dtype: jnp.dtype,
) -> Float[Array, "N M O"]:
    """Products of blocks, in `dtype`; `weight` may have fewer bits than `x`. What blocks without
    rows hold is not defined."""
    if implementation == "hopper":
        return _hopper(x, weight.astype(x.dtype), blocks.group, blocks.used, inputs, dtype)
    spec = {"first": "MI,IO->MO", "last": "MI,OI->MO"}[inputs]

    @jax.checkpoint  # the backward pass gathers again: kept, matrices would be many
    def product(block):
        x, group = block
        return jnp.einsum(spec, x, weight[group].astype(x.dtype), preferred_element_type=dtype)

    return jax.lax.map(product, (x, blocks.group), batch_size=_BLOCKS_AT_ONCE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _hopper(x, weight, group, used, inputs: Inputs, dtype):
    return _kernel(x, weight, group, used, inputs, dtype)


@functools.partial(jax.jit, static_argnums=(4, 5))  # compiled once for all layers
def _kernel(x, weight, group, used, inputs: Inputs, dtype) -> Array:
    return kernels_of("hopper").grouped.block_product(x, weight, group, used, inputs, dtype)


def _forward(x, weight, group, used, inputs: Inputs, dtype):
    return _kernel(x, weight, group, used, inputs, dtype), (x, weight, group, used)


def _backward(inputs: Inputs, dtype, saved, gradient):
    x, weight, group, used = saved
    has_rows = (jnp.arange(group.size) < used)[:, None, None]
    other: Inputs
    other, spec = ("last", "NMI,NMO->NIO") if inputs == "first" else ("first", "NMI,NMO->NOI")
    of_x = _kernel(gradient.astype(x.dtype), weight, group, used, other, x.dtype)
    # Experts are frozen: compiled programs do not use this one, and leave it out.
    of_blocks = jnp.where(has_rows, jnp.einsum(spec, x, gradient), 0)
    of_weight = jnp.zeros_like(weight).at[group].add(of_blocks.astype(weight.dtype))
    return jnp.where(has_rows, of_x, 0), of_weight, None, None


_hopper.defvjp(_forward, _backward)
