"""`train calibrate`: the command, its record and its plan."""

import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.checkpoints.loss_notes import loss_warning
from swiftkv_jax.model.mesh import MeshShape, make_mesh
from swiftkv_jax.train import calibrate as train_calibrate
from swiftkv_jax.train.__main__ import main
from swiftkv_jax.train.calibrate_options import CALIBRATION_DEMO
from swiftkv_jax.train.loss import far_tokens
from swiftkv_jax.train.run import evaluation, start
from tests.test_cost import CONFIG
from tests.train.test_chosen_cut import write_analysis

TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self, y):\n        return [self, y]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, teacher) -> Path:
    """A teacher with a tokenizer, and some text."""
    folder = tmp_path_factory.mktemp("calibrate")
    shutil.copytree(teacher, folder / "teacher")
    (folder / "text.txt").write_text(TEXT * 40)
    return folder


CUT = dataclasses.replace(CONFIG, num_layers=4).cut(2)
OWN = dataclasses.replace(CUT, generated_kv="own")


def calibrate(folder: Path, *flags: str) -> int:
    return main(
        ["calibrate", "--model", str(folder / "teacher"), "--data", str(folder / "text.txt")]
        + ["--max-length", "64", "--batch-size", "4", *flags]
    )


def test_it_writes_a_model_and_a_record(folder, capsys):
    """Of the cut in an analysis, a student that loses more than should be served."""
    found = {"num_layers": 6, "generated_kv": "boundary", "exact_tail": 0, "boundary_taps": 0}
    found |= {"num_key_value_layers": 2}
    write_analysis(folder / "analysis", model=str(folder / "teacher"), **found)
    flags = ["--analysis", str(folder / "analysis"), "--key-value-group-size", "2"]
    flags += ["--eval-data", str(folder / "text.txt"), "--output-dir", str(folder / "out")]
    assert calibrate(folder, *flags) == 0
    record = json.loads((folder / "out" / "calibration.json").read_text())
    assert [layer["layer"] for layer in record["layers"]] == [2, 3, 4, 5]
    assert all(0 < layer[name] <= 1.001 for layer in record["layers"] for name in ("r2_k", "r2_v"))
    held_out = record["held_out"]
    assert held_out["calibrated"]["kl"] < held_out["copied"]["kl"]
    assert held_out["calibrated"]["far_tokens"] == held_out["copied"]["far_tokens"]
    table, error = capsys.readouterr()
    assert "--key-value-group-size 2: given instead of what is recommended" in error
    assert "of perplexity on held-out text, more than 2%" in error
    lost = held_out["calibrated"]["perplexity"] / held_out["calibrated"]["teacher_perplexity"] - 1
    assert record["warning"].startswith(f"this cut lost {lost:.1%} of perplexity on held-out text")
    copied = held_out["copied"]
    assert copied["tokens"] > 100
    title = f"{copied['tokens']:,} tokens of held-out text; teacher's perplexity "
    assert f"{title}{copied['teacher_perplexity']:,.3f}" in table
    assert re.search(rf"^calibrated .* {held_out['calibrated']['kl']:.4f} ", table, re.M)
    model = skv.load(folder / "out" / "model")
    assert loss_warning(model.auxiliary_files.hf_config) == record["warning"]
    assert model.config.num_key_value_layers == 2 and model.config.shared_kv_heads is not None
    assert (folder / "out" / "model" / "tokenizer.json").is_file()

    assert calibrate(folder, *flags) == 2
    assert "it holds a model already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ("--model {0} --data stdlib --output-dir {0}/cpu", (512, 2, 8)),
        ("--model {0} --data stdlib --output-dir {0}/cpu --max-length 640", (640, 2, 8)),
        ("", (512, 8, 16)),
    ],
)
def test_rows_of_a_named_model_fit_a_cpu(flags, rows, folder, monkeypatch):
    options = []
    monkeypatch.setattr(train_calibrate, "run", options.append)
    assert main(["calibrate", *flags.format(folder / "teacher").split()]) == 0
    assert [(one.max_length, one.batch_size, one.eval_batches) for one in options] == [rows]


@pytest.mark.parametrize(
    ("width", "given", "tokens", "planned"),
    [
        (128, None, 32_768, 32_768),
        (576, None, 32_768, 147_456),
        (4096, None, 131_072, 1_048_576),
        (576, 99_999, 99_999, 99_999),
    ],
)
def test_the_fit_is_to_fewer_tokens_on_a_cpu(width, given, tokens, planned):
    config = dataclasses.replace(CUT, embed_dim=width)
    options = dataclasses.replace(CALIBRATION_DEMO, calibration_tokens=given)
    assert start.calibration_tokens(options, config, make_mesh(MeshShape())) == tokens
    assert start.calibration_tokens(options, config) == planned


