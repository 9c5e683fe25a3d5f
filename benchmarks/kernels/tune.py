"""Find the best block sizes for the current device and put them into
`swiftkv_jax/pallas_kernels/tuning.json`.

    python -m benchmarks.kernels.tune                            all kernels, head dims and formats
    python -m benchmarks.kernels.tune --only 'prefill H128'      some of them
    python -m benchmarks.kernels.tune --dry-run                  print, and write nothing
    python -m benchmarks.kernels.tune --dry-run --shapes smoke   tiny shapes, a test run

`--only` matches names like `hopper.decode H128 float8_e4m3fn`. On a CPU nothing can be timed:
`--dry-run` lists the candidates.

Candidates that their class refuses, that do not compile or whose results are wrong are skipped,
with the reason. The best goes to the top of the table for this kind of device as soon as it is
known; the current entry competes, and stays unless another is at least 1 % faster. Everything that
was tried goes to `benchmarks/results/` (from a smoke run only to `--output`). Exit code 1 if no
candidate of any kernel ran.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.pallas_kernels import ops, tuning
from swiftkv_jax.pallas_kernels.device import HEAD_DIMS, current_device
from swiftkv_jax.process import provenance
from swiftkv_jax.process.files import write_atomic

from .. import report
from ..timing import SMOKE_PLAN, Plan, measure
from ..worker import Worker, WorkerError
from . import inputs, oracle, sweep
from .candidates import Candidate, op, planned
from .shapes import Shape

KEEP = 0.99
"""A candidate replaces the best so far if it takes less than this share of its time: differences
below are noise."""
CACHES = ("bfloat16", "float8_e4m3fn", "int8")
CANDIDATE_SECONDS = 120
"""Time for a candidate, of which compilation takes most; then its process is ended."""
PLAN = Plan(short_run=0.01, seconds=0.25, warm_up=0.05)


class Job(NamedTuple):
    kernel: str
    """Name in the table: "hopper.prefill.packed" is `hopper.prefill` with segment ids."""
    head_dim: int
    dtype: str
    """Dtype of the keys as they are stored."""

    @property
    def name(self) -> str:
        return f"{self.kernel} H{self.head_dim} {self.dtype}"

    @property
    def argument(self) -> str:
        """The op's argument for this kernel's tuning."""
        return "backward_tuning" if self.kernel.endswith(".backward") else "tuning"

    @property
    def tuning_class(self) -> type:
        return importlib.import_module(
            f"{ops.__package__}.{self.kernel.removesuffix('.packed')}"
        ).Tuning


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.tune",
        description="Find the best block sizes for this device.",
    )
    report.add_flags(parser, tables=("full", "smoke"), seconds=540)
    parser.add_argument("--dry-run", action="store_true", help="print the best, change nothing")
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args))


def jobs(platform: str, pattern: str | None) -> list[Job]:
    """The kernels of a platform (all of them on a CPU), most used first, that match `pattern`.
    Raises `UsageError`."""
    prefixes = {"gpu": ("hopper",), "tpu": ("tpu",)}.get(platform, ("hopper", "tpu"))
    head_dims = sorted(HEAD_DIMS, key=lambda head_dim: head_dim != 128)
    found = [
        Job(f"{prefix}.{name}", head_dim, dtype)
        for head_dim in head_dims
        for prefix in prefixes
        for name in ("prefill", "decode", "prefill.packed", "backward")
        for dtype in (CACHES if name == "decode" else CACHES[:1])
    ]
    chosen = report.select([job.name for job in found], pattern, "kernel")
    return [job for job in found if job.name in chosen]


def _main(args: argparse.Namespace) -> int:
    with Worker() as worker:
        return _tune_all(args, worker)


def _tune_all(args: argparse.Namespace, worker: Worker) -> int:
    start, (platform, kind) = time.monotonic(), worker.call(current_device)
    chosen = jobs(platform, args.only)
    smoke = args.shapes == "smoke"
    if platform not in ("gpu", "tpu"):
        if not args.dry_run:
            raise UsageError("there is nothing to tune on a CPU; --dry-run lists the candidates")
        for job in chosen:
            counts = [len(accepted(job, group)) for group in range(len(sweep.SWEEPS[job.kernel]))]
            print(f"{job.name}: {' + '.join(map(str, counts))} candidates")
        print("Nothing can be timed on a CPU: these are the candidates for a device.")
        return cli.OK
    seed = report.new_seed(args.seed)
    facts = worker.call(report.environment, seed) | {"command": provenance.command()}
    document = {"benchmark": "tune", **facts, "shapes": args.shapes, "jobs": []}
    path = None if args.dry_run else report.output_path(args, "tune", kind, document["date"])
    if not args.dry_run:
        report.check_writable(tuning.TABLE)
    cli.log(f"{kind}, seed {seed}")
    for number, job in enumerate(chosen):
        if time.monotonic() - start > args.seconds:
            print(f"{job.name}: skipped, the budget of {args.seconds:g} s was spent", flush=True)
            document["jobs"].append({"name": job.name, "skipped": "budget"})
            continue
        draw = (seed, number)
        plan = SMOKE_PLAN if smoke else PLAN
        result = tune(worker, job, kind, args.shapes, draw, plan, deadline=start + args.seconds)
        document["jobs"].append(result)
        if result["best"] is None:
            print(f"{job.name}: none of {len(result['tried'])} candidates ran", flush=True)
            continue
        print(f"{job.name}: {json.dumps(result['best'])}: {result['basis']}", flush=True)
        if not args.dry_run:
            basis = f"measured {document['date'][:10]}, jax {jax.__version__}: {result['basis']}"
            write_entry(job, kind, result["best"], basis)
    document["seconds"] = time.monotonic() - start
    report.write_json(path, document)
    if any(result.get("best") is not None for result in document["jobs"]):
        return cli.OK
    cli.log("error: no candidate of any kernel ran")
    return cli.ERROR


def accepted(job: Job, group: int) -> list[dict[str, Any]]:
    """The candidates of a group, on the class's defaults, that the class does not refuse."""
    found = []
    for values in sweep.combinations(job.kernel, group, job.tuning_class, {}):
        with contextlib.suppress(ValueError):
            job.tuning_class(**values)
            found.append(values)
    return found


