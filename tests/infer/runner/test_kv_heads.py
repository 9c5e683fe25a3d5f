"""Copies of key/value heads for devices that share them: the same model, less memory on each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.infer.runner.kv_heads import (
    copy_kv_heads,
    kv_head_copies,
    with_kv_head_copies,
)
from swiftkv_jax.infer.runner.lowering import DecodeProgram
from swiftkv_jax.infer.runner.memory import bytes_per_device
from swiftkv_jax.model.initialization import init_llama, init_swiftkv
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.params import Param, map_params
from swiftkv_jax.model.quantization import Quantized, Scheme, dequantize, quantize
from tests import tiny
from tests.lowered import lower_program

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 12))
CONFIG = skv.Config(
    vocab_size=61,
    embed_dim=32,
    mlp_dim=48,
    num_layers=4,
    num_key_value_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
)


def student(config: skv.Config) -> Model:
    """Random weights, norms among them."""
    llama = init_llama(config, jax.random.key(0), scale=0.3)
    delta = init_swiftkv(config, llama, start="leader")
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def varied(leaf):
        return leaf * jax.random.uniform(next(keys), leaf.shape, leaf.dtype, 0.5, 1.5)

    llama, delta = jax.tree.map(varied, (llama, delta))
    return Model(llama, delta, config)


STUDENTS = {
    "plain": CONFIG,
    "biases": dataclasses.replace(CONFIG, qkv_bias=True),
    "a norm of each key": dataclasses.replace(CONFIG, qk_norm="head"),
    "a norm of all keys": dataclasses.replace(CONFIG, qk_norm="all"),
    "shared heads": dataclasses.replace(
        CONFIG, key_value_group_size=2, shared_kv_heads=((0, 1), (1, 0))
    ),
}


def quantized(tree: Any) -> Any:
    def one(row: Param, leaf):
        return leaf if row.in_axes is None else quantize(leaf, row.in_axes, Scheme("int8"))

    return map_params(one, tree)


def dequantized(tree: Any) -> Any:
    def is_leaf(leaf):
        return isinstance(leaf, Quantized)

    return jax.tree.map(
        lambda leaf: dequantize(leaf, jnp.float32) if is_leaf(leaf) else leaf, tree, is_leaf=is_leaf
    )


@pytest.mark.short("plain-True", "shared heads-False", "a norm of each key-True", "biases-True")
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("name", STUDENTS)
def test_it_is_the_same_model(name, eight_bits):
    model, mesh = student(STUDENTS[name]), make_mesh((1, 8))
    llama, delta = model.llama, model.swiftkv
    if eight_bits:
        llama, delta = quantized(llama), quantized(delta)
        model = dataclasses.replace(model, llama=dequantized(llama), swiftkv=dequantized(delta))
    assert kv_head_copies(model.config, mesh) == 4
    llama, delta = map(dequantized, copy_kv_heads(model.config, llama, delta, mesh))
    copied = Model(llama, delta, with_kv_head_copies(model.config, mesh))
    for swiftkv in True, False:
        found, expected = (skv.logits(each, TOKENS, swiftkv=swiftkv) for each in (copied, model))
        # Sums over one head and over two differ in order. A wrong head is off by the logits' size.
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_which_meshes_need_copies():
    def copies(heads: int, kv_heads: int, shape) -> int:
        config = dataclasses.replace(CONFIG, num_heads=heads, num_kv_heads=kv_heads)
        return kv_head_copies(config, make_mesh(shape))

    assert kv_head_copies(CONFIG, None) == 1
    assert [copies(8, 2, (1, size)) for size in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert copies(8, 2, (2, 4)) == 2
    assert copies(6, 2, (1, 4)) == 1  # every device has all query heads
    assert copies(12, 3, (1, 4)) == 1


@pytest.mark.parametrize("swiftkv", [True, False])
def test_a_device_keeps_what_it_reads(swiftkv):
    """One of two heads on each of four devices: half of the cache and of the projections."""
    hf = tiny.hf_config()
    model, options = tiny.model_of(hf, tiny.tensors_for(hf)), EngineOptions(max_num_seqs=2)
    runners = [
        build_model_runner(model, options, swiftkv=swiftkv, mesh=mesh)
        for mesh in (None, make_mesh((1, 4)))
    ]
    alone, split = (runner.layout.page_bytes(16) for runner in runners)
    assert split == alone // 2
    alone, split = (
        bytes_per_device(runner.weights.lower_qkv[0].heads[:, -2:]) for runner in runners
    )
    assert split == alone // 2


def test_attention_copies_nothing_out_of_the_cache():
    """A compiled decode step has no array as large as all heads of a page pool on one device."""
    mesh, pages = make_mesh((1, 8)), 64
    lowered = lower_program(
        CONFIG,
        DecodeProgram(2),
        batch=2,
        max_model_len=128,
        page_size=16,
        num_pages=pages,
        dtype=jnp.float32,
        mesh=mesh,
    )
    text = str(lowered.compile().as_text())
    assert f"f32[{pages},1,16,8]" in text and f"f32[{pages},2,16,8]" not in text
