"""What the benchmarks share: times per call, result files, and the reading of compiled programs."""

import json

import pytest

from benchmarks import calibration, hlo, kv_projection, report, serve, timing
from swiftkv_jax.errors import UsageError


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


def test_written_at_once(tmp_path):
    report.write_json(path := tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        report.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]


def test_names_of_results_say_what_never_ran():
    path = report.default_path("loss", "NVIDIA H200", "2026-11-21T09:30:00+00:00")
    assert path.name == "loss-nvidia-h200-20261121-093000.json"
    path = report.default_path("loss", "cpu", "2026-11-21T09:30:00", compiled_for="h200:1")
    assert path.name == "loss-compiled-for-h200-20261121-093000.json"
    for path in report.RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        target = document.get("compiled_for", "this device")
        assert ("-compiled-for-" in path.name) == (target != "this device"), path
        assert path.name.startswith("predicted-for-") == ("predicted_for" in document), path


def test_parts_of_serving_by_name():
    assert list(serve.select(serve.FULL, "^prefill$")) == ["prefill"]
    assert serve.select(serve.FULL, None) == serve.FULL
    for pattern, message in {"fly": "no such part; parts: prefill", "(": "not a regular"}.items():
        with pytest.raises(UsageError, match=message):
            serve.select(serve.FULL, pattern)


def test_a_part_of_serving_that_fails_says_why(tmp_path, monkeypatch, capfd):
    flags = ["prefill", "--model", str(tmp_path / "none"), "--input-len", "16"]
    status, document = serve._run("prefill", flags, tmp_path / "part.json", 60.0)
    assert status.startswith("failed with exit code 4: error: ") and document is None
    assert "none" in status and status.partition(": ")[2] in capfd.readouterr().err
    status, _ = serve._run("prefill", flags, tmp_path / "part.json", -59.99)
    assert status == "failed: not done 0 s after it began"


def test_parts_are_kept_when_a_later_one_does_not_end(tmp_path, monkeypatch):
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


def test_calibration_is_timed(tmp_path, capsys):
    path = tmp_path / "calibration.json"
    assert calibration.main(["--shapes", "smoke", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["pass"]["tokens"] == 256 * 64 and document["pass"]["seconds"] > 0
    assert [one["key_value_group_size"] for one in document["solutions"]] == [1, 2]
    assert "pass over 16,384 tokens" in capsys.readouterr().out
    assert calibration.main(["--shapes", "smoke", "--seconds", "0.001"]) == 0
    assert capsys.readouterr().out.count("was spent") == 2


# Compiled programs ------------------------------------------------------------


HLO = """HloModule m

%fused (p0: bf16[1,8,64,16], p1: bf16[4,8,8,16], p2: s32[]) -> bf16[1,8,64,16] {
  %p0 = bf16[1,8,64,16]{3,2,1,0} parameter(0)
  %p1 = bf16[4,8,8,16]{3,2,1,0} parameter(1)
  %wide = f32[4,8,8,16]{3,2,1,0} convert(%p1), metadata={op_name="x"}
  %left = f32[4,8,8,8]{3,2,1,0} slice(%wide), slice={[0:4], [0:8], [0:8], [0:8]}
  %right = f32[4,8,8,8]{3,2,1,0} slice(%wide), slice={[0:4], [0:8], [0:8], [8:16]}
  %turned = f32[4,8,8,16]{3,2,1,0} concatenate(%right, %left), dimensions={3}
  %group = f32[1,8,8,16]{3,2,1,0} slice(%turned), slice={[2:3], [0:8], [0:8], [0:16]}
  %n = bf16[1,8,8,16]{3,2,1,0} convert(%group)
  %z = s32[] constant(0)
  %p2 = s32[] parameter(2)
  ROOT %update = bf16[1,8,64,16]{3,2,1,0} dynamic-update-slice(%p0, %n, %z, %z, %p2, /*index=5*/%z)
}

ENTRY %main (a: bf16[32,64], b: bf16[64,64], cache: bf16[1,8,64,16], at: s32[]) -> bf16[1,8,64,16] {
  %a = bf16[32,64]{1,0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  %cache = bf16[1,8,64,16]{3,2,1,0} parameter(2)
  %at = s32[] parameter(3)
  %gemm = (bf16[64,64]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"
  %out = bf16[64,64]{1,0} get-tuple-element(%gemm), index=0
  %heads = bf16[4,8,8,16]{3,2,1,0} bitcast(%out)
  ROOT %new = bf16[1,8,64,16]{3,2,1,0} fusion(%cache, %heads, %at), kind=kLoop, calls=%fused
}
"""


def test_bytes_of_a_program():
    """A fusion that rotates one of four groups and writes it in place touches that group, not the
    others nor the cache."""
    gemm, update = hlo.kernels(HLO)
    assert (gemm.op, gemm.is_product, gemm.read_bytes, gemm.written_bytes) == (
        "custom-call",
        True,
        2 * (32 * 64 + 64 * 64),
        2 * 64 * 64,
    )
    group = 8 * 8 * 16 * 2
    assert (update.op, update.is_product, update.read_bytes, update.written_bytes) == (
        "fusion",
        False,
        group + 4,
        group,
    )


def test_a_fused_projection_saves_only_what_the_program_moves_beyond_the_least():
    config, (chunk,), length = kv_projection.CASES["smoke"]
    row = kv_projection.count(config, chunk, length, None)
    assert any(kernel["is_product"] for kernel in row["kernels"])
    assert row["kernel_seconds"] >= row["floor_seconds"] > 0
    assert 0 <= row["largest_saving"]["by_bytes"] <= row["largest_saving"]["with_launches"] < 1
