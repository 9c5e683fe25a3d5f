"""A run that starts from the closed form: the record of its start, and a run that continues."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from swiftkv_jax.model.model import AuxiliaryFiles
from swiftkv_jax.train.__main__ import main
from swiftkv_jax.train.run import loop, start

TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self, y):\n        return [self, y]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, teacher) -> Path:
    """A teacher, some text, and a finished run on them."""
    folder = tmp_path_factory.mktemp("start")
    shutil.copytree(teacher, folder / "teacher")
    (folder / "text.txt").write_text(TEXT * 40)
    assert train(folder, "run") == 0
    return folder


def train(folder: Path, run: str, *flags: str) -> int:
    settings = {
        "model": folder / "teacher",
        "data": folder / "text.txt",
        "output-dir": folder / run,
        "num-key-value-layers": 2,
        "key-value-group-size": 2,
        "max-length": 64,
        "batch-size": 4,
        "max-steps": 4,
        "save-steps": 2,
    }
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return main([*given, *flags])


@pytest.fixture
def no_steps(monkeypatch) -> None:
    """Runs stop before their first step."""
    monkeypatch.setattr(loop, "train", lambda context, state, checkpoints: (state, signal.SIGTERM))


def weights(run: Path) -> dict[str, bytes]:
    return {
        name: leaf.tobytes() for name, leaf in load_file(run / "model/model.safetensors").items()
    }


def test_the_record_says_how_it_started(folder):
    record = json.loads((folder / "run" / start.START).read_text())
    assert record["init"] == "closed-form"
    assert [layer["layer"] for layer in record["layers"]] == [2, 3, 4, 5]
    exported = skv.load(folder / "run" / "model")
    assert exported.config.shared_kv_heads == tuple(map(tuple, record["shared_kv_heads"]))


def test_no_token_counts_twice(folder, capsys, no_steps):
    """Where the data has fewer rows than a batch."""
    assert train(folder, "few", "--batch-size", "64", "--max-steps", "1") == 0
    (manifest,) = (folder / "few" / "data").glob("*/manifest.json")
    tokens = json.loads(manifest.read_text())["tokens"]
    assert f"fitted to {tokens} tokens" in capsys.readouterr().err


def test_a_start_that_has_no_effect_is_warned_of(folder, capsys, no_steps):
    again = ["--init", "leader"]
    assert train(folder, "run", *again) == 0
    assert "--init leader: the run continues, from closed-form" in capsys.readouterr().err
    given = ["--model", str(folder / "run" / "model"), "--max-steps", "1"]
    assert train(folder, "next", *given, *again) == 0
    assert "--init leader: the model has a delta" in capsys.readouterr().err
    assert train(folder, "next too", *given, "--calibration-tokens", "64") == 0
    assert "--calibration-tokens 64: the model has a delta" in capsys.readouterr().err
    assert train(folder, "none", *again, "--calibration-tokens", "64") == 2
    assert "--calibration-tokens 64 needs --init closed-form" in capsys.readouterr().err


def test_what_becomes_of_a_delta_is_said(folder, capsys, no_steps):
    """One of another cut is replaced, and one that is scaled for own is trained for boundary."""
    trained = ["--model", str(folder / "run" / "model"), "--max-steps", "1"]
    assert train(folder, "ungrouped", *trained, "--key-value-group-size", "1") == 0
    assert "the model's delta is of another cut" in capsys.readouterr().err
    assert train(folder, "same cut", *trained) == 0
    assert "the model's delta" not in (said := capsys.readouterr().err) and "scaled" not in said
    shutil.copytree(folder / "run" / "model", folder / "for own")
    config = json.loads((folder / "for own" / "config.json").read_text())
    (folder / "for own" / "config.json").write_text(json.dumps(config | {"generated_kv": "own"}))
    made_for_own = ["--model", str(folder / "for own"), "--max-steps", "1"]
    assert train(folder, "for boundary", *made_for_own, "--generated-kv", "boundary") == 0
    assert "--generated-kv boundary: the model was made for own" in capsys.readouterr().err


def test_a_new_delta_has_no_notes_on_what_the_one_before_lost(folder, tmp_path):
    record = {"init": "closed-form", "shared_kv_heads": None, "digest": "5eed"}
    (tmp_path / start.START).write_text(json.dumps(record))
    recipe: Any = SimpleNamespace(output_dir=tmp_path, init="closed-form")
    unused: Any = None
    student = skv.load(folder / "run" / "model")
    files = AuxiliaryFiles(hf_config={"swiftkv_far_loss": {}})
    for delta, kept in (student.swiftkv, files.hf_config), (None, {}):
        model = dataclasses.replace(student, swiftkv=delta, auxiliary_files=files)
        found, _ = start.start_of_run(recipe, unused, model, unused, unused, continues=True)
        assert found.auxiliary_files.hf_config == kept


def test_a_run_that_continues_does_not_calibrate_again(folder, monkeypatch):
    """It ends with the same weights, bit for bit, though its text could no longer be fitted to."""
    run = folder / "again"
    shutil.copytree(folder / "run", run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "4")

    def fail(*_):
        raise AssertionError("calibrated again")

    monkeypatch.setattr(start, "fitted_delta", fail)
    assert train(folder, "again") == 0
    assert weights(run) == weights(folder / "run")


def test_another_start_is_another_run(folder, capsys):
    run = folder / "other"
    shutil.copytree(folder / "run", run)
    record = json.loads((run / start.START).read_text())
    (run / start.START).write_text(json.dumps(record | {"digest": "0" * 64}))
    shutil.rmtree(run / "model")
    assert train(folder, "other") == 4
    assert "belongs to another run" in capsys.readouterr().err


def test_another_architecture_is_another_run(folder, capsys):
    """The weights alone do not say how they are used."""
    run, teacher = folder / "edited", folder / "edited teacher"
    shutil.copytree(folder / "run", run)
    shutil.rmtree(run / "model")
    shutil.copytree(folder / "teacher", teacher)
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert train(folder, "edited", "--model", str(teacher)) == 4
    assert "its architecture is not that of the run" in capsys.readouterr().err
    assert train(folder, "edited") == 0
