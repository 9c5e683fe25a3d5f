"""What a run reports of a student's loss: at each evaluation, and of the model that it exports."""

import json
import math
import shutil
from typing import Any

import numpy as np
import pytest

from swiftkv_jax.checkpoints.loss_notes import FAR, PERPLEXITY, loss_warning
from swiftkv_jax.model.model import LOSS_FIELDS, AuxiliaryFiles
from swiftkv_jax.train.__main__ import main
from swiftkv_jax.train.loss.quality import FarLoss, PerplexityLoss, StudentLoss, perplexity_loss
from swiftkv_jax.train.report.report import loss_sentence
from swiftkv_jax.train.run import evaluation

TEXT = (
    "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self, y):\n        return [self, y]\n\n"
)
FLAGS = "--max-length 32 --batch-size 2 --max-steps 2 --learning-rate 0.01 --eval-steps 1"


def test_far_tokens_are_found_once_and_lost_nats_reported_at_each_evaluation(
    teacher, tmp_path, monkeypatch, capsys
):
    """Where all predictions are far, what is lost there is what is lost. The rows are as many
    whatever number of micro-batches they are in."""
    found = []

    def all_are_far(*arguments):
        found.append(int(arguments[-1].loss_mask.sum()))
        return arguments[-1]

    monkeypatch.setattr(evaluation, "only_far", all_are_far)
    (code := tmp_path / "code.txt").write_text(TEXT * 10)
    files = ["--model", str(teacher), "--num-key-value-layers", "2", "--init", "leader"]
    files += ["--data", str(code), "--eval-data", str(code), "--output-dir", str(tmp_path / "run")]
    parts = ["--gradient-accumulation-steps", "2"]
    assert main([*FLAGS.split(), "--eval-batches", "3", *parts, *files]) == 0
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    measured = {row["step"]: row for row in rows if "eval_loss" in row}
    assert list(measured) == [0, 1, 2] and len(found) == 3 * 2
    for row in measured.values():
        lost = math.log(row["eval_student_perplexity"] / row["eval_teacher_perplexity"])
        assert row["eval_far_nats"] == pytest.approx(lost, rel=1e-3, abs=1e-6)
        assert row["eval_far_kl"] == pytest.approx(row["eval_kl"], rel=1e-3, abs=1e-6)
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


def row_of(step: int, loss: StudentLoss) -> dict[str, Any]:
    """An evaluation in `metrics.jsonl`."""
    row = {
        "step": step,
        "eval_loss": 1.0,
        "eval_teacher_perplexity": 4.0,
        "eval_student_perplexity": 4.0 * (1 + (loss.perplexity.share or 0.0)),
        "eval_perplexity_loss_error": loss.perplexity.error,
        "eval_far_tokens": loss.far.tokens,
        "eval_far_nats": loss.far.nats,
    }
    return {name: value for name, value in row.items() if value is not None}


FAR_TOO_MUCH = "0.160 nats on 1,200 tokens that depend on the far prompt, more than 0.15"


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (StudentLoss(PerplexityLoss(0.019), FarLoss(64, 0.14)), None),
        (StudentLoss(PerplexityLoss(0.03, 0.011), FarLoss(63, 0.9)), None),
        (StudentLoss(PerplexityLoss(0.0), FarLoss(1200, 0.16)), FAR_TOO_MUCH),
        (
            StudentLoss(PerplexityLoss(0.039, 0.011)),
            "3.9% ± 1.1% of perplexity on held-out text, more than 2%",
        ),
        (
            StudentLoss(PerplexityLoss(0.12), FarLoss(1200, 0.16)),
            f"12.0% of perplexity on held-out text, more than 2%, and {FAR_TOO_MUCH}",
        ),
    ],
)
def test_a_student_that_loses_too_much_is_warned_of(loss, expected, tmp_path, log):
    """Of the step that is exported, whatever the others lost. From few far tokens nothing
    follows, nor from perplexity within its error."""
    bad = StudentLoss(PerplexityLoss(0.9), FarLoss(1200, 0.9))
    rows = [row_of(0, bad), {"step": 1, "loss": 1.0}, row_of(1, loss), row_of(2, bad)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluation.log_loss(tmp_path, 1)
    assert found.perplexity.share == pytest.approx(loss.perplexity.share, abs=1e-12)
    assert found.far == loss.far and found.perplexity.error == loss.perplexity.error
    warnings = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    if expected is None:
        assert not warnings and loss_sentence(rows[:3]) == ""
    else:
        assert warnings[0].startswith(f"the student loses {expected}: train it longer, ")
        assert f"loses {expected}: do not serve it as it is." in loss_sentence([rows[2]])
    if loss.far.tokens == 63:
        assert log.messages[0].startswith("far tokens: 63 tokens, too few to say (64 are needed);")


@pytest.mark.parametrize(
    ("loss", "noted"),
    [
        (StudentLoss(PerplexityLoss(0.0), FarLoss(1200, 0.66412)), [FAR]),
        (StudentLoss(PerplexityLoss(0.0), FarLoss(1200, 0.15)), []),
        (StudentLoss(PerplexityLoss(0.12345, 0.01), FarLoss(63, 0.9)), [PERPLEXITY]),
        (StudentLoss(PerplexityLoss(0.3), FarLoss(64, 0.9)), [PERPLEXITY, FAR]),
        (StudentLoss(), []),
    ],
)
def test_the_export_of_a_student_that_loses_too_much_says_so(loss, noted):
    """And notes of the student that it was made from go, unless it was trained unmeasured."""
    old: dict[str, Any] = {FAR: {"nats": 9.0}, PERPLEXITY: {"share": 9.0}}
    given = AuxiliaryFiles(hf_config={"model_type": "llama"} | old)
    found = evaluation.noted(given, "calibration", loss).hf_config
    assert found["model_type"] == "llama"
    assert [name for name in LOSS_FIELDS if name in found] == noted
    trained = evaluation.noted(given, "training", loss).hf_config
    for name, each in ((PERPLEXITY, loss.perplexity), (FAR, loss.far)):
        if each.is_known:
            assert (trained.get(name) or {}) == (found.get(name) or {}) | (
                {"step": "training"} if name in noted else {}
            )
        else:
            assert trained[name] == old[name]
    if noted == [FAR]:
        assert found[FAR]["nats"] == 0.6641
        assert loss_warning(found) == (
            "this cut lost 0.664 nats on 1,200 far tokens (limit 0.15) after calibration: keep "
            "more layers, or distil it; swiftkv train analyze shows what it takes"
        )
    elif noted == [PERPLEXITY]:
        assert found[PERPLEXITY] == {
            "share": 0.1235,
            "error": 0.01,
            "limit": 0.02,
            "step": "calibration",
        }


@pytest.mark.parametrize("field", [None, "0.6", {"nats": "much"}, {"nats": 1.0}])
def test_other_fields_warn_of_nothing(field):
    assert loss_warning({FAR: field, PERPLEXITY: field}) is None


def test_the_error_of_a_loss_is_that_over_parts_of_the_text():
    """Parts that lose alike have none, and of a single part it is unknown."""
    tokens = np.array([10.0, 10.0, 0.0])
    share, error = perplexity_loss(np.array([2.0, 4.0, 0.0]), tokens)
    assert share == pytest.approx(math.expm1(0.3))
    assert error == pytest.approx(math.exp(0.3) * 0.1)
    assert perplexity_loss(np.array([3.0, 3.0, 0.0]), tokens)[1] == 0.0
    assert perplexity_loss(np.array([3.0]), tokens[:1])[1] is None