def tune(
    worker: Worker,
    job: Job,
    kind: str,
    table: str,
    draw: tuple[int, int],
    plan: Plan,
    deadline: float = math.inf,
) -> dict[str, Any]:
    """All candidates of one kernel, head dim and cache format on a device of this kind, and the
    best of those that are right, or None. After one that crashes or hangs the next has a new
    process."""
    cli.log(job.name)
    tuning_class = job.tuning_class

    tried: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    before = _current(job, kind)
    start = {} if before is None else before

    def attempt(values: dict[str, Any]) -> None:
        nonlocal best
        if any(values == other["tuning"] for other in tried):
            return
        record: dict[str, Any] = {"tuning": values}
        tried.append(record)
        try:
            candidate = tuning_class(**values)
            record["tuning"] = sweep.fields(candidate)
            seconds, reason = worker.call(
                *(_times, job, candidate, table, draw, plan, best),
                seconds=CANDIDATE_SECONDS,
            )
        except WorkerError as error:  # the others go on
            worker.works()
            seconds = None
            reason = str(error)
        except Exception as error:  # refused
            seconds = None
            reason = report.reason(error)
        if seconds is None:
            record["reason"] = reason
            cli.log(f"  {json.dumps(values, default=str)}: {record['reason']}")
            return
        record |= {
            "seconds": seconds,
            "mean": math.exp(sum(map(math.log, seconds.values())) / len(seconds)),
        }
        cli.log(f"  {json.dumps(record['tuning'])}: {_told(record['seconds'])}")
        if best is None or record["mean"] < KEEP * best["mean"]:
            best = record

    attempt(start)
    for group in range(len(sweep.SWEEPS[job.kernel])):
        for values in list(
            sweep.combinations(
                job.kernel, group, tuning_class, start if best is None else best["tuning"]
            )
        ):
            if time.monotonic() < deadline:
                attempt(values)
    result: dict[str, Any] = {"name": job.name, "tried": tried, "best": None}
    if best is None:
        return result
    ran = [record for record in tried if "mean" in record]
    basis = f"{_told(best['seconds'])}, best of {len(ran)} that ran and {len(tried)} tried"
    return result | {"best": best["tuning"], "basis": basis}


