"""Checkpoints of experts, a tensor for each expert of each layer: every way in which they are read
and written, also with weights of 8 and 4 bits."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.checkpoints.hf_read import load_delta
from swiftkv_jax.checkpoints.hf_write import base_model_digest
from swiftkv_jax.checkpoints.quantized.compressed_tensors import ROUTERS
from swiftkv_jax.checkpoints.quantized.config import read_quantization_config
from swiftkv_jax.convert import main as convert
from swiftkv_jax.errors import CheckpointError, ConfigError
from swiftkv_jax.model.quantization import Quantized
from tests.checkpoints import quantized_files
from tests.checkpoints.fp8_files import assert_same, stored
from tests.checkpoints.fp8_files import write as write_tensors

from . import models
from .cases import CASES
from .running import greedy_text
from .test_interleaved import FP8_CHANNELS, quantized
from .test_students import student

CASE = "qwen3-moe"
EXPERT = "model.layers.3.mlp.experts.5.down_proj.weight"


@pytest.mark.parametrize("mesh", ["2x2", "1x4", "data=1,fsdp=4,model=1"])
def test_read_straight_into_shards(mesh, load, tmp_path):
    path = models.write(CASE, tmp_path / "model")
    model = skv.load(path, dtype="float32", mesh=skv.make_mesh(mesh))
    assert_same(model, load(CASE))
    down = model.llama.lower.expert_down
    assert down.addressable_shards[0].data.shape == (6, 8 // (2 if mesh == "2x2" else 4), 48, 40)
    np.testing.assert_array_equal(down[3, 5], models.tensors(CASE)[EXPERT])


def test_conversions_and_the_digest_of_the_base(load, tmp_path):
    path, copy = models.write(CASE, tmp_path / "hf"), tmp_path / "orbax"
    assert convert(["hf2orbax", str(path), str(copy)]) == 0
    assert base_model_digest(open_any(path)) == base_model_digest(open_any(copy))
    assert convert(["orbax2hf", str(copy), str(tmp_path / "again")]) == 0
    written = load_file(tmp_path / "again" / "model.safetensors")
    expected = models.tensors(CASE)
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name], expected[name]) for name in expected)
    model = student(load(CASE))
    skv.save_hf(model, tmp_path / "delta", format="delta")
    assert_same(load_delta(tmp_path / "delta", skv.load(copy, dtype="float32")), model)


def test_inspect(tmp_path, capsys):
    assert convert(["inspect", str(models.write(CASE, tmp_path / "model"))]) == 0
    found = capsys.readouterr().out
    assert "2 of 8 experts 40" in found
    assert "qk_norm=head" in found and "renormalize_experts=True" in found


def test_missing_experts_are_named(tmp_path):
    path = models.write(CASE, tmp_path / "model")
    tensors = models.tensors(CASE)
    del tensors[EXPERT]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing: {EXPERT}"):
        skv.load(path)


@pytest.mark.parametrize("name", ["fp8 blocks", "W4A16", "gptq", "awq"])
def test_formats_that_are_decoded(name, tmp_path):
    """The router, a matrix that is not a `Linear` of those formats, stays as it is."""
    config, encode = quantized_files.FORMATS[name]
    hf, tensors, wide = quantized(CASE, encode, config, quantized_files.WIDE.get(name, ()))
    path = write_tensors(tmp_path / "model", hf, tensors)
    plain = skv.load(write_tensors(tmp_path / "wide", CASES[CASE], wide), dtype="float32")
    assert_same(skv.load(path, dtype="float32", mesh=skv.make_mesh("2x2")), plain)


@pytest.mark.long
def test_eight_bits_stay(tmp_path):
    """FP8 with a scale for each output of each expert; what is written leaves routers out."""
    config, encode = FP8_CHANNELS
    config = config | {"ignore": ["lm_head", ROUTERS]}
    hf, tensors, wide = quantized(CASE, encode, config)
    path = write_tensors(tmp_path / "fp8", hf, tensors)
    model = skv.load(path, dtype="float32")
    up = model.llama.lower.expert_up
    assert isinstance(up, Quantized) and up.scale.shape == (6, 8, 40)
    assert not isinstance(model.llama.lower.router, Quantized)
    plain = skv.load(write_tensors(tmp_path / "wide", CASES[CASE], wide), dtype="float32")
    assert_same(skv.load(path, dtype="float32", quantization="none"), plain)
    assert greedy_text(model, 3, swiftkv=False) == greedy_text(plain, 3, swiftkv=False)
    skv.save_hf(model, tmp_path / "out")
    written, given = stored(tmp_path / "out"), stored(path)
    assert written.keys() == given.keys()
    assert all(written[name] == given[name] for name in given)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["quantization_config"]["ignore"] == ["lm_head", ROUTERS]


def test_routers_may_be_left_out_by_name():
    fields = dict(FP8_CHANNELS[0])
    names = [f"model.layers.{layer}.mlp.gate" for layer in range(6)]
    for left in ([ROUTERS], names, ["re:.*mlp.gate$"]):
        assert read_quantization_config(fields | {"ignore": ["lm_head", *left]}).kept == "fp8"
    other = fields | {"ignore": ["lm_head", "model.layers.0.mlp.experts.0.gate_proj"]}
    assert read_quantization_config(other).kept is None


@pytest.mark.short("int8")
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_quantised_when_loaded(format, tmp_path):
    path = models.write(CASE, tmp_path / "model")
    model = skv.load(path, dtype="float32", quantization=format)
    skv.save(model, tmp_path / "orbax")
    assert_same(skv.load(tmp_path / "orbax", dtype="float32"), model)
    if format == "fp8":
        skv.save_hf(model, tmp_path / "hf")
        assert_same(skv.load(tmp_path / "hf", dtype="float32"), model)


REFUSED = {
    "counts that differ": ({"num_local_experts": 4}, "num_experts=8 and num_local_experts=4"),
    "more than there are": ({"num_experts_per_tok": 9}, "num_experts_per_token=9 must be from 1"),
    "none of them": ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
    "no experts": ({"num_experts": 0}, "num_experts"),
    "dense layers": ({"mlp_only_layers": [1]}, "mlp_only_layers=.1. is not supported"),
    "every second layer": ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
    "a window": ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    "text": ({"norm_topk_prob": "yes"}, "norm_topk_prob='yes' must be true or false"),
    "experts of another family": ({"model_type": "qwen3"}, "num_experts=8 is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    fields, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        config_from_hf(CASES[CASE] | fields)


def test_as_transformers_5_writes_it():
    """`num_local_experts` for `num_experts`, and `rope_parameters`."""
    fields = {key: value for key, value in CASES[CASE].items() if not key.startswith("rope")}
    fields |= {"num_local_experts": fields.pop("num_experts"), "dtype": "float32"}
    fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert config_from_hf(fields) == config_from_hf(CASES[CASE])
