"""Hugging Face checkpoints: what is read and what is written."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from swiftkv_jax import CheckpointError, Model, UsageError
from swiftkv_jax.checkpoints import load, save_hf
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.checkpoints.hf_read import load_delta, open_hf
from swiftkv_jax.checkpoints.hf_write import write_hf
from swiftkv_jax.checkpoints.source import from_model
from swiftkv_jax.model.mesh import make_mesh
from tests.checkpoints.hf_models import (
    BIASED,
    DTYPES,
    FIXTURES,
    TIED,
    UNTIED,
    assert_same,
    assert_same_files,
    biased_model,
    edit,
    student_logits,
)

# Reading ----------------------------------------------------------------------


@pytest.mark.parametrize("fixture", [UNTIED, TIED], ids=lambda path: path.name)
def test_fields_hold_the_tensors_that_their_names_say(fixture):
    model, file = load(fixture, dtype="float32"), load_file(fixture / "model.safetensors")
    config = model.config
    assert (config.num_key_value_layers, config.key_value_group_size) == (
        (4, 1) if fixture is UNTIED else (4, 2)
    )
    assert model.eos_token_ids == (1,) and model.tokenizer is None
    assert model.swiftkv is not None and model.llama.upper_qkv is not None
    leader = 4 + config.key_value_group_size
    for array, shape, name in (
        (model.llama.lower_qkv.q[3], (4, 16, 64), "layers.3.self_attn.q_proj"),
        (model.llama.upper.o[1], (64, 4, 16), "layers.5.self_attn.o_proj"),
        (model.llama.upper_qkv.k[2], (2, 16, 64), "layers.6.self_attn.k_proj"),
        (model.llama.lower.gate[0], (160, 64), "layers.0.mlp.gate_proj"),
        (model.swiftkv.q[3], (4, 16, 64), "layers.7.self_attn.q_proj_swiftkv"),
        (model.swiftkv.v[1], (2, 16, 64), f"layers.{leader}.self_attn.v_proj_swiftkv"),
        (model.swiftkv.norm, (64,), "norm_swiftkv"),
    ):
        expected = file[f"model.{name}.weight"].reshape(shape)
        np.testing.assert_array_equal(array, expected, err_msg=name)
    assert (model.llama.lm_head is None) == (fixture is TIED)


def test_default_dtype_on_a_cpu_is_float32_and_a_cast_rounds_each_value(tmp_path):
    exact = load(UNTIED)
    assert exact.dtype == jnp.float32
    rounded = load(UNTIED, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(
        rounded.llama.upper.down, exact.llama.upper.down.astype(jnp.bfloat16)
    )
    with pytest.raises(UsageError, match="float32, bfloat16, float16"):
        load(UNTIED, dtype="int8")


def test_values_beyond_float16_are_refused(tmp_path):
    def big(tensors):
        tensors["model.norm.weight"][5] = 1e6

    path = edit(UNTIED, tmp_path / "big", big)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values beyond float16"):
        load(path, dtype="float16")


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1), (1, 8)])
def test_sharded_load_gives_the_same_model_on_the_mesh(shape):
    mesh, whole = make_mesh(shape), load(TIED)
    model = load(TIED, mesh=mesh)
    assert_same(model, whole)
    gate = model.llama.lower.gate
    assert gate.sharding.mesh == mesh
    assert gate.addressable_shards[0].data.shape == (4, 160 // shape[1], 64)


def test_a_plain_llama_can_be_cut_while_it_is_read(tmp_path):
    whole = load(UNTIED)
    save_hf(Model(whole.llama, None, config=whole.config), tmp_path / "plain")
    plain = load(tmp_path / "plain")
    assert plain.swiftkv is None and plain.config.num_key_value_layers == 8
    assert plain.llama.upper.gate.shape == (0, 160, 64)
    cut = load(tmp_path / "plain", config=plain.config.cut(6, 2))
    assert cut.swiftkv is None and cut.llama.upper_qkv is not None
    assert cut.llama.lower.up.shape[0] == 6 and cut.llama.upper_qkv.q.shape[0] == 2
    np.testing.assert_array_equal(cut.llama.lower.up[5], whole.llama.upper.up[1])
    with pytest.raises(CheckpointError, match=r"embed_dim=64 \(asked for 32\)"):
        load(tmp_path / "plain", config=BIASED)


def test_moving_the_cut_of_a_swiftkv_file_leaves_its_delta_behind():
    model = load(UNTIED, config=load(UNTIED).config.cut(2, 3))
    assert model.swiftkv is None and model.llama.upper.gate.shape[0] == 6


def test_the_teachers_upper_projections_may_be_absent_altogether(tmp_path):
    def drop(tensors):
        for name in [n for n in tensors if re.search(r"layers\.[4-7]\.self_attn\.[qkv]_proj\.", n)]:
            del tensors[name]

    slim = load(edit(TIED, tmp_path / "slim", drop))
    whole = load(TIED)
    llama = dataclasses.replace(whole.llama, upper_qkv=None)
    assert_same(slim, dataclasses.replace(whole, llama=llama))
    for format in ("full", "expanded", "delta"):
        with pytest.raises(UsageError, match="needs the teacher's upper q, k, v"):
            save_hf(slim, tmp_path / "out", format=format)
    with pytest.raises(CheckpointError, match="missing: model.layers.6.self_attn.k_proj.weight$"):
        load(
            edit(
                TIED,
                tmp_path / "some",
                lambda tensors: tensors.pop("model.layers.6.self_attn.k_proj.weight"),
            )
        )


def test_end_tokens_come_from_generation_config_first(tmp_path):
    path = edit(UNTIED, tmp_path / "eos", eos_token_id=[5, 6])
    assert load(path).eos_token_ids == (5, 6)
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 4, 9]}')
    model = load(path)
    assert model.eos_token_ids == (3, 4, 9)
    save_hf(model, tmp_path / "out")
    assert (tmp_path / "out/generation_config.json").read_bytes() == (
        path / "generation_config.json"
    ).read_bytes()


def test_inert_extras_are_let_pass(tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    assert_same(load(edit(TIED, tmp_path / "extra", add)), load(TIED))

    def differ(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        load(edit(TIED, tmp_path / "untied", differ))


# Writing ----------------------------------------------------------------------


@pytest.mark.parametrize("fixture", [UNTIED, TIED], ids=lambda path: path.name)
def test_full_round_trip_is_bit_exact(tmp_path, fixture):
    save_hf(load(fixture, dtype="float32"), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert_same_files(tmp_path / "out", fixture)
    original, written = (
        json.loads((p / "config.json").read_text()) for p in (fixture, tmp_path / "out")
    )
    assert written == original
    assert open_hf(tmp_path / "out").digests and not open_hf(fixture).digests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_biased_model_round_trips_in_each_dtype(tmp_path, dtype):
    model = biased_model(jnp.dtype(dtype))
    save_hf(model, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "np") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {DTYPES[dtype]}
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == dtype
    biases = {name for name in names if name.endswith(".bias")}
    assert (
        len(biases) == 6 * 4 + 4 + 2 * 2
        and "model.layers.4.self_attn.v_proj_swiftkv.bias" in biases
    )
    assert (
        "model.layers.3.self_attn.k_proj_swiftkv.bias" not in biases
        and "lm_head.weight" not in names
    )
    assert_same(load(tmp_path / "out", dtype=dtype), model)


def test_each_tensor_keeps_its_own_dtype_in_a_mixed_file(tmp_path):
    import ml_dtypes

    def narrow(tensors):
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    path = edit(TIED, tmp_path / "mixed", narrow)
    opened = open_hf(path)
    assert (opened.dtypes["lower.up"].name, opened.dtypes["lower.attn_norm"].name) == (
        "bfloat16",
        "float32",
    )
    write_hf(opened, tmp_path / "out")
    assert_same_files(tmp_path / "out", path)
    assert {leaf.dtype for leaf in jax.tree.leaves(load(path, dtype="bfloat16"))} == {
        jnp.dtype(jnp.bfloat16)
    }


def test_shards_and_index(tmp_path):
    model = biased_model()
    write_hf(from_model(model), tmp_path / "out", shard_bytes=20_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert (
        files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        and len(files) > 3
    )
    assert index["metadata"]["total_size"] == sum(leaf.size * 4 for leaf in jax.tree.leaves(model))
    assert sorted(set(index["weight_map"].values())) == files
    assert_same(load(tmp_path / "out"), model)
    assert_same(load(tmp_path / "out", mesh=make_mesh((2, 2))), model)


@pytest.mark.parametrize(
    ("make", "kv"), [(lambda: load(TIED), "boundary"), (biased_model, "own")], ids=["tied", "own"]
)
def test_expanded_gives_the_same_student_without_groups(tmp_path, make, kv):
    """For `boundary`, which the queries for shared keys need."""
    model = make()
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, generated_kv=kv))
    save_hf(model, tmp_path / "out", format="expanded")
    expanded = load(tmp_path / "out")
    assert model.config.key_value_group_size == 2 and expanded.config.key_value_group_size == 1
    assert expanded.config.generated_kv == "boundary"
    assert expanded.swiftkv is not None and model.swiftkv is not None
    for name in ("k", "v"):
        ours, theirs = getattr(model.swiftkv, name), getattr(expanded.swiftkv, name)
        np.testing.assert_array_equal(theirs, np.repeat(ours, 2, axis=0))
    # Another number of entries, and so perhaps another order of the sums in a product.
    np.testing.assert_allclose(student_logits(expanded), student_logits(model), atol=5e-5, rtol=0)


def test_delta_holds_what_was_trained_and_fits_only_its_base(tmp_path):
    model = load(TIED)
    save_hf(model, tmp_path / "delta", format="delta")
    reference = load_file(FIXTURES / "llama-trained-4of8-group2-tied.reference.safetensors")
    trained = {name.removeprefix("grad.") for name in reference if name.startswith("grad.")}
    assert load_file(tmp_path / "delta/model.safetensors").keys() == trained
    save_hf(Model(model.llama, None, config=model.config), tmp_path / "base")
    base = load(tmp_path / "base")
    assert_same(load_delta(tmp_path / "delta", base), model)
    with pytest.raises(CheckpointError, match="holds only the trained tensors"):
        load(tmp_path / "delta")
    llama = dataclasses.replace(base.llama, final_norm=base.llama.final_norm + 1)
    other = dataclasses.replace(base, llama=llama)
    with pytest.raises(CheckpointError, match="was trained for another base model"):
        load_delta(tmp_path / "delta", other)
    with pytest.raises(UsageError, match="no delta"):
        save_hf(base, tmp_path / "none", format="delta")


def test_gradients_are_exported_under_the_same_names(tmp_path):
    model = biased_model()
    gradients = jax.tree.map(lambda leaf: -2 * leaf, model)
    save_hf(gradients, tmp_path / "gradients")
    assert_same(load(tmp_path / "gradients"), gradients)


def test_config_is_written_as_transformers_4_reads_it(tmp_path):
    fields = {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "rope_scaling": None,
        "dtype": "float32",
    }
    path = edit(UNTIED, tmp_path / "five", **fields)
    save_hf(load(path), tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert "rope_parameters" not in written and "dtype" not in written
    assert (written["rope_theta"], written["rope_scaling"]) == (
        5e5,
        {"rope_type": "linear", "factor": 2.0},
    )
    assert config_from_hf(written) == load(path).config


def test_an_existing_target_is_left_alone(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    save_hf(biased_model(), target)  # empty: taken
    with pytest.raises(UsageError, match=f"{target}: exists already"):
        save_hf(biased_model(), target)


def test_failing_half_way_leaves_nothing_behind(tmp_path):
    source, seen = from_model(biased_model()), []

    def stop(leaf):
        seen.append(leaf.name)
        if len(seen) == 5:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_hf(source, tmp_path / "out", progress=stop)
    assert len(seen) == 5 and list(tmp_path.iterdir()) == []
