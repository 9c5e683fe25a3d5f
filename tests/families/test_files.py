"""Checkpoints of families whose tensors are laid out otherwise than Llama's, rows of interleaved
rotary embeddings and a tensor for each expert: every way in which they are read and written, also
with weights of 8 and 4 bits."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.hf_read import load_delta
from swiftkv_jax.checkpoints.hf_write import base_model_digest
from swiftkv_jax.checkpoints.interleaved import Interleaved, join_pairs, split_pairs
from swiftkv_jax.checkpoints.quantized import matrices
from swiftkv_jax.checkpoints.quantized.compressed_tensors import ROUTERS
from swiftkv_jax.checkpoints.quantized.config import read_quantization_config
from swiftkv_jax.checkpoints.tensor_map import leaves
from swiftkv_jax.convert import main as convert
from swiftkv_jax.errors import CheckpointError
from swiftkv_jax.model.quantization import Quantized, dequantize
from tests.checkpoints import quantized_files
from tests.checkpoints.fp8_files import stored
from tests.checkpoints.fp8_files import write as write_tensors
from tests.checkpoints.hf_models import assert_same

from . import models
from .cases import CASES
from .running import greedy_text, logits
from .test_students import student

EXPERTS = "qwen3-moe"
EXPERT = "model.layers.3.mlp.experts.5.down_proj.weight"
FSDP = "data=1,fsdp=4,model=1"
LONG = pytest.mark.long
FP8, FP8_ENCODER = quantized_files.FP8_DYNAMIC


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        ("glm4", "2x2"),
        ("glm4", FSDP),
        ("ernie4.5", "1x2"),
        ("ernie4.5", FSDP),
        (EXPERTS, "2x2"),
        (EXPERTS, "1x4"),
        (EXPERTS, FSDP),
    ],
)
def test_read_straight_into_shards(case, mesh, load, tmp_path):
    """`fsdp` splits four query heads, and the dimensions of two key/value heads."""
    sharded = skv.load(
        models.write(case, tmp_path / "model"), dtype="float32", mesh=skv.make_mesh(mesh)
    )
    assert_same(sharded, load(case))
    if case == EXPERTS:
        down = sharded.llama.lower.expert_down
        split = 2 if mesh == "2x2" else 4
        assert down.addressable_shards[0].data.shape == (6, 8 // split, 48, 40)
        np.testing.assert_array_equal(down[3, 5], models.tensors(case)[EXPERT])
        return
    heads, dims = sharded.llama.lower_qkv.k.addressable_shards[0].data.shape[1:3]
    whole = load(case).config.head_dim
    assert (heads, dims) == ((2, whole // 4) if mesh == FSDP else (1, whole))
    skv.save_hf(sharded, tmp_path / "out")
    models.assert_same_tensors(tmp_path / "out", case)


@pytest.mark.parametrize("case", [EXPERTS, pytest.param("glm4", marks=LONG)])
def test_conversions_and_the_digest_of_the_base(case, load, tmp_path):
    """A delta that was trained on the Hugging Face directory fits the Orbax copy, and the other way
    round; the copy is written as the directory was."""
    path = models.write(case, tmp_path / "hf")
    copy = tmp_path / "orbax"
    assert convert(["hf2orbax", str(path), str(copy)]) == 0
    assert base_model_digest(open_any(path)) == base_model_digest(open_any(copy))
    assert convert(["orbax2hf", str(copy), str(tmp_path / "again")]) == 0
    models.assert_same_tensors(tmp_path / "again", case)
    model = student(load(case))
    skv.save_hf(model, tmp_path / "delta", format="delta")
    assert_same(load_delta(tmp_path / "delta", skv.load(copy, dtype="float32")), model)
    if case == "glm4":
        command = ["hf2orbax", str(tmp_path / "delta"), str(tmp_path / "joined")]
        assert convert([*command, "--base", str(copy)]) == 0
        assert_same(skv.load(tmp_path / "joined", dtype="float32"), model)


def quantized(case: str, encode, config, left=()):
    """(fields of config.json, tensors, the same with every matrix wide); `left` as they are."""
    tensors, wide = quantized_files.encode_all(models.tensors(case), encode, left)
    return CASES[case] | {"quantization_config": config}, tensors, wide


@pytest.mark.parametrize("case", ["glm4", "ernie4.5", pytest.param(EXPERTS, marks=LONG)])
def test_eight_bits_stay(case, tmp_path):
    """Values and their scales are permuted alike, and routers are left out; a quantised model is
    written as it was."""
    left_out = ["lm_head", ROUTERS] if case == EXPERTS else ["lm_head"]
    hf, tensors, wide = quantized(case, FP8_ENCODER, FP8 | {"ignore": left_out})
    path = write_tensors(tmp_path / "fp8", hf, tensors)
    plain = skv.load(write_tensors(tmp_path / "wide", CASES[case], wide), dtype="float32")
    model = skv.load(path, dtype="float32")
    q = model.llama.lower_qkv.q
    assert isinstance(q, Quantized) and q.scale.shape == q.values.shape[:3]
    np.testing.assert_array_equal(dequantize(q, np.float32), plain.llama.lower_qkv.q)
    assert_same(skv.load(path, dtype="float32", quantization="none"), plain)
    assert_same(skv.load(path, dtype="float32", mesh=skv.make_mesh("1x2")), model)
    if case == EXPERTS:
        assert model.llama.lower.expert_up.scale.shape == (6, 8, 40)
        assert not isinstance(model.llama.lower.router, Quantized)
        assert greedy_text(model, 3, swiftkv=False) == greedy_text(plain, 3, swiftkv=False)
    skv.save_hf(model, tmp_path / "out")
    assert stored(tmp_path / "out") == stored(path)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["quantization_config"]["ignore"] == left_out


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *(("ernie4.5", name) for name in ("fp8 blocks", "W4A16 asymmetric", "MXFP4", "gptq")),
        *((EXPERTS, name) for name in ("fp8 blocks", "W4A16", "gptq")),
        ("ernie4.5", "awq"),
        (EXPERTS, "awq"),
    ],
)
def test_formats_that_are_decoded(case, name, tmp_path, monkeypatch):
    """The router, a matrix that is not a `Linear` of those formats, stays as it is."""
    monkeypatch.setattr(matrices, "_CHUNK_ELEMENTS", 300)  # a few rows, less than a head
    config, encode = quantized_files.FORMATS[name]
    hf, tensors, wide = quantized(case, encode, config, quantized_files.WIDE.get(name, ()))
    path = write_tensors(tmp_path / "model", hf, tensors)
    plain = skv.load(write_tensors(tmp_path / "wide", CASES[case], wide), dtype="float32")
    assert_same(skv.load(path, dtype="float32", mesh=skv.make_mesh("2x2")), plain)


@pytest.mark.parametrize(
    ("case", "format"),
    [("glm4", "fp8"), (EXPERTS, "int8"), pytest.param(EXPERTS, "fp8", marks=LONG)],
)
def test_quantised_when_loaded(case, format, load, tmp_path):
    """A wide checkpoint, written in 8 bits and read again."""
    path = models.write(case, tmp_path / "model")
    model = skv.load(path, dtype="float32", quantization=format)
    save = skv.save_hf if format == "fp8" else skv.save
    save(model, tmp_path / "copy")
    assert_same(skv.load(tmp_path / "copy", dtype="float32"), model)
    q, expected = model.llama.lower_qkv.q, np.asarray(load(case).llama.lower_qkv.q)
    np.testing.assert_allclose(
        dequantize(q, np.float32), expected, atol=np.abs(expected).max() / 16
    )


@pytest.mark.parametrize(
    ("case", "facts"),
    [
        ("glm4", ["glm4", "rope of 0.5 of each head, theta 10000, no scaling"]),
        ("granite4", ["rope, theta 10000"]),
        ("granite4-unrotated", ["no rope"]),
        (EXPERTS, ["2 of 8 experts 40", "qk_norm=head", "renormalize_experts=True"]),
    ],
)
def test_inspect(case, facts, tmp_path, capsys):
    assert convert(["inspect", str(models.write(case, tmp_path / "model"))]) == 0
    found = capsys.readouterr().out
    assert all(fact in found for fact in facts), found


# Interleaved rotary embeddings ------------------------------------------------


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


# Experts ----------------------------------------------------------------------


def test_missing_experts_are_named(tmp_path):
    path = models.write(EXPERTS, tmp_path / "model")
    tensors = models.tensors(EXPERTS)
    del tensors[EXPERT]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing: {EXPERT}"):
        skv.load(path)


def test_routers_may_be_left_out_by_name():
    names = [f"model.layers.{layer}.mlp.gate" for layer in range(6)]
    for left in ([ROUTERS], names, ["re:.*mlp.gate$"]):
        assert read_quantization_config(FP8 | {"ignore": ["lm_head", *left]}).kept == "fp8"
    other = FP8 | {"ignore": ["lm_head", "model.layers.0.mlp.experts.0.gate_proj"]}
    assert read_quantization_config(other).kept is None
