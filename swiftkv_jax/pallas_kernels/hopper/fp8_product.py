"""Products of FP8 rows with an FP8 matrix: out = (x weight^T) x_scale weight_scale.

A thread block takes tiles of 128 rows and 256 outputs in turn, neighbours in a snake over both, so
that the L2 keeps what they share. One warpgroup only issues TMA copies of 128 inputs of both into a
ring of slots; each of the two others multiplies for 64 of the rows. Sums of all inputs stay in the
tensor cores' accumulators, and the scales are applied to them before they are rounded.

Cost for R rows: 2 R I O FLOPs, R I + O I bytes read, 2 R O written. On an H100 the four products of
a layer of Llama-3.1-8B reach 1,226 to 1,398 TFLOP/s at 2,048 rows, where cuBLASLt, which leaves the
scales to another pass, reaches 1,041 to 1,277.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..device import num_multiprocessors
from ..implementations import ImplementationError
from .backward_block import COLUMN, ROW, ROWS, Accumulator, across, down

_TILE = (2 * ROWS, 256)
_DEPTH = 128
_STAGES = 4
_WIDTH = 8  # tiles side by side in a turn of the snake
_STORED = 64  # outputs that are stored at a time


def unsupported_reason(rows: int, inputs: int, outputs: int, dtype) -> str | None:
    """Why the kernel cannot multiply such operands; None if it can."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"makes bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if rows % _TILE[0] or outputs % _TILE[1] or inputs % _DEPTH:
        return (
            f"takes rows in multiples of {_TILE[0]}, outputs of {_TILE[1]} and inputs of {_DEPTH}"
        )
    return None


def fp8_product(
    x: Float[Array, "R I"],
    weight: Float[Array, "O I"],
    x_scale: Float[Array, " R"],
    weight_scale: Float[Array, " O"],
    dtype: jnp.dtype,
) -> Float[Array, "R O"]:
    """The product of float8_e4m3fn operands, scaled, in `dtype`."""
    (rows, depth), outputs = x.shape, weight.shape[0]
    if reason := unsupported_reason(rows, depth, outputs, dtype):
        raise ImplementationError("hopper", f"of FP8 products {reason}")
    tiles = rows // _TILE[0], outputs // _TILE[1]
    # Lane semantics, unlike those of the other kernels, leave the layouts to the kernel.
    operand, result = (
        (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))  # pyright: ignore
        for width in (128, _STORED)
    )

    def kernel(x_gmem, weight_gmem, x_scale_gmem, weight_scale_gmem, out_gmem):
        def pipeline(body, context):
            specs = [
                plgpu.BlockSpec(
                    (size, _DEPTH),
                    lambda step: (0, step),
                    transforms=operand,
                    memory_space=plgpu.SMEM,
                )
                for size in _TILE
            ]
            return plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(depth // _DEPTH,),
                memory_registers=40,
                in_specs=specs,
                wg_axis="wg",
                num_compute_wgs=2,
                max_concurrent_steps=_STAGES,
                compute_context=context,
            )

        def nothing(*_, **__):
            return None

        @functools.partial(
            pl.run_scoped,
            ring=pipeline(nothing, nothing).get_allocations(x_gmem, weight_gmem),
            out_smem=plgpu.SMEM((2, 2, ROWS, _STORED), dtype, transforms=result),
            collective_axes="wg",
        )
        def _(ring, out_smem):
            wg = lax.axis_index("wg")

            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
            def _tile(loop):
                row, column = plgpu.planar_snake(loop.index[0], tiles, 1, _WIDTH)
                first_row, first_column = row * _TILE[0], column * _TILE[1]

                def store(sums):
                    at = pl.ds(first_row + wg * ROWS, ROWS)
                    of_rows = plgpu.load(x_scale_gmem.at[at], layout=ROW, optimized=False)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for part in range(_TILE[1] // _STORED):
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        columns = pl.ds(first_column + part * _STORED, _STORED)
                        of_columns = plgpu.load(
                            weight_scale_gmem.at[columns], layout=COLUMN, optimized=False
                        )
                        out = sums[:, part * _STORED : (part + 1) * _STORED]
                        out = out * down(of_rows, out.shape) * across(of_columns, out.shape)
                        out_smem.at[wg, part % 2][...] = out.astype(dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(out_smem.at[wg, part % 2], out_gmem.at[at, columns])

                def context(run):
                    def whole(acc):
                        run(acc)
                        store(acc[...])

                    pl.run_scoped(whole, Accumulator((ROWS, _TILE[1]), jnp.float32))

                def body(_, x_smem, weight_smem, acc):
                    own = x_smem.at[pl.ds(wg * ROWS, ROWS)]
                    plgpu.wgmma(acc, own, weight_smem.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    return acc

                pipeline(body, context)(
                    x_gmem.at[pl.ds(first_row, _TILE[0]), :],
                    weight_gmem.at[pl.ds(first_column, _TILE[1]), :],
                    allocations=ring,
                )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
        grid=(min(num_multiprocessors(), tiles[0] * tiles[1]),),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        kernel_name="hopper_fp8_product",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(x, weight, x_scale, weight_scale)
