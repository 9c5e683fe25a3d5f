"""How good students of a small teacher are, beside the teacher, in one table.

    python -m benchmarks.quality                             everything; hours on two cores
    python -m benchmarks.quality --cuts 50 --groups 1 --steps 0
    python -m benchmarks.quality --quick                     a few minutes: does everything run?
    python -m benchmarks.quality --teacher build/t1          of a teacher by `benchmarks.teachers`

A student has a cut (share of the layers that keep their own keys and values), a group size g (upper
layers that share a cache), a start (`authors`: the mean of a group's projections; `leader`: those
of its first layer; `closed-form`: least squares) and a number of optimiser steps of 8 rows of 512
tokens. The authors' start is trained by the authors' recipe at the best of several learning rates,
the others by this package's at its default rate, or at the best of `--package-rates`. Every student
is also served with own keys and values for the tokens after the prompt (`own`), and for the last 64
of the prompt too (`own+64`). With `--generated-kv own` they are fitted to and trained for that;
with groups they are trained for the boundary and then scaled, unless `--train-own` is given.

Untrained students come first, then by steps. Each is kept in the folder when it is done, the same
command continues, and the JSON in `benchmarks/results` is rewritten every time. The exit code is 0
unless `--check` is given and a bar is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from swiftkv_jax import cli
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.config import GENERATED_KV
from swiftkv_jax.model.mesh import emulate_cpu_devices, parse_mesh
from swiftkv_jax.process import files
from swiftkv_jax.train.analysis.cut_list import parse_cuts
from swiftkv_jax.train.recipe import DEMO, Init

from .. import report
from ..teachers.files import TeacherFiles
from . import bootstrap, generation, summary, table, verdict
from .bench import Bench
from .held_out import PROMPT
from .students import AUTHORS_RATES, PACKAGE_RATES, STARTS, Arm, Loss, plan

logger = logging.getLogger("swiftkv_jax.benchmarks")

QUICK: dict[str, Any] = {
    "cuts": "50",
    "groups": "1,2",
    "starts": "closed-form",
    "steps": "0,1",
    "seeds": 1,
    "rows": 8,
    "prompts": 2,
    "folder": Path("runs/quality-quick"),
    "output": Path("runs/quality-quick/result.json"),
}


def parser() -> argparse.ArgumentParser:
    result = cli.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = result.add_argument
    flag(
        "--teacher",
        type=Path,
        metavar="FOLDER",
        help="of `python -m benchmarks.teachers` (default: the demo model and its text)",
    )
    flag("--cuts", default="75,62.5,50,37.5,25", help="percent of layers (default: %(default)s)")
    flag(
        "--groups",
        default="1,2,4,all",
        help="group sizes, where they divide the upper layers (default: %(default)s)",
    )
    flag("--starts", default=",".join(STARTS), help="(default: %(default)s)")
    flag("--steps", default="0,64", help="optimiser steps (default: %(default)s)")
    flag(
        "--generated-kv",
        choices=GENERATED_KV,
        default="boundary",
        help="what students are fitted to and trained for; own: those from the closed form "
        "(default: %(default)s)",
    )
    flag(
        "--train-own",
        action="store_true",
        help="with --generated-kv own: train students with groups for own keys and values, from "
        "the scaled start (default: for the boundary, and scale them in the end)",
    )
    flag(
        "--loss",
        choices=get_args(Loss),
        default="distillation",
        help="what students are trained with; cross-entropy: with the text alone, as a control "
        "(default: %(default)s)",
    )
    flag(
        "--rates",
        type=_rates,
        default=AUTHORS_RATES,
        metavar="RATE,...",
        help="learning rates of the authors' recipe, tried upwards until one is worse (default: "
        + ",".join(f"{rate:g}" for rate in AUTHORS_RATES)
        + ")",
    )
    flag(
        "--package-rates",
        type=_rates,
        default=PACKAGE_RATES,
        metavar="RATE,...",
        help="the same for this package's recipe (default: "
        + ",".join(f"{rate:g}" for rate in PACKAGE_RATES)
        + ", its own)",
    )
    flag("--seeds", type=int, default=3, help="of each trained student (default: 3)")
    flag("--rows", type=int, help="held-out rows (default: the first 4,096 tokens of every file)")
    flag(
        "--prompts",
        type=int,
        default=generation.PROMPTS,
        help="functions to write (default: %(default)s)",
    )
    flag("--no-generation", action="store_true", help="write no functions")
    flag("--quick", action="store_true", help="few of everything, to see that it runs")
    flag("--check", action="store_true", help="exit code 1 if a measured bar is missed")
    flag("--mesh", default="4x1", help="devices, emulated on a CPU (default: %(default)s)")
    flag(
        "--folder",
        type=Path,
        default=Path("runs/quality"),
        help="what is kept (default: %(default)s; with --quick another)",
    )
    flag(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file (default: a new one in benchmarks/results; with --quick in the folder)",
    )
    return result


def _rates(text: str) -> tuple[float, ...]:
    """A flag's value, rising. Raises what argparse reports."""
    try:
        rates = tuple(sorted(float(part) for part in text.split(",")))
    except ValueError:
        rates = (math.nan,)
    if not all(0 < rate < math.inf for rate in rates):
        raise argparse.ArgumentTypeError(f"must be positive numbers, got {text!r}")
    return rates


