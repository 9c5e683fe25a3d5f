"""What the benchmarks share: times per call and result files."""

import json

import pytest

from benchmarks import report, serve, timing


class Clock:
    """A clock that stands still until a program advances it."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_time_per_call_is_that_of_the_calls():
    """Without what a run costs once, and however often it runs: a program of three calls of 2 ms
    each."""
    clock = Clock()

    def run(repeats):
        start = clock()
        clock.seconds += 0.01 + repeats * 0.006
        return timing.Run(clock() - start, 0.0)

    program = timing.Program(run, 3, None)
    plan = timing.Plan(short_run=0.03, seconds=0.0, min_rounds=3, max_rounds=3, warm_up=0.1)
    broken = timing.Program(lambda repeats: 1 / 0, 1, None)  # pyright: ignore
    timings, failed = timing.measure({"steady": program, "broken": broken}, plan, clock=clock)
    steady = timings["steady"]
    assert steady.seconds == pytest.approx(0.002) and list(failed) == ["broken"]
    assert steady.spread == pytest.approx(0, abs=1e-9) and len(steady.short_runs) == 3
    assert steady.repeats == 2, "of 16 ms a run, as many as 30 ms hold"
    warm_up = clock.seconds - 3 * (0.01 + 2 * 0.006 + 0.01 + 6 * 0.006)
    assert warm_up == pytest.approx(0.112), "until 0.1 s are over, in runs of 16 ms"


def test_a_time_below_the_noise_is_that_of_the_long_runs():
    seconds = iter([0.01, 0.01, 0.02, 0.01])  # twice to warm up, then a short run and a long one
    program = timing.Program(lambda repeats: timing.Run(next(seconds), 0.0), 1, None)
    plan = timing.Plan(short_run=0.01, seconds=0.0, min_rounds=1, max_rounds=1, warm_up=0.0)
    found = timing.measure({"noisy": program}, plan)[0]["noisy"]
    assert found.seconds == pytest.approx(0.01 / 3) and not found.linear


def test_names_of_results():
    path = report.default_path("loss", "NVIDIA H200", "2026-11-21T09:30:00+00:00")
    assert path.name == "loss-nvidia-h200-20261121-093000.json"


def test_a_part_of_serving_that_fails_says_why(tmp_path, monkeypatch, capfd):
    flags = ["prefill", "--model", str(tmp_path / "none"), "--input-len", "16"]
    status, document = serve._run("prefill", flags, tmp_path / "part.json", 60.0)
    assert status.startswith("failed with exit code 4: error: ") and document is None
    assert "none" in status and status.partition(": ")[2] in capfd.readouterr().err
    status, _ = serve._run("prefill", flags, tmp_path / "part.json", -59.99)
    assert status == "failed: not done 0 s after it began"


def test_parts_are_kept_when_a_later_one_does_not_end(tmp_path, monkeypatch, capsys):
    path = tmp_path / "serve.json"
    device = {"kind": "cpu"}
    facts = {"date": "2026-01-01T00:00:00", "device": device, "versions": {}, "commit": None}

    def run(part, *_):
        if part == "decode-fp8":
            return "failed with exit code 5: error: no room", None
        if part == "latency":
            kept = json.loads(path.read_text())
            assert list(kept["parts"]) == ["prefill"] and kept["device"] == device
            assert "no room" in kept["status"]["decode-fp8"]
            raise KeyboardInterrupt
        return "done", facts

    monkeypatch.setattr(serve, "_run", run)
    assert serve.main(["--shapes", "smoke", "--output", str(path)]) == 130
    assert serve.main(["--shapes", "smoke", "--output", str(tmp_path)]) == 2
    assert serve.main(["--shapes", "smoke", "--only", "fly"]) == 2
    assert "no such part; parts: prefill" in capsys.readouterr().err
