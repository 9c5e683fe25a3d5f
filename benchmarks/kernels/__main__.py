"""Check and time the attention ops against other libraries and against the device's roofline.

    python -m benchmarks.kernels                        all rows, most important first, <10 minutes
    python -m benchmarks.kernels --only 'decode.*fp8'   some rows
    python -m benchmarks.kernels --shapes smoke         tiny shapes, a test run; also on a CPU

A line per row and implementation goes to stdout: time per call on the device, that of
`benchmarks.predict` where it has a model of the device and the kernel, rate, share of the device's
measured roofline (matrix product for prefill, copy bandwidth for decode), speed relative to cuDNN,
error. Then which targets are met. `~` marks a time that does not scale with the number of
calls, and `host-bound` one that is the host's, not the device's. JSON with everything, raw times
included, goes to `benchmarks/results/` (from a smoke run only to `--output`), rewritten after every
row. Exit code 1 if a result is wrong, one of this package's implementations failed or nothing was
measured; the other rows are measured all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.roofline import Roofline

from .. import report
from ..predict import attention
from ..predict.devices import device_model
from ..timing import SMOKE_PLAN, Plan, Program, measure
from . import baselines, inputs, oracle
from .candidates import OURS, Candidate, ours, ours_here, why_not
from .shapes import TABLES, TARGETS, Shape, rate, roof

CONVENTIONS = (
    "FLOPs: visible pairs x 4 H N, x 3.5 with gradients; bytes: keys and values of "
    "valid positions and their scales"
)
MARKS = {
    "~": "three times as many calls did not take about three times as long, so the time is not to "
    "be trusted",
    "host-bound": "the host was busy handing over the calls: the time is its own, not the device's",
}
"""Marks behind a time and their meaning: the table's footer."""
Builders = dict[str, Callable[[Shape], Candidate]]


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


def builders() -> Builders:
    """All implementations for the current platform by name, this package's first."""
    own = {name: lambda shape, name=name: ours(name, shape) for name in ours_here()}
    return own | baselines.builders()


def select(table: Sequence[Shape], pattern: str | None) -> list[Shape]:
    """The rows whose name matches. Raises `UsageError`."""
    try:
        chosen = [shape for shape in table if re.search(pattern or "", shape.name)]
    except re.error as error:
        raise UsageError(f"--only {pattern!r}: not a regular expression ({error})") from error
    if not chosen:
        raise UsageError(
            f"--only {pattern!r}: no such row; rows: {', '.join(shape.name for shape in table)}"
        )
    return chosen