def main(argv: list[str] | None = None) -> int:
    arguments = parser()
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        arguments.set_defaults(**QUICK)
    args = arguments.parse_args(argv)
    return cli.run(lambda: measure(args), arguments)


def measure(args: argparse.Namespace) -> int:
    """Measure all students and print the table. Returns the exit code."""
    teacher = TeacherFiles.demo() if args.teacher is None else TeacherFiles.of(args.teacher)
    teacher.check()
    num_layers = open_any(teacher.model).config.num_layers
    arms, mesh = choose_arms(args, num_layers), parse_mesh(args.mesh)
    emulate_cpu_devices(math.prod(mesh))
    facts, output = begin(args)
    bench = Bench(
        args.folder,
        teacher,
        mesh,
        [arm.num_key_value_layers for arm in arms],
        rows=args.rows,
        num_prompts=0 if args.no_generation else args.prompts,
        sources=facts["sources_sha256"],
        rates=args.rates,
        package_rates=args.package_rates,
    )
    drawn = bootstrap.draws(len(bench.held_out.names))
    document: dict[str, Any] = facts | {
        "teacher": teacher.description,
        "layers": num_layers,
        "documents": len(bench.held_out.names),
        "prompt": PROMPT,
        "tokens_per_step": DEMO.batch_size * DEMO.max_length,
        "rows": [],
    }
    for arm in arms:
        finished = document["rows"]
        for cells, tried in bench.cells_of(arm, args.seeds):
            rows = summary.rows_of(arm, cells, tried, bench.teacher_cell(), drawn)
            document["rows"] = finished + rows
            report.write_json(output, document)
    if not document["rows"]:
        raise UsageError("every student diverged")
    print(table.table(document))
    lines, kept = verdict.verdict(document["rows"])
    print("\n" + "\n".join(lines))
    logger.info("written to %s", output)
    return cli.ERROR if args.check and not kept else cli.OK


def choose_arms(args: argparse.Namespace, num_layers: int) -> list[Arm]:
    """Raises `UsageError` for arguments that name no student."""
    for name in ("seeds", "rows", "prompts"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"`{name}`={value}: must be at least 1")
    cuts = [cut.k for cut in parse_cuts(args.cuts, num_layers)]
    groups = [None if size == "all" else _whole("groups", size, 1) for size in _parts(args.groups)]
    steps = [_whole("steps", count, 0) for count in _parts(args.steps)]
    starts = _parts(args.starts)
    if unknown := [start for start in starts if start not in STARTS]:
        raise UsageError(f"`starts`={unknown[0]!r}: expected some of {','.join(STARTS)}")
    chosen: list[Init] = [start for start in STARTS if start in starts]
    if args.train_own and args.generated_kv != "own":
        raise UsageError("`train_own` needs `generated_kv`=own")
    loss, trains_own = args.loss, args.train_own
    arms = plan(num_layers, cuts, groups, chosen, steps, args.generated_kv, loss, trains_own)
    if not arms:
        raise UsageError(
            f"`groups`={args.groups}: with `cuts`={args.cuts} and `starts`={args.starts} there is "
            f"no student: sizes must divide the upper layers, `leader` needs more than 1, and "
            f"`generated_kv`=own the closed form, `loss`=cross-entropy steps and "
            f"another start than the authors', `train_own` steps and sizes of more than 1"
        )
    return arms


def _parts(text: str) -> Sequence[str]:
    return [part.strip() for part in text.split(",")]


def _whole(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"`{name}`={text!r}: expected whole numbers from {least} up")
    return int(text)


def begin(args: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """The facts of the run, and the file of its result. A command that was given before keeps its
    date and its file, so that it continues."""
    chosen = {name: str(value) for name, value in sorted(vars(args).items()) if name != "check"}
    mark = hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:8]
    record, facts = args.folder / f"run-{mark}.json", report.environment(seed=0)
    if record.exists():
        first = json.loads(record.read_text(encoding="utf-8"))
        facts |= {"date": first["date"]}
    kind = facts["device"]["kind"]
    name = "quality" if args.teacher is None else f"quality-{args.teacher.name}"
    output = args.output or report.default_path(name, kind, facts["date"])
    report.check_writable(output)
    args.folder.mkdir(parents=True, exist_ok=True)
    files.write_json(record, {"date": facts["date"], "output": str(output)} | chosen)
    return facts, output


if __name__ == "__main__":
    sys.exit(main())
