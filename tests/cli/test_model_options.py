"""The arguments that name a model, and loading it."""

import argparse
import dataclasses
import logging
from pathlib import Path

import pytest

import swiftkv_jax as skv
from swiftkv_jax import demo
from swiftkv_jax.cli.fields import add_flags
from swiftkv_jax.cli.model_loading import load_model, read_model
from swiftkv_jax.cli.model_options import ModelOptions
from swiftkv_jax.errors import CheckpointError, UsageError
from swiftkv_jax.model.mesh import MeshShape

STUDENT = Path(__file__).parents[1] / "fixtures" / "llama-init-4of8-group1"


def options(*argv: str) -> ModelOptions:
    parser = argparse.ArgumentParser()
    add_flags(parser, ModelOptions)
    return ModelOptions.from_args(parser.parse_args(argv))


def test_every_field_has_an_argument():
    parser = argparse.ArgumentParser()
    add_flags(parser, ModelOptions)
    names = {action.dest for action in parser._actions if action.dest != "help"}
    assert names == {field.name for field in dataclasses.fields(ModelOptions)}
    assert all(action.help for action in parser._actions)


def test_without_arguments_it_is_the_demo_model_on_one_device():
    found = options()
    assert found.path == demo.SWIFTKV and found.uses_swiftkv is None
    assert found.mesh == MeshShape() and found.compile_cache == "~/.cache/swiftkv-jax/compiled"
    assert dataclasses.replace(found, compile_cache=None) == ModelOptions()


def test_arguments_become_fields():
    found = options(
        *"-m x --swiftkv off --mesh 2x4 --dtype bfloat16 --quantization int8 --attention xla "
        "--compile-cache none --coordinator-address h:1 --num-processes 2 --process-id 0".split()
    )
    assert found == ModelOptions(
        "x",
        swiftkv="off",
        dtype="bfloat16",
        quantization="int8",
        mesh=MeshShape(data=2, model=4),
        attention="xla",
        coordinator_address="h:1",
        num_processes=2,
        process_id=0,
    )
    assert found.uses_swiftkv is False
    with pytest.raises(UsageError, match="2by4"):
        options("--mesh", "2by4")


def test_a_model_is_loaded_and_described(caplog):
    with caplog.at_level(logging.INFO, "swiftkv_jax"):
        model, mesh = load_model(ModelOptions(STUDENT))
    assert mesh is None and model.swiftkv is not None
    assert (
        f"{STUDENT}: SwiftKV, prompts run 4 of 8 layers, 8 layers of KV; float32 on" in caplog.text
    )
    with caplog.at_level(logging.INFO, "swiftkv_jax"):
        read_model(ModelOptions(STUDENT, swiftkv="off"), None)
    assert "teacher, 8 layers" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_auto_is_that_of_the_checkpoint(dtype, tmp_path):
    skv.save_hf(skv.load(STUDENT, dtype=dtype), tmp_path / "model")
    assert read_model(ModelOptions(tmp_path / "model", dtype="auto"), None).dtype == dtype


def test_a_model_that_cannot_run_as_asked(tmp_path):
    student = skv.load(STUDENT)
    skv.save(dataclasses.replace(student, swiftkv=None), tmp_path / "plain")
    with pytest.raises(UsageError, match="`swiftkv`=on: .* has no SwiftKV weights"):
        load_model(ModelOptions(tmp_path / "plain", swiftkv="on"))
    dropped = dataclasses.replace(student.llama, upper_qkv=None)
    skv.save(dataclasses.replace(student, llama=dropped), tmp_path / "student")
    with pytest.raises(UsageError, match="`swiftkv`=off: .* has no teacher"):
        load_model(ModelOptions(tmp_path / "student", swiftkv="off"))


def test_an_installation_without_the_demo_model(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SWIFTKV", tmp_path)
    with pytest.raises(CheckpointError, match="name one with `model`"):
        load_model(ModelOptions())
