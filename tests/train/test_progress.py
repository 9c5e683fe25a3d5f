"""Progress: speeds that add up, a bar that fits its terminal, and lines where there is none."""

import io
import itertools
import sys
import types

import jax.numpy as jnp
import pytest

from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.plan import roofline
from swiftkv_jax.plan.hardware import Hardware
from swiftkv_jax.train.run import progress
from swiftkv_jax.train.run.progress import PeakFlops, Progress, peak_flops, track


def make_progress() -> Progress:
    return Progress(
        first_step=0, steps=10, tokens_per_step=100, flops_per_token=3.0, peak=PeakFlops(600.0, "")
    )


def test_speeds_add_up(monkeypatch, log):
    clock = iter([0.0, 5.0, 5.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    bar = make_progress()
    bar.advance(jnp.zeros(()))
    bar.advance(jnp.zeros(()))
    values = {
        "loss": 1.5,
        "logits_loss": jnp.float32(1.25),
        "kl": 0.375,
        "hidden_loss": 0.25,
        "agreement": 0.5,
        "grad_norm": 3.0,
        "tokens": 190,
    }
    assert bar.report(2, values, useful_share=0.95) == {
        "tokens_per_second": 40.0,
        "useful_tokens_per_second": 38.0,
        "mfu": 0.2,
        "seconds": 5.0,
    }
    shown = (
        "loss 1.5000  KL 0.3750  agreement 0.5000  distillation loss 1.2500  hidden 0.2500  "
        "grad norm 3.0000  tokens/s 40  MFU 20.0%  left 00:20"
    )
    assert log.messages == [f"step 2/10  {shown}"]


@pytest.mark.parametrize("ready", [True, False], ids=["waits", "runs ahead"])
def test_only_finished_steps_count(ready, monkeypatch):
    """Steps of one second, read one late: on a device that runs ahead of the host, and where
    starting a step runs it."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    bar = make_progress()
    speeds = []
    for step in range(1, 5):
        now[0] = (
            step if ready else step - 1
        )  # when the step before has been read, and this one started
        bar.advance(types.SimpleNamespace(is_ready=lambda: ready))
        if step > 1:
            speeds.append(bar.report(step - 1, {}, useful_share=1.0)["tokens_per_second"])
    assert speeds == [100.0] * 3


def test_no_speed_before_the_clock_has_run(log):
    bar = make_progress()
    bar.advance(jnp.zeros(()))
    bar.restart_clock()
    assert bar.report(1, {"loss": 1.0}, useful_share=1.0) == {}
    assert log.messages == ["step 1/10  loss 1.0000"]


def test_the_measured_rate_is_that_of_the_best_size(monkeypatch):
    monkeypatch.setattr(roofline, "matmul_rates", lambda dtype: {512: 1e12, 1024: 5e12, 2048: 4e12})
    assert roofline.matmul_rate.__wrapped__(jnp.float32) == 5e12


def test_the_peak_is_the_published_one_where_it_is_known(monkeypatch):
    monkeypatch.setattr(progress, "matmul_rate", lambda dtype: 5e12)
    mesh = make_mesh((2, 1))
    unknown = peak_flops(mesh, jnp.float32)
    assert unknown.flops == 5e12, "emulated devices share their cores"
    assert unknown.description == "1 x cpu: a large float32 matrix product reaches 5 TFLOP/s"
    monkeypatch.setattr(progress, "hardware_of", lambda kind: Hardware("Abacus", 9e12, 1, 1))
    known = peak_flops(mesh, jnp.float32)
    assert known.flops == 9e12
    assert (
        known.description
        == "1 x Abacus: published bfloat16 peak 9 TFLOP/s, a large float32 matrix product reaches "
        "5 TFLOP/s"
    )


# What is shown ----------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        return [line for line in self.getvalue().replace("\n", "\r").split("\r") if line.strip()]


FIGURES = {
    "loss": 0.0397,
    "kl": 0.0386,
    "agreement": 0.9086,
    "logits_loss": 0.0386,
    "hidden_loss": 0.011,
    "grad_norm": 0.1234,
}


@pytest.mark.parametrize(
    ("columns", "whole"),
    [
        (60, ["loss 0.0397"]),
        (80, ["loss 0.0397", "KL 0.0386"]),
        (110, ["loss 0.0397", "KL 0.0386", "agreement 0.9086"]),
        (300, ["loss 0.0397", "KL 0.0386", "agreement 0.9086"]),
    ],
)
def test_the_bar_fits_its_terminal(columns, whole, monkeypatch):
    """Its figures are whole, whatever there is room for."""
    # Not in a fixture: pytest puts its own stream here after those.
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    bar = Progress(
        first_step=500,
        steps=1000,
        tokens_per_step=4096,
        flops_per_token=3e6,
        peak=PeakFlops(1e12, ""),
    )
    monkeypatch.setattr(bar._bar, "dynamic_ncols", lambda _: (columns, 50))
    bar.advance(jnp.zeros(()))
    bar.report(500, FIGURES, useful_share=1.0)
    bar.close()
    line = terminal.lines()[-1].rstrip()
    assert len(line) <= min(columns, 110)
    assert line.startswith(" 50%|") and "| 501/1000 [" in line
    shown = [figure.strip() for figure in line.partition("], ")[2].split("  ")]
    assert shown[: len(whole)] == whole
    every = {f"{progress._SHOWN[name]} {value:.4f}" for name, value in FIGURES.items()}
    assert all(figure in every or figure.split()[0] in ("tokens/s", "MFU") for figure in shown)


def test_what_takes_long_has_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    for number in track(iter("abc"), "evaluating", 3):
        assert any(line.startswith("evaluating:   0%|") for line in terminal.lines()), number
    assert any("0/3 [" in line for line in terminal.lines())


def test_and_lines_where_there_is_no_terminal(monkeypatch, log):
    """One at the start, then one in ten seconds at most."""
    clock = itertools.count(0.0, 4.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(track(range(8), "evaluating", 8)) == list(range(8))
    assert log.messages == [
        "evaluating: 8 batches",
        "evaluating: 3 of 8 batches",
        "evaluating: 6 of 8 batches",
    ]
