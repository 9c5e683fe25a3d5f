"""Text models inside models that take images too: read as the recorded text models are, whatever
the spelling of their tensors, and written as text models."""

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError
from swiftkv_jax.checkpoints.hf_read import load_delta
from swiftkv_jax.checkpoints.hf_write import base_model_digest
from swiftkv_jax.checkpoints.source import from_model
from swiftkv_jax.convert import main as convert
from swiftkv_jax.model.quantization import Quantized
from tests.checkpoints import quantized_files
from tests.checkpoints.fp8_files import stored
from tests.checkpoints.hf_models import assert_same

from . import models
from .cases import CASES
from .test_students import student
from .wrapped_models import KINDS, SPELLINGS, VISION, spelled, write


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_text_model(kind, spelling, load, tmp_path, caplog):
    case, _ = KINDS[kind]
    path = write(kind, spelling, tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        model = skv.load(path, dtype="float32")
        skv.load(path, dtype="float32")
    assert caplog.messages == [
        f"{path}: of this {kind} model only the text model is read: images are not supported, and "
        f"the tensors of the vision side are not read"
    ]
    assert_same(model, load(case))
    assert model.eos_token_ids == ((2, 5) if kind == "gemma3" else (2,))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tensors_that_do_not_fit(spelling, tmp_path):
    """One error names them as the file does; those of the vision side are nobody's."""

    def refused(tensors, name: str) -> str:
        path = write("mistral3", spelling, tmp_path / name, tensors)
        with pytest.raises(CheckpointError) as error:
            skv.load(path)
        return str(error.value).removeprefix(f"{path}: ")

    plain = models.tensors("mistral-window")
    gone = "model.layers.3.self_attn.q_proj.weight"
    rest = {name: array for name, array in plain.items() if name != gone}
    assert refused(rest, "missing") == f"missing: {spelled(gone, spelling)}"
    more = "model.layers.3.self_attn.q_norm.weight"
    found = refused(plain | {more: np.ones(12, np.float32)}, "more")
    assert found == f"unexpected: {spelled(more, spelling)}"
    found = refused(plain | {gone: plain[gone][:, :-1].copy()}, "shape")
    assert found.startswith(f"wrong shape: {spelled(gone, spelling)} [48, 47]")
    rest = {name: array for name, array in plain.items() if name != "lm_head.weight"}
    found = refused(rest, "head")
    assert found.startswith(f"missing: {spelled('lm_head.weight', spelling)}; if the head is the ")


@pytest.mark.parametrize("name", ["audio_tower.weight", "model.norm.weight", "vision_tower"])
def test_other_tensors(name, tmp_path):
    """Neither of the text model nor of the vision side."""
    path = write("gemma3", "files", tmp_path / "model")
    tensors = load_file(path / "model.safetensors") | {name: np.ones(48, np.float32)}
    models.save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"unexpected: {name}$"):
        skv.load(path)


def test_two_spellings_at_once(tmp_path):
    path = write("gemma3", "files", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.language_model.norm.weight"] = tensors.pop("language_model.model.norm.weight")
    models.save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing: language_model\.model\.norm\.weight; unex"
    ):
        skv.load(path)


