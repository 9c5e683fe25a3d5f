"""Training with prompt attention layers and taps: gradients, meshes, a run and its continuation."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from swiftkv_jax.model.initialization import init_llama
from swiftkv_jax.model.model import Model
from swiftkv_jax.plan.cost import calibration_flops_by_part, train_flops_by_part
from swiftkv_jax.train.__main__ import main
from tests.train import test_distill, test_step
from tests.train.test_run import TEXT, arguments


@pytest.fixture(scope="module")
def model() -> Model:
    """A student of which no tensor is zero."""
    config = test_distill.CONFIG
    plain = Model(init_llama(config, jax.random.key(0), scale=0.3), None, config)
    fields = {"prompt_attention_layers": 2, "prompt_mlp_neurons": 5, "boundary_taps": 1}
    student = skv.add_swiftkv(plain, 2, **fields)
    leaves, tree = jax.tree.flatten(student.swiftkv)
    drawn = [
        leaf + 0.1 * jax.random.normal(jax.random.key(number), leaf.shape)
        for number, leaf in enumerate(leaves)
    ]
    return dataclasses.replace(student, swiftkv=jax.tree.unflatten(tree, drawn))


@pytest.mark.parametrize("generated_kv", [pytest.param("boundary", marks=pytest.mark.long), "own"])
def test_gradients_are_finite_differences(model, generated_kv):
    """Of taps, maps and neurons, and of the projections of the prompt attention layers."""
    model = dataclasses.replace(
        model, config=dataclasses.replace(model.config, generated_kv=generated_kv)
    )
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, model.config.vocab_size)

    @jax.jit
    def loss(delta):
        student = dataclasses.replace(model, swiftkv=delta)
        return skv.distill_loss(student, tokens, jnp.ones((2, 17)), prompt_lengths=[9, 12])[0]

    gradient = jax.grad(loss)(model.swiftkv)
    of_mlp = "mlp_map", "mlp_gate", "mlp_up", "mlp_down"
    for name in ("k_tap", *of_mlp, "k", "v", "q", "norm"):
        own, slope = getattr(model.swiftkv, name), getattr(gradient, name)
        step = 2e-3 * slope / jnp.linalg.norm(slope)
        up, down = (
            loss(dataclasses.replace(model.swiftkv, **{name: moved}))
            for moved in (own + step, own - step)
        )
        expected = 2 * float((slope * step).sum())
        assert float(up - down) == pytest.approx(expected, rel=0.03), name
    for name, layers in ("k", 2), ("v", 2), *((name, 2) for name in of_mlp):
        each = jnp.abs(getattr(gradient, name)[:layers]).max(axis=(1, 2))
        assert np.min(each.max(-1)) > 0, name


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,model=2"])
def test_the_update_is_the_same_on_every_mesh(mesh, monkeypatch):
    fields = {"prompt_attention_layers": 1, "prompt_mlp_neurons": 12, "boundary_taps": 1}
    config = dataclasses.replace(test_step.CONFIG, **fields)
    monkeypatch.setattr(test_step, "CONFIG", config)
    (metrics, moment), (ours, of_mesh) = test_step.step_once(), test_step.step_once(mesh, 2, True)
    for name, value in metrics.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
    for name in "mlp_map", "mlp_down", "k_tap":  # gate and up get a gradient once down is not 0
        assert np.abs(getattr(moment, name)).max() > 0, name
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), of_mesh, moment
    )


FLAGS = {
    "init": "closed-form",
    "calibration-tokens": 600,
    "num-key-value-layers": 4,
    "prompt-attention-layers": 1,
    "prompt-mlp-neurons": 8,
    "boundary-taps": 1,
    "max-steps": 4,
    "save-steps": 2,
}


@pytest.mark.long
def test_a_run_that_continues_ends_like_one_that_was_not_stopped(tmp_path, capsys):
    """And another number of layers is not a continuation of it."""
    (data := tmp_path / "code.txt").write_text(TEXT)
    assert main(arguments(data, tmp_path / "run", **FLAGS)) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "model")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "4")
    assert main(arguments(data, tmp_path / "again", **FLAGS)) == 0
    written = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert written["model_type"] == "llama_swiftkv_extended"
    assert (written["prompt_attention_layers"], written["boundary_taps"]) == (1, 1)
    one, other = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "again")
    )
    assert written["prompt_mlp_neurons"] == 8 and "model.layers.4.mlp.up_swiftkv.weight" in one
    for name, array in one.items():
        np.testing.assert_array_equal(array.view(np.uint8), other[name].view(np.uint8), name)
    capsys.readouterr()
    more = FLAGS | {"prompt-attention-layers": 2, "max-steps": 6}
    assert main(arguments(data, tmp_path / "again", **more)) != 0
    assert "prompt_attention_layers was 1 and is now 2" in capsys.readouterr().err


def test_operations_are_counted():
    """Of a prompt attention layer, and of a tap."""
    config = dataclasses.replace(test_step.CONFIG, num_key_value_layers=2)
    width, heads, kv = 64, 8 * 16, 2 * 4 * 16
    closer = dataclasses.replace(config, prompt_attention_layers=1)
    tapped = dataclasses.replace(config, boundary_taps=1)
    neurons = dataclasses.replace(closer, prompt_mlp_neurons=24)
    plain, one, tap, more = (train_flops_by_part(c, 1) for c in (config, closer, tapped, neurons))
    layer = 2 * heads * width + kv * width + width * width
    trained = layer - heads * width
    pairs = 4 * heads  # scores and weighted values of one pair, as there is one position
    expected = 2 * (2 * layer + trained) + 3 * pairs
    assert one["prompt attention layers, with backward"] == expected
    of_neurons = more["prompt attention layers, with backward"] - expected
    assert of_neurons == 3 * 2 * 3 * 24 * width, "forward, and both products of backward"
    fewer = plain["student's upper layers"] - one["student's upper layers"]
    assert fewer == 2 * kv * width, "its keys and values are not projected twice"
    assert tap["student's upper layers"] - plain["student's upper layers"] == 4 * kv * width
    plain, one, tap, more = (
        calibration_flops_by_part(c, 1) for c in (config, closer, tapped, neurons)
    )
    assert tap["second moments"] == 4 * 2 * 2 * width * (2 * width + kv)
    assert one["second moments"] == 3 * 2 * width * (width + kv)
    whole = 2 * (2 * heads * width + kv * width + 3 * 192 * width) + pairs
    once = 2 * layer + pairs
    assert one["prompt attention layers"] == once
    assert one["passes for maps"] == 3 * whole + once + 4 * width * width
    both, size = once + 2 * 3 * 24 * width, width + 24
    chosen = 2 * whole + both + 4 * 192 * width
    assert more["passes for maps"] == 3 * whole + both + 2 * size * (size + width) + chosen
    assert "passes for maps" not in plain
