"""An evaluation that a signal left out is made up when the run continues."""

import functools
import json
import shutil
import signal
from pathlib import Path

import pytest

from swiftkv_jax.train.__main__ import main
from swiftkv_jax.train.run import loop
from swiftkv_jax.train.run.metrics import EVAL_LOSS
from swiftkv_jax.train.run.signals import StopSignals

TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self, y):\n        return [self, y]\n"
LOSSES = (3.0, 1.0, 2.0, 2.5)
"""Held-out losses of the steps 0, 2, 4 and 6: the second is the best."""
SPEED = {"tokens_per_second", "useful_tokens_per_second", "mfu", "seconds"}


class Signals(StopSignals):
    """Signals of which the one after `stop_at` steps stops the run; that step may be fatal."""

    calls = 0

    def __init__(self, stop_at: int | None, *, fatal: bool):
        self._stop_at, self._fatal = stop_at, fatal

    def agreed(self) -> int:
        self.calls += 1
        if self.calls != self._stop_at:
            return 0
        if self._fatal:
            raise RuntimeError("killed")
        return signal.SIGTERM


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs a command for (run, flags), stopped after so many steps of this attempt. The held-out
    losses are `LOSSES`, in the order in which a run asks for them."""
    (code := tmp_path / "code.txt").write_text(TEXT * 20)
    settings = "--init leader --max-length 32 --batch-size 2 --max-steps 6"
    settings += " --eval-steps 2 --save-steps 6"
    files = ["--data", str(code), "--eval-data", str(code)]
    real, scripts = loop.evaluate, {}

    def run(name: str, *flags: str, stop_at: int | None = None, fatal: bool = False) -> Path:
        losses = scripts.setdefault(name, iter(LOSSES))

        def evaluate(*arguments):
            return real(*arguments) | {EVAL_LOSS: next(losses)}

        monkeypatch.setattr(loop, "evaluate", evaluate)
        monkeypatch.setattr(loop, "StopSignals", functools.partial(Signals, stop_at, fatal=fatal))
        output = tmp_path / name
        more = ["--logging-steps", "1", "--output-dir", str(output), *flags]
        assert main([*settings.split(), *files, *more]) == int(fatal)
        return output

    return run


def rows(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in SPEED}
        for line in lines
    ]


@pytest.mark.long
def test_a_stop_changes_neither_metrics_nor_the_best_model(train, capsys):
    """Stopped at the step of an evaluation, then killed after that was made up, then to the end:
    the best state, of that very step, is kept and exported."""
    best = "--load-best-model-at-end", "--save-total-limit", "1"
    whole = train("whole", *best)
    run = train("stopped", *best, stop_at=2)
    assert [row["step"] for row in rows(run)] == [0, 1, 2], "a run that is stopped ends soon"
    train("stopped", *best, stop_at=1, fatal=True)
    assert rows(run)[3]["eval_loss"] == LOSSES[1]
    capsys.readouterr()
    train("stopped", *best)
    assert "exporting step 2, which had the lowest held-out loss" in capsys.readouterr().err
    assert rows(run) == rows(whole)
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run, whole)]
    assert models[0] == models[1]


@pytest.mark.long
def test_a_stop_does_not_put_off_early_stopping(train, capsys):
    """The second evaluation after the best one ends the run: that of the step it was stopped
    at."""
    patience = "--early-stopping-patience", "2"
    whole = train("whole", *patience, "--max-steps", "8")
    run = train("stopped", *patience, "--max-steps", "8", stop_at=6)
    assert len(rows(run)) == len(rows(whole)) - 1
    capsys.readouterr()
    train("stopped", *patience, "--max-steps", "8")
    error = capsys.readouterr().err
    assert "step 6: the held-out loss has not fallen in 2 evaluations" in error
    assert "finished after step 6 of 8" in error
    assert rows(run) == rows(whole)
    shutil.rmtree(run / "model")
    train("stopped", *patience, "--max-steps", "8")
    assert rows(run) == rows(whole), "what was made up is not made again"
