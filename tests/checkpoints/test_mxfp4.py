"""MXFP4 in the layout of compressed-tensors, against its definition; `test_stored_formats` loads
whole directories of it."""

import warnings

import ml_dtypes
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError, ConfigError
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.checkpoints.quantized import decode, matrices
from swiftkv_jax.checkpoints.tensor_reader import TensorReader
from swiftkv_jax.convert import main as convert
from tests import tiny
from tests.checkpoints.fp8_files import assert_same, write
from tests.checkpoints.quantized_files import FORMATS, directory, e2m1


def powers(*codes: int) -> np.ndarray:
    return np.array([codes], np.uint8).view(ml_dtypes.float8_e8m0fnu)


def test_every_code():
    """The low four bits of a byte come first."""
    packed = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    found = decode.decode_mxfp4(packed, powers(128), group_size=32, num_inputs=16)
    half = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(found, [[2 * x for x in half] + [-2 * x for x in half]])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0] / 2, [e2m1(code) for code in range(16)])


def test_a_power_for_each_32_inputs():
    """2^(byte - 127), for subnormal numbers of float32 too."""
    packed = np.full((1, 40), 0x22, np.uint8)  # 1 everywhere
    found = decode.decode_mxfp4(packed, powers(127, 120, 140), group_size=32, num_inputs=79)
    expected = np.repeat(np.array([1, 2**-7, 2**13], np.float32), 32)[:79]
    np.testing.assert_array_equal(found, expected[None])
    for code in (0, 1, 254):
        found = decode.decode_mxfp4(packed[:, :1], powers(code), group_size=32, num_inputs=1)
        assert float(found[0, 0]) == 2.0 ** (code - 127)


@pytest.mark.parametrize("mesh", ["2x2", "1x4"])
def test_read_straight_into_shards(tmp_path, mesh, monkeypatch):
    monkeypatch.setattr(matrices, "_CHUNK_ELEMENTS", 300)  # a few rows
    hf, tensors, wide = directory("MXFP4")
    path = write(tmp_path / "model", hf, tensors)
    model = skv.load(path, mesh=skv.make_mesh(mesh))
    assert_same(model, tiny.model_of({**hf, "quantization_config": None}, wide))


