"""Paths that are no checkpoint of a kind that is read: the error says what they are, and the way
out."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax import ConfigError
from swiftkv_jax.model.quantization import dequantize
from tests import tiny
from tests.checkpoints.fp8_files import fp8_tensors, hf_fields, write
from tests.checkpoints.hf_models import TIED, UNTIED, edit, message

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


@pytest.mark.parametrize("path", ["Llama", "a/b/c", "a b/c"])
def test_a_mistyped_path(path, tmp_path, monkeypatch):
    """`a/b` is looked for on the Hub: tests/checkpoints/test_hub.py."""
    monkeypatch.chdir(tmp_path)
    assert message(path) == (
        "no such file or directory, and no name on the Hub, which is ORGANISATION/NAME"
    )
    assert message(tmp_path / path) == "no such file or directory"


@pytest.mark.parametrize("config", [False, True])
def test_an_adapter(tmp_path, config):
    """With the tokenizer and the config.json that some tools write beside it, too."""
    if config:
        (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config()))
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    assert message(tmp_path) == (
        f"adapter_config.json: an adapter, not a model: swiftkv convert orbax2hf Qwen/Qwen3-8B DST "
        f"--adapter {tmp_path} merges it into its base"
    )
    (tmp_path / "adapter_config.json").write_text("[")
    assert "swiftkv convert orbax2hf BASE DST --adapter" in message(tmp_path)


POINTED = ["model.safetensors", "tokenizer.json", "tokenizer.model", "config.json"]


@pytest.mark.parametrize("name", [*POINTED, "chat_template.jinja"])
def test_a_pointer_of_git_lfs(tmp_path, name):
    path = edit(UNTIED, tmp_path / "model")
    (path / name).write_text(POINTER)
    assert message(path) == (
        f"/{name}: a Git LFS pointer in the place of the file: `git lfs pull` in its folder "
        f"fetches it"
    )


def test_a_pointer_by_itself_and_in_an_index(tmp_path):
    (tmp_path / "model.gguf").write_text(POINTER)
    assert message(tmp_path / "model.gguf").startswith("a Git LFS pointer")
    path = edit(UNTIED, tmp_path / "model")
    (path / "model.safetensors.index.json").write_text(POINTER)
    assert message(path).startswith("/model.safetensors.index.json: a Git LFS pointer")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
@pytest.mark.parametrize("config", [False, True])
def test_pickles(tmp_path, name, config):
    if config:
        (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config()))
    (tmp_path / name).write_bytes(b"")
    assert message(tmp_path) == (
        f"{name}: pickle files can run code; convert to safetensors, with save_pretrained of "
        f"transformers, or get the model's safetensors files"
    )


def test_other_folders_and_files(tmp_path):
    looked_for = (
        "looked for manifest.json (written by save), config.json (Hugging Face) and a GGUF file"
    )
    assert message(tmp_path) == f"not a checkpoint: {looked_for}"
    (tmp_path / "training_args.bin").write_bytes(b"")
    assert message(tmp_path) == f"not a checkpoint: {looked_for}"
    (tmp_path / "model.safetensors").write_bytes(b"")
    found = message(tmp_path / "model.safetensors")
    assert found == f"a checkpoint is a directory: give {tmp_path}"
    (tmp_path / "notes").write_text("")
    assert message(tmp_path / "notes") == "a checkpoint is a directory"
    (tmp_path / "snapshots" / "0a1b").mkdir(parents=True)
    assert message(tmp_path).startswith(
        "a folder of the Hub's cache: give the folder of a revision"
    )


def test_a_projector_alone(tmp_path):
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"")
    assert message(tmp_path) == (
        "mmproj-f16.gguf: a projector of images; the model's own GGUF file is needed"
    )


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    path = edit(UNTIED, tmp_path / "model")
    (path / "model.safetensors").rename(tmp_path / "blob")
    os.symlink(tmp_path / "blob", path / "model.safetensors")
    assert skv.load(path).config == skv.load(UNTIED).config


def test_a_head_that_is_missing(tmp_path):
    path = edit(UNTIED, tmp_path / "model", lambda tensors: tensors.pop("lm_head.weight"))
    assert message(path) == (
        "missing: lm_head.weight; if the head is the embedding, set tie_word_embeddings to true in "
        "config.json"
    )
    fields = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(fields))
    assert skv.load(path).llama.lm_head is None

    def more(tensors):
        del tensors["lm_head.weight"], tensors["model.norm.weight"]

    both = edit(UNTIED, tmp_path / "more", more)
    assert sorted(message(both).removeprefix("missing: ").split(", ")) == [
        "lm_head.weight",
        "model.norm.weight",
    ]


def test_modelopt(tmp_path):
    """Its settings stand in a file of their own; the fp8 weights are like those of other tools."""
    hf = {name: value for name, value in hf_fields().items() if name != "quantization_config"}
    path = write(tmp_path / "fp8", hf, fp8_tensors(hf))
    quantization = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert message(path).startswith(
        "/hf_quant_config.json: weights that ModelOpt has quantised are "
    )


# Negative scales ----------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, "none"])
def test_negative_scales(tmp_path, quantization):
    """auto-round writes them: a weight is its value times its scale."""
    hf = hf_fields()
    plain, negative = fp8_tensors(hf), fp8_tensors(hf)
    name = "model.layers.1.self_attn.o_proj.weight"
    negative[f"{name}_scale"] = -plain[f"{name}_scale"]
    negative[name] = (-plain[name].astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
    one = skv.load(write(tmp_path / "plain", hf, plain), quantization="none")
    two = skv.load(write(tmp_path / "negative", hf, negative), quantization=quantization)
    found = two.llama.lower.o
    if quantization is None:
        found = dequantize(found, np.float32)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(one.llama.lower.o))


def test_an_unknown_field_and_its_remedy(tmp_path):
    path = edit(TIED, tmp_path / "model", wonders=1)
    with pytest.raises(ConfigError, match="'wonders'.*; if it changes nothing, remove it$"):
        skv.load(path)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
