"""Hugging Face directories that are wrong: each error is one line that names the place."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swiftkv_jax import CheckpointError, ConfigError
from swiftkv_jax.checkpoints.hf_read import load_hf, save_hf
from swiftkv_jax.checkpoints.hf_write import write_hf
from swiftkv_jax.checkpoints.source import from_model
from swiftkv_jax.errors import OutOfMemoryError
from swiftkv_jax.model.mesh import make_mesh
from tests.checkpoints.hf_models import UNTIED, biased_model, edit


def test_every_difference_is_in_one_error(tmp_path):
    def change(tensors):
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(65, np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)

    path = edit(UNTIED, tmp_path / "bad", change)
    with pytest.raises(CheckpointError) as error:
        load_hf(path)
    assert str(error.value) == (
        f"{path}: missing: model.layers.2.mlp.up_proj.weight; unexpected: "
        f"model.layers.9.mlp.up_proj.weight; "
        "wrong shape: model.norm.weight [65], expected [64]; "
        "dtype not supported yet: lm_head.weight I8 (supported: F32, BF16, F16)"
    )


def test_fp8_weights_are_refused_by_name(tmp_path):
    import ml_dtypes

    def change(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)

    with pytest.raises(
        CheckpointError, match=r"not supported yet: model\.layers\.0\.mlp\.up_proj\.weight F8_E4M3"
    ):
        load_hf(edit(UNTIED, tmp_path / "fp8", change))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_hf(from_model(biased_model()), tmp_path / "out", shard_bytes=20_000)
    first, second = sorted((tmp_path / "out").glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: load_file(first)[name]}, second, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"repeated: {re.escape(name)} \(in {first.name}, {second.name}\)$"
    ):
        load_hf(tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "a/b.safetensors", "..", "a\\b.safetensors"]
)
def test_an_index_stays_within_its_directory(tmp_path, name):
    path = edit(UNTIED, tmp_path / "index")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match="weight files must lie in the same directory"):
        load_hf(path)


def test_a_missing_shard_is_named(tmp_path):
    write_hf(from_model(biased_model()), tmp_path / "out", shard_bytes=20_000)
    gone = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"missing weight files .*: {gone.name}$"):
        load_hf(tmp_path / "out")


@pytest.mark.parametrize("damage", ["truncated", "garbled", "empty"])
def test_damaged_files_are_named(tmp_path, damage):
    path = edit(UNTIED, tmp_path / "bad")
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(
        {"truncated": content[: len(content) // 2], "garbled": b"\xff" * 4000, "empty": b""}[damage]
    )
    with pytest.raises(CheckpointError, match=f"{file}: not a complete safetensors file"):
        load_hf(path)


@pytest.mark.parametrize("mesh", [None, (1, 4)])
def test_a_flipped_byte_in_our_export_is_found(tmp_path, mesh):
    save_hf(biased_model(), tmp_path / "out")
    file = tmp_path / "out/model.safetensors"
    content = bytearray(file.read_bytes())
    header = int.from_bytes(content[:8], "little")
    name = "model.layers.3.mlp.down_proj.weight"
    start, _ = json.loads(content[8 : 8 + header])[name]["data_offsets"]
    content[8 + header + start + 17] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file}: {re.escape(name)} is damaged"):
        load_hf(tmp_path / "out", mesh=None if mesh is None else make_mesh(mesh))


def test_no_weights(tmp_path):
    path = edit(UNTIED, tmp_path / "empty")
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights: looked for"):
        load_hf(path)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
            "rope_type='ntk' is not supported",
        ),
        ({"clip_kv": 3.0}, "unknown field 'clip_kv'"),
        ({"key_value_group_size": 3}, "key_value_group_size=3 must divide the 4 layers"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_a_bad_config_is_named(tmp_path, fields, message):
    path = edit(UNTIED, tmp_path / "bad", **fields)
    with pytest.raises(ConfigError, match=f"{path / 'config.json'}: .*{message}"):
        load_hf(path)


def test_a_garbled_config_is_named(tmp_path):
    path = edit(UNTIED, tmp_path / "bad")
    (path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=f"{path / 'config.json'}: not valid JSON"):
        load_hf(path)


# One short line, whatever their number ------------------------------------------


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 1000
    return text


def test_thousands_of_missing_tensors_are_counted(tmp_path):
    path = edit(UNTIED, tmp_path / "long", num_hidden_layers=900)
    with pytest.raises(
        CheckpointError, match="missing: .*input_layernorm.* and [0-9,]+ more$"
    ) as e:
        load_hf(path)
    assert one_line(e).count("model.layers") == 5


def test_thousands_of_misshapen_tensors_are_counted(tmp_path):
    path = edit(UNTIED, tmp_path / "wide", intermediate_size=2**31 - 1)
    with pytest.raises(CheckpointError, match=r"wrong shape: .*, expected \[.* and \d+ more$") as e:
        load_hf(path)
    one_line(e)


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "x\0.safetensors"])
def test_a_file_name_that_no_file_has(tmp_path, name):
    path = edit(UNTIED, tmp_path / "index")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match="missing weight files that model") as error:
        load_hf(path)
    assert len(one_line(error)) < len(str(path)) + 200


def test_an_index_of_thousands_of_missing_files(tmp_path):
    path, index = (
        edit(UNTIED, tmp_path / "index"),
        {f"t{i}": f"f{i}.safetensors" for i in range(3000)},
    )
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match=r"f0\.safetensors, .* and 2,995 more$") as error:
        load_hf(path)
    one_line(error)


def test_host_memory_that_is_not_there(tmp_path, monkeypatch):
    """A leaf for which the host has no room is named, with what it needs."""

    def empty(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(np, "empty", empty)
    with pytest.raises(
        OutOfMemoryError, match=r"out of host memory: reading embed needs 0\.\d\d GiB"
    ):
        load_hf(UNTIED)


def test_a_config_that_cannot_be_read(tmp_path):
    path = edit(UNTIED, tmp_path / "folder")
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="config.json: cannot be read \\(Is a directory\\)"):
        load_hf(path)
