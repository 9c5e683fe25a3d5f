"""Random weights of any architecture, made on the devices: no checkpoint, no float32 copy, no
traffic between devices.

Every number is a hash of its indices, so a device makes its own shards and needs no further memory.
Matrices are uniform with a standard deviation of 0.02, in 8 bits over the whole range with
the scale that gives the same.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...model.config import Config
from ...model.model import Model
from ...model.params import Llama
from ...model.quantization import Format, Quantized, Scheme, is_quantized
from ..runner.serving_form import model_shapes

STANDARD_DEVIATION = 0.02
_LARGEST = STANDARD_DEVIATION * 3**0.5  # of a uniform distribution around zero
_RANGE: dict[Format, float] = {"fp8": 448.0, "int8": 127.0}


def dummy_model(
    config: Config,
    dtype,
    *,
    mesh: Mesh | None = None,
    quantization: Scheme | None = None,
    student: bool = True,
    teacher: bool = True,
) -> Model:
    """A model with random weights, each shard made on its device.

    Without `teacher` it lacks what a served student does not read of the teacher's upper q, k, v;
    without `student` the delta.
    """
    llama, delta = model_shapes(config, dtype, quantization, mesh)
    if not teacher:
        llama = _without_teacher(config, llama)
    if not (student and config.num_upper_layers):
        delta = None
    return Model(_make_tree(llama), _make_tree(delta), config)


def _without_teacher(config: Config, llama: Llama) -> Llama:
    """Return the weights without the upper q, k, v; where tokens keep their own, with those that
    they need."""
    kept = None
    if config.has_two_caches:
        kept = llama.upper_qkv
    elif config.keeps_own and llama.upper_qkv is not None:
        kept = dataclasses.replace(llama.upper_qkv, q=None, q_bias=None)
    return dataclasses.replace(llama, upper_qkv=kept)


def _make_tree(shapes):
    return jax.tree_util.tree_map_with_path(_make, shapes, is_leaf=is_quantized)


def _make(path, leaf: jax.ShapeDtypeStruct | Quantized) -> jax.Array | Quantized:
    name = ".".join(key.name for key in path)
    if isinstance(leaf, Quantized):
        largest = _RANGE[leaf.scheme.format]
        return Quantized(
            _uniform(leaf.values, largest, _seed(name)),
            _constant(leaf.scale, _LARGEST / largest),
            leaf.scheme,
        )
    if name.endswith("norm"):
        return _constant(leaf, 1.0)
    return _constant(leaf, 0.0) if name.endswith("bias") else _uniform(leaf, _LARGEST, _seed(name))


def _seed(name: str) -> int:
    """A hash of the name. Python's own differs between processes."""
    return functools.reduce(lambda total, letter: (total * 31 + ord(letter)) % 2**32, name, 7)


def _constant(leaf: jax.ShapeDtypeStruct, value: float) -> jax.Array:
    return jnp.full(leaf.shape, value, leaf.dtype, device=leaf.sharding)


def _uniform(leaf: jax.ShapeDtypeStruct, largest: float, seed: int) -> jax.Array:
    return jax.jit(_hashed, static_argnums=(0, 1, 2), out_shardings=leaf.sharding)(
        leaf.shape, leaf.dtype, largest, jnp.uint32(seed)
    )


def _hashed(shape: tuple[int, ...], dtype, largest: float, index: jax.Array) -> jax.Array:
    for axis in range(len(shape)):
        index = index * jnp.uint32(shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return (_scramble(index).astype(jnp.int32).astype(jnp.float32) * (largest * 2.0**-31)).astype(
        dtype
    )


def _scramble(x: jax.Array) -> jax.Array:
    """Mix all bits by Chris Wellons' `lowbias32` (https://nullprogram.com/blog/2018/07/31/)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