def _current(job: Job, kind: str) -> dict[str, Any] | None:
    """The table's entry, or None if it has none that the class accepts."""
    try:
        return sweep.fields(
            tuning.tuning_for(job.tuning_class, job.kernel, job.head_dim, job.dtype, kind)
        )
    except (NotImplementedError, TypeError, ValueError):
        return None


# On the device ----------------------------------------------------------------


@functools.lru_cache(1)
def _cases(job: Job, table: str, draw: tuple[int, int]) -> list[tuple[Shape, Any, Any]]:
    """(shape, sets of inputs, the right result of the last) for each shape of a job."""
    key = jax.random.fold_in(jax.random.key(draw[0]), draw[1])
    cases = []
    for i, shape in enumerate(sweep.shapes(job.kernel, job.head_dim, job.dtype, table)):
        sets = inputs.draw(shape, jax.random.fold_in(key, i))
        cases.append((shape, sets, oracle.expected(shape, sets[-1])))
    return cases


def _times(
    job: Job,
    candidate: Any,
    table: str,
    draw: tuple[int, int],
    plan: Plan,
    best: dict[str, Any] | None,
) -> tuple[dict[str, float] | None, str]:
    """(seconds per call on every shape, ""), or (None, why not) for a result that is wrong, and for
    one that is far behind on the first shape. Raises for what fails."""
    seconds: dict[str, float] = {}
    cases = _cases(job, table, draw)
    for shape, sets, wanted in cases:
        name = job.kernel.split(".")[0]
        tunings = {job.argument: candidate}
        call = op(shape, name, **tunings)
        prepare = planned(shape, name, **tunings)
        try:
            program = Candidate(job.name, call, prepare).start(sets)
        except NotImplementedError as error:
            return None, report.reason(error)
        result = program.result if isinstance(program.result, tuple) else (program.result,)
        if wrong := oracle.check(shape, result, wanted)[1]:
            return None, wrong
        timings, failed = measure({"": program}, plan)
        for error in failed.values():
            raise error
        seconds[shape.name] = timings[""].seconds
        if (
            best is not None
            and len(cases) > 1
            and len(seconds) == 1
            and seconds[shape.name] > 2 * best["seconds"][shape.name]
        ):
            told = report.duration(seconds[shape.name])
            return None, f"{told} on {shape.name} is over twice the best"
    return seconds, ""


def _told(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {report.duration(value)}" for name, value in seconds.items())


# The table --------------------------------------------------------------------


def with_entry(entries: list[dict[str, Any]], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The table with `entry` on top, without another for the same kernel, device, head dim and
    dtype."""
    same = ("kernel", "device", "head_dim", "dtype")
    return [
        entry,
        *(other for other in entries if any(other[field] != entry[field] for field in same)),
    ]


def write_entry(job: Job, kind: str, best: dict[str, Any], basis: str) -> None:
    """Put the best tuning of a kernel on top of the package's table."""
    entry = {"kernel": job.kernel, "device": kind, "head_dim": job.head_dim, "dtype": job.dtype}
    entry |= {"tuning": best, "basis": basis}
    text = table_text(with_entry(json.loads(tuning.TABLE.read_text()), entry))
    write_atomic(tuning.TABLE, text.encode())


def table_text(entries: list[dict[str, Any]]) -> str:
    """The table's JSON, one entry a line."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"


if __name__ == "__main__":
    sys.exit(main())
