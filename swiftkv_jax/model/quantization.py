"""Weight matrices of 8 bits with a float32 scale per output channel, for inference.

A `Quantized` stands in a tree where an array would: scans, `unstack` and shardings see its two
arrays. Only matrices of the layers and of the delta are quantised; embedding, head, norms and
biases stay as they are.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from ..errors import UsageError
from ..pallas_kernels.choice import choose_product
from ..pallas_kernels.device import Device, current_device
from ..pallas_kernels.eight_bits import to_eight_bits
from ..pallas_kernels.fp8_product import fp8_product
from ..pallas_kernels.fp8_rows import NormOptions, fp8_norm, fp8_swiglu
from .low_rank import Adapted, added
from .params import Llama, Param, SwiftKV, map_params

Format = Literal["fp8", "int8"]
"""fp8 is float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no infinities, at most 448."""
FORMATS: tuple[Format, ...] = ("fp8", "int8")
Arithmetic = Literal["widen", "native", "auto"]

VALUES = "values"
SCALE = "scale"
"""The fields of a `Quantized`, the last part of its arrays' names in a tree."""

CPU_ROWS = 128
"""Most rows of a product on a CPU whose weights are the left operand: to transpose the result of
more takes as long as that saves."""

DTYPES: dict[Format, Any] = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
# Device kinds whose matrix units multiply float8_e4m3fn: Hopper and Blackwell, Ironwood.
_ARITHMETIC: dict[str, Arithmetic] = {
    r"NVIDIA G?(H100|H200|B200|B300)\b": "auto",
    r"TPU ?7x": "native",
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How weights are kept, and how products with them run.

    `widen` converts the weights to the activations' dtype inside the product. `native` quantises
    the activations too, each token by its own largest magnitude, and multiplies 8 bits by 8 bits.
    For fp8 that is what `FP8_DYNAMIC` checkpoints are calibrated for, and on an H100 1.4 to 1.5
    times as fast in prefill as bfloat16. For int8 it is never the default: activations have
    outliers that 8-bit integers with one scale per token may not represent (arXiv:2208.07339).

    `auto` (fp8 only) is `native` for two rows or more, and `widen` for one row, as a sum: that
    spares the passes that quantise, and a GPU widens weights as it reads them. As a product with
    widened weights XLA for GPUs fuses it through Triton only; without, each layer's weights are
    written to memory in 16 bits, and a loop over steps holds all of them. Two float8 rows or more
    are one call of cuBLASLt.
    """

    format: Format
    arithmetic: Arithmetic = "widen"
    kernels: str | None = None
    """The device's kernels (`Device.kernels`), which run products of float8 by float8 where they
    take them; None runs all through XLA, as on several devices."""

    def __post_init__(self):
        if self.format not in FORMATS:
            raise UsageError(
                f"`quantization`={self.format!r} is not known; choose {' or '.join(FORMATS)}"
            )
        known = get_args(Arithmetic) if self.format == "fp8" else ("widen", "native")
        if self.arithmetic not in known:
            raise UsageError(
                f"`arithmetic`={self.arithmetic!r} is not known for {self.format}; choose widen "
                f"or native, or auto with fp8"
            )

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(DTYPES[self.format])

    def __str__(self) -> str:
        if self.arithmetic != "widen":
            return f"{self.format} weights times activations quantised per token"
        reason = "" if self.format == "int8" else " (this device has no FP8 arithmetic)"
        return f"{self.format} weights, widened in each product{reason}"


def scheme_for(format: Format, device_kind: str) -> Scheme:
    """The arithmetic that suits a `jax.Device.device_kind`. Raises `UsageError` for an unknown
    format."""
    if format == "fp8":
        for kind, arithmetic in _ARITHMETIC.items():
            if re.match(kind, device_kind):
                return Scheme(format, arithmetic)
    return Scheme(format)


@struct.dataclass
class Quantized:
    """A matrix: `values` times `scale`, which lacks the axes that a product sums over."""

    values: Any  # the matrix's shape, output channels first; float8_e4m3fn or int8
    scale: Any  # f32; shape values.shape[: scale.ndim]
    scheme: Scheme = struct.field(pytree_node=False)


@struct.dataclass
class QuantizedRows:
    """Activations in 8 bits, in the place of the array that products would quantise."""

    values: Any  # rows, then the axis that products sum over; float8_e4m3fn
    scale: Any  # f32; one for each row
    dtype: Any = struct.field(pytree_node=False)
    """Dtype of that array."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def is_quantized(leaf: Any) -> bool:
    """For `is_leaf` of `jax.tree.map` and `params.map_params`."""
    return isinstance(leaf, Quantized)


def values_of(leaf: Any) -> Any:
    """The array, or of a quantised one its 8-bit values."""
    if isinstance(leaf, Quantized):
        return leaf.values
    return leaf


def quantize(weight: Float[Array, "*shape"], in_axes: int, scheme: Scheme) -> Quantized:
    """Round to nearest, with the scale of each output channel set by its largest magnitude.

    Products sum over the last `in_axes` axes. An int8 value is off by at most half a scale; an fp8
    one by a sixteenth of itself, or by 2^-10 of a scale where it is below 2^-6 of one.
    """
    return Quantized(
        *to_eight_bits(weight, tuple(range(weight.ndim - in_axes, weight.ndim)), scheme.dtype),
        scheme,
    )


def dequantize(weight: Quantized, dtype) -> Float[Array, "*shape"]:
    """The matrix as one array."""
    scale = weight.scale.reshape(
        *weight.scale.shape, *(1,) * (weight.values.ndim - weight.scale.ndim)
    )
    return (weight.values.astype(jnp.float32) * scale).astype(dtype)


def product(
    spec: str,
    x: Float[Array, "*x"] | QuantizedRows,
    weight: Array | Quantized | Adapted,
    dtype: Any = None,
) -> Float[Array, "*out"]:
    """`jnp.einsum(spec, x, weight)`, of a plain matrix, a quantised or an adapted one: in `dtype`,
    None that of x.

    The scales are applied to the sums, in float32. What adapters add is no part of a quantised
    matrix.
    """
    if isinstance(weight, Adapted):
        assert not isinstance(x, QuantizedRows), "adapters need the activations themselves"
        return product(spec, x, weight.matrix, dtype) + added(product, spec, x, weight)
    inputs, _, out = spec.partition("->")
    of_x, of_weight = inputs.split(",")
    if isinstance(x, QuantizedRows):
        assert isinstance(weight, Quantized), "rows are quantised for a quantised matrix"
        return _eight_bit_product(of_x, of_weight, out, x, weight, dtype)
    on_cpu = current_device().platform == "cpu"
    multiply = _multiply_on_cpu if on_cpu else _multiply
    if not isinstance(weight, Quantized):
        return multiply(of_x, of_weight, out, x, weight, dtype)
    dtype = x.dtype if dtype is None else dtype
    outputs = of_weight[: weight.scale.ndim]
    num_inputs = math.prod(weight.values.shape[len(outputs) :])
    arithmetic = weight.scheme.arithmetic
    reads_row = arithmetic == "auto" or (arithmetic == "widen" and on_cpu)
    if reads_row and x.size == num_inputs:
        return _spread(_row_product(x, weight), outputs, out).astype(dtype)
    if arithmetic == "widen":
        scale = _spread(weight.scale, outputs, out)
        values = weight.values.astype(x.dtype)
        sums = multiply(of_x, of_weight, out, x, values, _sums_of(x.dtype))
        return (sums * scale).astype(dtype)
    summed = tuple(axis for axis, letter in enumerate(of_x) if letter not in out)
    rows = QuantizedRows(*to_eight_bits(x, summed, weight.scheme.dtype), x.dtype)
    return _eight_bit_product(of_x, of_weight, out, rows, weight, dtype)


def _eight_bit_product(
    of_x: str, of_weight: str, out: str, x: QuantizedRows, weight: Quantized, dtype: Any
) -> Array:
    dtype = x.dtype if dtype is None else dtype
    rows = "".join(letter for letter in of_x if letter in out)
    outputs = of_weight[: weight.scale.ndim]
    num_inputs = math.prod(weight.values.shape[len(outputs) :])
    call = x.scale.size, num_inputs, weight.scale.size, x.dtype
    choice = choose_product(weight.scheme.kernels, "fp8_product", call, rows=x.scale.size)
    if choice.implementation != "xla":
        found = fp8_product(
            x.values.reshape(-1, num_inputs),
            weight.values.reshape(-1, num_inputs),
            x.scale.ravel(),
            weight.scale.ravel(),
            dtype,
            choice.implementation,
        )
        found = found.reshape(*x.scale.shape, *weight.scale.shape)
        return jnp.einsum(f"{rows}{outputs}->{out}", found)
    scale = _spread(weight.scale, outputs, out) * _spread(x.scale, rows, out)
    sums = jnp.dtype(jnp.int32) if weight.scheme.format == "int8" else _sums_of(x.dtype)
    return (_multiply(of_x, of_weight, out, x.values, weight.values, sums) * scale).astype(dtype)


def _sums_of(dtype: Any) -> jnp.dtype:
    """The dtype of sums without their scale, which may exceed float16. bfloat16 holds them, and is
    half of what devices exchange."""
    return jnp.promote_types(dtype, jnp.bfloat16)


def quantized_swiglu(
    gate_up: Float[Array, "*B M"], weight: Array | Quantized | Adapted
) -> QuantizedRows | None:
    """SiLU(gate) up of rows that have both side by side, for a product with `weight`; None where no
    kernel makes and quantises them at once."""
    *rows, width = gate_up.shape
    implementation = _rows_kernel(rows, width // 2, gate_up.dtype, weight)
    if implementation is None:
        return None
    values, scale = fp8_swiglu(gate_up.reshape(-1, width), implementation)
    return QuantizedRows(values.reshape(*rows, width // 2), scale.reshape(rows), gate_up.dtype)


def quantized_norm(
    x: Float[Array, "*B D"],
    added: Float[Array, "*B D"] | None,
    scale: Float[Array, " D"],
    options: NormOptions,
    weight: Array | Quantized | Adapted | None,
) -> tuple[Float[Array, "*B D"], QuantizedRows] | None:
    """(x + added, its norm for a product with `weight`), of x alone where `added` is None; None
    where no kernel makes and quantises the norm at once."""
    *rows, width = x.shape
    implementation = _rows_kernel(rows, width, x.dtype, weight)
    if implementation is None:
        return None
    flat = None if added is None else added.reshape(-1, width)
    total, values, of_rows = fp8_norm(x.reshape(-1, width), flat, scale, options, implementation)
    if total is not None:
        x = total.reshape(x.shape)
    return x, QuantizedRows(values.reshape(x.shape), of_rows.reshape(rows), x.dtype)


def _rows_kernel(rows: Sequence[int], width: int, dtype: Any, weight: Any) -> str | None:
    """The implementation with a kernel for rows that products with `weight` take in 8 bits."""
    if not isinstance(weight, Quantized) or weight.scheme.arithmetic == "widen":
        return None
    kernels, call = weight.scheme.kernels, (width, dtype)
    choice = choose_product(kernels, "fp8_rows", call, rows=math.prod(rows))
    return None if choice.implementation == "xla" else choice.implementation


def _multiply(of_x: str, of_weight: str, out: str, x: Array, weight: Array, dtype: Any) -> Array:
    return jnp.einsum(f"{of_x},{of_weight}->{out}", x, weight, preferred_element_type=dtype)


def _multiply_on_cpu(
    of_x: str, of_weight: str, out: str, x: Array, weight: Array, dtype: Any
) -> Array:
    """`_multiply` as XLA's CPU backend is fast at it.

    In each call it copies the right operand of a product of several rows into another layout. With
    few rows the weights are therefore the left one: in float32 that takes a third to a half of the
    time. One row alone reads float32 weights as they are; narrower ones it would widen first, so a
    row of zeros is added, which makes it twice as fast.
    """
    rows = "".join(letter for letter in of_x if letter in out)
    outputs = "".join(letter for letter in of_weight if letter in out)
    num_rows = math.prod(size for size, letter in zip(x.shape, of_x, strict=True) if letter in out)
    is_row = num_rows == 1
    if not 0 < num_rows <= CPU_ROWS or (is_row and x.dtype == jnp.float32):
        return _multiply(of_x, of_weight, out, x, weight, dtype)
    if is_row:
        x = jnp.pad(x, ((0, 1), *((0, 0),) * (x.ndim - 1)))
    found = _multiply(of_weight, of_x, outputs + rows, weight, x, dtype)
    # Without it XLA would exchange the operands of a product whose result is transposed.
    found = jax.lax.optimization_barrier(found)
    if is_row:
        found = jax.lax.slice_in_dim(found, 0, 1, axis=len(outputs))
    return jnp.einsum(f"{outputs}{rows}->{out}", found)


def _row_product(x: Float[Array, "*x"], weight: Quantized) -> Float[Array, "*channels"]:
    """The product with one row, in float32, as a sum over the weights."""
    inputs = weight.values.shape[weight.scale.ndim :]
    products = weight.values.astype(jnp.float32) * x.reshape(inputs).astype(jnp.float32)
    return jnp.sum(products, axis=tuple(range(-len(inputs), 0))) * weight.scale


def as_matrix(weight: Any) -> Any:
    """A matrix, plain or quantised, with the axes after the first merged into one; adapted as it
    was."""
    if isinstance(weight, Adapted):
        return dataclasses.replace(weight, matrix=as_matrix(weight.matrix))
    if isinstance(weight, Quantized):
        return dataclasses.replace(weight, values=as_matrix(weight.values))
    return weight.reshape(weight.shape[0], -1)


def merge_outputs(weight: Any) -> Any:
    """A matrix, plain or quantised, with the axes before the last merged into one; adapted as it
    was."""
    if isinstance(weight, Adapted):
        return dataclasses.replace(weight, matrix=merge_outputs(weight.matrix))
    if isinstance(weight, Quantized):
        return dataclasses.replace(
            weight, values=merge_outputs(weight.values), scale=weight.scale.ravel()
        )
    return weight.reshape(-1, weight.shape[-1])


def quantized_shapes[Tree: Llama | SwiftKV](shapes: Tree, scheme: Scheme | None) -> Tree:
    """A tree of `params` in which each matrix's `ShapeDtypeStruct` has become a `Quantized` of two;
    None changes nothing."""
    if scheme is None:
        return shapes

    def quantized(row: Param, leaf: jax.ShapeDtypeStruct):
        if row.in_axes is None:
            return leaf
        scale = jax.ShapeDtypeStruct(leaf.shape[: -row.in_axes], jnp.float32)
        return Quantized(jax.ShapeDtypeStruct(leaf.shape, scheme.dtype), scale, scheme)

    return map_params(quantized, shapes)


def scheme_of(tree: Any) -> Scheme | None:
    """The scheme of the tree's quantised matrices; None if it has none."""
    leaves = jax.tree.leaves(tree, is_leaf=is_quantized)
    return next((leaf.scheme for leaf in leaves if is_quantized(leaf)), None)


def with_kernels[Tree](tree: Tree, device: Any) -> Tree:
    """The tree with the kernels of `device`, a `jax.Device`, for each quantised matrix."""
    return with_scheme(tree, kernels=Device.of(device).kernels)


def with_scheme[Tree](tree: Tree, **fields: Any) -> Tree:
    """The tree with these fields in the scheme of each quantised matrix."""

    def leaf(weight):
        if not is_quantized(weight):
            return weight
        return dataclasses.replace(weight, scheme=dataclasses.replace(weight.scheme, **fields))

    return jax.tree.map(leaf, tree, is_leaf=is_quantized)


def refuse_quantized(tree: Any, purpose: str) -> None:
    """Raise `UsageError` if a matrix of `tree` is quantised: `purpose` needs the weights as they
    were."""
    if (scheme := scheme_of(tree)) is not None:
        how = "load(..., quantization='none') dequantises them, and save keeps the result"
        raise UsageError(f"{purpose} needs unquantised weights, these are {scheme.format}: {how}")


def _spread(scale: Float[Array, "*channels"], letters, out: str) -> Float[Array, "*out"]:
    """`scale`, whose axes are `letters` in the order in which `out` has them, with an axis of one
    for each other letter."""
    sizes = dict(zip(letters, scale.shape, strict=True))
    return scale.reshape([sizes.get(letter, 1) for letter in out])
