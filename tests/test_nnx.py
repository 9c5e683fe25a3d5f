"""The `flax.nnx` view of a model: the same arrays, the same logits, optimisers of the delta."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import swiftkv_jax as skv
from swiftkv_jax.model.initialization import init_llama
from swiftkv_jax.nnx import Frozen, LlamaForCausalLM
from tests import tiny


@pytest.fixture(scope="module")
def model() -> skv.Model:
    hf = tiny.hf_config(num_hidden_layers=4, attention_bias=True)
    return tiny.model_of(hf, tiny.tensors_for(hf))


ROWS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 12)), jnp.int32)


def test_the_same_arrays_there_and_back(model):
    module = LlamaForCausalLM(model)
    again = module.to_model()
    assert jax.tree.structure(again) == jax.tree.structure(model)
    pairs = zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module))}
    assert {"llama.lower_qkv.q_bias", "llama.embed", "swiftkv.norm"} <= names
    assert len(names) == len(jax.tree.leaves(model))


def test_logits(model):
    module = LlamaForCausalLM(model)
    for swiftkv in (None, False):
        expected = skv.logits(model, ROWS, swiftkv=swiftkv)
        np.testing.assert_array_equal(module(ROWS, swiftkv=swiftkv), expected)
        found = nnx.jit(lambda m, swiftkv=swiftkv: m(ROWS, swiftkv=swiftkv))(module)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    graph, state = nnx.split(module)
    np.testing.assert_array_equal(nnx.merge(graph, state)(ROWS), skv.logits(model, ROWS))


def test_an_optimizer_trains_the_delta_alone(model):
    model = dataclasses.replace(skv.add_swiftkv(model, 2))
    before = jax.tree.map(np.asarray, model)
    module = LlamaForCausalLM(model)
    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)

    def loss(module: LlamaForCausalLM):
        teacher = jax.nn.softmax(module(ROWS, swiftkv=False))
        return -(teacher * jax.nn.log_softmax(module(ROWS))).sum(-1).mean()

    values = []
    for _ in range(5):
        value, gradient = nnx.value_and_grad(loss)(module)
        optimizer.update(module, gradient)
        values.append(float(value))
    assert values[-1] < values[0]
    after = module.to_model()
    assert all(map(np.array_equal, jax.tree.leaves(after.llama), jax.tree.leaves(before.llama)))
    assert not any(
        map(np.array_equal, jax.tree.leaves(after.swiftkv), jax.tree.leaves(before.swiftkv))
    )


def test_without_a_delta_all_is_trained(model):
    teacher = dataclasses.replace(model, swiftkv=None)
    module = LlamaForCausalLM(teacher)
    assert module.swiftkv is None and not nnx.state(module, Frozen)
    assert len(jax.tree.leaves(nnx.state(module, nnx.Param))) == len(jax.tree.leaves(teacher))
    with pytest.raises(skv.UsageError, match="`model` must be a Model"):
        LlamaForCausalLM("Llama")  # pyright: ignore[reportArgumentType]


def test_orbax_saves_and_restores_the_view(tmp_path):
    """A model with norms of q and k and a delta, its state as Orbax keeps it."""
    teacher = skv.Config(
        vocab_size=61,
        embed_dim=32,
        mlp_dim=48,
        num_layers=4,
        num_key_value_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        qk_norm="head",
        family="qwen3",
    )
    llama = init_llama(teacher, jax.random.key(1))
    model = skv.add_swiftkv(skv.Model(llama, None, teacher), 2)
    graph, state = nnx.split(LlamaForCausalLM(model))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
        found = checkpointer.restore(tmp_path / "state", shapes)
    zeros = jax.tree.map(jnp.zeros_like, state)
    nnx.replace_by_pure_dict(zeros, found)
    again = nnx.merge(graph, zeros).to_model()
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), again, model))