def _main(args: argparse.Namespace) -> int:
    start, chosen = time.monotonic(), select(TABLES[args.shapes], args.only)
    available = builders()
    if unknown := set(args.implementation or ()) - available.keys():
        name = min(unknown)
        reason = (why_not(name) if name in OURS else None) or "not here"
        raise UsageError(f"--implementation {name}: {reason}; here are {', '.join(available)}")
    available = {
        name: build
        for name, build in available.items()
        if not args.implementation or name in args.implementation
    }
    seed = report.new_seed(args.seed)
    document, path = report.begin(args, "kernels", seed)
    document |= {"conventions": CONVENTIONS, "shapes": args.shapes}
    cli.log(f"{document['device']['kind']}, seed {seed}, writing {path or 'nothing'}")

    plan, key = SMOKE_PLAN if args.shapes == "smoke" else Plan(), jax.random.key(seed)
    roofline = report.roofline(args.shapes)
    report.add_roofline(document, roofline)
    print(CONVENTIONS)
    print(
        f"{'row':22} {'implementation':14} {'time':>10} {'predicted':>10} {'rate':>14} "
        f"{'of roof':>8} {'of cuDNN':>8} {'error':>8}",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    document["rows"] = rows
    for number, shape in enumerate(chosen):
        spent = time.monotonic() - start
        if spent > args.seconds:
            rows.append(
                _described(shape)
                | {"skipped": f"the budget of {args.seconds:g} s was spent", "results": []}
            )
            continue
        cli.log(f"{shape.name} ({number + 1} of {len(chosen)}, {spent:.0f} s)")
        rows.append(measure_row(shape, available, jax.random.fold_in(key, number), roofline, plan))
        _print_row(rows[-1])
        report.write_json(path, document)
    timed = [result for row in rows for result in row["results"] if "seconds" in result]
    for mark, meaning in MARKS.items():
        if any(mark in _marks(result) for result in timed):
            print(f"{mark}: {meaning}")
    if skipped := [row["name"] for row in rows if "skipped" in row]:
        print(f"skipped, the budget of {args.seconds:g} s was spent: {', '.join(skipped)}")

    document["targets"] = judge(rows, args.shapes)
    document["seconds"] = time.monotonic() - start
    for target in document["targets"]:
        print(
            f"target {target['row']}: {target['measure']} at least {target['at_least']:g}: "
            f"{target['verdict']}"
        )
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


def measure_row(
    shape: Shape, available: Builders, key: jax.Array, roofline: Roofline, plan: Plan
) -> dict[str, Any]:
    """Check and time every implementation of one row. A failure is recorded as its result."""
    row = _described(shape)
    try:
        sets = inputs.draw(shape, key)
        wanted = oracle.expected(shape, sets[-1])
    except Exception as error:
        return row | {
            "results": [
                {"implementation": "oracle", "status": "error", "reason": report.reason(error)}
            ]
        }
    results: dict[str, dict[str, Any]] = {}
    programs: dict[str, Program] = {}
    for name, build in available.items():
        results[name], program = _start(name, build, shape, sets, wanted)
        if program is not None:
            programs[name] = program
    timings, failed = measure(programs, plan)
    for name, error in failed.items():
        results[name] |= {"status": "error", "reason": report.reason(error)}
    for name, timing in timings.items():
        speed = rate(shape, timing.seconds)
        results[name] |= {
            "seconds": timing.seconds,
            "rate": speed,
            "share_of_roofline": speed / roof(shape, roofline),
        }
        if name == "hopper" and (model := device_model(jax.devices()[0].device_kind)):
            results[name]["predicted_seconds"] = attention.seconds(model, shape)
        if baselines.CUDNN in timings and results[baselines.CUDNN]["status"] == "ok":
            results[name]["ratio_to_cudnn"] = timings[baselines.CUDNN].seconds / timing.seconds
        results[name]["timing"] = dataclasses.asdict(timing)
    return row | {"results": list(results.values())}


def _start(
    name: str, build: Callable[[Shape], Candidate], shape: Shape, sets, wanted
) -> tuple[dict[str, Any], Program | None]:
    """(the result so far, the program to time; None if it failed)."""
    result: dict[str, Any] = {"implementation": name}
    try:
        candidate = build(shape)
        program = candidate.start(sets)
        errors, wrong = oracle.check(shape, candidate.canonical(program.result), wanted)
    except NotImplementedError as error:
        return result | {
            "status": "unsupported",
            "reason": " ".join(str(error).split())[:300],
        }, None
    except Exception as error:  # the other implementations go on
        return result | {"status": "error", "reason": report.reason(error)}, None
    result |= {"status": "wrong", "reason": wrong} if wrong else {"status": "ok"}
    result["errors"] = {output: dataclasses.asdict(error) for output, error in errors.items()}
    result["compile_seconds"] = program.compile_seconds
    return result, dataclasses.replace(program, result=None)


def _described(shape: Shape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "shape": dataclasses.asdict(shape),
        "work": shape.work,
        "unit": shape.unit,
    }


def _is_bad(result: dict[str, Any]) -> bool:
    """Whether a result is wrong, or failed and is this package's."""
    return result["status"] == "wrong" or (
        result["status"] == "error" and result["implementation"] in (*OURS, "oracle")
    )


def _marks(result: dict[str, Any]) -> list[str]:
    """Marks (`MARKS`) of a time that is not to be trusted."""
    timing = result["timing"]
    host_bound = timing["host_share"] > 0.9 and jax.default_backend() != "cpu"
    return ["~"] * (not timing["linear"]) + ["host-bound"] * host_bound


def _print_row(row: dict[str, Any]) -> None:
    for result in row["results"]:
        line = f"{row['name']:22} {result['implementation']:14} "
        if "seconds" in result:
            predicted = result.get("predicted_seconds")
            predicted = "-" if predicted is None else report.duration(predicted)
            line += (
                f"{report.duration(result['seconds']):>10} {predicted:>10} {result['rate']:>6.4g} "
                f"{row['unit']:7} {result['share_of_roofline']:8.1%} "
            )
            line += (
                f"{result['ratio_to_cudnn']:8.3f} " if "ratio_to_cudnn" in result else f"{'-':>8} "
            )
            line += f"{max(error['relative'] for error in result['errors'].values()):8.1e}"
            line += "".join(f" {mark}" for mark in _marks(result))
        if "reason" in result:
            line += f" {result['status']}: {result['reason']}"
        print(line, flush=True)


def judge(rows: Sequence[dict[str, Any]], table: str) -> list[dict[str, Any]]:
    """Each target of the release and the best device kernel's value, as a verdict."""
    if table != "full":
        return []
    by_name, verdicts = {row["name"]: row for row in rows}, []
    for target in TARGETS:
        row = by_name.get(target.row, {"results": []})
        right = [
            result
            for result in row["results"]
            if result["implementation"] in ("hopper", "tpu") and result["status"] == "ok"
        ]
        values = [result[target.measure] for result in right if target.measure in result]
        verdict = "not measured"
        if values:
            verdict = f"{'met' if max(values) >= target.value else 'MISSED'}, {max(values):.4g}"
        verdicts.append(
            {
                "row": target.row,
                "measure": target.measure,
                "at_least": target.value,
                "verdict": verdict,
            }
        )
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