def test_rows_that_are_not_fitted_to_are_measured(folder, capsys, monkeypatch):
    """Without held-out text: no row is both fitted to and measured."""
    read = {"fitted": [], "measured": []}
    for name, module in ("fitted", start), ("measured", evaluation):
        function = "batches" if name == "fitted" else "shuffled_batches"
        whole = getattr(module, function)

        def spy(*args, whole=whole, name=name, **options):
            for local in whole(*args, **options):
                read[name].append(local.batch.tokens)
                yield local

        monkeypatch.setattr(module, function, spy)
    text = folder / "numbers.txt"
    text.write_text(" ".join(map(str, range(1000))))
    flags = ["--data", str(text), "--num-key-value-layers", "2", "--output-dir"]
    assert calibrate(folder, *flags, str(folder / "rows-left"), "--calibration-tokens", "512") == 0
    fitted, measured = (
        {row.tobytes() for row in np.concatenate(read[name]) if row.any()} for name in read
    )
    assert 8 <= len(fitted) <= 10 and len(measured) == 1
    assert not fitted & measured
    output = capsys.readouterr()
    assert "fitted to 512 tokens\n" in output.err, "without the rows' padding"
    record = json.loads((folder / "rows-left" / "calibration.json").read_text())
    assert set(record["held_out"]) == {"copied", "calibrated"}
    assert record["measured_on"] == [str(folder / "text.txt"), str(text)]
    title = "tokens of the data, in rows that were not fitted to; teacher's"
    assert title in output.out
    assert calibrate(folder, *flags, str(folder / "all-rows"), "--calibration-tokens", "99999") == 0
    assert "nothing is measured, because all of --data was fitted to" in capsys.readouterr().err


@pytest.mark.long
def test_a_shared_basis_that_the_model_has_is_left_behind(folder, capsys):
    """The copy and the fit are those of the teacher, whatever heads the old delta's layers read."""
    flags = ["--num-key-value-layers", "2", "--key-value-group-size", "2"]
    flags += ["--eval-data", str(folder / "text.txt")]
    assert calibrate(folder, *flags, "--output-dir", str(folder / "first")) == 0
    replaced = "warning: the model has a delta already, which a new fit replaces"
    assert replaced not in capsys.readouterr().err
    model = skv.load(folder / "first" / "model")
    turned = dataclasses.replace(model.config, shared_kv_heads=((0, 1), (1, 0)) * 2)
    skv.save_hf(dataclasses.replace(model, config=turned), folder / "turned")
    given = ["--model", str(folder / "turned")]
    assert calibrate(folder, *given, *flags, "--output-dir", str(folder / "again")) == 0
    assert replaced in capsys.readouterr().err
    first, again = (
        json.loads((folder / name / "calibration.json").read_text())["held_out"]
        for name in ("first", "again")
    )
    assert again == first


def test_for_generated_tokens_with_keys_of_their_own(folder, monkeypatch):
    """The model says so, and it is measured so: nearer to the teacher than without. Far tokens are
    those of the same rows, wherever text was cut into prompt and answer."""
    monkeypatch.setattr(far_tokens, "FAR_NATS", 0.01)
    program: Any = far_tokens.only_far
    program.clear_cache()
    flags = ["--num-key-value-layers", "2", "--eval-data", str(folder / "text.txt")]
    assert calibrate(folder, *flags, "--output-dir", str(folder / "boundary")) == 0
    flags += ["--generated-kv", "own", "--exact-tail", "8"]
    assert calibrate(folder, *flags, "--output-dir", str(folder / "own")) == 0
    config = skv.load(folder / "own" / "model").config
    assert (config.generated_kv, config.exact_tail) == ("own", 8)
    boundary, own = (
        json.loads((folder / name / "calibration.json").read_text()) for name in ("boundary", "own")
    )
    assert (own["generated_kv"], own["exact_tail"]) == ("own", 8)
    boundary, own = (record["held_out"]["calibrated"] for record in (boundary, own))
    assert own["kl"] < boundary["kl"]
    assert own["far_tokens"] == boundary["far_tokens"] > 0


@pytest.mark.long
def test_a_tail_that_covers_the_measured_prompt_is_said(folder, capsys):
    """By both commands."""
    flags = ["--num-key-value-layers", "2", "--generated-kv", "own", "--max-length", "32"]
    rest = ["--eval-data", str(folder / "text.txt"), "--output-dir", str(folder / "tail")]
    assert calibrate(folder, *flags, *rest, "--exact-tail", "16") == 0
    warning = "--exact-tail 16: a measured prompt, half of --max-length 32, keeps all"
    assert warning in capsys.readouterr().err
    text, run = str(folder / "text.txt"), str(folder / "trained for a tail")
    train = ["--model", str(folder / "teacher"), "--data", text, "--eval-data", text, *flags]
    train += ["--batch-size", "4", "--max-steps", "1", "--output-dir", run]
    assert main([*train, "--exact-tail", "15"]) == 0
    assert "a measured prompt" not in capsys.readouterr().err
    shutil.rmtree(run)
    assert main([*train, "--exact-tail", "16"]) == 0
    assert warning in capsys.readouterr().err


