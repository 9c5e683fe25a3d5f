"""Products of blocks of rows by the matrices of their groups: out[n] = x[n] weight[group[n]].

A thread block has one block of rows and 128 outputs. One warpgroup only issues TMA copies of 64
inputs of the rows and of the matrix into a ring of slots; each of the others multiplies for 64 of
the rows. Blocks of one group run next to each other, so that its matrix is read from memory once.

Cost for N blocks of M rows in G groups: 2 N M I O FLOPs, 2 G I O bytes of weights, which is the
floor while a group has fewer rows than an H100 multiplies in the time (some 300), and 2 N M I bytes
of rows for each 128 outputs, of which the L2 keeps some.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from ..implementations import ImplementationError
from .backward_block import ROWS, Accumulator, compiler_params

COLUMNS = 128
_DEPTH = 64
_STAGES = 4


def unsupported_reason(inputs: int, outputs: int, dtype) -> str | None:
    """Why the kernel cannot multiply by such matrices; None if it can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 or float16, got {jnp.dtype(dtype).name}"
    if inputs % _DEPTH or outputs % COLUMNS:
        return f"takes inputs in multiples of {_DEPTH} and outputs of {COLUMNS}"
    return None


def block_product(
    x: Float[Array, "N M I"],  # M is 64 or 128
    weight: Float[Array, "G I O"] | Float[Array, "G O I"],
    group: Int[Array, " N"],
    used: Int[Array, " 1"],
    inputs: Literal["first", "last"],
    dtype: jnp.dtype,
) -> Float[Array, "N M O"]:
    """The products of the first `used` blocks, in `dtype`; what the others hold is not defined."""
    count, rows, depth = x.shape
    if inputs == "first":
        outputs = weight.shape[2]
        weight_tile = (_DEPTH, COLUMNS)
    else:
        outputs = weight.shape[1]
        weight_tile = (COLUMNS, _DEPTH)
    if reason := unsupported_reason(depth, outputs, x.dtype):
        raise ImplementationError("hopper", f"of grouped products {reason}")
    consumers = rows // ROWS
    steps = depth // _DEPTH

    def kernel(x_gmem, weight_gmem, group_gmem, used_gmem, out_gmem, *scratch):
        x_smem, weight_smem, out_smem, full, free = scratch
        block = lax.axis_index("block")
        wg = lax.axis_index("wg")
        columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)

        def slot(step):
            return lax.rem(step, jnp.int32(_STAGES))

        @pl.when((block < used_gmem[0]) & (wg == consumers))
        def _producer():
            matrix = weight_gmem.at[group_gmem[block]]

            @pl.loop(0, steps)
            def _load(step):
                at = slot(step)
                pl.when(step >= _STAGES)(lambda: plgpu.barrier_wait(free.at[at]))
                part = pl.ds(step * _DEPTH, _DEPTH)
                plgpu.copy_gmem_to_smem(x_gmem.at[block, :, part], x_smem.at[at], full.at[at])
                tile = matrix.at[part, columns] if inputs == "first" else matrix.at[columns, part]
                plgpu.copy_gmem_to_smem(tile, weight_smem.at[at], full.at[at])

            # Whatever was loaded must be seen consumed before the block ends.
            @pl.loop(max(steps - _STAGES, 0), steps)
            def _drain(step):
                plgpu.barrier_wait(free.at[slot(step)])

        @pl.when((block < used_gmem[0]) & (wg < consumers))
        def _consumer():
            rows = pl.ds(wg * ROWS, ROWS)

            def multiply(acc):
                @pl.loop(0, steps)
                def _step(step):
                    at = slot(step)
                    plgpu.barrier_wait(full.at[at])
                    tile = weight_smem.at[at]
                    if inputs == "last":
                        tile = tile.transpose((1, 0))
                    plgpu.wgmma(acc, x_smem.at[at, rows], tile)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[at])

                return plgpu.wgmma_accumulator_load(acc, wait_n=0)

            out = pl.run_scoped(multiply, Accumulator((ROWS, COLUMNS), jnp.float32))
            out_smem.at[wg][...] = out.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[wg], out_gmem.at[block, rows, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((count, rows, outputs), dtype),
        scratch_types=[
            plgpu.SMEM((_STAGES, rows, _DEPTH), x.dtype),
            plgpu.SMEM((_STAGES, *weight_tile), x.dtype),
            plgpu.SMEM((consumers, ROWS, COLUMNS), dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=_STAGES),
        ],
        grid=(outputs // COLUMNS, count),
        grid_names=("column", "block"),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name="hopper_grouped",
        compiler_params=compiler_params(),
    )(x, weight, group, used)
