"""Commands of a plan, in order of value, within a total time: for a device that is lent briefly.

    python -m benchmarks.short_run PLAN.toml --seconds 780 --output FOLDER

A plan is a list of tables: `[[step]]` with `name`, `command` (`{output}` is the folder) and
`seconds`, its own limit. Each step ends at its limit or with the whole run, and a failure does not
end the others. FOLDER gets what each printed and, rewritten after every step, `steps.json` with
exit codes and times. Exit code 1 if a step failed or was left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.process import files

from .first_hour import GRACE, Outcome, Step, run

FIELDS = tuple({"name": str, "command": str, "seconds": kind} for kind in (int, float))
LEFT_OUT = "left out"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.short_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("plan", type=Path)
    flag("--seconds", type=float, required=True, help="of the whole run")
    flag("--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    return cli.run(
        lambda: short_run(read_plan(args.plan, args.output), args.seconds, args.output), parser
    )


def read_plan(file: Path, output: Path) -> list[Step]:
    """The steps of a plan. Raises `UsageError` for a file that is none."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8")).get("step")
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file}: not a plan ({error})") from error
    if not isinstance(found, list):
        raise UsageError(f"{file}: not a plan (it has no [[step]])")
    for number, step in enumerate(found, 1):
        if {name: type(value) for name, value in step.items()} not in FIELDS:
            raise UsageError(
                f"{file}: step {number} needs `name` and `command`, texts, and a number of seconds"
            )
        if "/" in step["name"]:
            raise UsageError(f"{file}: `name`={step['name']!r} is the name of a file: no /")
    return [
        Step(
            step["name"],
            tuple(shlex.split(step["command"].replace("{output}", str(output)))),
            float(step["seconds"]),
        )
        for step in found
    ]


def short_run(steps: Sequence[Step], seconds: float, output: Path) -> int:
    """Run the steps while there is time. Returns the exit code."""
    output.mkdir(parents=True, exist_ok=True)
    end, outcomes = time.monotonic() + seconds, list[Outcome]()
    for step in steps:
        left = end - time.monotonic() - GRACE
        if left < GRACE:
            outcomes.append(Outcome(step.name, LEFT_OUT, 0.0))
        else:
            cli.log(f"{step.name}: at most {min(step.seconds, left):.0f} of {left:.0f} s")
            limited = dataclasses.replace(step, seconds=min(step.seconds, left))
            outcomes.append(run(limited, output))
        files.write_json(output / "steps.json", [vars(one) for one in outcomes])
    for one in outcomes:
        print(f"{one.name:28} {one.exit:>12} {one.seconds:6.0f} s")
    return cli.ERROR if any(one.failed for one in outcomes) else cli.OK


if __name__ == "__main__":
    sys.exit(main())
