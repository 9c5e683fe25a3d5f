"""Quantised matrices against NumPy: their rounding, products with them, and whole models made of
them."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import UsageError
from swiftkv_jax.model import quantization
from swiftkv_jax.model.layers import output_and_mlp
from swiftkv_jax.model.mesh import MeshShape, make_mesh
from swiftkv_jax.model.params import Param, ServingBlock, map_params
from swiftkv_jax.model.quantization import (
    CPU_ROWS,
    Arithmetic,
    Quantized,
    Scheme,
    as_matrix,
    dequantize,
    product,
    quantize,
    quantized_shapes,
    refuse_quantized,
    scheme_for,
    scheme_of,
    with_scheme,
)
from swiftkv_jax.model.sharding import llama_shardings, swiftkv_shardings
from swiftkv_jax.model.stacks import split_layers
from swiftkv_jax.pallas_kernels import choice
from tests import tiny
from tests.pallas_kernels.interpreted import device_of

FP8, INT8, NATIVE = Scheme("fp8"), Scheme("int8"), Scheme("fp8", "native")
AUTO = Scheme("fp8", "auto")
SCHEMES = {"fp8": FP8, "int8": INT8, "fp8 native": NATIVE, "fp8 auto": AUTO}
SCHEMES |= {"int8 native": Scheme("int8", "native")}
SCHEMES |= {"fp8 one row": AUTO, "int8 one row": INT8}
E4M3 = ml_dtypes.float8_e4m3fn
SPECS = {  # those of the model: shapes of x and of the matrix, and the axes summed over
    "BTD,NHD->BTNH": ((2, 3, 16), (4, 6, 16), 1),
    "BTM,DM->BTD": ((2, 3, 24), (16, 24), 1),
    "BTD,JKHD->BTJKH": ((2, 3, 16), (2, 3, 4, 16), 1),
    "BTD,PJKHD->PBTJKH": ((2, 3, 16), (2, 2, 3, 4, 16), 1),
}


def random(shape, seed=0, spread=3.0) -> jax.Array:
    """Normal numbers whose rows differ in size by orders of magnitude."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(
        rng.normal(size=shape) * np.exp(spread * rng.normal(size=(*shape[:-1], 1))), jnp.float32
    )


def rounded(x: np.ndarray, largest: float, dtype) -> tuple[np.ndarray, np.ndarray]:
    """(values as float64, scale) of each row."""
    amax = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.where(amax > 0, amax / np.float32(largest), np.float32(1))
    values = np.rint(x / scale) if dtype == np.int8 else x / scale
    return values.astype(dtype).astype(np.float64), scale.astype(np.float64)


def quantized_model(model: skv.Model, scheme: Scheme) -> skv.Model:
    def leaf(row: Param, array):
        return array if row.in_axes is None else quantize(array, row.in_axes, scheme)

    assert model.swiftkv is not None
    llama, delta = map_params(leaf, model.llama), map_params(leaf, model.swiftkv)
    return dataclasses.replace(model, llama=llama, swiftkv=delta)


def plain_model(model: skv.Model) -> skv.Model:
    """The same numbers without quantised matrices."""

    def leaf(weight):
        return dequantize(weight, model.dtype) if isinstance(weight, Quantized) else weight

    return jax.tree.map(leaf, model, is_leaf=lambda weight: isinstance(weight, Quantized))


@functools.cache
def tiny_model(scheme: Scheme | None = None) -> skv.Model:
    """Two lower layers and two upper ones, with biases."""
    hf = tiny.hf_config(num_hidden_layers=4, attention_bias=True)
    model = tiny.model_of(hf, tiny.tensors_for(hf))
    return model if scheme is None else quantized_model(model, scheme)


@functools.cache
def tiny_logits(scheme: Scheme | None = None, swiftkv: bool = True) -> np.ndarray:
    return np.asarray(skv.logits(tiny_model(scheme), tokens(), swiftkv=swiftkv))


