"""Checkpoints of quantised matrices that are wrong or not supported, and what these models
refuse."""

import warnings
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError, UsageError
from swiftkv_jax.checkpoints.hf_read import load_delta
from tests import tiny
from tests.checkpoints.fp8_files import (
    E4M3,
    fp8_tensors,
    hf_fields,
    tokens,
    write,
)
from tests.checkpoints.hf_models import assert_same
from tests.checkpoints.quantized_files import directory

OUT = "model.layers.1.self_attn.o_proj"
ONE, BYTES, WORDS = (
    np.ones(1, np.float32),
    np.zeros((32, 2), np.uint8),
    np.zeros((32, 16), np.int32),
)
SUPPORTED = r"\(supported: F8_E4M3\)$"
# Format, the tensors that change (of `OUT` where they begin with a dot), each with its new values,
# a function of the old ones or None for no tensor, and what the error says.
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("fp8", {".weight_scale": None}, "missing: OUT.weight_scale$"),
    ("fp8", {".weight": None}, "missing: OUT.weight$"),
    ("fp8", {"lm_head.weight_scale": ONE}, "unexpected: lm_head.weight_scale$"),
    ("fp8", {"model.layers.0.mlp.up_proj.input_scale": ONE}, "unexpected: .*input_scale"),
    (
        "fp8",
        {".weight_scale": lambda scale: scale[:1]},
        r"wrong shape: OUT.weight_scale \[1, 1\], expected \[32, 1\]",
    ),
    (
        "fp8",
        {".weight_scale": lambda scale: scale[:, 0]},
        r"wrong shape: OUT.weight_scale \[32\], expected \[32, 1\]",
    ),
    ("fp8", {".weight": lambda values: values.astype("f")}, rf"OUT.weight F32 {SUPPORTED}"),
    ("fp8", {".weight": lambda values: values.astype("i1")}, rf"OUT.weight I8 {SUPPORTED}"),
    (
        "fp8",
        {"model.norm.weight": lambda norm: norm.astype(E4M3)},
        r"model.norm.weight F8_E4M3 \(supported: F32, BF16, F16\)",
    ),
    (
        "fp8",
        {".weight_scale": None, "model.norm.weight": None},
        "missing: OUT.weight_scale, model.norm.weight$",
    ),
    (
        "fp8",
        {".weight_scale": lambda scale: scale * np.nan},
        "scale has scales that are not finite",
    ),
    (
        "fp8",
        {".weight_scale": lambda scale: scale * np.inf},
        "scale has scales that are not finite",
    ),
    ("gptq", {".scales": None}, "missing: OUT.scales$"),
    ("W4A16 asymmetric", {".weight_zero_point": None}, "missing: OUT.weight_zero_point$"),
    ("W4A16", {".weight_zero_point": WORDS}, "unexpected: OUT.weight_zero_point$"),
    (
        "awq symmetric",
        {".qzeros": np.zeros_like},
        "model.safetensors: OUT.qzeros has other zeros than 8, but .*zero_point is false; if ",
    ),
    (
        "gptq",
        {".g_idx": lambda groups: groups[::-1].copy()},
        "model.safetensors: OUT.g_idx is not in order: .*quantization_config.desc_act",
    ),
    ("W4A16", {".weight_g_idx": WORDS[0]}, "unexpected: OUT.weight_g_idx$"),
    (
        "gptq",
        {".bias": np.ones_like},
        "model.safetensors: OUT.bias is not zero, but config.json says there is no bias$",
    ),
    (
        "gptq",
        {".scales": lambda scales: scales[:1].copy()},
        r"wrong shape: OUT.scales \[1, 32\], expected \[2, 32\]$",
    ),
    # AWQ's order of axes.
    ("gptq", {".qweight": WORDS}, r"wrong shape: OUT.qweight \[32, 16\], expected \[4, 32\]$"),
    (
        "W4A16",
        {".weight_shape": np.array([32, 31])},
        r"OUT.weight_shape is \[32, 31\], expected \[32, 32\]$",
    ),
    (
        "fp8 blocks",
        {".weight": lambda values: values.view(np.int8)},
        rf"dtype not supported yet: OUT.weight I8 {SUPPORTED}",
    ),
    (
        "fp8 blocks",
        {".weight_scale_inv": None, ".weight": np.zeros((32, 32), np.float16)},
        "not quantised, though quantization_config says 8-bit float, blocks of 32x32: OUT$",
    ),
    (
        "fbgemm_fp8",
        {".weight_scale": ONE[:, None]},
        "quantised, though quantization_config leaves them out: OUT$",
    ),
    ("fp8 blocks", {".activation_scale": ONE}, "unexpected: OUT.activation_scale$"),
    (
        "fp8 static",
        {"model.layers.0.self_attn.k_scale": ONE},
        "model.safetensors: .*self_attn.k_scale: scales of a quantised KV cache are not supported",
    ),
    (
        "awq",
        {"model.layers.1.mlp.up_proj.scales": lambda scales: scales * np.inf},
        "model.safetensors: .*up_proj.scales has scales that are not finite",
    ),
    ("gptq", {"lm_head.qweight": WORDS}, "unexpected: lm_head.qweight$"),
    ("MXFP4", {".weight_scale": None}, "missing: OUT.weight_scale$"),
    # Groups of 16; a byte for each value; words of 32 bits; scales of NVFP4.
    (
        "MXFP4",
        {".weight_scale": BYTES},
        r"wrong shape: OUT.weight_scale \[32, 2\], expected \[32, 1\]$",
    ),
    (
        "MXFP4",
        {".weight_packed": BYTES},
        r"wrong shape: OUT.weight_packed \[32, 2\], expected \[32, 16\]$",
    ),
    (
        "MXFP4",
        {".weight_packed": WORDS},
        r"dtype not supported yet: OUT.weight_packed I32 \(supported: U8\)$",
    ),
    (
        "MXFP4",
        {".weight_scale": np.ones((32, 1), ml_dtypes.float8_e4m3fn)},
        r"dtype not supported yet: OUT.weight_scale F8_E4M3 \(supported: U8\)$",
    ),
    ("MXFP4", {".weight_global_scale": ONE}, "unexpected: OUT.weight_global_scale$"),
    ("MXFP4", {".input_global_scale": ONE}, "unexpected: OUT.input_global_scale$"),
    (
        "MXFP4",
        {".weight_scale": lambda scale: np.full_like(scale, 255)},
        "model.safetensors: OUT.weight_scale has scales that are not finite",
    ),
    ("MXFP4", {"model.layers.1.self_attn.o_proj_blocks": BYTES}, "unexpected: OUT_blocks$"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_damaged_tensors(tmp_path, name, changes, message):
    if name == "fp8":  # a student in the authors' format
        hf, tensors = hf_fields(), fp8_tensors(hf_fields())
    else:
        hf, tensors, _ = directory(name)
    for tensor, change in changes.items():
        tensor = OUT + tensor if tensor.startswith(".") else tensor
        old = tensors.pop(tensor, None)
        if change is not None:
            tensors[tensor] = change if isinstance(change, np.ndarray) else change(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match=message.replace("OUT", OUT)) as error:
            skv.load(write(tmp_path / "bad", hf, tensors))
    assert "\n" not in str(error.value)


def test_act_order_needs_its_groups(tmp_path):
    """Groups that `desc_act` may have put out of order are read where `g_idx` says they are not."""
    hf, tensors, wide = directory("gptq")
    hf["quantization_config"] = hf["quantization_config"] | {"desc_act": True}
    model = skv.load(write(tmp_path / "good", hf, tensors))
    assert_same(model, tiny.model_of({**hf, "quantization_config": None}, wide))
    del tensors[f"{OUT}.g_idx"]
    with pytest.raises(CheckpointError, match=f"missing: {OUT}.g_idx$"):
        skv.load(write(tmp_path / "bad", hf, tensors))


def test_eight_bits_without_a_config(tmp_path):
    hf = {name: value for name, value in hf_fields().items() if name != "quantization_config"}
    with pytest.raises(
        CheckpointError,
        match=r"unexpected: .*o_proj.weight_scale.*o_proj.weight F8_E4M3 \(supported: F32",
    ):
        skv.load(write(tmp_path / "bad", hf, fp8_tensors(hf)))


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
