"""What a run reports of far tokens: at each evaluation, and of the model that it exports."""

import json
import math
import shutil

import pytest

from swiftkv_jax.checkpoints.far_loss import FIELD, far_loss_warning
from swiftkv_jax.model.model import AuxiliaryFiles
from swiftkv_jax.train.__main__ import main
from swiftkv_jax.train.loss.far_tokens import FarLoss
from swiftkv_jax.train.run import evaluation

TEXT = (
    "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self, y):\n        return [self, y]\n\n"
)
FLAGS = "--max-length 32 --batch-size 2 --max-steps 2 --learning-rate 0.01 --eval-steps 1"


def test_far_tokens_are_found_once_and_lost_nats_reported_at_each_evaluation(
    tmp_path, monkeypatch, capsys
):
    """Where all predictions are far, what is lost there is what is lost. The rows are as many
    whatever number of micro-batches they are in."""
    found = []

    def all_are_far(*arguments):
        found.append(int(arguments[-1].loss_mask.sum()))
        return arguments[-1]

    monkeypatch.setattr(evaluation, "only_far", all_are_far)
    (code := tmp_path / "code.txt").write_text(TEXT * 10)
    files = ["--data", str(code), "--eval-data", str(code), "--output-dir", str(tmp_path / "run")]
    parts = ["--gradient-accumulation-steps", "2"]
    assert main([*FLAGS.split(), "--eval-batches", "3", *parts, *files]) == 0
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    measured = {row["step"]: row for row in rows if "eval_loss" in row}
    assert list(measured) == [0, 1, 2] and len(found) == 3 * 2
    for row in measured.values():
        lost = math.log(row["eval_student_perplexity"] / row["eval_teacher_perplexity"])
        assert row["eval_far_nats"] == pytest.approx(lost, rel=1e-3, abs=1e-6)
        assert row["eval_far_tokens"] == sum(found)
    first, last = (measured[step]["eval_far_nats"] for step in (0, 2))
    error = capsys.readouterr().err
    count = f"{sum(found)} tokens"
    assert (
        f"far tokens: {first:+.3f} nats lost before training, {last:+.3f} after, on {count}"
    ) in error
    assert f"  far nats {last:+.3f} ({count})\n" in error

    # Losses on other rows are not comparable.
    shutil.rmtree(tmp_path / "run" / "model")
    other = [*FLAGS.split(), "--eval-batches", "2", *files]
    assert main([*other, "--load-best-model-at-end"]) == 2
    error = capsys.readouterr().err
    assert "--eval-batches 2: the run was measured with 3" in error
    assert main(other) == 0
    assert "--eval-batches has changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "lost", "warns"),
    [(64, 0.14, False), (1200, 0.16, True), (63, 0.9, False), (0, None, False)],
)
def test_a_student_that_loses_far_tokens_is_warned_of(tokens, lost, warns, tmp_path, log):
    """Of the step that is exported, whatever the others lost. From few nothing follows."""
    number = {"eval_far_tokens": tokens}
    rows = [{"step": 0, "eval_far_nats": 0.1} | number, {"step": 1, "loss": 1.0}, {"step": 1}]
    rows += [{"step": 2, "eval_far_nats": 0.9} | number]
    if lost is not None:
        rows[2] |= {"eval_far_nats": lost} | number
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluation.log_far_loss(tmp_path, 1)
    assert found == ((0, None) if lost is None else (tokens, lost))
    text = "the student loses 0.160 nats on 1,200 tokens that depend on the far prompt, more than"
    assert any(message.startswith(text) for message in log.messages) == warns
    assert len(log.messages) == (0 if lost is None else 1 + warns)
    if tokens == 63:
        assert log.messages[0].startswith("far tokens: 63 tokens, too few to say (64 are needed);")


@pytest.mark.parametrize(
    ("tokens", "lost", "noted"),
    [(1200, 0.664, True), (1200, 0.15, False), (63, 0.9, False), (0, None, False)],
)
def test_the_export_of_a_student_that_loses_far_tokens_says_so(tokens, lost, noted):
    """And the note of the student that it was made from goes, unless it was trained unmeasured."""
    given = AuxiliaryFiles(hf_config={"model_type": "llama", FIELD: {"nats": 9.0}})
    found = evaluation.noted_far_loss(given, "calibration", FarLoss(tokens, lost)).hf_config
    assert found["model_type"] == "llama" and (FIELD in found) == noted
    trained = evaluation.noted_far_loss(given, "training", FarLoss(tokens, lost)).hf_config
    kept = given.hf_config[FIELD] if tokens < 64 else found.get(FIELD)
    assert (trained.get(FIELD) or {}).get("nats") == (kept or {}).get("nats")
    assert far_loss_warning(found) == (
        "this cut lost 0.664 nats on 1,200 far tokens (limit 0.15) after calibration: keep more "
        "layers, or distil it; swiftkv train analyze shows what it takes"
        if noted
        else None
    )


@pytest.mark.parametrize("field", [None, "0.6", {"nats": "much"}, {"nats": 1.0}])
def test_other_fields_warn_of_nothing(field):
    assert far_loss_warning({FIELD: field}) is None
