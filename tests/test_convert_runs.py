"""`convert` of training runs, and of deltas with their base."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swiftkv_jax import Config, load, save_hf
from swiftkv_jax.checkpoints.digest import digest_all
from swiftkv_jax.cli.model_options import ModelOptions
from swiftkv_jax.convert import main
from swiftkv_jax.model.params import SwiftKV, swiftkv_shapes
from swiftkv_jax.model.stacks import split_layers
from swiftkv_jax.train.run.checkpointing import RunCheckpoints
from swiftkv_jax.train.run.step import TrainState
from tests.checkpoints.hf_models import TIED, UNTIED, tensors


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """An output folder as training leaves it, with two checkpoints of random deltas at another cut
    than the base's."""
    base = load(UNTIED, dtype="float32")
    config = base.config.cut(6, 2)
    llama = split_layers(config, base.llama)
    fingerprint = {"dtype": "float32", "base_model": digest_all(jax.tree.leaves(llama))}
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.json").write_text(
        json.dumps({"model": str(UNTIED), "config": dataclasses.asdict(config)})
    )
    checkpoints = RunCheckpoints(folder, fingerprint, keep=5, resume="never")
    shapes = TrainState(jnp.int32(0), swiftkv_shapes(config), {})
    checkpoints.restore(shapes, shapes)
    for step in (10, 20):
        checkpoints.save(TrainState(jnp.int32(step), delta_at(config, step), {}))
    checkpoints.close()
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def delta_at(config: Config, step: int) -> SwiftKV:
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), swiftkv_shapes(config)
    )


@pytest.fixture(scope="module")
def exported_at(tmp_path_factory):
    """The folder that `save_hf` makes of the same weights, by step."""

    @functools.cache
    def export(step: int) -> Path:
        base = load(UNTIED, dtype="float32")
        config = base.config.cut(6, 2)
        llama = split_layers(config, base.llama)
        delta = delta_at(config, step)
        path = tmp_path_factory.mktemp("exported") / str(step)
        save_hf(dataclasses.replace(base, config=config, llama=llama, swiftkv=delta), path)
        return path

    return export


def test_a_run_is_exported_at_its_newest_step_or_any(trained, tmp_path, exported_at):
    assert main(["orbax2hf", str(trained), str(tmp_path / "newest")]) == 0
    assert tensors(tmp_path / "newest") == tensors(exported_at(20))
    assert main(["orbax2hf", str(trained), str(tmp_path / "ten"), "--step", "10"]) == 0
    assert tensors(tmp_path / "ten") == tensors(exported_at(10))
    assert load(tmp_path / "ten").config.num_key_value_layers == 6


def test_the_folder_of_a_calibration_is_its_model(tmp_path, capsys, exported_at):
    """As that of a run: OUTPUT_DIR and OUTPUT_DIR/model are converted alike, and served alike."""
    shutil.copytree(exported_at(10), tmp_path / "out" / "model")
    (tmp_path / "out" / "calibration.json").write_text("{}")
    for source, target in ("out", "a"), ("out/model", "b"):
        flags = ["--format", "delta"]
        assert main(["orbax2hf", str(tmp_path / source), str(tmp_path / target), *flags]) == 0
    assert tensors(tmp_path / "a") == tensors(tmp_path / "b")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert ModelOptions(tmp_path / "out").path == tmp_path / "out" / "model"
    (tmp_path / "out" / "calibration.json").unlink()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 4
    assert "out: not a checkpoint" in capsys.readouterr().err


def test_a_run_is_exported_in_every_format_and_dtype(trained, tmp_path):
    flags = ["--format", "expanded", "--dtype", "bfloat16"]
    assert main(["orbax2hf", str(trained), str(tmp_path / "expanded"), *flags]) == 0
    expanded = load_file(tmp_path / "expanded/model.safetensors")
    assert {tensor.dtype.name for tensor in expanded.values()} == {"bfloat16"}
    assert "model.layers.7.self_attn.k_proj_swiftkv.weight" in expanded
    assert main(["orbax2hf", str(trained), str(tmp_path / "delta"), "--format", "delta"]) == 0
    assert all("swiftkv" in name for name in tensors(tmp_path / "delta"))