def tokens() -> jax.Array:
    return jnp.asarray(tiny.tokens_for({"vocab_size": 61}, 4, 9))


# Rounding ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "largest", "dtype"), [(FP8, 448, E4M3), (INT8, 127, np.int8)], ids=["fp8", "int8"]
)
def test_rounds_to_nearest_with_a_scale_per_row(scheme, largest, dtype):
    weight = np.array(random((5, 7, 64)))
    weight[1, 2] = 0
    weight[3, 4, 5] = -1e3  # the largest of its row, and negative
    found = jax.jit(quantize, static_argnums=(1, 2))(weight, 1, scheme)
    values, scale = rounded(weight, largest, dtype)
    assert (
        found.values.dtype == dtype
        and found.scale.dtype == jnp.float32
        and found.scale.shape == (5, 7)
    )
    np.testing.assert_allclose(found.scale, scale[..., 0], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(found.values).astype(np.float64), values)
    assert found.scale[1, 2] == 1 and not np.asarray(found.values)[1, 2].astype(np.float32).any()
    assert float(found.values[3, 4, 5]) == -largest

    error = np.abs(np.asarray(dequantize(found, jnp.float32)) - weight)
    bound = scale / 2 if scheme is INT8 else np.maximum(np.abs(weight) / 16, scale * 2**-10)
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max() > 0.9 * bound.max() or scheme is FP8


@pytest.mark.parametrize("scheme", [FP8, INT8], ids=["fp8", "int8"])
def test_rows_too_small_for_a_scale_become_zero(scheme):
    found = quantize(jnp.full((2, 4), 1e-41), 1, scheme)
    np.testing.assert_array_equal(found.scale, 1)
    np.testing.assert_array_equal(dequantize(found, jnp.float32), 0)


def test_two_input_axes():
    weight = random((3, 4, 5, 6), spread=0.0)
    found, merged = quantize(weight, 2, FP8), quantize(weight.reshape(3, 4, 30), 1, FP8)
    np.testing.assert_array_equal(found.scale, merged.scale)
    np.testing.assert_array_equal(found.values.reshape(3, 4, 30), merged.values)
    one = Quantized(found.values[0], found.scale[0], FP8)
    np.testing.assert_array_equal(as_matrix(one).values, merged.values[0])
    np.testing.assert_array_equal(
        dequantize(one, jnp.float32).reshape(4, 30), dequantize(as_matrix(one), jnp.float32)
    )


# Products ---------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", SCHEMES)
def test_product(spec, name):
    of_x, of_weight, in_axes = SPECS[spec]
    if name.endswith("one row"):  # widened
        of_x = (1, 1, of_x[-1])
    x, weight = (
        random(of_x, seed=1),
        quantize(random(of_weight, seed=2, spread=1.0), in_axes, SCHEMES[name]),
    )
    matrix = (
        np.asarray(weight.values).astype(np.float64)
        * np.asarray(weight.scale, np.float64)[..., None]
    )
    largest = {"fp8 native": 448, "fp8 auto": 448, "int8 native": 127}.get(name)
    seen = np.asarray(x, np.float64)
    if largest:
        seen = np.multiply(*rounded(np.asarray(x), largest, weight.values.dtype))
    found = jax.jit(product, static_argnums=0)(spec, x, weight)
    assert found.dtype == jnp.float32
    size = np.einsum(spec, np.abs(seen), np.abs(matrix))
    assert (np.abs(found - np.einsum(spec, seen, matrix)) <= 1e-5 * size).all()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_product_in_half_precision(name, dtype):
    """Sums before the scale are far beyond float16's largest number."""
    x, weight = jnp.ones((1, 2, 4096), dtype), quantize(jnp.full((3, 4096), 0.01), 1, SCHEMES[name])
    found = product("BTD,FD->BTF", x, weight)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float32), 40.96, rtol=2**-7)


