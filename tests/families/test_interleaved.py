"""Families whose rotary embedding is interleaved: the order of rows that a checkpoint has, in every
way in which weights are read and written."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.hf_read import load_delta
from swiftkv_jax.checkpoints.hf_write import base_model_digest
from swiftkv_jax.checkpoints.interleaved import Interleaved, join_pairs, split_pairs
from swiftkv_jax.checkpoints.quantized import matrices
from swiftkv_jax.checkpoints.tensor_map import leaves
from swiftkv_jax.convert import main as convert
from swiftkv_jax.model.quantization import Quantized, dequantize
from tests.checkpoints import quantized_files
from tests.checkpoints.fp8_files import assert_same, stored
from tests.checkpoints.fp8_files import write as write_tensors

from . import models
from .cases import CASES
from .running import logits
from .test_students import student

FP8_CHANNELS = (
    quantized_files.compressed_tensors(
        "float-quantized",
        quantized_files.F8 | {"strategy": "channel"},
        quantized_files.TOKENS | {"type": "float"},
    ),
    quantized_files.scaled((1, 0)),
)


def test_order_of_rows():
    """Two heads of six dimensions, of which four rotate."""
    rows, order = np.arange(12).repeat(2).reshape(12, 2), Interleaved(6, 4)
    found = rows.copy()
    split_pairs(found, order)
    np.testing.assert_array_equal(found[:, 0], [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11])
    np.testing.assert_array_equal(join_pairs(found, order), rows)
    one = np.arange(6).astype(ml_dtypes.float8_e4m3fn)
    split_pairs(one, Interleaved(6, 6))
    np.testing.assert_array_equal(one.astype(int), [0, 2, 4, 1, 3, 5])


def test_leaves_that_are_permuted(load):
    """Queries and keys, of the teacher and of the delta; of quantised ones both parts."""
    config = skv.add_swiftkv(load("glm4"), 3).config
    order = Interleaved(16, 8)
    rotated = {
        f"{stack}.{name}{bias}"
        for stack in ("lower_qkv", "upper_qkv", "swiftkv")
        for name in "qk"
        for bias in ("", "_bias")
    }
    assert {leaf.name for leaf in leaves(config) if leaf.interleaved == order} == rotated
    assert {leaf.interleaved for leaf in leaves(config)} == {order, None}
    parts = {leaf.name for leaf in leaves(config, quantization="fp8") if leaf.interleaved}
    assert {"lower_qkv.q.values", "lower_qkv.q.scale", "swiftkv.k.scale"} <= parts
    assert not any(leaf.interleaved for leaf in leaves(load("qwen3").config))


@pytest.mark.parametrize("case", ["glm4", "ernie4.5"])
@pytest.mark.parametrize("format", ["full", "delta"])
def test_a_fresh_delta_has_the_teachers_tensors(case, format, load, tmp_path):
    """Bit for bit, under its own names."""
    skv.save_hf(skv.add_swiftkv(load(case), 3), tmp_path / "hf", format=format)
    written, teacher = load_file(tmp_path / "hf" / "model.safetensors"), models.tensors(case)
    delta = {name: array for name, array in written.items() if "_proj_swiftkv." in name}
    assert len(delta) == (18 if case == "glm4" else 9)
    for name, array in delta.items():
        np.testing.assert_array_equal(array, teacher[name.replace("_swiftkv", "")], err_msg=name)


def test_a_trained_delta_there_and_back(load, tmp_path):
    model = student(load("glm4"), 2)
    skv.save_hf(model, tmp_path / "full")
    assert_same(skv.load(tmp_path / "full", dtype="float32"), model)
    skv.save_hf(model, tmp_path / "delta", format="delta")
    assert_same(load_delta(tmp_path / "delta", load("glm4")), model)
    skv.save_hf(model, tmp_path / "expanded", format="expanded")
    apart = skv.load(tmp_path / "expanded", dtype="float32")
    np.testing.assert_allclose(logits(apart), logits(model), atol=1e-5)


@pytest.mark.parametrize("case", ["glm4", "ernie4.5"])
@pytest.mark.parametrize("mesh", ["2x2", "1x2", "data=1,fsdp=4,model=1"])
def test_read_straight_into_shards(case, mesh, load, tmp_path):
    """`fsdp` splits four query heads, and the dimensions of two key/value heads."""
    path = models.write(case, tmp_path / "model")
    sharded = skv.load(path, dtype="float32", mesh=skv.make_mesh(mesh))
    assert_same(sharded, load(case))
    heads, dims = sharded.llama.lower_qkv.k.addressable_shards[0].data.shape[1:3]
    whole = load(case).config.head_dim
    assert (heads, dims) == ((2, whole // 4) if "fsdp" in mesh else (1, whole))
    skv.save_hf(sharded, tmp_path / "out")
    written, expected = load_file(tmp_path / "out" / "model.safetensors"), models.tensors(case)
    assert all(np.array_equal(written[name], expected[name]) for name in expected)


@pytest.mark.long
def test_conversions_and_the_digest_of_the_base(load, tmp_path):
    """A delta that was trained on the Hugging Face directory fits the Orbax copy, and the other way
    round; the copy is written as the directory was."""
    path, copy = models.write("glm4", tmp_path / "hf"), tmp_path / "orbax"
    assert convert(["hf2orbax", str(path), str(copy)]) == 0
    assert_same(skv.load(copy, dtype="float32"), load("glm4"))
    assert base_model_digest(open_any(path)) == base_model_digest(open_any(copy))
    assert convert(["orbax2hf", str(copy), str(tmp_path / "again")]) == 0
    written = load_file(tmp_path / "again" / "model.safetensors")
    expected = models.tensors("glm4")
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name], expected[name]) for name in expected)

    model = student(load("glm4"))
    skv.save_hf(model, tmp_path / "delta", format="delta")
    assert_same(load_delta(tmp_path / "delta", skv.load(copy, dtype="float32")), model)
    command = ["hf2orbax", str(tmp_path / "delta"), str(tmp_path / "joined")]
    assert convert([*command, "--base", str(copy)]) == 0
    assert_same(skv.load(tmp_path / "joined", dtype="float32"), model)


def quantized(case: str, encode, config, left=()):
    """(fields of config.json, tensors, the same with every matrix wide); `left` as they are."""
    tensors, wide = quantized_files.encode_all(models.tensors(case), encode, left)
    return CASES[case] | {"quantization_config": config}, tensors, wide


@pytest.mark.parametrize("case", ["glm4", "ernie4.5"])
def test_eight_bits_stay(case, tmp_path):
    """Values and their scales are permuted alike; a quantised student, and what is written."""
    config, encode = FP8_CHANNELS
    hf, tensors, wide = quantized(case, encode, config)
    path = write_tensors(tmp_path / "fp8", hf, tensors)
    plain = skv.load(write_tensors(tmp_path / "wide", CASES[case], wide), dtype="float32")
    model = skv.load(path, dtype="float32")
    q = model.llama.lower_qkv.q
    assert isinstance(q, Quantized) and q.scale.shape == q.values.shape[:3]
    np.testing.assert_array_equal(dequantize(q, np.float32), plain.llama.lower_qkv.q)
    assert_same(skv.load(path, dtype="float32", quantization="none"), plain)
    sharded = skv.load(path, dtype="float32", mesh=skv.make_mesh("1x2"))
    assert_same(sharded, model)
    skv.save_hf(model, tmp_path / "out")
    written, given = stored(tmp_path / "out"), stored(path)
    assert written.keys() == given.keys()
    assert all(written[name] == given[name] for name in given)


@pytest.mark.parametrize("name", ["fp8 blocks", "W4A16 asymmetric", "MXFP4", "gptq", "awq"])
def test_formats_that_are_decoded(name, tmp_path, monkeypatch):
    monkeypatch.setattr(matrices, "_CHUNK_ELEMENTS", 300)  # a few rows, less than a head
    config, encode = quantized_files.FORMATS[name]
    hf, tensors, wide = quantized("ernie4.5", encode, config, quantized_files.WIDE.get(name, ()))
    path = write_tensors(tmp_path / "model", hf, tensors)
    plain = skv.load(write_tensors(tmp_path / "wide", CASES["ernie4.5"], wide), dtype="float32")
    for mesh in (None, skv.make_mesh("2x2")):
        assert_same(skv.load(path, dtype="float32", mesh=mesh), plain)


def test_quantised_when_loaded(load, tmp_path):
    """`quantization="fp8"` of a wide checkpoint, written and read again."""
    path = models.write("glm4", tmp_path / "model")
    model = skv.load(path, dtype="float32", quantization="fp8")
    skv.save_hf(model, tmp_path / "fp8")
    assert_same(skv.load(tmp_path / "fp8", dtype="float32"), model)
    q, expected = model.llama.lower_qkv.q, np.asarray(load("glm4").llama.lower_qkv.q)
    np.testing.assert_allclose(
        dequantize(q, np.float32), expected, atol=np.abs(expected).max() / 16
    )


def test_inspect(tmp_path, capsys):
    assert convert(["inspect", str(models.write("glm4", tmp_path / "model"))]) == 0
    found = capsys.readouterr().out
    assert "glm4" in found and "rope of 0.5 of each head, theta 10000, no scaling" in found
