"""Served weights that are quantised: the same student and teacher, whose shapes and places are
known beforehand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer.runner.serving_form import (
    num_bytes,
    served_config,
    serving_weights,
    weight_shapes,
)
from swiftkv_jax.model.boundary import project_fused_kv, project_kv
from swiftkv_jax.model.layers import norm
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.params import QKV
from swiftkv_jax.model.quantization import Scheme
from swiftkv_jax.model.rope import rope_tables
from swiftkv_jax.model.sharding import llama_shardings, swiftkv_shardings
from swiftkv_jax.model.stacks import unstack
from swiftkv_jax.plan.presets import LLAMA_8B
from tests.test_quantization import SCHEMES, tiny_model

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9]]


def weights_of(model: skv.Model, swiftkv: bool):
    return serving_weights(model.llama, model.swiftkv if swiftkv else None, model.config)


def own_kv_model(scheme: Scheme | None) -> skv.Model:
    """One whose generated tokens keep their own keys and values."""
    model = tiny_model(scheme)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, generated_kv="own"))


@pytest.mark.parametrize(
    ("name", "swiftkv"), [("fp8", True), pytest.param("int8", False, marks=pytest.mark.long)]
)
def test_generates_what_whole_sequences_say(name, swiftkv):
    model = tiny_model(SCHEMES[name])
    found = skv.generate(model, PROMPTS, max_tokens=4, swiftkv=swiftkv)
    for prompt, new in zip(PROMPTS, found, strict=True):
        row = jnp.array([prompt + new])
        logits = np.asarray(skv.logits(model, row, swiftkv=swiftkv))[0, len(prompt) - 1 : -1]
        assert len(new) == 4 and (logits[np.arange(4), new] >= logits.max(axis=-1) - 1e-4).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_fused_keys_and_values_are_those_of_the_delta(name):
    model = tiny_model(SCHEMES[name])
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))
    (rope,) = rope_tables(model.config, jnp.broadcast_to(jnp.arange(5), (2, 5)))
    weights = weights_of(model, True)
    assert model.swiftkv is not None
    s = norm(model.config, x, weights.norm_swiftkv)
    fused = project_fused_kv(model.config, weights.kv, weights.kv_bias, None, s, rope)
    for ours, theirs in zip(fused, project_kv(model.config, model.swiftkv, x, rope), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("swiftkv", [True, False], ids=["student", "teacher"])
@pytest.mark.parametrize("scheme", [None, *SCHEMES.values()], ids=["plain", *SCHEMES])
def test_shapes_are_known_without_weights(scheme, swiftkv):
    model = tiny_model(scheme)
    weights = weights_of(model, swiftkv)
    assert weight_shapes(model.config, swiftkv, jnp.float32, scheme) == jax.eval_shape(
        lambda: weights
    )
    if scheme is not None:
        assert weights.lower[0].o.values.shape == (32, 32) and weights.lower[0].o.scale.shape == (
            32,
        )
        assert not swiftkv or weights.kv.scale.shape == (2, 2, 2, 8)
    assert len(weights.lower) == served_config(model.config, swiftkv).num_lower_layers


@pytest.mark.parametrize("scheme", [None, *SCHEMES.values()], ids=["plain", *SCHEMES])
def test_own_keys_and_values_are_the_teachers(scheme):
    model = own_kv_model(scheme)
    weights = weights_of(model, True)
    assert weight_shapes(model.config, True, jnp.float32, scheme) == jax.eval_shape(lambda: weights)
    assert not weights.upper_q, "no token attends to keys and values from the boundary"
    for ours, theirs in zip(weights.upper_qkv, unstack(model.llama.upper_qkv), strict=True):
        for place, projection in ((-2, theirs.k), (-1, theirs.v)):
            mine = jax.tree.map(lambda leaf, place=place: leaf[:, place], ours.heads)
            jax.tree.map(np.testing.assert_array_equal, mine, projection)


def test_projections_are_joined_by_head():
    """Each key/value head with its queries, its key and its value, in both kinds of layers."""
    model = own_kv_model(None)
    config, delta, teacher = model.config, model.swiftkv, model.llama
    assert delta is not None and isinstance(teacher.upper_qkv, QKV)
    weights = weights_of(model, True)
    of_one = config.num_heads // config.num_kv_heads
    for joined, q, kv in (
        (weights.lower_qkv[1].heads, teacher.lower_qkv.q[1], teacher.lower_qkv),
        (weights.upper_qkv[0].heads, delta.q[0], teacher.upper_qkv),
    ):
        layer = 1 if kv is teacher.lower_qkv else 0
        assert joined.shape == (config.num_kv_heads, of_one + 2, *q.shape[1:])
        for head in range(config.num_kv_heads):
            for query in range(of_one):
                np.testing.assert_array_equal(joined[head, query], q[head * of_one + query])
            np.testing.assert_array_equal(joined[head, -2], kv.k[layer, head])
            np.testing.assert_array_equal(joined[head, -1], kv.v[layer, head])


@pytest.mark.parametrize("cut", [2, 4])
def test_queries_of_a_teachers_last_layer_are_apart(cut):
    """Whether or not the checkpoint has upper layers: prefill needs its keys and values only."""
    config = tiny_model(None).config.cut(cut)
    *others, last = weight_shapes(config, False, jnp.float32).lower_qkv
    assert last.q is not None and all(one.q is None for one in others)
    assert len(others) == config.num_layers - 1


def test_donated_keys_and_values():
    """The teacher's queries go too, and memory holds the others once."""
    model = own_kv_model(None)
    llama, delta = jax.tree.map(jnp.copy, (model.llama, model.swiftkv))
    expected = weights_of(model, True)
    found = serving_weights(llama, delta, model.config, donate=True)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(llama.upper_qkv))


