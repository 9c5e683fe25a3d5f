"""The first hour on a GPU: no step that fails or hangs loses another, and all is packed."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import first_hour
from benchmarks.first_hour import Step

ROOT = Path(__file__).parent.parent


def python(name: str, code: str, seconds: float = 60) -> Step:
    return Step(name, (sys.executable, "-c", code), seconds)


def test_steps_go_on_after_a_failure(tmp_path, capfd):
    """One fails, one hangs with a process that it has started, one is not there."""
    hangs = (
        "import subprocess, sys; print('begun', flush=True);"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    )
    steps = [
        python("fails", "import sys; print('out'); sys.exit('a reason')"),
        python("hangs", hangs, seconds=2),
        Step("missing", ("no-such-program",), 1),
        python("works", "print('done')"),
    ]
    folder = tmp_path / "found"
    folder.mkdir()
    assert first_hour.first_hour(python("device", ""), steps, folder) == 1
    rows = [line.split()[:2] for line in (folder / "steps.txt").read_text().splitlines()[1:]]
    assert rows == [
        ["device", "0"],
        ["fails", "1"],
        ["hangs", "timeout"],
        ["missing", "not"],
        ["works", "0"],
    ]
    printed = capfd.readouterr().out
    for text in ("out\n", "a reason\n", "begun\n", "done\n", "found.tar.gz"):
        assert text in printed
    with tarfile.open(tmp_path / "found.tar.gz") as archive:
        names = archive.getnames()
        log = archive.extractfile("found/fails.log")
        assert log is not None and sorted(log.read().split()) == [b"a", b"out", b"reason"]
    assert {"found/nvidia-smi.log", "found/hangs.log", "found/steps.txt"} <= set(names)


def test_without_a_gpu_nothing_runs(tmp_path, capfd):
    ran = tmp_path / "ran"
    steps = [python("step", f"open({str(ran)!r}, 'w')")]
    (folder := tmp_path / "found").mkdir()
    assert first_hour.first_hour(python("device", "raise SystemExit(1)"), steps, folder) == 1
    assert not ran.exists() and (tmp_path / "found.tar.gz").exists()
    assert "JAX finds no GPU" in capfd.readouterr().err


def test_the_page_has_the_steps(tmp_path, capsys):
    page = (ROOT / "docs/first-hour-on-a-gpu.md").read_text()
    for step in first_hour.steps(tmp_path):
        assert step.name in page
    assert first_hour.main(["--only", "nothing such"]) == 2
    assert "no such step; steps: check-kernels, test-gpu" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize(("target", "last"), [("gpu", "test_prefill_tiles"), ("tpu", "test_parts")])
def test_every_file_of_the_device_runs(target, last, tmp_path):
    """Each in a process of its own; one fails, one hangs, and the exit code tells."""
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(
        f'#!/bin/sh\necho "$JAX_PLATFORMS $*" >> {calls}\n'
        'case "$*" in *test_attention*) exit 1;; *test_windows*) exec sleep 60;; esac\n'
    )
    stub.chmod(0o755)
    made = subprocess.run(
        ["make", f"test-{target}", f"DEVICE_PYTHON={stub}", "DEVICE_SECONDS=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 2 and "failed: test_attention test_windows\n" in made.stderr
    _, *files = calls.read_text().splitlines()
    platform = "cuda" if target == "gpu" else "tpu"
    assert all(line.startswith(f"{platform},cpu -m pytest -q -m long or not") for line in files)
    names = [line.split("tests/pallas_kernels/")[1].partition(".py")[0] for line in files]
    assert names[:3] == ["test_attention", "test_windows", "test_parts"] and names[-1] == last
    assert len(names) == (5 if target == "gpu" else 3)
