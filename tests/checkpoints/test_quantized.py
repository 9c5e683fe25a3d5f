"""Checkpoints of 8-bit matrices: the authors' FP8 format as it is published, and this package's
own directories."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError
from swiftkv_jax.checkpoints import load, open_any
from swiftkv_jax.convert import main as convert
from swiftkv_jax.demo import SWIFTKV
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.quantization import Quantized, Scheme, dequantize
from tests import tiny
from tests.checkpoints.fp8_files import (
    E4M3,
    QUANTIZATION_CONFIG,
    dequantized,
    fp8_tensors,
    hf_fields,
    stored,
    write,
)
from tests.checkpoints.hf_models import assert_same

# Reading ----------------------------------------------------------------------


BIASED_AND_TIED = {"attention_bias": True, "key_value_group_size": 2, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("overrides", "scale_dtype"),
    [({}, np.float32), (BIASED_AND_TIED, ml_dtypes.bfloat16)],
    ids=["float32", "bfloat16, biased and tied"],
)
def test_the_authors_format(tmp_path, overrides, scale_dtype):
    hf = hf_fields(**overrides)
    tensors = fp8_tensors(hf, scale_dtype)
    model = skv.load(write(tmp_path / "fp8", hf, tensors))
    assert model.quantization == Scheme("fp8", "widen") and model.dtype == jnp.float32
    assert model.swiftkv is not None
    gate, o, k = model.llama.lower.gate, model.llama.upper.o, model.swiftkv.k
    assert (gate.values.dtype, gate.scale.dtype) == (E4M3, jnp.float32)
    assert (gate.values.shape, gate.scale.shape, o.scale.shape, k.scale.shape[1:]) == (
        (2, 48, 32),
        (2, 48),
        (2, 32),
        (2, 8),
    )

    name = "model.layers.3.self_attn.o_proj.weight"
    np.testing.assert_array_equal(
        o.values[1].reshape(32, 32).view(np.uint8), tensors[name].view(np.uint8)
    )
    np.testing.assert_array_equal(o.scale[1], tensors[f"{name}_scale"][:, 0].astype(np.float32))
    name = "model.layers.2.self_attn.k_proj_swiftkv.weight"
    np.testing.assert_array_equal(
        k.scale[0].reshape(16, 1), tensors[f"{name}_scale"].astype(np.float32)
    )

    plain = tiny.model_of(hf, dequantized(tensors))
    assert_same(skv.load(tmp_path / "fp8", quantization="none"), plain)


def test_half_of_the_bytes_stay_half(fp8):
    model = skv.load(fp8, dtype="bfloat16")
    assert (
        model.dtype == jnp.bfloat16
        and model.llama.lower_qkv.q.values.dtype == E4M3
        and model.llama.lower.mlp_norm.dtype == jnp.bfloat16
    )
    dequantised = skv.load(fp8, dtype="bfloat16", quantization="none")
    expected = dequantize(model.llama.lower.down, jnp.bfloat16)
    np.testing.assert_array_equal(dequantised.llama.lower.down, expected)


@pytest.mark.parametrize("quantization", [None, "none"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=["1x2", "2x2"])
def test_read_straight_into_shards(fp8, shape, quantization):
    mesh = make_mesh(shape)
    model = skv.load(fp8, mesh=mesh, quantization=quantization)
    assert_same(model, skv.load(fp8, quantization=quantization))
    for leaf, heads in (model.llama.lower_qkv.q, 2), (model.llama.lower.gate, 24):
        for array in jax.tree.leaves(leaf):
            assert (
                array.sharding.mesh == mesh and array.addressable_shards[0].data.shape[1] == heads
            )
    assert quantization or model.llama.lower.down.scale.is_fully_replicated


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("shape", [None, (1, 2)], ids=["one device", "1x2"])
def test_any_checkpoint_is_quantised_while_it_is_read(tmp_path, format, shape):
    hf = tiny.hf_config(num_hidden_layers=4)
    tensors = tiny.tensors_for(hf)
    path = write(tmp_path / "plain", hf, tensors)
    mesh = shape and make_mesh(shape)
    model = skv.load(path, quantization=format, mesh=mesh, dtype="bfloat16")
    assert model.quantization == Scheme(format)
    down = model.llama.upper.down
    assert (
        isinstance(down, Quantized)
        and not isinstance(model.llama.embed, Quantized)
        and model.llama.lm_head.dtype == jnp.bfloat16
    )
    original = tensors[
        "model.layers.3.mlp.down_proj.weight"
    ]  # quantised from float32, not from bfloat16
    np.testing.assert_allclose(
        down.scale[1], np.abs(original).max(axis=1) / (448 if format == "fp8" else 127), rtol=1e-6
    )
    if mesh is not None:
        assert down.values.addressable_shards[0].data.shape == (2, 32, 24)
        assert_same(model, skv.load(path, quantization=format, dtype="bfloat16"))
    assert_same(skv.load(path, quantization="none"), skv.load(path))


@pytest.mark.long
def test_a_plain_llama_is_quantised_and_cut(fp8, tmp_path):
    model = load(fp8, config=skv.load(fp8).config.cut(3))
    assert model.swiftkv is None and model.llama.lower.gate.values.shape[0] == 3
    skv.save(skv.load(fp8), tmp_path / "orbax")
    assert_same(load(tmp_path / "orbax", config=model.config), model)
    skv.save_hf(model, tmp_path / "plain")  # no upper layer at all
    plain = skv.load(tmp_path / "plain")
    assert (
        plain.llama.upper.gate.values.shape == (0, 48, 32)
        and plain.llama.upper.gate.values.dtype == E4M3
    )
    np.testing.assert_array_equal(plain.llama.lower.o.scale[3], model.llama.upper.o.scale[0])


# Writing ----------------------------------------------------------------------


def test_round_trip_is_bit_exact(fp8, tmp_path):
    skv.save_hf(skv.load(fp8), tmp_path / "out")
    assert stored(tmp_path / "out") == stored(fp8)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["quantization_config"] == QUANTIZATION_CONFIG
    assert open_any(tmp_path / "out").digests
    assert_same(skv.load(tmp_path / "out"), skv.load(fp8))


def test_what_was_quantised_here_is_written_in_that_format(tmp_path):
    hf = tiny.hf_config(num_hidden_layers=4)
    write(tmp_path / "plain", hf, tiny.tensors_for(hf))
    model = skv.load(tmp_path / "plain", quantization="fp8")
    skv.save_hf(model, tmp_path / "out")
    found = stored(tmp_path / "out")
    name = "model.layers.2.self_attn.v_proj_swiftkv.weight"
    assert found[name][:2] == ("F8_E4M3", [16, 32]) and found[f"{name}_scale"][:2] == (
        "F32",
        [16, 1],
    )
    assert len(found) == len(tiny.tensors_for(hf)) + 7 * 4 + 3 * 2
    assert_same(skv.load(tmp_path / "out"), model)


def test_groups_are_repeated_with_their_scales(tmp_path):
    hf = hf_fields(key_value_group_size=2)
    model = skv.load(write(tmp_path / "fp8", hf, fp8_tensors(hf)))
    skv.save_hf(model, tmp_path / "out", format="expanded")
    expanded = skv.load(tmp_path / "out")
    assert model.swiftkv is not None and expanded.swiftkv is not None
    assert expanded.config.key_value_group_size == 1 and expanded.swiftkv.k.scale.shape[0] == 2
    for layer in (0, 1):
        np.testing.assert_array_equal(expanded.swiftkv.k.values[layer], model.swiftkv.k.values[0])
        np.testing.assert_array_equal(expanded.swiftkv.v.scale[layer], model.swiftkv.v.scale[0])


@pytest.mark.long
def test_our_own_directories(tmp_path):
    hf = tiny.hf_config(num_hidden_layers=4)
    model = skv.load(write(tmp_path / "plain", hf, tiny.tensors_for(hf)), quantization="int8")
    skv.save(model, tmp_path / "out")
    assert_same(skv.load(tmp_path / "out"), model)
    assert_same(skv.load(tmp_path / "out", mesh=make_mesh((2, 2))), model)
    leaf = tmp_path / "out/weights/lower.gate.values"
    assert leaf.is_dir() and len(list((tmp_path / "out/weights").iterdir())) == len(
        jax.tree.leaves(model)
    )
    unquantised = skv.load(tmp_path / "out", quantization="none")
    np.testing.assert_array_equal(
        unquantised.llama.upper.o, dequantize(model.llama.upper.o, jnp.float32)
    )

    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    del manifest["leaves"]["upper.up.scale"]
    manifest["leaves"]["lower.up.values"]["dtype"] = "bfloat16"
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"missing: upper\.up\.scale; dtype .*: lower\.up\.values bfloat16"
    ):
        skv.load(tmp_path / "out")


def test_conversion_keeps_eight_bits(fp8, tmp_path, capsys):
    assert convert(["hf2orbax", str(fp8), str(tmp_path / "orbax"), "--dtype", "bfloat16"]) == 0
    model = skv.load(tmp_path / "orbax", dtype="bfloat16")
    assert model.llama.lower.gate.scale.dtype == jnp.float32
    assert_same(model, skv.load(fp8, dtype="bfloat16"))
    assert convert(["orbax2hf", str(tmp_path / "orbax"), str(tmp_path / "hf")]) == 0
    assert_same(skv.load(tmp_path / "hf", dtype="bfloat16"), model)
    capsys.readouterr()
    assert convert(["inspect", str(fp8)]) == 0
    report = capsys.readouterr().out
    plain = tiny.tensors_for(hf_fields())
    assert (
        f"{sum(tensor.size for tensor in plain.values()):,} =" in report
        and "float8_e4m3fn" in report
    )


# Quality ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "agreement"), [pytest.param("fp8", 0.9, marks=pytest.mark.long), ("int8", 0.95)]
)
def test_the_demo_model_says_the_same(format, agreement):
    text = Path(skv.__file__).read_text() + Path(__file__).read_text()
    model = skv.load(SWIFTKV)
    ids = jnp.asarray(model.tokenizer(text)["input_ids"][: 4 * 128]).reshape(4, 128)
    before, after = (
        np.asarray(skv.logits(m, ids)) for m in (model, skv.load(SWIFTKV, quantization=format))
    )

    def perplexity(logits) -> float:
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return float(jnp.exp(-jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1).mean()))

    same = (before.argmax(-1) == after.argmax(-1)).mean()
    print(
        f"{format}: perplexity {perplexity(before):.4f} to {perplexity(after):.4f}, top token the "
        f"same in {100 * same:.1f} %"
    )
    assert same > agreement and abs(perplexity(after) / perplexity(before) - 1) < 0.02
