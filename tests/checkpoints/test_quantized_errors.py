"""Checkpoints of 8-bit matrices that are wrong or not supported, and what these models refuse."""

import copy
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError, ConfigError, UsageError
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.checkpoints.hf_read import load_delta
from tests import tiny
from tests.checkpoints.fp8_files import (
    E4M3,
    QUANTIZATION_CONFIG,
    assert_same,
    fp8_tensors,
    hf_fields,
    tokens,
    write,
)

WEIGHT, SCALE = (
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.self_attn.o_proj.weight_scale",
)
BAD = {
    "no scale": (lambda t: t.pop(SCALE), f"missing: {SCALE}$"),
    "no weight": (lambda t: t.pop(WEIGHT), f"missing: {WEIGHT}$"),
    "a scale too many": (
        lambda t: t.update({"lm_head.weight_scale": np.ones((61, 1), np.float32)}),
        "unexpected: lm_head.weight_scale$",
    ),
    "scale of inputs": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.input_scale": np.ones(1)}),
        "unexpected: .*input_scale",
    ),
    "scale per tensor": (
        lambda t: t.update({SCALE: t[SCALE][:1]}),
        rf"wrong shape: {SCALE} \[1, 1\], expected \[32, 1\]",
    ),
    "flat scale": (
        lambda t: t.update({SCALE: t[SCALE][:, 0]}),
        rf"wrong shape: {SCALE} \[32\], expected \[32, 1\]",
    ),
    "weight not quantised": (
        lambda t: t.update({WEIGHT: t[WEIGHT].astype(np.float32)}),
        rf"{WEIGHT} F32 \(supported: F8_E4M3\)",
    ),
    "weight of integers": (
        lambda t: t.update({WEIGHT: t[WEIGHT].astype(np.int8)}),
        rf"{WEIGHT} I8 \(supported: F8_E4M3\)",
    ),
    "norm quantised": (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(E4M3)}),
        r"model.norm.weight F8_E4M3 \(supported: F32, BF16, F16\)",
    ),
    "two at a time": (
        lambda t: [t.pop(SCALE), t.pop("model.norm.weight")],
        f"missing: {SCALE}, model.norm.weight$",
    ),
    "scale not finite": (
        lambda t: t.update({SCALE: t[SCALE] * np.float32(np.nan)}),
        f"{SCALE} has scales that are not finite",
    ),
    "infinite scale": (
        lambda t: t.update({SCALE: t[SCALE] * np.float32(np.inf)}),
        f"{SCALE} has scales that are not finite",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_tensors(tmp_path, name):
    damage, message = BAD[name]
    tensors = fp8_tensors(hf_fields())
    damage(tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        skv.load(write(tmp_path / "bad", hf_fields(), tensors))
    assert "\n" not in str(error.value)


def test_eight_bits_without_a_config(tmp_path):
    hf = {name: value for name, value in hf_fields().items() if name != "quantization_config"}
    with pytest.raises(
        CheckpointError,
        match=r"unexpected: .*o_proj.weight_scale.*o_proj.weight F8_E4M3 \(supported: F32",
    ):
        skv.load(write(tmp_path / "bad", hf, fp8_tensors(hf)))


GROUP = "config_groups.group_0"
REFUSED = {  # path of a field, another value, what the error says of it
    "another method": (
        "quant_method",
        "bitsandbytes",
        "quant_method='bitsandbytes' is not supported; supported: compressed-tensors, fp8, ",
    ),
    "fp4": ("format", "nvfp4-pack-quantized", "format='nvfp4-pack-quantized' is not supported"),
    "packed floats": (
        "format",
        "pack-quantized",
        "type='float', num_bits=8, symmetric=True is not supported in format='pack-quantized'",
    ),
    "mixed without formats": ("format", "mixed-precision", r"group_0\.format='mixed-precision'"),
    "not compressed": ("quantization_status", "frozen", "quantization_status='frozen'"),
    "quantised cache": ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme="),
    "no groups": ("config_groups", {}, r"config_groups=\{\} must be an object with groups"),
    "groups as text": ("config_groups", "all", "config_groups='all'"),
    "quantised outputs": (
        f"{GROUP}.output_activations",
        {"num_bits": 8},
        r"group_0\.output_activations=",
    ),
    "four bits": (
        f"{GROUP}.weights.num_bits",
        4,
        "num_bits=4, symmetric=True is not supported in format='float-quantized'",
    ),
    "act-order": (f"{GROUP}.weights.actorder", "group", r"weights\.actorder='group'"),
    "no targets": (f"{GROUP}.targets", [], r"group_0\.targets=\[\] must name modules"),
    "a broken expression": ("ignore", ["re:("], r"ignore: 're:\(' is not a regular expression"),
    "blocks without sizes": (f"{GROUP}.weights.strategy", "block", "block_structure=None must be"),
    "integers": (f"{GROUP}.weights.type", "int", r"weights: type='int', num_bits=8"),
    "groups of weights": (f"{GROUP}.weights.group_size", 128, r"weights\.group_size=128"),
    "asymmetric": (f"{GROUP}.weights.symmetric", False, "symmetric=False is not supported in"),
    "no weights": (f"{GROUP}.weights", None, r"weights=None must be an object"),
    "unknown field": (f"{GROUP}.weights.rotation", "hadamard", "weights: unknown field 'rotation'"),
    "unknown field on top": ("smoothing", 0.5, "quantization_config: unknown field 'smoothing'"),
    "sparse experts": ("moe_sparsity_config", {"pruned": 1}, "moe_sparsity_config="),
    "sparse": ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_quantisations(name):
    path, value, message = REFUSED[name]
    fields = copy.deepcopy(QUANTIZATION_CONFIG)
    *parents, last = path.split(".")
    functools.reduce(lambda node, key: node[key], parents, fields)[last] = value
    with pytest.raises(ConfigError, match=message) as error:
        config_from_hf(hf_fields() | {"quantization_config": fields})
    assert "quantization_config" in str(error.value) and "\n" not in str(error.value)


def test_quantised_models_are_for_inference(fp8, tmp_path):
    model = skv.load(fp8)
    mask = jnp.ones(tokens().shape, jnp.float32)
    with pytest.raises(UsageError, match="distill_loss needs unquantised weights, these are fp8"):
        skv.distill_loss(model, tokens(), mask)
    with pytest.raises(UsageError, match="add_swiftkv needs unquantised weights, these are fp8"):
        skv.add_swiftkv(model, 2)
    with pytest.raises(UsageError, match="a delta needs unquantised weights, these are fp8"):
        load_delta(fp8, model)
    with pytest.raises(UsageError, match="`format`=delta: not for fp8 weights"):
        skv.save_hf(model, tmp_path / "delta", format="delta")
    assert skv.add_swiftkv(skv.load(fp8, quantization="none"), 2).swiftkv is not None


def test_other_formats_than_the_stored_one(fp8, tmp_path):
    with pytest.raises(UsageError, match=r"`quantization`='int8': .* is fp8 already"):
        skv.load(fp8, quantization="int8")
    with pytest.raises(
        UsageError, match="`quantization`='int4' is not known; choose none or fp8 or int8"
    ):
        skv.load(fp8, quantization="int4")  # pyright: ignore[reportArgumentType]
    assert_same(skv.load(fp8, quantization="fp8"), skv.load(fp8))
    hf = tiny.hf_config(num_hidden_layers=4)
    model = skv.load(write(tmp_path / "plain", hf, tiny.tensors_for(hf)), quantization="int8")
    with pytest.raises(
        UsageError,
        match="`format`=full: not for int8 weights; use save, or load them with "
        "`quantization`='none'",
    ):
        skv.save_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