def test_product_by_a_kernel(monkeypatch):
    monkeypatch.setattr(choice, "FROM_ROWS", 128)
    x, weight = random((2, 64, 128)), quantize(random((2, 1, 2, 64, 128)), 1, AUTO)
    expected = product("BTD,PJKHD->PBTJKH", x.astype(jnp.bfloat16), weight)
    weight = dataclasses.replace(weight, scheme=dataclasses.replace(AUTO, kernels="hopper"))
    with device_of("hopper"):
        found = product("BTD,PJKHD->PBTJKH", x.astype(jnp.bfloat16), weight)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.float32(out) for out in (found, expected)), rtol=2**-7)


def test_rows_by_kernels(monkeypatch):
    """A layer whose kernels make and quantise activations is the one whose products do. Products
    stay XLA's."""

    def choose(kernels, name, *calls, rows):
        return choice.choose_product(kernels if name == "fp8_rows" else None, name, *calls)

    monkeypatch.setattr(quantization, "choose_product", choose)
    config = dataclasses.replace(tiny_model().config, embed_dim=128, mlp_dim=256)
    o, gate_up, down = (
        quantize(random(shape, seed), 1, AUTO)
        for seed, shape in enumerate([(128, 32), (2, 256, 128), (128, 256)])
    )
    block = ServingBlock(jnp.ones(128), o, jnp.ones(128), gate_up, down)
    x, attended = (random((2, 64, width)).astype(jnp.bfloat16) for width in (128, 32))

    def layer(block):
        return output_and_mlp(config, block, x, attended[:, :, None])

    expected = layer(block)
    with device_of("hopper"):
        by_kernels = with_scheme(block, kernels="hopper")
        found = layer(by_kernels)
        program = str(jax.make_jaxpr(layer)(by_kernels))
    assert all(name in program for name in ("hopper_fp8_sum_norm", "hopper_fp8_swiglu"))
    error = np.abs(np.float32(found) - np.float32(expected))
    assert (error <= 0.02 * np.abs(np.float32(expected)).max(axis=-1, keepdims=True)).all()


@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (1, 3), (2, CPU_ROWS)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_plain_matrices(rows, dtype):
    """In a compiled product of few rows on a CPU, but of more than one in float32, the weights are
    the left operand: it would copy them as the right one."""
    x, weight = (random(shape, spread=0.0).astype(dtype) for shape in [(*rows, 256), (48, 256)])
    compiled = jax.jit(product, static_argnums=0).lower("BTD,FD->BTF", x, weight).compile()
    found = compiled(x, weight)
    assert found.dtype == dtype
    exact = np.einsum("BTD,FD->BTF", np.float64(x), np.float64(weight))
    error = 2**-8 * np.abs(exact) + 1e-3
    assert (np.abs(np.float64(found) - exact) <= error).all()
    num = math.prod(rows)
    few = 1 < num <= CPU_ROWS or (num, dtype) == (1, jnp.bfloat16)
    (shape,) = re.findall(r"= \w+\[([\d,]+)\]\S* dot\(", str(compiled.as_text()))
    assert shape.startswith("48,") == few, shape


# Models -----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("swiftkv", [True, False], ids=["student", "teacher"])
def test_a_widened_model_is_its_dequantised_self(scheme, swiftkv):
    dequantised = skv.logits(plain_model(tiny_model(scheme)), tokens(), swiftkv=swiftkv)
    np.testing.assert_allclose(tiny_logits(scheme, swiftkv), dequantised, atol=3e-5, rtol=1e-5)
    assert 1e-3 < np.abs(tiny_logits(scheme, swiftkv) - tiny_logits(None, swiftkv)).max() < 1.0


def test_a_native_model_is_near_its_widened_self():
    assert 1e-3 < np.abs(tiny_logits(NATIVE) - tiny_logits(FP8)).max() < 0.5