def test_a_delta_and_its_base_are_joined(trained, tmp_path, capsys, exported_at):
    """Export a delta, join it, export it whole: the same as exporting the whole run."""
    delta, joined = tmp_path / "delta", tmp_path / "joined"
    assert main(["orbax2hf", str(trained), str(delta), "--format", "delta"]) == 0
    assert main(["hf2orbax", str(delta), str(joined), "--base", str(UNTIED)]) == 0
    assert main(["orbax2hf", str(joined), str(tmp_path / "whole")]) == 0
    assert tensors(tmp_path / "whole") == tensors(exported_at(20))
    capsys.readouterr()
    for flags, message in (
        (
            [],
            "holds only the trained tensors, not its base model; join them by convert hf2orbax "
            "with its --base",
        ),
        (["--base", str(changed(tmp_path))], "was trained for another base model"),
        (["--base", str(TIED)], "not the model asked for"),
    ):
        assert main(["hf2orbax", str(delta), str(tmp_path / "no"), *flags]) == 4
        assert message in capsys.readouterr().err
    assert main(["hf2orbax", str(UNTIED), str(tmp_path / "no"), "--base", str(UNTIED)]) == 4
    assert "holds a whole model, not a delta" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def changed(tmp_path: Path) -> Path:
    """The base model with other numbers in one tensor."""
    path = Path(shutil.copytree(UNTIED, tmp_path / "changed"))
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, path / "model.safetensors")
    return path


def test_a_run_whose_base_has_moved_or_changed(run, tmp_path, capsys, exported_at):
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps(recipe | {"model": str(tmp_path / "gone")}))
    out = tmp_path / "out"
    assert main(["orbax2hf", str(run), str(out)]) == 4
    message = (
        f"names {tmp_path / 'gone'} as the base model: no such directory here; give its "
        f"directory as --base"
    )
    assert message in capsys.readouterr().err
    for base, message in (
        (changed(tmp_path), "not the weights that"),
        (TIED, "tie_word_embeddings True, not False"),
    ):
        assert main(["orbax2hf", str(run), str(out), "--base", str(base)]) == 4
        captured = capsys.readouterr().err
        assert message in captured and captured.count("\n") == 1
    assert not out.exists()
    assert main(["orbax2hf", str(run), str(out), "--base", str(UNTIED)]) == 0
    assert tensors(out) == tensors(exported_at(20))


def test_a_run_with_a_damaged_newest_checkpoint(run, tmp_path, capsys, exported_at):
    (run / "checkpoints/20/_CHECKPOINT_METADATA").write_text("{")
    assert main(["orbax2hf", str(run), str(tmp_path / "no"), "--step", "20"]) == 4
    assert "checkpoints/20: its metadata cannot be read" in capsys.readouterr().err
    assert main(["orbax2hf", str(run), str(tmp_path / "out")]) == 0
    assert "checkpoints/20: its metadata cannot be read" in capsys.readouterr().err
    assert tensors(tmp_path / "out") == tensors(exported_at(10))


def test_a_run_is_inspected(trained, capsys):
    assert main(["inspect", str(trained)]) == 0
    printed = capsys.readouterr().out.splitlines()
    for line in (
        "kind training run",
        "checkpoint 20",
        "of 10, 20",
        "swiftkv yes",
        "num_key_value_layers 6",
        "key_value_group_size 2",
    ):
        assert line in (" ".join(found.split()) for found in printed)


def test_flags_that_do_not_fit_what_is_there(trained, tmp_path, capsys):
    for arguments, code, message in (
        (
            ["orbax2hf", str(trained), str(tmp_path / "no"), "--step", "15"],
            2,
            "--step 15: no checkpoint of that step in",
        ),
        (
            ["orbax2hf", str(UNTIED), str(tmp_path / "no"), "--step", "1"],
            2,
            "--step and --base are for training runs",
        ),
        (
            ["hf2orbax", str(trained), str(tmp_path / "no")],
            4,
            "a training run; convert it with orbax2hf first",
        ),
    ):
        assert main(arguments) == code
        assert message in capsys.readouterr().err
