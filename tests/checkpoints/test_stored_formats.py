"""Checkpoints that other programs quantised: what each format's tensors mean, by hand, and whole
directories in it."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.hf_read import load_delta, open_delta
from swiftkv_jax.checkpoints.quantized import decode, matrices
from swiftkv_jax.checkpoints.tensor_reader import TensorReader
from swiftkv_jax.convert import main as convert
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.quantization import Scheme, dequantize
from tests import tiny
from tests.checkpoints import quantized_files
from tests.checkpoints.fp8_files import assert_same, stored, write
from tests.checkpoints.quantized_files import FORMATS, directory

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


# Directories ------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_directory_is_the_model_of_its_decoded_weights(tmp_path, name):
    hf, tensors, wide = directory(name)
    model = skv.load(write(tmp_path / "model", hf, tensors))
    plain = tiny.model_of({**hf, "quantization_config": None}, wide)
    assert model.quantization is None
    assert_same(model, plain)
    tokens = jnp.asarray(tiny.tokens_for(hf, 1, 7))
    np.testing.assert_array_equal(skv.logits(model, tokens), skv.logits(plain, tokens))


@pytest.mark.parametrize("name", ["fp8 blocks", "W4A16 asymmetric", "gptq", "awq"])
def test_read_straight_into_shards(tmp_path, name, monkeypatch):
    monkeypatch.setattr(matrices, "_CHUNK_ELEMENTS", 300)  # a few rows
    hf, tensors, wide = directory(name)
    path = write(tmp_path / "model", hf, tensors)
    model = skv.load(path, mesh=make_mesh((2, 2)))
    assert_same(model, tiny.model_of({**hf, "quantization_config": None}, wide))
    assert model.llama.lower.gate.addressable_shards[0].data.shape[1] == 24


def test_parts_of_a_matrix_are_read_in_parts(tmp_path, monkeypatch):
    """Only the words and scales of the groups that are asked for."""
    hf, tensors, wide = directory("gptq")
    opened = open_any(write(tmp_path / "model", hf, tensors))
    assert isinstance(opened.reader, TensorReader)
    matrix = opened.reader.tensors["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(matrix, matrices.EncodedMatrix)
    seen = {}
    read = matrices.read_block
    monkeypatch.setattr(
        matrices,
        "read_block",
        lambda tensor, index: seen.setdefault(tensor.name, read(tensor, index)),
    )
    out = np.empty((5, 20), np.float32)
    matrix.read_into(out, (slice(9, 14), slice(14, 34)))
    np.testing.assert_array_equal(out, wide[matrix.name][9:14, 14:34])
    shapes = [seen[f"model.layers.1.mlp.down_proj.{part}"].shape for part in ("qweight", "scales")]
    assert shapes == [(6, 8), (3, 8)]


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

    skv.save_hf(student, tmp_path / "delta", format="delta")
    joined = load_delta(tmp_path / "delta", skv.load(path, dtype="bfloat16"))
    assert joined.swiftkv is not None
    opened = open_any(path, student.config)
    assert open_delta(tmp_path / "delta", opened).has_delta

    again = skv.load(path, quantization="fp8")
    skv.save_hf(again, tmp_path / "fp8")
    assert_same(skv.load(tmp_path / "fp8"), again)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fp8 blocks", "fp8: 8-bit float, blocks of 32x32 (decoded when read)"),
        ("fp8 static", "fp8: 8-bit float, one scale (decoded when read)"),
        ("W8A16", "compressed-tensors: 8-bit int, a scale for each output (decoded when read)"),
        ("gptq", "gptq: 4-bit int, groups of 16 (decoded when read)"),
    ],
)
def test_inspect_names_the_format(tmp_path, capsys, name, line):
    hf, tensors, _ = directory(name)
    assert convert(["inspect", str(write(tmp_path / "model", hf, tensors))]) == 0
    assert f"quantization           {line}\n" in capsys.readouterr().out


# Errors -----------------------------------------------------------------------

OUT = "model.layers.1.self_attn.o_proj"
BAD = {  # format, what happens to its tensors, what the error says
    "no scale": ("gptq", lambda t: t.pop(f"{OUT}.scales"), f"missing: {OUT}.scales$"),
    "no zeros": (
        "W4A16 asymmetric",
        lambda t: t.pop(f"{OUT}.weight_zero_point"),
        f"missing: {OUT}.weight_zero_point$",
    ),
    "zeros too many": (
        "W4A16",
        lambda t: t.update({f"{OUT}.weight_zero_point": np.zeros((4, 2), np.int32)}),
        f"unexpected: {OUT}.weight_zero_point$",
    ),
    "zeros of an AWQ without them": (
        "awq symmetric",
        lambda t: t[f"{OUT}.qzeros"].fill(0),
        f"model.safetensors: {OUT}.qzeros has other zeros than 8, but .*zero_point is false; if ",
    ),
    "act-order of GPTQ": (
        "gptq",
        lambda t: t.update({f"{OUT}.g_idx": t[f"{OUT}.g_idx"][::-1].copy()}),
        f"model.safetensors: {OUT}.g_idx is not in order: .*quantization_config.desc_act",
    ),
    "act-order of packed integers": (
        "W4A16",
        lambda t: t.update({f"{OUT}.weight_g_idx": np.zeros(32, np.int32)}),
        f"unexpected: {OUT}.weight_g_idx$",
    ),
    "a bias": (
        "gptq",
        lambda t: t.update({f"{OUT}.bias": np.ones(32, np.float16)}),
        f"model.safetensors: {OUT}.bias is not zero, but config.json says there is no bias$",
    ),
    "other groups": (
        "gptq",
        lambda t: t.update({f"{OUT}.scales": t[f"{OUT}.scales"][:1].copy()}),
        rf"wrong shape: {OUT}.scales \[1, 32\], expected \[2, 32\]$",
    ),
    "AWQ's order of axes": (
        "gptq",
        lambda t: t.update({f"{OUT}.qweight": np.zeros((32, 4), np.int32)}),
        rf"wrong shape: {OUT}.qweight \[32, 4\], expected \[4, 32\]$",
    ),
    "another shape of the matrix": (
        "W4A16",
        lambda t: t.update({f"{OUT}.weight_shape": np.array([32, 31])}),
        rf"{OUT}.weight_shape is \[32, 31\], expected \[32, 32\]$",
    ),
    "integers for floats": (
        "fp8 blocks",
        lambda t: t.update({f"{OUT}.weight": t[f"{OUT}.weight"].view(np.int8)}),
        rf"dtype not supported yet: {OUT}.weight I8 \(supported: F8_E4M3\)$",
    ),
    "not quantised": (
        "fp8 blocks",
        lambda t: [
            t.pop(f"{OUT}.weight_scale_inv"),
            t.update({f"{OUT}.weight": np.zeros((32, 32), np.float16)}),
        ],
        f"not quantised, though quantization_config says 8-bit float, blocks of 32x32: {OUT}$",
    ),
    "quantised all the same": (
        "fbgemm_fp8",
        lambda t: t.update({f"{OUT}.weight_scale": np.ones((32, 1), np.float32)}),
        f"quantised, though quantization_config leaves them out: {OUT}$",
    ),
    "scales of activations that are not static": (
        "fp8 blocks",
        lambda t: t.update({f"{OUT}.activation_scale": np.ones(1, np.float32)}),
        f"unexpected: {OUT}.activation_scale$",
    ),
    "scales of the cache": (
        "fp8 static",
        lambda t: t.update({"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}),
        r"model.safetensors: .*self_attn.k_scale: scales of a quantised KV cache are not supported",
    ),
    "a scale that is not finite": (
        "awq",
        lambda t: t["model.layers.1.mlp.up_proj.scales"].fill(np.inf),
        r"model.safetensors: .*up_proj.scales has scales that are not finite",
    ),
    "a quantised head": (
        "gptq",
        lambda t: t.update({"lm_head.qweight": np.zeros((4, 61), np.int32)}),
        "unexpected: lm_head.qweight$",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_tensors(tmp_path, case):
    name, damage, message = BAD[case]
    hf, tensors, _ = directory(name)
    damage(tensors)
    with pytest.raises(CheckpointError, match=message) as error:
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


def test_a_gguf_file_that_is_cut_off(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config()))
    (tmp_path / "model-Q4_K_M.gguf").touch()
    with pytest.raises(CheckpointError, match=r"model-Q4_K_M\.gguf: not a complete GGUF file"):
        skv.load(tmp_path)