def test_quantised_layers_can_be_split_elsewhere():
    model = tiny_model(INT8)
    moved = split_layers(model.config.cut(3), model.llama)
    assert moved.lower.gate.scale.shape == (3, 48) and scheme_of(moved) == INT8
    np.testing.assert_array_equal(moved.lower.gate.values[2], model.llama.upper.gate.values[0])


def test_shapes_and_shardings_are_those_of_a_quantised_model():
    model, mesh = tiny_model(FP8), make_mesh((2, 2))
    places = llama_shardings(model.config, mesh, FP8), swiftkv_shardings(model.config, mesh, FP8)
    assert jax.tree.structure(places) == jax.tree.structure((model.llama, model.swiftkv))
    shapes = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, jnp.float32), tiny_model().llama
    )
    assert quantized_shapes(shapes, FP8) == jax.eval_shape(lambda: model.llama)
    assert quantized_shapes(shapes, None) is shapes
    q, o = places[0].lower_qkv.q, places[0].lower.o
    assert tuple(q.values.spec) == tuple(q.scale.spec) == (None, "model")
    assert tuple(o.values.spec) == (None, None, "model") and tuple(o.scale.spec) == ()


@pytest.mark.parametrize(
    ("shape", "scheme"),
    [((1, 2), FP8), ((1, 2), NATIVE), ((2, 2), INT8), ((2, 2), NATIVE), (MeshShape(1, 2, 2), FP8)],
    ids=["1x2 fp8", "1x2 native", "2x2 int8", "2x2 native", "fsdp fp8"],
)
def test_a_mesh_changes_nothing(shape, scheme):
    model, mesh = tiny_model(scheme), make_mesh(shape)
    llama = jax.device_put(model.llama, llama_shardings(model.config, mesh, scheme))
    delta = jax.device_put(model.swiftkv, swiftkv_shardings(model.config, mesh, scheme))
    assert (
        not llama.lower.gate.values.is_fully_replicated
        and not llama.lower.gate.scale.is_fully_replicated
    )
    found = skv.logits(dataclasses.replace(model, llama=llama, swiftkv=delta), tokens())
    # A rounding of the activations may fall the other way where their sums were added in another
    # order.
    np.testing.assert_allclose(
        found, tiny_logits(scheme), atol=0.1 if scheme == NATIVE else 3e-5, rtol=1e-5
    )


# Schemes ----------------------------------------------------------------------

KINDS: dict[str, Arithmetic] = {
    "NVIDIA H100 80GB HBM3": "auto",
    "NVIDIA H200": "auto",
    "NVIDIA GH200 480GB": "auto",
    "NVIDIA B200": "auto",
    "TPU7x": "native",
    "NVIDIA A100-SXM4-80GB": "widen",
    "TPU v6 lite": "widen",
    "TPU v5p": "widen",
    "cpu": "widen",
}


@pytest.mark.parametrize("kind", KINDS)
def test_arithmetic_follows_the_device(kind):
    assert scheme_for("fp8", kind) == Scheme("fp8", KINDS[kind])
    assert scheme_for("int8", kind) == INT8


def test_schemes_say_what_they_do():
    assert str(NATIVE) == str(AUTO) == "fp8 weights times activations quantised per token"
    assert str(FP8) == "fp8 weights, widened in each product (this device has no FP8 arithmetic)"
    assert str(INT8) == "int8 weights, widened in each product"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int4",), "`quantization`='int4' is not known; choose fp8 or int8"),
        (("int8", "auto"), "`arithmetic`='auto' is not known for int8; choose widen or native"),
        (("fp8", "fast"), "`arithmetic`='fast' is not known for fp8"),
    ],
)
def test_unknown_schemes(arguments, message):
    with pytest.raises(UsageError, match=message):
        Scheme(*arguments)


def test_training_is_refused():
    refuse_quantized(tiny_model(), "training")
    with pytest.raises(
        UsageError,
        match=r"training needs unquantised weights, these are fp8: load\(\.\.\., "
        r"quantization='none'\)",
    ):
        refuse_quantized(tiny_model(FP8), "training")
