"""Check and time the attention ops against cuDNN and against the device's roofline.

    python -m benchmarks.kernels                        all rows, most important first, <10 minutes
    python -m benchmarks.kernels --only 'decode.*fp8'   some rows
    python -m benchmarks.kernels --shapes smoke         tiny shapes, a test run; also on a CPU

A line per row and implementation goes to stdout: time per call on the device, rate, share of the
device's measured roofline (matrix product for prefill, copy bandwidth for decode), speed relative
to cuDNN, error. Then which targets are met. `~` marks a time that does not scale with the number of
calls, and `host-bound` one that is the host's, not the device's. JSON with everything, raw times
included, goes to `benchmarks/results/` (from a smoke run only to `--output`), rewritten after every
row. Rows are measured in another process, and in a new one after a crash or a hang. Exit code 1 if
a result is wrong, one of this package's implementations failed or nothing was measured; the other
rows are measured all the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan.roofline import Roofline

from .. import report
from ..timing import SMOKE_PLAN, Plan
from ..worker import Worker, WorkerError
from .candidates import OURS, why_not
from .rows import described, measure_named, names_here
from .shapes import TABLES, Shape, required

CONVENTIONS = (
    "FLOPs: visible pairs x 4 H N, x 3.5 with gradients; bytes: keys and values of "
    "valid positions and their scales; decoding has its plan, made once a step, beforehand"
)
ROW_SECONDS = 180
"""Time for a row, of which compilation takes most; then its process is ended."""
MARKS = {
    "~": "three times as many calls did not take about three times as long, so the time is not to "
    "be trusted",
    "host-bound": "the host was busy handing over the calls: the time is its own, not the device's",
}
"""Marks behind a time and their meaning: the table's footer."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description="Check and time the attention ops."
    )
    report.add_flags(parser, tables=tuple(TABLES), seconds=540)
    parser.add_argument(
        "--implementation",
        action="append",
        metavar="NAME",
        help="only this implementation, of this package or another; repeat to add more",
    )
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    with Worker() as worker:
        return _measure(args, worker)


def _measure(args: argparse.Namespace, worker: Worker) -> int:
    start = time.monotonic()
    table = {shape.name: shape for shape in TABLES[args.shapes]}
    chosen = [table[name] for name in report.select(list(table), args.only, "row")]
    available = worker.call(names_here)
    if unknown := set(args.implementation or ()) - set(available):
        name = min(unknown)
        reason = (worker.call(why_not, name) if name in OURS else None) or "not here"
        raise UsageError(f"--implementation {name}: {reason}; here are {', '.join(available)}")
    names = [name for name in available if name in (args.implementation or available)]
    seed = report.new_seed(args.seed)
    facts = worker.call(report.environment, seed)
    document, path = report.begin(args, "kernels", seed, facts=facts)
    document |= {"conventions": CONVENTIONS, "shapes": args.shapes}
    device = document["device"]
    cli.log(f"{device['kind']}, seed {seed}, writing {path or 'nothing'}")

    plan = SMOKE_PLAN if args.shapes == "smoke" else Plan()
    roofline = worker.call(report.roofline, args.shapes)
    report.add_roofline(document, roofline)
    print(CONVENTIONS)
    print(
        f"{'row':22} {'implementation':14} {'time':>10} {'rate':>14} "
        f"{'of roof':>8} {'of cuDNN':>8} {'error':>8}",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    document["rows"] = rows
    for number, shape in enumerate(chosen):
        spent = time.monotonic() - start
        if spent > args.seconds:
            rows.append(
                described(shape)
                | {"skipped": f"the budget of {args.seconds:g} s was spent", "results": []}
            )
            continue
        cli.log(f"{shape.name} ({number + 1} of {len(chosen)}, {spent:.0f} s)")
        rows.append(measure_apart(worker, shape, names, (seed, number), roofline, plan))
        _print_row(rows[-1], device["platform"])
        report.write_json(path, document)
    timed = [result for row in rows for result in row["results"] if "seconds" in result]
    for mark, meaning in MARKS.items():
        if any(mark in _marks(result, device["platform"]) for result in timed):
            print(f"{mark}: {meaning}")
    if skipped := [row["name"] for row in rows if "skipped" in row]:
        print(f"skipped, the budget of {args.seconds:g} s was spent: {', '.join(skipped)}")

    document["seconds"] = time.monotonic() - start
    for row in rows:
        for result in row["results"]:
            if result["implementation"] in ("hopper", "tpu") and result["status"] == "ok":
                for bound, met in required(result | {"name": row["name"], "unit": row["unit"]}):
                    print(f"target {row['name']}: {bound}: {'met' if met else 'MISSED'}")
    report.write_json(path, document)
    bad = [
        f"{row['name']}/{result['implementation']}"
        for row in rows
        for result in row["results"]
        if _is_bad(result)
    ]
    if bad:
        cli.log(f"error: wrong or broken: {', '.join(bad)}")
    if not timed:
        cli.log("error: nothing was measured")
    return cli.ERROR if bad or not timed else cli.OK


def measure_apart(
    worker: Worker,
    shape: Shape,
    names: Sequence[str],
    draw: tuple[int, int],
    roofline: Roofline,
    plan: Plan,
) -> dict[str, Any]:
    """A row (`rows.measure_named`), measured in the worker's process. Where that is lost, or its
    device works no more, the implementations that failed are measured again, one by one in new
    processes: after an illegal access all fail that come next."""
    try:
        row = worker.call(measure_named, shape, names, draw, roofline, plan, seconds=ROW_SECONDS)
        failed = [one["implementation"] for one in row["results"] if one["status"] == "error"]
        lost = bool(failed) and not worker.works()
    except WorkerError as error:
        failure = {"status": "error", "reason": str(error)}
        results = [{"implementation": name} | failure for name in names]
        row = described(shape) | {"results": results}
        failed = names
        lost = True
    if not lost or len(names) == 1 or "oracle" in failed:
        return row
    again = {
        name: measure_apart(worker, shape, [name], draw, roofline, plan)["results"][0]
        for name in failed
    }
    results = [again.get(one["implementation"], one) for one in row["results"]]
    return row | {"results": results}


def _is_bad(result: dict[str, Any]) -> bool:
    """True if a result is wrong, or failed and is this package's."""
    return result["status"] == "wrong" or (
        result["status"] == "error" and result["implementation"] in (*OURS, "oracle")
    )


def _marks(result: dict[str, Any], platform: str) -> list[str]:
    """Marks (`MARKS`) of a time that is not to be trusted."""
    timing = result["timing"]
    host_bound = timing["host_share"] > 0.9 and platform != "cpu"
    return ["~"] * (not timing["linear"]) + ["host-bound"] * host_bound


def _print_row(row: dict[str, Any], platform: str) -> None:
    for result in row["results"]:
        line = f"{row['name']:22} {result['implementation']:14} "
        if "seconds" in result:
            line += (
                f"{report.duration(result['seconds']):>10} {result['rate']:>6.4g} "
                f"{row['unit']:7} {result['share_of_roofline']:8.1%} "
            )
            line += (
                f"{result['ratio_to_cudnn']:8.3f} " if "ratio_to_cudnn" in result else f"{'-':>8} "
            )
            line += f"{max(error['relative'] for error in result['errors'].values()):8.1e}"
            line += "".join(f" {mark}" for mark in _marks(result, platform))
        if "reason" in result:
            line += f" {result['status']}: {result['reason']}"
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
