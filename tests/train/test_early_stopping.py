"""A run that stops early has ended, also if it is killed before its export."""

import json
import shutil
from pathlib import Path

import pytest

from swiftkv_jax.train.__main__ import main
from tests.train.test_chosen_cut import write_analysis

TEXT = (
    "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self, y):\n        return [self, y]\n\n"
    * 10
)


def test_a_run_stops_when_the_held_out_loss_has_not_fallen_and_stays_stopped(tmp_path, capsys):
    """At a learning rate that changes no weight, the held-out loss is the same from the first
    evaluation on. What it lost is more than the analysis in its folder allows its cut."""
    code, run = tmp_path / "code.txt", tmp_path / "run"
    code.write_text(TEXT)
    settings = (
        "--init leader --max-length 32 --batch-size 2 --max-steps 12 --learning-rate 1e-30 "
        "--logging-steps 1 --eval-steps 2 --early-stopping-patience 2 "
        f"--data {code} --eval-data {code} --output-dir {run}"
    )
    command = settings.split()
    write_analysis(run / "analysis", num_key_value_layers=4, max_perplexity_loss=1e-6)
    for is_killed in (True, False):
        assert main(command) == 0
        error = capsys.readouterr().err
        assert (
            "step 4: the held-out loss has not fallen in 2 evaluations" in error
            and "finished after step 4 of 12" in error
            and "of perplexity on held-out text, more than the 0.0001% that the cut was" in error
        )
        assert [row["step"] for row in steps(run)] == [1, 2, 3, 4]
        if is_killed:
            shutil.rmtree(run / "model")  # in the export
    assert main(command) == 0
    assert "finished after step 4 before" in capsys.readouterr().err


@pytest.mark.long
def test_the_start_is_exported_where_training_made_it_worse(tmp_path, capsys):
    code = tmp_path / "code.txt"
    code.write_text(TEXT)
    settings = "--init leader --max-length 32 --batch-size 2 --max-steps 4"
    settings += " --eval-steps 2 --save-steps 2"
    files = ["--data", str(code), "--eval-data", str(code)]

    def exported(run: str, rate: str, *flags: str) -> bytes:
        more = ["--learning-rate", rate, "--output-dir", str(tmp_path / run), *flags]
        assert main([*settings.split(), *files, *more]) == 0
        return (tmp_path / run / "model" / "model.safetensors").read_bytes()

    start = exported("unchanged", "1e-30")
    assert exported("worse", "0.3") != start
    best = ["--load-best-model-at-end"]
    assert exported("best", "0.3", *best) == start
    assert "exporting step 0, which had the lowest held-out loss" in capsys.readouterr().err
    # As after a kill in the export, and before the second step.
    shutil.rmtree(tmp_path / "best" / "model")
    shutil.rmtree(tmp_path / "best" / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "best" / "checkpoints" / "2")
    assert exported("best", "0.3", *best) == start


def steps(run: Path) -> list[dict]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]
