"""The metrics of a run: cut back on resume in every sink; traces of whole steps."""

import contextlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.train.recipe import parse_report_to
from swiftkv_jax.train.run.metrics import MetricsLog, read_metrics
from swiftkv_jax.train.run.profiling import ProfileWindow
from swiftkv_jax.train.run.progress import PeakFlops, Progress


@contextlib.contextmanager
def metrics_log(folder: Path, first_step: int, *report_to: str) -> Iterator[MetricsLog]:
    with contextlib.closing(MetricsLog(folder, first_step=first_step, report_to=report_to)) as log:
        yield log


def write_steps(log: MetricsLog, first: int, last: int, *, attempt: float) -> None:
    for step in range(first, last + 1):
        log.write({"step": step, "loss": jnp.float32(attempt)})
        if step % 2 == 0:
            log.write({"step": step, "eval_agreement": attempt})


# JSON lines -------------------------------------------------------------------


def test_rows_come_back_as_they_were_written(tmp_path):
    with metrics_log(tmp_path, 0) as log:
        log.write({"step": 1, "loss": jnp.float32(0.5), "batch": 7, "grad_norm": np.float64(2.0)})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.5, "batch": 7, "grad_norm": 2.0}
    ]


def test_a_resumed_run_cuts_back_to_its_first_step(tmp_path):
    """Rows after step 4 go; so does a line that was cut off in the middle."""
    with metrics_log(tmp_path, 0) as log:
        write_steps(log, 1, 6, attempt=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    with metrics_log(tmp_path, 4) as log:
        write_steps(log, 5, 6, attempt=2)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 2),
        (6, 2),
    ]
    assert [(row["step"], row["eval_agreement"]) for row in rows if "loss" not in row] == [
        (2, 1),
        (4, 1),
        (6, 2),
    ]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_a_run_from_the_start_keeps_nothing(tmp_path):
    for attempt in 1, 2:
        with metrics_log(tmp_path, 0) as log:
            log.write({"step": 0, "eval_agreement": attempt})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "eval_agreement": 2}]


def test_a_line_still_being_written_is_not_read(tmp_path):
    """Nor one that is no text."""
    lines = b'\xff\xfe\n{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}'
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with metrics_log(tmp_path, 0, "tensorboard") as log:
        write_steps(log, 1, 2, attempt=1)
    bar = Progress(
        first_step=0, steps=10, tokens_per_step=100, flops_per_token=3.0, peak=PeakFlops(600.0, "")
    )
    bar.advance(jnp.zeros(()))
    assert bar.report(1, {"loss": 1.0}, useful_share=1.0)["tokens_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


# Other sinks ------------------------------------------------------------------


def test_names_to_report_to():
    assert parse_report_to("jsonl") == ("jsonl",)
    assert parse_report_to("tensorboard, jsonl,tensorboard") == ("jsonl", "tensorboard")
    with pytest.raises(
        UsageError,
        match="`report_to`='jsonl,board': 'board' is unknown; choose from jsonl, tensorboard, "
        "wandb",
    ):
        parse_report_to("jsonl,board")


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [("tensorboard", "tensorboardX", "'swiftkv-jax.report.'"), ("wandb", "wandb", "wandb")],
)
def test_a_missing_package_is_named_at_once(name, module, command, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UsageError, match=f"`report_to`={name} needs {module}: pip install {command}"
    ):
        parse_report_to(name)


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """{name: {step: value}} as TensorBoard reads it: the start of a session drops what stood at its
    step and after."""
    from tensorboardX.proto import event_pb2

    Event, SessionLog = (getattr(event_pb2, name) for name in ("Event", "SessionLog"))
    scalars: dict[str, dict[int, float]] = {}
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:  # a record is its length (u64), a checksum, the event, a checksum
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                scalars = {
                    name: {s: v for s, v in steps.items() if s < event.step}
                    for name, steps in scalars.items()
                }
            for value in event.summary.value:
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    return scalars


def test_tensorboard_agrees_with_the_json_lines_after_a_resume(tmp_path):
    with metrics_log(tmp_path, 0, "tensorboard") as log:
        write_steps(log, 1, 6, attempt=1)
    with metrics_log(tmp_path, 4, "tensorboard") as log:
        write_steps(log, 5, 5, attempt=2)
    scalars = tensorboard_scalars(tmp_path / "tensorboard")
    assert scalars == {"train/loss": {1: 1, 2: 1, 3: 1, 4: 1, 5: 2}, "eval/agreement": {2: 1, 4: 1}}


class FakeRun:
    def __init__(self, id: str):
        self.id, self.rows, self.finished = id, [], False

    def log(self, values, *, step):
        self.rows.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_continues_one_run(tmp_path, monkeypatch):
    runs: list[FakeRun] = []
    asked: list[dict] = []

    def init(**settings):
        asked.append(settings)
        runs.append(FakeRun(settings["id"] or "abc123"))
        return runs[-1]

    wandb = types.ModuleType("wandb")
    monkeypatch.setattr(wandb, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert parse_report_to("wandb") == ("jsonl", "wandb")
    for first in 0, 1:
        with metrics_log(tmp_path, first, "wandb") as log:
            write_steps(log, first + 1, first + 1, attempt=1)
    assert [settings["id"] for settings in asked] == [None, "abc123"]
    assert all(
        settings["resume"] == "allow" and settings["dir"] == str(tmp_path) for settings in asked
    )
    assert [run.rows for run in runs] == [
        [(1, {"train/loss": 1.0})],
        [(2, {"train/loss": 1.0}), (2, {"eval/agreement": 1})],
    ]
    assert all(run.finished for run in runs)


# Profile ----------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch) -> list[str]:
    events: list[str] = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda folder: events.append(f"start {folder}")
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    return events


def run_steps(
    window: str | None, folder: Path, events: list[str], first: int, last: int
) -> list[str]:
    with ProfileWindow(window, folder) as profile:
        for number in range(first, last + 1):
            profile.step(number, jnp.zeros(()))
            events.append(str(number))
    return events


def test_whole_steps_are_traced(traced, tmp_path):
    assert run_steps("2:3", tmp_path, traced, 1, 5) == [
        "1",
        f"start {tmp_path}",
        "2",
        "3",
        "stop",
        "4",
        "5",
    ]


def test_a_run_that_ends_inside_the_window_closes_the_trace(traced, tmp_path):
    assert run_steps("2:9", tmp_path, traced, 3, 4) == [f"start {tmp_path}", "3", "4", "stop"]


def test_no_window_traces_nothing(traced, tmp_path):
    assert run_steps(None, tmp_path, traced, 0, 2) == ["0", "1", "2"]


@pytest.mark.parametrize("text", ["", "10", "10:", "0:5", "5:4", "a:b", "1:2:3"])
def test_bad_windows(text, tmp_path):
    with pytest.raises(UsageError, match="`profile_steps`="):
        ProfileWindow(text, tmp_path)
