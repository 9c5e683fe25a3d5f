"""Students with prompt attention layers and taps come back from every format."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.checkpoints.hf_read import load_delta
from swiftkv_jax.convert import main
from swiftkv_jax.model.initialization import init_swiftkv
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.quantization import dequantize, is_quantized
from swiftkv_jax.model.stacks import split_layers
from tests import tiny
from tests.checkpoints.hf_models import assert_same

HF = tiny.hf_config(attention_bias=True)
TOKENS = tiny.tokens_for(HF, 2, 19)
PLAIN = tiny.model_of(HF, tiny.tensors_for(HF))
CUTS = [(0, 1, 1, 0), (2, 0, 1, 0), (2, 1, 1, 1, 7), (2, 1, 2, 0, 5), (0, 0, 1, 1)]
"""(prompt attention layers, taps, group size, exact head, neurons); layers of a group mix shared
values."""


def student_of(layers: int, taps: int, group: int, head: int = 0, neurons: int = 0) -> Model:
    """A student of which every tensor is random."""
    fields = {"prompt_attention_layers": layers, "prompt_mlp_neurons": neurons}
    model = skv.add_swiftkv(PLAIN, 2, group, boundary_taps=taps, **fields)
    config = dataclasses.replace(model.config, exact_head=head)
    if group > 1:
        heads = ((0, 1),) * layers + ((0, 1), (1, 0))
        config = dataclasses.replace(config, shared_kv_heads=heads)
    start, tree = jax.tree.flatten(init_swiftkv(config, model.llama))
    keys = jax.random.split(jax.random.key(0), len(start))
    drawn = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(start, keys, strict=True)
    ]
    delta = jax.tree.unflatten(tree, drawn)
    if group > 1 and layers:  # they have no group: nothing mixes their values
        eye = jnp.broadcast_to(jnp.eye(config.head_dim), delta.mix[:layers].shape)
        delta = dataclasses.replace(delta, mix=delta.mix.at[:layers].set(eye))
    return dataclasses.replace(model, config=config, swiftkv=delta)


@pytest.fixture(scope="module", params=CUTS, ids=str)
def student(request) -> Model:
    return student_of(*request.param)


@pytest.mark.parametrize("format", ["full", "delta"])
def test_it_comes_back_from_a_hugging_face_folder(student, format, tmp_path):
    skv.save_hf(student, tmp_path / "hf", format=format)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["model_type"] == "llama_swiftkv_extended", "one that other loaders refuse"
    for name in ("prompt_attention_layers", "prompt_mlp_neurons", "boundary_taps", "exact_head"):
        assert written[name] == getattr(student.config, name)
    if format == "full":
        assert_same(skv.load(tmp_path / "hf", dtype="float32"), student)
    else:
        assert_same(load_delta(tmp_path / "hf", PLAIN), student)


@pytest.mark.short("(2, 1, 2, 0, 5)")
def test_expanded_it_says_the_same(student, tmp_path):
    skv.save_hf(student, tmp_path / "hf", format="expanded")
    back = skv.load(tmp_path / "hf", dtype="float32")
    config = dataclasses.replace(student.config, key_value_group_size=1, shared_kv_heads=None)
    assert back.config == config
    expected = np.asarray(skv.logits(student, TOKENS))
    atol = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(skv.logits(back, TOKENS), expected, atol=atol)


@pytest.mark.short("(2, 1, 1, 1, 7)")
def test_it_comes_back_from_orbax(student, tmp_path):
    skv.save(student, tmp_path / "orbax")
    assert_same(skv.load(tmp_path / "orbax", dtype="float32"), student)


def test_tensors_are_named_after_their_layers(tmp_path):
    from safetensors.numpy import load_file

    student = student_of(1, 1, 1, neurons=6)
    skv.save_hf(student, tmp_path / "hf", format="delta")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert student.swiftkv is not None
    for layer in range(3, 6):
        stored = tensors[f"model.layers.{layer}.self_attn.k_tap_swiftkv.weight"]
        np.testing.assert_array_equal(stored, student.swiftkv.k_tap[layer - 3].reshape(16, 32))
    for name in "map", "gate", "up", "down":
        stored = tensors[f"model.layers.2.mlp.{name}_swiftkv.weight"]
        np.testing.assert_array_equal(stored, getattr(student.swiftkv, f"mlp_{name}")[0])
    assert not [name for name in tensors if "layers.2.self_attn.k_tap" in name or "v_tap" in name]
    assert not [name for name in tensors if "layers.3.mlp.map" in name]


def test_another_cut_leaves_it_behind(tmp_path):
    student = student_of(2, 1, 1)
    skv.save_hf(student, tmp_path / "hf")
    other = skv.add_swiftkv(skv.load(tmp_path / "hf", dtype="float32"), 3)
    assert (other.config.prompt_attention_layers, other.config.boundary_taps) == (0, 0)
    expected = split_layers(other.config, PLAIN.llama)
    jax.tree.map(np.testing.assert_array_equal, other.llama, expected)


def test_taps_are_quantised_and_maps_are_not(tmp_path):
    student = student_of(2, 1, 1, neurons=6)
    skv.save_hf(student, tmp_path / "hf")
    small = skv.load(tmp_path / "hf", dtype="float32", quantization="int8")
    assert small.swiftkv is not None and student.swiftkv is not None
    tap, exact = small.swiftkv.k_tap, np.asarray(student.swiftkv.k_tap)
    assert is_quantized(tap)
    rounding = np.abs(exact).max() / 127
    np.testing.assert_allclose(dequantize(tap, np.float32), exact, atol=rounding)
    expected = student.swiftkv.prompt_mlp
    jax.tree.map(np.testing.assert_array_equal, small.swiftkv.prompt_mlp, expected)


def test_inspect_names_what_there_is(tmp_path, capsys):
    skv.save_hf(student_of(2, 1, 1, neurons=6), tmp_path / "both")
    assert main(["inspect", str(tmp_path / "both")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^prompt_attention_layers +2$", shown, re.M)
    assert re.search(r"^prompt_mlp_neurons +6$", shown, re.M)
    assert re.search(r"^boundary_taps +1$", shown, re.M) and "boundary_taps=1" not in shown
    skv.save_hf(student_of(0, 1, 1), tmp_path / "tap")
    assert main(["inspect", str(tmp_path / "tap")]) == 0
    assert "prompt_attention_layers" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_attention_layers": "2"}, "prompt_attention_layers='2' must be an integer"),
        ({"prompt_mlp_neurons": "6"}, "prompt_mlp_neurons='6' must be an integer"),
        ({"prompt_mlp_neurons": 49}, "prompt_mlp_neurons=49 must be from 0 to mlp_dim=48"),
        ({"boundary_taps": 2}, "boundary_taps=2 must be 0 or 1"),
        ({"exact_head": 2}, "exact_head=2 must be 0 or 1"),
        ({"prompt_attention_layers": 4}, "prompt_attention_layers=4 must be from 0 to 3"),
    ],
)
def test_bad_fields_are_one_line(fields, message, tmp_path):
    skv.save_hf(student_of(2, 1, 1), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(skv.CheckpointError, match=message):
        skv.load(tmp_path / "hf")
