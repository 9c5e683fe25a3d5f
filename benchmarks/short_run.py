"""Commands of a plan, in order of value, each within its own limit and all within a total time.

    python -m benchmarks.short_run PLAN.toml --seconds 780 --output FOLDER
    python -m benchmarks.short_run benchmarks/first_hour.toml --output FOLDER    (make first-hour)

A plan is a list of tables: `[[step]]` with `name`, `command` and `seconds`, its own limit. In a
command `{output}` is the folder and `{python}` this interpreter. Each step ends at its limit or
with the whole run, and a failure does not end the others, unless the step says `required = true`.
FOLDER gets what each printed and, rewritten after every step, `steps.json` with exit codes and
times; in the end it is packed as FOLDER.tar.gz. Exit code 1 if a step failed or was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.process import files

from .report import ROOT, select

GRACE = 10.0
"""Seconds from the request to end to being killed."""
FIELDS = {"name": str, "command": str, "seconds": (int, float), "required": bool}
LEFT_OUT = "left out"


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]
    seconds: float
    """Time after which it is ended."""
    required: bool = False
    """True if the other steps are left out if this one fails."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    name: str
    exit: str
    """Exit code, or why there is none."""
    seconds: float

    @property
    def failed(self) -> bool:
        return self.exit != "0"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.short_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("plan", type=Path)
    flag("--seconds", type=float, help="of the whole run (default: those of all steps)")
    flag("--only", metavar="PATTERN", help="steps whose name has a match, and required ones")
    flag("--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    output = args.output.absolute()
    steps = read_plan(args.plan, output)
    names = select([step.name for step in steps if not step.required], args.only, "step")
    chosen = [step for step in steps if step.required or step.name in names]
    return short_run(chosen, args.seconds, output)


def read_plan(file: Path, output: Path) -> list[Step]:
    """The steps of a plan. Raises `UsageError` for a file that is none."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8")).get("step")
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file}: not a plan ({error})") from error
    if not isinstance(found, list):
        raise UsageError(f"{file}: not a plan (it has no [[step]])")
    return [_step(f"{file}: step {number}", step, output) for number, step in enumerate(found, 1)]


def _step(where: str, table: dict[str, Any], output: Path) -> Step:
    """A step from its table. Raises `UsageError`."""
    step: dict[str, Any] = {"required": False} | table
    if step.keys() != FIELDS.keys() or not all(
        isinstance(step[name], kind) for name, kind in FIELDS.items()
    ):
        raise UsageError(
            f"{where} needs `name` and `command`, texts, and a number of seconds; `required` may "
            "be true"
        )
    if "/" in step["name"]:
        raise UsageError(f"{where}: `name`={step['name']!r} is the name of a file: no /")
    command = step["command"].replace("{output}", shlex.quote(str(output)))
    words = shlex.split(command.replace("{python}", shlex.quote(sys.executable)))
    return Step(step["name"], tuple(words), float(step["seconds"]), step["required"])


def short_run(steps: Sequence[Step], seconds: float | None, output: Path) -> int:
    """Run the steps while there is time, and pack what they left. Returns the exit code."""
    output.mkdir(parents=True, exist_ok=True)
    outcomes = list[Outcome]()
    for outcome in _outcomes(steps, seconds, output):
        outcomes.append(outcome)
        files.write_json(output / "steps.json", [vars(one) for one in outcomes])
    packed = output.with_name(f"{output.name}.tar.gz")
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(output, arcname=output.name)
    for one in outcomes:
        print(f"{one.name:28} {one.exit:>12} {one.seconds:6.0f} s")
    print(f"packed: {packed}", flush=True)
    return cli.ERROR if any(one.failed for one in outcomes) else cli.OK


def _outcomes(steps: Sequence[Step], seconds: float | None, output: Path) -> Iterator[Outcome]:
    """The outcome of each step; those after a required one that failed, after the end of the time
    or after Ctrl-C are left out."""
    end = time.monotonic() + (sum(step.seconds + 2 * GRACE for step in steps))
    if seconds is not None:
        end = time.monotonic() + seconds
    stopped = False
    for step in steps:
        left = end - time.monotonic() - GRACE
        if stopped or left < GRACE:
            yield Outcome(step.name, LEFT_OUT, 0.0)
            continue
        limit = min(step.seconds, left)
        cli.log(f"{step.name}: at most {limit:.0f} of {left:.0f} s")
        try:
            outcome = run(dataclasses.replace(step, seconds=limit), output)
        except KeyboardInterrupt:
            cli.log("interrupted: the remaining steps are left out")
            outcome = Outcome(step.name, "interrupted", 0.0)
            stopped = True
        if step.required and outcome.failed:
            cli.log(f"error: {step.name} failed, and the other steps need it")
            stopped = True
        yield outcome


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
