"""Every step of docs/first-hour-on-a-gpu.md, and one file with all that they found.

    python -m benchmarks.first_hour                 all steps, some hours at most
    python -m benchmarks.first_hour --only kernels  some of them

A step that fails or takes longer than its limit does not end the others. What each prints goes to
the terminal and to a file of the folder, which also gets the JSON of the steps and the output of
`nvidia-smi`. In the end there are a table of the steps and the folder as one .tar.gz. Without a
GPU nothing is run. Exit code 1 if a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError

from .report import ROOT, matcher

GRACE = 10.0
"""Seconds from the request to end to being killed."""


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]
    seconds: float
    """Time after which it is ended."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    name: str
    exit: str
    """Exit code, or why there is none."""
    seconds: float

    @property
    def failed(self) -> bool:
        return self.exit != "0"


BENCHMARKS = "kernels", "serve", "train_step", "calibration", "loss", "command_buffers"

DEVICE = Step(
    "device",
    (
        sys.executable,
        "-c",
        "import jax; print(jax.devices()); assert jax.default_backend() == 'gpu', 'no GPU'",
    ),
    300,
)


def steps(folder: Path) -> list[Step]:
    """The steps of the page, which write their JSON into `folder`."""
    python = sys.executable, "-m"
    kernels, prefill = str(folder / "kernels.json"), str(folder / "prefill.json")
    infer = *python, "swiftkv_jax", "infer"
    shape = "--config", "llama-3.1-8b", "--load-format", "dummy", "--input-len", "512,2k,8k"
    return [
        Step("check-kernels", (*python, "swiftkv_jax", "check-kernels", "--json", kernels), 3600),
        Step("test-gpu", ("make", "test-gpu", f"DEVICE_PYTHON={sys.executable}"), 9000),
        *(
            Step(
                f"benchmarks.{name}",
                (*python, f"benchmarks.{name}", "--output", str(folder / f"benchmark-{name}.json")),
                1200,
            )
            for name in BENCHMARKS
        ),
        Step("infer", (*infer, "-p", "def read_lines(path):"), 600),
        Step("infer bench", (*infer, "bench", "prefill", *shape, "-o", prefill), 900),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_hour", description="Every step of the first hour on a GPU."
    )
    parser.add_argument(
        "--only", metavar="PATTERN", help="only steps whose name has a match of this expression"
    )
    parser.add_argument(
        "--folder", type=Path, help="a new folder for the results (default: one in runs/)"
    )
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    folder = args.folder or ROOT / f"runs/first-hour-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder = folder.absolute()
    matches = matcher(args.only)
    chosen = [step for step in steps(folder) if matches(step.name)]
    if not chosen:
        names = ", ".join(step.name for step in steps(folder))
        raise UsageError(f"--only {args.only!r}: no such step; steps: {names}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--folder {folder}: cannot be made ({error.strerror})") from error
    return first_hour(DEVICE, chosen, folder)


def first_hour(device: Step, chosen: Sequence[Step], folder: Path) -> int:
    """Run `device`, and where that finds one the steps; pack what is found. The exit code."""
    run(Step("nvidia-smi", ("nvidia-smi",), 60), folder)
    outcomes = [run(device, folder)]
    if outcomes[0].failed:
        cli.log("error: JAX finds no GPU: see docs/first-hour-on-a-gpu.md")
        chosen = ()
    try:
        for number, step in enumerate(chosen, start=1):
            cli.log(f"step {number} of {len(chosen)}: {step.name}, at most {step.seconds:g} s")
            outcomes.append(run(step, folder))
    except KeyboardInterrupt:
        cli.log("interrupted: the remaining steps are left out")
        outcomes.append(Outcome("the rest", "interrupted", 0.0))
    table = "".join(
        f"{line}\n"
        for line in (
            f"{'step':28} {'exit':>12} {'time':>8}",
            *(f"{one.name:28} {one.exit:>12} {one.seconds:6.0f} s" for one in outcomes),
        )
    )
    (folder / "steps.txt").write_text(table)
    packed = folder.with_name(folder.name + ".tar.gz")
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    print(f"\n{table}\nsend back {packed}", flush=True)
    return cli.ERROR if any(one.failed for one in outcomes) else cli.OK


def run(step: Step, folder: Path) -> Outcome:
    """Run a step; what it prints goes to the terminal and to a file of `folder`."""
    start = time.monotonic()
    with (folder / f"{step.name.replace(' ', '-')}.log").open("wb") as log:
        try:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        except OSError as error:
            log.write(f"{error}\n".encode())
            return Outcome(step.name, "not found", 0.0)
        assert process.stdout is not None
        copying = threading.Thread(target=_copy, args=(process.stdout, log), daemon=True)
        copying.start()
        try:
            found = str(process.wait(step.seconds))
        except subprocess.TimeoutExpired:
            found = "timeout"
        finally:
            _end(process)
            copying.join(GRACE)  # what hangs in a driver may keep the output open
    return Outcome(step.name, found, time.monotonic() - start)


def _end(process: subprocess.Popen) -> None:
    """End a step and what it has started, which may outlive it."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def _copy(output: BinaryIO, log: BinaryIO) -> None:
    with output, contextlib.suppress(ValueError):  # the log was closed: the step has ended
        for line in output:
            log.write(line)
            log.flush()
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
