"""Runs of two processes on this machine, one device each: they end like a run of one process, and
stop together.

Ten steps: later, Adam's division has made rounding visible.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from swiftkv_jax.train.__main__ import main
from tests.free_port import free_port

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TEXT = (
    "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self, y):\n        return [self, y]\n\n"
    * 40
)
STEPS = 10
SECONDS = 180
"""In which a pair of processes has ended, also on a busy machine, or is killed."""


def arguments(folder: Path, run: str, mesh: str) -> list[str]:
    """A short run of the demo model on `folder`/code.txt."""
    code, sizes = (
        str(folder / "code.txt"),
        f"--max-length 32 --batch-size 4 --max-steps {STEPS} --save-steps 5 --logging-steps 1 "
        "--init leader",  # so few tokens leave a closed form to rounding
    )
    return [
        "--data",
        code,
        "--eval-data",
        code,
        "--output-dir",
        str(folder / run),
        "--mesh",
        mesh,
        *sizes.split(),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`one`: a run of one process. `together`: one of two, on a device each."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "code.txt").write_text(TEXT)
    assert main(arguments(folder, "one", "1x1")) == 0
    with two_processes(folder, "together", "2x1") as pair:
        assert pair.exit_codes() == [0, 0], pair.logs()
    return folder


class Pair(NamedTuple):
    processes: list[subprocess.Popen]
    files: list[Path]
    """What each has written to stderr."""

    def logs(self) -> list[str]:
        return [file.read_text() for file in self.files]

    def wait_for(self, message: str) -> None:
        """Until process 0 has written it."""
        deadline = time.monotonic() + SECONDS
        while message not in self.logs()[0]:
            assert time.monotonic() < deadline and all(
                process.poll() is None for process in self.processes
            ), self.logs()
            time.sleep(0.01)

    def exit_codes(self) -> list[int | None]:
        """None for one that had not ended in time, or not soon after the other had failed."""
        deadline = time.monotonic() + SECONDS
        while None in (codes := [process.poll() for process in self.processes]):
            if any(codes) or time.monotonic() > deadline:
                return codes
            time.sleep(0.01)
        return codes


@contextlib.contextmanager
def two_processes(folder: Path, run: str, mesh: str) -> Iterator[Pair]:
    """The same command twice, joined; both are killed on leaving."""
    port = free_port()
    command = [sys.executable, "-m", "swiftkv_jax.train", *arguments(folder, run, mesh)]
    command += [
        "--coordinator-address",
        f"127.0.0.1:{port}",
        "--num-processes",
        "2",
        "--process-id",
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}  # for the next pair
    files = [folder / f"{run}-{index}.log" for index in (0, 1)]
    with contextlib.ExitStack() as stack:
        processes = []
        for index, file in enumerate(files):
            log = stack.enter_context(file.open("w"))
            processes.append(
                stack.enter_context(
                    subprocess.Popen([*command, str(index)], env=environment, stderr=log)
                )
            )
            stack.callback(processes[-1].kill)
        yield Pair(processes, files)


def numbers(run: Path, prefix: str = "") -> np.ndarray:
    """Step, loss and gradient norm of every row, or with the prefix `eval_` those of held-out rows:
    step, loss and perplexity."""
    names = ("eval_loss", "eval_student_perplexity") if prefix else ("loss", "grad_norm")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return np.array(
        [[row["step"], *(row[name] for name in names)] for row in rows if names[0] in row]
    )


@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_two_processes_compute_what_one_does(prefix, folder):
    """The same rows in the same order, each step recorded once."""
    ours, single = (numbers(folder / run, prefix) for run in ("together", "one"))
    assert single[:, 0].tolist() == ([0, STEPS] if prefix else list(range(1, STEPS + 1)))
    np.testing.assert_allclose(ours, single, rtol=2e-4)


def test_only_process_0_logs(folder):
    first, second = ((folder / f"together-{index}.log").read_text() for index in (0, 1))
    assert (
        "in 2 processes, data 2" in first
        and f"step {STEPS}/{STEPS}" in first
        and "finished after step" in first
    )
    assert not any(
        words in second for words in ("frozen", "held-out", "loss", "report:", "finished")
    )


def test_the_export_of_two_processes_is_complete(folder):
    files = [
        sorted(path.name for path in (folder / run / "model").iterdir())
        for run in ("together", "one")
    ]
    assert files[0] == files[1]
    ours, single = (
        load_file(folder / run / "model" / "model.safetensors") for run in ("together", "one")
    )
    assert ours.keys() == single.keys()
    for name in single:
        relative, absolute = (
            (2**-7, 2e-4) if "swiftkv" in name else (0.0, 0.0)
        )  # bfloat16; the teacher is not trained
        actual, desired = (run[name].astype(np.float32) for run in (ours, single))
        np.testing.assert_allclose(actual, desired, rtol=relative, atol=absolute, err_msg=name)


def test_a_signal_to_one_stops_both_and_one_process_goes_on(folder):
    """On SIGTERM both finish and save the same step; another number of processes and another mesh
    continue from it."""
    with two_processes(folder, "stopped", "fsdp=2") as pair:
        pair.wait_for("step 0: held-out")  # then the first step is compiled
        pair.processes[1].send_signal(signal.SIGTERM)
        assert pair.exit_codes() == [0, 0], pair.logs()
        first, _ = pair.logs()
    step = int(first.split("stopped after step ")[1].split()[0])
    run = folder / "stopped"
    assert 0 < step < STEPS and [path.name for path in (run / "checkpoints").iterdir()] == [
        str(step)
    ]
    assert numbers(run)[:, 0].tolist() == list(range(1, step + 1)) and not (run / "model").exists()

    assert main(arguments(folder, "stopped", "1x2")) == 0
    np.testing.assert_allclose(numbers(run), numbers(folder / "one"), rtol=2e-4)
    assert (run / "model").is_dir()