def test_a_tie_that_only_the_outer_fields_say(tmp_path):
    """transformers 5 writes a new Mistral 3 so: true beside `text_config`, false in it, no head."""
    plain = models.tensors("mistral-window")
    tensors = {name: array for name, array in plain.items() if name != "lm_head.weight"}
    inside = CASES["mistral-window"] | {"tie_word_embeddings": False}
    tie = {"tie_word_embeddings": True, "text_config": inside}
    model = skv.load(write("mistral3", "files", tmp_path / "tied", tensors, **tie))
    assert model.config.tie_word_embeddings and model.llama.lm_head is None
    skv.save_hf(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
    untied = skv.load(write("mistral3", "files", tmp_path / "head", plain, **tie))
    assert not untied.config.tie_word_embeddings
    with pytest.raises(CheckpointError, match=r"missing: language_model\.lm_head\.weight; if the"):
        path = write("mistral3", "files", tmp_path / "no", tensors, tie_word_embeddings=False)
        skv.load(path)


def test_a_head_beside_a_tied_one(tmp_path):
    """It may be there if it is the embedding."""
    plain = models.tensors("gemma3")
    head = {"lm_head.weight": plain["model.embed_tokens.weight"]}
    skv.load(write("gemma3", "files", tmp_path / "same", plain | head))
    head["lm_head.weight"] = 2 * head["lm_head.weight"]
    path = write("gemma3", "files", tmp_path / "other", plain | head)
    message = "language_model.lm_head.weight differs from language_model.model.embed_tokens.weight"
    with pytest.raises(CheckpointError, match=message):
        skv.load(path)


@pytest.mark.short("gemma3-files")
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_written_as_the_text_model(kind, spelling, load, tmp_path):
    case, _ = KINDS[kind]
    path = write(kind, spelling, tmp_path / "model")
    assert convert(["hf2orbax", str(path), str(tmp_path / "copy")]) == 0
    assert convert(["orbax2hf", str(tmp_path / "copy"), str(tmp_path / "converted")]) == 0
    skv.save_hf(skv.load(path, dtype="float32"), tmp_path / "out")
    for out in ("out", "converted"):
        models.assert_same_tensors(tmp_path / out, case)
        hf = json.loads((tmp_path / out / "config.json").read_text())
        assert hf["model_type"] == {"gemma3": "gemma3_text", "mistral3": "mistral"}[kind]
        assert hf["architectures"][0].endswith("ForCausalLM") and "text_config" not in hf
        assert not hf.keys() & {"vision_config", "image_token_index", "mm_tokens_per_image"}
        assert hf["eos_token_id"] == ([2, 5] if kind == "gemma3" else 2)
        assert_same(skv.load(tmp_path / out, dtype="float32"), load(case))


@pytest.mark.short("mistral3")
@pytest.mark.parametrize("kind", KINDS)
def test_students(kind, load, tmp_path):
    """A delta fits the model that it was trained on, as it is and as it is exported; a student is
    one of the text model."""
    case, _ = KINDS[kind]
    path = write(kind, "files", tmp_path / "model")
    base = skv.load(path, dtype="float32")
    assert base_model_digest(from_model(base)) == base_model_digest(from_model(load(case)))
    group = 1 if kind == "gemma3" else 2
    model = student(base, group)
    skv.save_hf(model, tmp_path / "delta", format="delta")
    for teacher in (base, load(case)):
        assert_same(load_delta(tmp_path / "delta", teacher), model)
    command = ["hf2orbax", str(tmp_path / "delta"), str(tmp_path / "joined"), "--base", str(path)]
    assert convert(command) == 0
    assert_same(skv.load(tmp_path / "joined", dtype="float32"), model)
    skv.save_hf(model, tmp_path / "full")
    assert_same(skv.load(tmp_path / "full", dtype="float32"), model)
    hf = json.loads((tmp_path / "full" / "config.json").read_text())
    assert hf["model_type"] == {"gemma3": "gemma3_text", "mistral3": "mistral"}[kind] + "_swiftkv"


def test_inspect(tmp_path, capsys):
    path = write("gemma3", "files", tmp_path / "model")
    assert convert(["inspect", str(path)]) == 0
    found = capsys.readouterr()
    assert "gemma3_text" in found.out
    assert f"warning: {path}: of this gemma3 model only the text model is read" in found.err


# Quantised --------------------------------------------------------------------

PACKED = quantized_files.FORMATS["W4A16 asymmetric"]
# (spelling of the tensors, names that leave the MLPs of layer 0, the head and the vision side out)
LISTS = {
    "patterns": ("files", ["re:.*lm_head", "re:.*vision_tower.*", r"re:.*\.layers\.0\.mlp\..*"]),
    "names of modules": (
        "files",
        ["lm_head", f"model.{VISION[0]}", "model.language_model.layers.0.mlp"],
    ),
    "names of files": (
        "modules",
        ["language_model.lm_head", "vision_tower", "language_model.model.layers.0.mlp"],
    ),
    "patterns of modules": ("files", ["lm_head", r"re:model\.language_model\.layers\.0\.mlp\..*"]),
    "names of the text model": ("modules", ["lm_head", "layers.0.mlp"]),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_modules(name, tmp_path):
    """By the names of the file's tensors, and by those of modules, which may differ from them."""
    spelling, ignore = LISTS[name]
    config, encode = PACKED
    plain = models.tensors("mistral-window")
    tensors, wide = quantized_files.encode_all(plain, encode, ("layers.0.mlp",))
    fields = {"quantization_config": config | {"ignore": ignore}}
    path = write("mistral3", spelling, tmp_path / "model", tensors, **fields)
    expected = skv.load(write("mistral3", spelling, tmp_path / "wide", wide), dtype="float32")
    assert_same(skv.load(path, dtype="float32"), expected)
    fields["quantization_config"]["ignore"] = ["lm_head"]
    path = write("mistral3", spelling, tmp_path / "other", tensors, **fields)
    module = spelled("model.layers.0.mlp.down_proj", spelling)
    with pytest.raises(CheckpointError, match=f"not quantised, though.*: {module}"):
        skv.load(path)


def test_awq_and_blocks_of_fp8(tmp_path):
    """`modules_to_not_convert`."""
    vision = ["vision_tower", "multi_modal_projector"]
    for name in ("awq", "fp8 blocks"):
        config, encode = quantized_files.FORMATS[name]
        left = [part for part in config.get("modules_to_not_convert") or () if part != "lm_head"]
        plain = models.tensors("mistral-window")
        tensors, wide = quantized_files.encode_all(plain, encode, tuple(left))
        fields = {"quantization_config": config | {"modules_to_not_convert": vision + left}}
        path = write("mistral3", "files", tmp_path / name, tensors, **fields)
        expected = skv.load(write("mistral3", "files", tmp_path / f"{name} wide", wide), dtype="f4")
        assert_same(skv.load(path, dtype="f4"), expected)


HEADS = {
    "its name": ["lm_head"],
    "its name in files": ["language_model.lm_head", "multi_modal_projector.linear_1"],
    "a pattern": ["re:.*lm_head", "re:.*vision_tower.*", "re:multi_modal_projector.*"],
    "modules": ["lm_head", r"re:model\.vision_tower.*", f"model.{VISION[0]}"],
}


@pytest.mark.parametrize("name", HEADS)
def test_eight_bits_stay(name, tmp_path):
    """Where lists leave out the head and the vision side only. The text model's own list names its
    head."""
    config, encode = quantized_files.FP8_DYNAMIC
    tensors, _ = quantized_files.encode_all(models.tensors("mistral-window"), encode)
    fields = {"quantization_config": config | {"ignore": HEADS[name]}}
    path = write("mistral3", "files", tmp_path / "model", tensors, **fields)
    model = skv.load(path, dtype="float32")
    assert isinstance(model.llama.lower_qkv.q, Quantized)
    skv.save_hf(model, tmp_path / "out")
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "lm_head" in hf["quantization_config"]["ignore"]
    given, written = stored(path), stored(tmp_path / "out")
    assert {spelled(name, "files"): found for name, found in written.items()} == {
        name: found for name, found in given.items() if name not in VISION
    }
    assert_same(skv.load(tmp_path / "out", dtype="float32"), model)