@pytest.mark.long
def test_queries_of_a_given_delta_are_scaled(folder, capsys):
    """As if it had been calibrated for own keys and values at once, without an exact tail, which
    weights tokens otherwise; all else stays."""
    flags = ["--num-key-value-layers", "2", "--key-value-group-size", "2"]
    assert calibrate(folder, *flags, "--output-dir", str(folder / "shared")) == 0
    own = ["--generated-kv", "own"]
    assert calibrate(folder, *flags, *own, "--output-dir", str(folder / "at once")) == 0
    given, kept = str(folder / "shared" / "model"), ["--keep-delta", *own]
    rest = ["--eval-data", str(folder / "text.txt"), "--output-dir", str(folder / "later")]
    capsys.readouterr()
    assert calibrate(folder, "--model", given, *kept, *rest) == 0
    assert re.search(r"^as it was  .*\nscaled  ", capsys.readouterr().out, re.M)
    before, once, later = (
        skv.load(folder / name / "model") for name in ("shared", "at once", "later")
    )
    assert later.config == once.config and later.config.has_two_caches
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4), later.swiftkv, once.swiftkv
    )
    assert before.swiftkv is not None and later.swiftkv is not None
    assert np.abs(later.swiftkv.q / before.swiftkv.q).max() > 1.01
    for message, arguments in {
        "--keep-delta: the model has no delta": kept,
        "--keep-delta needs --generated-kv own and layers that share": [
            *("--model", given, "--keep-delta"),
        ],
        "--keep-delta: the model's delta is of K=2 of ": [
            *("--model", given, "--key-value-group-size", "4", *kept),
        ],
        "--keep-delta: the model is for --generated-kv own: it is scaled already": [
            *("--model", str(folder / "later" / "model"), *kept),
        ],
        "--calibration-tokens: --keep-delta fits nothing to them": [
            *("--model", given, "--calibration-tokens", "64", *kept),
        ],
        "--dry-run: there is none of --keep-delta": ["--model", given, "--dry-run", *kept],
    }.items():
        assert calibrate(folder, *arguments, "--output-dir", str(folder / "none")) == 2
        assert message in capsys.readouterr().err
    text = str(folder / "text.txt")
    flags = ["--model", given, "--data", text, "--max-length", "64", *own]
    assert main([*flags, "--output-dir", str(folder / "run")]) == 2
    assert "run train calibrate --keep-delta" in capsys.readouterr().err


def test_far_predictions_are_found_once(folder, monkeypatch):
    """For both students. Where all are far, what is lost there is what is lost."""
    found = []

    def all_are_far(*arguments):
        found.append(float(arguments[-1].loss_mask.sum()))
        return arguments[-1]

    monkeypatch.setattr(evaluation, "only_far", all_are_far)
    flags = ["--num-key-value-layers", "2", "--eval-data", str(folder / "text.txt")]
    assert calibrate(folder, *flags, "--output-dir", str(folder / "once")) == 0
    record = json.loads((folder / "once" / "calibration.json").read_text())
    for student in record["held_out"].values():
        assert student["far_tokens"] == sum(found)
        lost = math.log(student["perplexity"] / student["teacher_perplexity"])
        assert student["far_nats"] == pytest.approx(lost, rel=1e-4)


@pytest.mark.parametrize(
    ("tokens", "lost", "cell", "sentence"),
    [
        (0, None, "none", "there are none on which .*; measure on more text, or longer rows"),
        (1200, 0.5, "[+]0.500", "the 1,200 on which .* without the far part of the row"),
        (64, -0.5, "-0.500", "the 64 on which .* the row; below 0 is no gain"),
        (63, -0.5, "too few", "the 63 on which .* the row, too few to say, 64 are needed: .*"),
    ],
)
def test_the_table_says_what_far_tokens_are(tokens, lost, cell, sentence):
    row = {"teacher_perplexity": 9.0, "perplexity": 10.0, "kl": 0.1, "agreement": 0.9}
    row |= {"tokens": 5000, "far_tokens": tokens, "far_nats": lost}
    table = train_calibrate.table({"copied": row, "calibrated": row}, CUT)
    assert re.search(f"^calibrated .* {cell}\nfar tokens: {sentence}$", table, re.M)
    own = train_calibrate.table({"copied": row, "calibrated": row}, OWN)
    behind = (
        "5,000 tokens of held-out text, those in answers, or after a random point of plain text;"
    )
    assert behind not in table and behind in own