def test_parts_of_a_matrix_are_read_in_parts(tmp_path, monkeypatch):
    hf, tensors, wide = directory("MXFP4", intermediate_size=128)
    opened = open_any(write(tmp_path / "model", hf, tensors))
    assert isinstance(opened.reader, TensorReader)
    matrix = opened.reader.tensors["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(matrix, matrices.EncodedMatrix)
    seen, read = {}, matrices.read_block
    monkeypatch.setattr(
        matrices,
        "read_block",
        lambda tensor, index: seen.setdefault(tensor.name, read(tensor, index)),
    )
    out = np.empty((5, 40), np.float32)
    matrix.read_into(out, (slice(9, 14), slice(39, 79)))
    np.testing.assert_array_equal(out, wide[matrix.name][9:14, 39:79])
    shapes = [seen[f"{matrix.name}_{part}"].shape for part in ("packed", "scale")]
    assert shapes == [(5, 32), (5, 2)]


def test_inspect(tmp_path, capsys):
    hf, tensors, _ = directory("MXFP4")
    assert convert(["inspect", str(write(tmp_path / "model", hf, tensors))]) == 0
    line = "compressed-tensors: 4-bit float, groups of 32 (decoded when read)"
    assert f"quantization           {line}\n" in capsys.readouterr().out


# Errors -----------------------------------------------------------------------

OUT = "model.layers.1.self_attn.o_proj"
BAD = {  # what happens to the tensors, what the error says
    "no scale": (lambda t: t.pop(f"{OUT}.weight_scale"), f"missing: {OUT}.weight_scale$"),
    "groups of 16": (
        lambda t: t.update({f"{OUT}.weight_scale": np.zeros((32, 2), np.uint8)}),
        rf"wrong shape: {OUT}.weight_scale \[32, 2\], expected \[32, 1\]$",
    ),
    "a byte for each value": (
        lambda t: t.update({f"{OUT}.weight_packed": np.zeros((32, 32), np.uint8)}),
        rf"wrong shape: {OUT}.weight_packed \[32, 32\], expected \[32, 16\]$",
    ),
    "words of 32 bits": (
        lambda t: t.update({f"{OUT}.weight_packed": np.zeros((32, 16), np.int32)}),
        rf"dtype not supported yet: {OUT}.weight_packed I32 \(supported: U8\)$",
    ),
    "scales of NVFP4": (
        lambda t: t.update({f"{OUT}.weight_scale": np.ones((32, 1), ml_dtypes.float8_e4m3fn)}),
        rf"dtype not supported yet: {OUT}.weight_scale F8_E4M3 \(supported: U8\)$",
    ),
    "a global scale": (
        lambda t: t.update({f"{OUT}.weight_global_scale": np.ones(1, np.float32)}),
        f"unexpected: {OUT}.weight_global_scale$",
    ),
    "a scale of activations": (
        lambda t: t.update({f"{OUT}.input_global_scale": np.ones(1, np.float32)}),
        f"unexpected: {OUT}.input_global_scale$",
    ),
    "no number": (
        lambda t: t[f"{OUT}.weight_scale"].fill(255),
        rf"model.safetensors: {OUT}.weight_scale has scales that are not finite",
    ),
    "gpt-oss's names": (
        lambda t: t.update({f"{OUT}_blocks": np.zeros((32, 1, 16), np.uint8)}),
        f"unexpected: {OUT}_blocks$",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_tensors(tmp_path, case):
    damage, message = BAD[case]
    hf, tensors, _ = directory("MXFP4")
    damage(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match=message) as error:
            skv.load(write(tmp_path / "bad", hf, tensors))
    assert "\n" not in str(error.value)


REFUSED = [  # fields of weights, of the whole, what the error says
    ({"group_size": 16}, {}, "weights.group_size=16 is not supported in format='mxfp4-pack-quan"),
    (
        {"strategy": "channel", "group_size": None},
        {},
        "weights.strategy='channel' is not supported",
    ),
    ({"strategy": "tensor_group"}, {}, "weights.strategy='tensor_group' is not supported"),
    ({"symmetric": False}, {}, "symmetric=False is not supported in format='mxfp4-pack-quantized'"),
    ({"num_bits": 8}, {}, "num_bits=8, .* is not supported in format='mxfp4-pack-quantized'"),
    ({"type": "int"}, {}, "type='int', .* is not supported in format='mxfp4-pack-quantized'"),
    (
        {"scale_dtype": "torch.float8_e4m3fn"},
        {},
        "scale_dtype='torch.float8_e4m3fn' is not support",
    ),
    ({}, {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized' is not supported"),
    ({}, {"quant_method": "mxfp4"}, "quant_method='mxfp4' is not supported; supported: "),
    ({}, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
]


@pytest.mark.parametrize(("weights", "fields", "message"), REFUSED)
def test_configs_that_are_refused(weights, fields, message):
    config = FORMATS["MXFP4"][0]
    group = config["config_groups"]["group_0"]
    group = group | {"weights": group["weights"] | weights}
    config = config | {"config_groups": {"group_0": group}} | fields
    with pytest.raises(ConfigError, match=f"quantization_config.*{message}") as error:
        config_from_hf(tiny.hf_config() | {"quantization_config": config})
    assert "\n" not in str(error.value)


def test_bytes_are_scales_of_mxfp4_alone():
    config = FORMATS["FP8_BLOCK"][0]
    group = config["config_groups"]["group_0"]
    for arguments, fields in (
        ("weights", {"scale_dtype": "torch.uint8"}),
        ("input_activations", {"num_bits": 4}),
    ):
        changed = group | {arguments: group[arguments] | fields}
        ((name, value),) = fields.items()
        with pytest.raises(ConfigError, match=f"{arguments}.{name}={value!r} is not supported"):
            config_from_hf(
                tiny.hf_config()
                | {"quantization_config": config | {"config_groups": {"group_0": changed}}}
            )


def test_gpt_oss_is_refused():
    with pytest.raises(ConfigError, match="model_type='gpt_oss' is not supported"):
        config_from_hf(tiny.hf_config() | {"model_type": "gpt_oss"})
