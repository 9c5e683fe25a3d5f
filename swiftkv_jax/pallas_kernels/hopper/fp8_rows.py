"""Rows that are quantised to FP8 as they are made: SiLU(gate) up, and the norm of a sum.

A thread block has one row, in registers: it reads memory once, finds the largest magnitude of what
it makes, and writes that in 8 bits, and its scale. Of SwiGLU it holds the 16-bit results, 56
registers of a thread at a width of 14,336.

Cost for R rows of F values: SwiGLU reads 4 R F bytes and writes R F; a norm reads 2 R F and writes
R F, or with a sum 4 R F and 3 R F. XLA, in two passes, reads twice as much.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

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
    """Why the kernels cannot make rows of so many values; None if they can."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"takes bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if width % _THREADS or width > _WIDEST:
        return f"makes FP8 rows of a multiple of {_THREADS} values, {_WIDEST} at most"
    return None


def fp8_swiglu(gate_up: Float[Array, "R M"]) -> tuple[Float[Array, "R F"], Float[Array, " R"]]:
    """(values, scale of each row) of SiLU(gate) up."""
    width = gate_up.shape[1] // 2

    def make(row, gate_up_gmem):
        made = []
        for part in _parts(width):
            gate = _load(gate_up_gmem.at[row, part])
            up = _load(gate_up_gmem.at[row, pl.ds(width + part.start, part.size)])
            made.append((gate / (1 + jnp.exp(-gate)) * up).astype(gate_up.dtype))
        return made

    _, values, scale = _run("hopper_fp8_swiglu", make, width, None, gate_up)
    return values, scale


def fp8_norm(
    x: Float[Array, "R D"],
    added: Float[Array, "R D"] | None,
    weight: Float[Array, " D"],
    eps: float,
    offset: bool,
    wide: bool,
) -> tuple[Float[Array, "R D"] | None, Float[Array, "R D"], Float[Array, " R"]]:
    """(x + added, values, scale of each row) of the root-mean-square norm of x + added; without
    `added` (None, and those of x). Options are those of `model.layers.rms_norm`."""
    width = x.shape[1]

    def make(row, x_gmem, weight_gmem, *sum_refs):
        rows = []
        for part in _parts(width):
            one = _load(x_gmem.at[row, part])
            if sum_refs:
                added_gmem, sum_gmem = sum_refs
                one = (one + _load(added_gmem.at[row, part])).astype(x.dtype)
                store_plain(sum_gmem.at[row, part], one)
                one = one.astype(jnp.float32)
            rows.append(one)
        squares = functools.reduce(jnp.add, [one * one for one in rows])
        factor = lax.rsqrt(jnp.sum(squares) / width + eps)
        made = []
        for part, one in zip(_parts(width), rows, strict=True):
            normed = one * factor
            if not wide:
                normed = normed.astype(x.dtype).astype(jnp.float32)
            made.append((normed * (_load(weight_gmem.at[part]) + float(offset))).astype(x.dtype))
        return made

    if added is None:
        return _run("hopper_fp8_norm", make, width, None, x, weight)
    return _run("hopper_fp8_sum_norm", make, width, x.dtype, x, weight, added)


def _run(
    name: str, make: Callable[..., list[Array]], width: int, sum_dtype: Any, *operands: Array
) -> tuple[Any, Any, Any]:
    """(sums or None, values, scales) of the rows whose parts are `make(row, *refs)`, where a ref
    for sums of `sum_dtype` is the last."""
    rows = operands[0].shape[0]

    def kernel(*refs):
        *inputs, sum_gmem, values_gmem, scale_gmem = refs
        row = lax.axis_index("row")
        if sum_gmem is not None:
            inputs = [*inputs, sum_gmem]
        made = make(row, *inputs)
        sizes = [jnp.abs(x.astype(jnp.float32)) for x in made]
        scale = jnp.max(functools.reduce(jnp.maximum, sizes)) / largest_of(_FP8)
        scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
        scale_gmem[row] = scale
        inverse = 1 / scale
        for part, x in zip(_parts(width), made, strict=True):
            store_plain(values_gmem.at[row, part], (x.astype(jnp.float32) * inverse).astype(_FP8))

    shape = rows, width
    call = plgpu.kernel(
        kernel,
        out_type=[
            None if sum_dtype is None else jax.ShapeDtypeStruct(shape, sum_dtype),
            jax.ShapeDtypeStruct(shape, _FP8),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        grid=(rows,),
        grid_names=("row",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return tuple(call(*operands))


def _parts(width: int) -> list[Any]:
    size = math.gcd(width, _PART)
    return [pl.ds(start, size) for start in range(0, width, size)]


def _load(ref):
    """A part of a row, in float32, spread over the threads."""
    size = ref.shape[0]
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=min(8, size // _THREADS))
    return plgpu.load(ref, layout=layout).astype(jnp.float32)
