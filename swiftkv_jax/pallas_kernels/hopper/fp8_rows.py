"""Rows that are quantised to FP8 as they are made: SiLU(gate) up.

A thread block has one row, in registers: it reads gate and up once, finds the largest magnitude of
the result, and writes the result in 8 bits and its scale. It holds 16-bit results of its thread,
56 registers at a width of 14,336.

Cost for R rows of F values: 4 R F bytes read, R F + 4 R written. XLA, in two passes, reads 8 R F.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..eight_bits import largest_of
from .decode_combine import store_plain

_THREADS = 128
_PART = 2048
"""Most values of a row that are computed at a time."""
_WIDEST = 16384
"""Values of a row that a thread block has registers for."""
_FP8 = jnp.float8_e4m3fn


def unsupported_reason(width: int, dtype) -> str | None:
    """Why the kernel cannot make rows of so many values; None if it can."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"takes bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if width % _THREADS or width > _WIDEST:
        return f"makes FP8 rows of a multiple of {_THREADS} values, {_WIDEST} at most"
    return None


def fp8_swiglu(gate_up: Float[Array, "R 2F"]) -> tuple[Float[Array, "R F"], Float[Array, " R"]]:
    """(values, scale of each row) of SiLU(gate) up."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    part = math.gcd(width, _PART)
    layout = plgpu.Layout.WG_STRIDED((part,), vec_size=min(8, part // _THREADS))

    def kernel(gate_up_gmem, values_gmem, scale_gmem):
        row = lax.axis_index("row")

        def load(start):
            ref = gate_up_gmem.at[row, pl.ds(start, part)]
            return plgpu.load(ref, layout=layout).astype(jnp.float32)

        starts = range(0, width, part)
        made = []
        for start in starts:
            gate = load(start)
            silu = gate / (1 + jnp.exp(-gate))
            made.append((silu * load(width + start)).astype(gate_up.dtype))
        sizes = [jnp.abs(x.astype(jnp.float32)) for x in made]
        largest = jnp.max(functools.reduce(jnp.maximum, sizes))
        scale = largest / largest_of(_FP8)
        scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
        scale_gmem[row] = scale
        inverse = 1 / scale
        for start, x in zip(starts, made, strict=True):
            values = (x.astype(jnp.float32) * inverse).astype(_FP8)
            store_plain(values_gmem.at[row, pl.ds(start, part)], values)

    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((rows, width), _FP8),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        grid=(rows,),
        grid_names=("row",),
        kernel_name="hopper_fp8_swiglu",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(gate_up)