def test_prompt_attention_layers_and_a_tap(folder):
    flags = ["--num-key-value-layers", "2", "--prompt-attention-layers", "1"]
    flags += ["--prompt-mlp-neurons", "9"]
    flags += ["--boundary-taps", "1", "--output-dir", str(folder / "closer")]
    assert calibrate(folder, *flags) == 0
    record = json.loads((folder / "closer" / "calibration.json").read_text())
    names = "prompt_attention_layers", "prompt_mlp_neurons", "boundary_taps"
    assert [record[name] for name in names] == [1, 9, 1]
    assert [layer["layer"] for layer in record["layers"]] == [3, 4, 5]
    model = skv.load(folder / "closer" / "model")
    assert [getattr(model.config, name) for name in names] == [1, 9, 1]
    assert model.swiftkv is not None and np.abs(model.swiftkv.mlp_down).max() > 0


ROW = {
    "perplexity": 5.0,
    "teacher_perplexity": 5.0,
    "perplexity_loss_error": None,
    "kl": 0.1,
    "far_nats": 0.4,
    "far_tokens": 99,
}


def test_a_model_that_loses_far_tokens_is_warned_of(caplog):
    before = ROW | {"kl": 0.02, "far_nats": 0.3}
    cases = (0.01, 0.16, 1), (0.03, 0.14, 0), (0.03, 0.31, 2), (0.01, None, 0), (0.03, None, 1)
    for kl, far, warnings in cases:
        caplog.clear()
        results = {"copied": before, "calibrated": before | {"kl": kl, "far_nats": far}}
        train_calibrate.warn_of_losses(results, CUT, keep_delta=False)
        assert len(caplog.records) == warnings
    caplog.clear()
    results = {"copied": before, "calibrated": before | {"kl": 0.03, "far_nats": 0.4}}
    train_calibrate.warn_of_losses(results, CUT, keep_delta=False)
    far, kl = caplog.messages
    assert far.startswith("the calibrated model loses 0.400 nats on 99 tokens that depend")
    assert (
        kl
        == "the calibrated model's KL from the teacher, 0.0300, is above that of the model "
        + ("copied, 0.0200")
    )


@pytest.mark.parametrize(
    ("group", "keep_delta", "remedy"),
    [
        (1, False, "bring its boundary state closer (`boundary_taps`, `exact_head`)"),
        (2, False, "distil it for boundary before you scale it"),
        (2, True, "serve it with `generated_kv`=boundary"),
    ],
)
def test_what_is_advised_to_a_student_that_loses_too_much(group, keep_delta, remedy, caplog):
    config = dataclasses.replace(CUT.cut(CUT.num_key_value_layers, group), generated_kv="own")
    rows = {"one": ROW, "other": ROW}
    train_calibrate.warn_of_losses(rows, config, keep_delta=keep_delta)
    assert caplog.messages[0].endswith(f": {remedy}, or keep more layers (`num_key_value_layers`)")


BAD_INPUT = {
    "--num-key-value-layers 3 --exact-tail 4 --output-dir o": "--exact-tail 4 needs --generated-kv",
    "--generated-kv own --exact-tail 9999 --output-dir out": "--exact-tail 9999: this model has",
    "--topology h200:1 --output-dir out": "--topology goes with --dry-run",
    "--num-key-value-layers 6 --output-dir out": "nothing is left to distil",
    "--model llama-3.1-8b": "the name of a shape, for --dry-run only",
    "--eval-data nowhere.txt --output-dir {folder}/none": "nowhere.txt: no such file",
    "--calibration-tokens 0 --output-dir out": "--calibration-tokens 0: must be",
    "": "--model also needs --output-dir",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_one_line(flags, folder, capsys):
    assert calibrate(folder, *flags.format(folder=folder).split()) == 2
    error = capsys.readouterr().err
    assert BAD_INPUT[flags] in error and error.count("error: ") == 1
    assert error.endswith("\n") and "Traceback" not in error


def test_a_run_without_data_leaves_nothing(folder):
    """Neither the output folder nor parents that it made; a folder that was there stays."""
    command = ["--model", str(folder / "teacher"), "--max-length", "64"]
    (folder / "old").mkdir()
    (empty := folder / "empty.txt").touch()
    for name, (data, code) in itertools.product(
        ("new/none", "old/none", "old"), {"/nonexist": 2, str(empty): 1}.items()
    ):
        for first in (["calibrate"], []):
            output = str(folder / name)
            assert main([*first, *command, "--data", data, "--output-dir", output]) == code
    assert not (folder / "new").exists()
    assert list((folder / "old").iterdir()) == []