@pytest.mark.parametrize("swiftkv", [True, False], ids=["student", "teacher"])
@pytest.mark.parametrize("name", SCHEMES)
def test_places_are_known_without_weights(name, swiftkv):
    """Unstacking leaves each layer on the devices that it is split over."""
    scheme, mesh = SCHEMES[name], make_mesh((2, 2))
    model = own_kv_model(scheme)
    llama = jax.device_put(model.llama, llama_shardings(model.config, mesh, scheme))
    delta = jax.device_put(model.swiftkv, swiftkv_shardings(model.config, mesh, scheme))
    placed = dataclasses.replace(model, llama=llama, swiftkv=delta)
    weights = weights_of(placed, swiftkv)

    def same(array, sharding):
        assert array.sharding.is_equivalent_to(sharding, array.ndim), (
            f"{array.sharding}, expected {sharding.spec}"
        )

    shapes = weight_shapes(model.config, swiftkv, jnp.float32, scheme, mesh)
    jax.tree.map(lambda array, shape: same(array, shape.sharding), weights, shapes)


def test_bytes_of_8b():
    """Embedding and head are 1.05e9 of 8.03e9 parameters; the student has 0.34e9 more and leaves
    0.40e9 of the teacher's out."""
    bfloat16, fp8 = (
        num_bytes(weight_shapes(LLAMA_8B, True, jnp.bfloat16, scheme))
        for scheme in (None, Scheme("fp8"))
    )
    matrices = 2 * 128256 * 4096
    vectors = 4096 * (2 * 32 + 2)
    layers = 32 * (2 * 4096 * 4096 + 3 * 4096 * 14336) + (16 + 16) * 2 * 1024 * 4096
    assert bfloat16 == 2 * (matrices + vectors + layers)
    channels = 32 * (2 * 4096 + 4096 + 2 * 14336) + (16 + 16) * 2 * 1024
    assert fp8 == 2 * (matrices + vectors) + layers + 4 * channels
