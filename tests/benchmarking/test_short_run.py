"""A plan of commands: steps in order, within their own limits and a total one, and all packed."""

import argparse
import json
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from benchmarks import report, serve, short_run, train_variants
from benchmarks.serve_targets import TARGETS, judge
from swiftkv_jax.infer.bench import options as bench_options

ROOT = Path(__file__).parents[2]


def step(name: str, code: str, seconds: float) -> str:
    command = f"{{python}} -c '{code}'"
    return f'[[step]]\nname = {name!r}\ncommand = """{command}"""\nseconds = {seconds}\n'


def test_steps_end_with_their_time_and_with_the_whole(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(short_run, "GRACE", 0.3)
    plan, found = tmp_path / "plan.toml", tmp_path / "found"
    plan.write_text(
        step("writes", 'open("{output}/result.json", "w").write("[]")', 60)
        + step("hangs", "import time; time.sleep(60)", 0.5)
        + step("is ended", "import time; time.sleep(60)", 60)
        + step("has no time", "", 60)
    )
    arguments = [str(plan), "--seconds", "3", "--output", str(found)]
    assert short_run.main(arguments) == 1
    steps = json.loads((found / "steps.json").read_text())
    assert [(one["name"], one["exit"]) for one in steps] == [
        ("writes", "0"),
        ("hangs", "timeout"),
        ("is ended", "timeout"),
        ("has no time", "left out"),
    ]
    assert (found / "result.json").read_text() == "[]" and (found / "hangs.log").exists()
    printed = capfd.readouterr()
    assert "hangs: at most 0 of " in printed.err and "found.tar.gz" in printed.out
    with tarfile.open(tmp_path / "found.tar.gz") as archive:
        assert {"found/steps.json", "found/hangs.log"} <= set(archive.getnames())


def test_steps_that_need_another_are_left_out(tmp_path, capfd):
    plan, found = tmp_path / "plan.toml", tmp_path / "found"
    plan.write_text(
        "[[step]]\nname = 'missing'\ncommand = 'no-such-program'\nseconds = 1\n"
        + step("device", 'raise SystemExit("no GPU")', 60)
        + "required = true\n"
        + step("writes", f'open("{tmp_path}/ran", "w")', 60)
    )
    assert short_run.main([str(plan), "--output", str(found)]) == 1
    steps = json.loads((found / "steps.json").read_text())
    assert [one["exit"] for one in steps] == ["not found", "1", "left out"]
    assert not (tmp_path / "ran").exists() and "no GPU" in capfd.readouterr().out
    assert short_run.main([str(plan), "--output", str(found), "--only", "none"]) == 2
    assert "no such step; steps: missing; writes" in capfd.readouterr().err


def test_the_page_has_the_steps_of_the_first_hour(tmp_path):
    page = (ROOT / "docs/first-hour-on-a-gpu.md").read_text()
    steps = short_run.read_plan(ROOT / "benchmarks/first_hour.toml", tmp_path)
    assert [step.required for step in steps].count(True) == 1
    for step in steps:
        assert step.name in page


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_every_file_of_the_device_runs(tmp_path):
    """Each in a process of its own; one fails, one hangs, and the exit code tells."""
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(
        f'#!/bin/sh\necho "$JAX_PLATFORMS $*" >> {calls}\n'
        'case "$*" in *test_attention*) exit 1;; *test_cudnn*) exec sleep 60;; esac\n'
    )
    stub.chmod(0o755)
    made = subprocess.run(
        ["make", "test-gpu", f"DEVICE_PYTHON={stub}", "DEVICE_SECONDS=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 2 and "failed: test_attention test_cudnn\n" in made.stderr
    _, *files = calls.read_text().splitlines()
    assert all(line.startswith("cuda,cpu -m pytest -q -m long or not") for line in files)
    names = [line.split("tests/pallas_kernels/")[1].partition(".py")[0] for line in files]
    assert names == ["test_attention", "test_cudnn", "test_prefill_tiles"]


def test_a_plan_that_is_none(tmp_path, capsys):
    plan = tmp_path / "plan.toml"
    arguments = [str(plan), "--seconds", "5", "--output", str(tmp_path / "found")]
    for content, error in (
        ("[[step]", "not a plan"),
        ("", "it has no [[step]]"),
        ("[step]\nname = 'a'\n", "it has no [[step]]"),
        ("[[step]]\nname = 'a'\n", "step 1 needs `name` and `command`"),
        (step("a", "", 1).replace("= 1", "= 'soon'"), "and a number of seconds"),
        (step("a/b", "", 1), "`name`='a/b' is the name of a file"),
    ):
        plan.write_text(content)
        assert short_run.main(arguments) == 2
        assert error in capsys.readouterr().err
    assert not (tmp_path / "found").exists()


def test_measurements_of_a_quarter_of_an_hour(tmp_path):
    """Each step is of a benchmark, writes its JSON, and names something that the benchmark has."""
    for step in short_run.read_plan(ROOT / "benchmarks/quarter_hour.toml", tmp_path):
        _, dash, module, *flags = step.command
        assert dash == "-m" and Path(flags[flags.index("--output") + 1]).parent == tmp_path
        pattern = flags[flags.index("--only") + 1] if "--only" in flags else ""
        if module == "benchmarks.serve":
            assert len(report.select([*serve.FULL, *serve.W8A8], pattern, "part")) == 1
        elif module == "benchmarks.train_step":
            names = [variant.name for variant in train_variants.SIZES["full"].variants]
            assert len(report.select(names, pattern, "variant")) == 1
        else:
            assert module in ("benchmarks.http_load", "benchmarks.drafts_and_tiers")


@pytest.mark.parametrize("part", serve.FULL | serve.W8A8)
def test_parts_of_serving(part):
    """Their options are those of `infer bench`, and targets name cells that they measure."""
    parser = argparse.ArgumentParser()
    bench_options.add_arguments(parser)
    flags = shlex.split((serve.FULL | serve.W8A8)[part])
    _, cells = bench_options.plan(bench_options.BenchOptions.from_args(parser.parse_args(flags)))
    measured = {(cell.input_len, cell.prompts) for cell in cells}
    targets = {target for each in TARGETS.values() for target in each if target.part == part}
    assert {(target.input_len, target.prompts) for target in targets} <= measured


def test_targets_are_those_of_the_device():
    """What a student gains is judged by the ratio of operations; each part here has a target."""
    row = {"speed_up": 1.86, "teacher_flops_over_own": 1.877, "tokens_per_s": 5_000.0}
    cell = {"input_len": 2048, "prompts": 64}
    part = {"rows": [{"variant": "swiftkv", "label": "2k", "cell": cell} | row]}
    kind = "NVIDIA H200"
    missed = ("decode-2k, 2k: tokens/s", "≥ 5,100", "5,000", False)
    assert judge({"decode-2k": part}, kind) == [missed]
    assert judge({"decode-2k": part}, "NVIDIA H100 80GB HBM3") == []
    row = part["rows"][0] | {"cell": {"input_len": 32768, "prompts": 1}, "ttft": 0.7}
    (ratio, ttft) = judge({"prefill": {"rows": [row]}}, kind)
    assert ratio[1:] == ("≥ 0.950", "0.991", True) and ttft[1:] == ("≤ 900", "700", True)
    assert {target.part for each in TARGETS.values() for target in each} <= {
        *serve.FULL,
        *serve.W8A8,
    }
