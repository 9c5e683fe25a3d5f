"""Checkpoints that other programs quantised: what each format's tensors mean, by hand, and whole
directories in it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.hf_read import load_delta, open_delta
from swiftkv_jax.checkpoints.loss_notes import FAR, PERPLEXITY, loss_warning, with_notes
from swiftkv_jax.checkpoints.quantized import decode, matrices
from swiftkv_jax.checkpoints.tensor_reader import TensorReader
from swiftkv_jax.convert import main as convert
from swiftkv_jax.model.quantization import Scheme, dequantize
from tests import tiny
from tests.checkpoints import quantized_files
from tests.checkpoints.fp8_files import stored, write
from tests.checkpoints.hf_models import assert_same
from tests.checkpoints.quantized_files import FORMATS, KEPT, directory, e2m1

# One matrix -------------------------------------------------------------------


def test_scales_of_blocks():
    weight = np.array([[1, -2, 448], [0.5, 3, -0.25]], np.float32).astype(ml_dtypes.float8_e4m3fn)
    found = decode.decode_scaled(weight, np.array([[2, 10]], np.float32), block=(128, 2))
    np.testing.assert_array_equal(found, [[2, -4, 4480], [1, 6, -2.5]])
    powers = np.array([[1 / 4], [8]], ml_dtypes.float8_e8m0fnu)
    found = decode.decode_scaled(weight, powers, block=(1, 128))
    np.testing.assert_array_equal(found, [[0.25, -0.5, 112], [4, 24, -2]])
    integers = np.array([[-128, 127]], np.int8)
    found = decode.decode_scaled(integers, np.array([[0.5]], np.float16), block=(0, 0))
    np.testing.assert_array_equal(found, [[-64, 63.5]])


def test_packed_integers():
    # 4 bits: 0, 1, ... 7 in the first word, 8 ... 11 and padding in the second.
    packed = np.array([[0x76543210, 0x0000BA98]], np.uint32).view(np.int32)
    found = decode.decode_packed(
        packed, np.array([[1, 2, 4]], np.float16), bits=4, group_size=4, num_inputs=12
    )
    np.testing.assert_array_equal(found, [[-8, -7, -6, -5, -8, -6, -4, -2, 0, 4, 8, 12]])
    zeros = np.array([[0x3], [0xF]], np.uint32).view(np.int32)[:1]
    found = decode.decode_packed(
        packed[:, :1], np.array([[0.5]], np.float16), zeros, bits=4, group_size=0, num_inputs=8
    )
    np.testing.assert_array_equal(found, [[-1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2]])
    eight = np.array([[0xFF800100]], np.uint32).view(np.int32)
    found = decode.decode_packed(
        eight, np.array([[1]], np.float32), bits=8, group_size=0, num_inputs=4
    )
    np.testing.assert_array_equal(found, [[-128, -127, 0, 127]])


@pytest.mark.parametrize("stored_zero", [0, 1])
def test_gptq(stored_zero):
    qweight = np.zeros((1, 8), np.uint32)  # 8 inputs of 8 outputs
    qweight[0, 0], qweight[0, 7] = 0x76543210, 0xFFFFFFFF
    qzeros = np.array([[0x70000007], [0x00000001]], np.uint32)  # groups of 4 inputs
    scales = np.array([[1] * 8, [2] * 8], np.float16)
    found = decode.decode_gptq(
        qweight.view(np.int32),
        qzeros.view(np.int32),
        scales,
        bits=4,
        group_size=4,
        stored_zero=stored_zero,
    )
    zeros = np.array([7] * 4 + [1] * 4) + stored_zero
    np.testing.assert_array_equal(
        found[0], (np.arange(8) - zeros) * np.array([1, 1, 1, 1, 2, 2, 2, 2])
    )
    zeros = np.array([7] * 4 + [0] * 4) + stored_zero
    np.testing.assert_array_equal(found[7], (15 - zeros) * np.array([1, 1, 1, 1, 2, 2, 2, 2]))


def test_awq():
    qweight = np.array([[0x76543210]], np.uint32).view(np.int32)  # one input of 8 outputs
    qzeros = np.array([[0x00000080]], np.uint32).view(np.int32)  # 8 for output 2
    found = decode.decode_awq(qweight, qzeros, np.array([[1] * 8], np.float16), group_size=128)
    np.testing.assert_array_equal(found[:, 0], [0, 4, 1 - 8, 5, 2, 6, 3, 7])


def powers(*codes: int) -> np.ndarray:
    return np.array([codes], np.uint8).view(ml_dtypes.float8_e8m0fnu)


def test_every_code_of_mxfp4():
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


# Directories ------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_directory_is_the_model_of_its_decoded_weights(tmp_path, name):
    hf, tensors, wide = directory(name)
    path = write(tmp_path / "model", hf, tensors)
    model = skv.load(path)
    assert model.quantization == (Scheme("fp8") if name in KEPT else None)
    if name in KEPT:
        down = tensors["model.layers.1.mlp.down_proj.weight"]
        np.testing.assert_array_equal(model.llama.lower.down.values[1], down)
        skv.save_hf(model, tmp_path / "again")
        assert_same(skv.load(tmp_path / "again"), model)
        model = skv.load(path, quantization="none")
    assert_same(model, tiny.model_of({**hf, "quantization_config": None}, wide))


@pytest.mark.parametrize(
    ("name", "rows", "columns", "shapes"),
    [
        ("gptq", slice(9, 14), slice(14, 34), {"qweight": (6, 8), "scales": (3, 8)}),
        ("MXFP4", slice(9, 14), slice(39, 79), {"weight_packed": (5, 32), "weight_scale": (5, 2)}),
    ],
)
def test_parts_of_a_matrix_are_read_in_parts(tmp_path, monkeypatch, name, rows, columns, shapes):
    """Only the words and scales of the groups that are asked for."""
    hf, tensors, wide = directory(name, intermediate_size=128 if name == "MXFP4" else 48)
    opened = open_any(write(tmp_path / "model", hf, tensors))
    assert isinstance(opened.reader, TensorReader)
    module = "model.layers.1.mlp.down_proj"
    matrix = opened.reader.tensors[f"{module}.weight"]
    assert isinstance(matrix, matrices.EncodedMatrix)
    seen, read = {}, matrices.read_block
    monkeypatch.setattr(
        matrices,
        "read_block",
        lambda tensor, index: seen.setdefault(tensor.name, read(tensor, index)),
    )
    out = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
    matrix.read_into(out, (rows, columns))
    np.testing.assert_array_equal(out, wide[matrix.name][rows, columns])
    assert {part: seen[f"{module}.{part}"].shape for part in shapes} == shapes


def test_fused_matrices(tmp_path):
    hf = tiny.hf_config(**(quantized_files.PLAIN | {"num_hidden_layers": 2}))
    plain = tiny.tensors_for(hf)
    config, encode = FORMATS["gptq"]
    tensors, wide = quantized_files.encode_all(plain, encode)
    for layer in (f"model.layers.{i}." for i in range(2)):
        for fused, names in {
            "self_attn.qkv_proj": [f"self_attn.{name}_proj" for name in "qkv"],
            "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
        }.items():
            for part in ("qweight", "qzeros", "scales", "g_idx", "bias"):
                found = [tensors.pop(f"{layer}{name}.{part}") for name in names]
                tensors[f"{layer}{fused}.{part}"] = (
                    found[0] if part == "g_idx" else np.concatenate(found, axis=-1)
                )
    skip = ("attention_bias", "swiftkv", "num_key_value_layers", "key_value_group_size")
    fields = {name: value for name, value in hf.items() if name not in skip}
    fields |= {"model_type": "phi3", "quantization_config": config}
    model = skv.load(write(tmp_path / "model", fields, tensors))
    expected = tiny.model_of(hf, wide)
    for a, b in zip(jax.tree.leaves(model.llama), jax.tree.leaves(expected.llama), strict=True):
        np.testing.assert_array_equal(a, b)


def test_formats_of_groups(tmp_path):
    """Formats differ from module to module; a name goes before the class of all modules."""
    mlp = quantized_files.compressed_tensors("pack-quantized", quantized_files.W4, None)
    config = quantized_files.compressed_tensors(
        "int-quantized", quantized_files.W8, quantized_files.TOKENS | {"type": "int"}
    )
    group = mlp["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*"]}
    config["config_groups"]["group_1"] = group
    config |= {"format": "mixed-precision"}
    hf, tensors, wide = directory("W4A16")
    chosen = quantized_files.scaled((1, 0), np.int8)
    plain = {name: array for name, array in wide.items() if "self_attn" in name}
    attention, attention_wide = quantized_files.encode_all(plain, chosen)
    tensors = {name: array for name, array in tensors.items() if "self_attn" not in name}
    hf["quantization_config"] = config
    model = skv.load(write(tmp_path / "model", hf, tensors | attention))
    assert_same(model, tiny.model_of({**hf, "quantization_config": None}, wide | attention_wide))


def test_int8_stays_int8(tmp_path):
    activations = quantized_files.TOKENS | {"type": "int"}
    config = quantized_files.compressed_tensors("int-quantized", quantized_files.W8, activations)
    hf = tiny.hf_config(**(quantized_files.PLAIN | {"num_hidden_layers": 2}))
    encode = quantized_files.scaled((1, 0), np.int8)
    tensors, wide = quantized_files.encode_all(tiny.tensors_for(hf), encode)
    path = write(tmp_path / "model", hf | {"quantization_config": config}, tensors)
    model, plain = skv.load(path), tiny.model_of(hf, wide)
    down = model.llama.lower.down
    assert model.quantization == Scheme("int8") and down.values.dtype == jnp.int8
    np.testing.assert_array_equal(dequantize(down, jnp.float32), plain.llama.lower.down)
    assert_same(skv.load(path, quantization="none"), plain)
    tokens = jnp.asarray(tiny.tokens_for(hf, 1, 7))
    np.testing.assert_allclose(
        skv.logits(model, tokens), skv.logits(plain, tokens), atol=3e-5, rtol=1e-5
    )


def test_decoded_models_are_plain_ones(tmp_path):
    """They take a delta, are written wide, and are quantised anew."""
    hf, tensors, wide = directory("gptq")
    path = write(tmp_path / "model", hf, tensors)
    student = skv.add_swiftkv(skv.load(path), 1)
    assert student.swiftkv is not None
    skv.save_hf(student, tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in written and written["torch_dtype"] == "float32"
    found = stored(tmp_path / "out")["model.layers.0.mlp.up_proj.weight"]
    assert found[2] == wide["model.layers.0.mlp.up_proj.weight"].tobytes()
    assert_same(skv.load(tmp_path / "out"), student)
    assert convert(["orbax2hf", str(path), str(tmp_path / "plain")]) == 0
    assert_same(skv.load(tmp_path / "plain"), skv.load(path))

    far = {"nats": 0.4, "tokens": 300, "limit": 0.15, "step": "calibration"}
    more = {"share": 0.0712, "error": None, "limit": 0.02, "step": "training"}
    files = with_notes(student.auxiliary_files, {FAR: far, PERPLEXITY: more})
    noted = dataclasses.replace(student, auxiliary_files=files)
    skv.save_hf(noted, tmp_path / "delta", format="delta")
    joined = load_delta(tmp_path / "delta", skv.load(path, dtype="bfloat16"))
    assert joined.swiftkv is not None
    opened = open_delta(tmp_path / "delta", open_any(path, student.config))
    assert opened.has_delta
    assert loss_warning(opened.auxiliary_files.hf_config) == (
        "this cut lost 7.1% of perplexity on held-out text (limit 2%) after training and 0.400 "
        "nats on 300 far tokens (limit 0.15) after calibration: keep more layers, or distil it; "
        "swiftkv train analyze shows what it takes"
    )

    again = skv.load(path, quantization="fp8")
    skv.save_hf(again, tmp_path / "fp8")
    assert_same(skv.load(tmp_path / "fp8"), again)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fp8 blocks", "fp8: 8-bit float, blocks of 32x32 (decoded when read)"),
        ("fp8 static", "fp8: 8-bit float, one scale (kept as fp8)"),
        ("W8A16", "compressed-tensors: 8-bit int, a scale for each output (decoded when read)"),
        ("gptq", "gptq: 4-bit int, groups of 16 (decoded when read)"),
        ("MXFP4", "compressed-tensors: 4-bit float, groups of 32 (decoded when read)"),
    ],
)
def test_inspect_names_the_format(tmp_path, capsys, name, line):
    hf, tensors, _ = directory(name)
    assert convert(["inspect", str(write(tmp_path / "model", hf, tensors))]) == 0
    assert f"quantization           {line}\n" in capsys.readouterr().out
