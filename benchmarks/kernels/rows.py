"""One row of the kernel benchmarks: every implementation checked and timed. Runs on the device, in
a process apart from that which prints the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from swiftkv_jax.plan.roofline import Roofline

from .. import report
from ..timing import Plan, Program, measure
from . import inputs, oracle
from .candidates import CUDNN, Candidate, cudnn_in_its_order, ours, ours_here
from .shapes import Shape, rate, roof

Builders = dict[str, Callable[[Shape], Candidate]]


def builders() -> Builders:
    """All implementations for the current platform by name, this package's first."""
    own = {name: lambda shape, name=name: ours(name, shape) for name in ours_here()}
    return own | ({CUDNN: cudnn_in_its_order} if jax.default_backend() == "gpu" else {})


def names_here() -> list[str]:
    """Names of `builders`."""
    return list(builders())


def measure_named(
    shape: Shape, names: Sequence[str], draw: tuple[int, int], roofline: Roofline, plan: Plan
) -> dict[str, Any]:
    """`measure_row` for the implementations of these names, on inputs drawn by (seed, number)."""
    available = builders()
    key = jax.random.fold_in(jax.random.key(draw[0]), draw[1])
    return measure_row(shape, {name: available[name] for name in names}, key, roofline, plan)


def measure_row(
    shape: Shape, available: Builders, key: jax.Array, roofline: Roofline, plan: Plan
) -> dict[str, Any]:
    """Check and time every implementation of one row. A failure is recorded as its result."""
    row = described(shape)
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
        if CUDNN in timings and results[CUDNN]["status"] == "ok":
            results[name]["ratio_to_cudnn"] = timings[CUDNN].seconds / timing.seconds
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


def described(shape: Shape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "shape": dataclasses.asdict(shape),
        "work": shape.work,
        "unit": shape.unit,
    }
