"""Predict what `benchmarks.kernels` and `benchmarks.serve` measure on a GPU, from counts of bytes,
products and launches: nothing runs on one.

    python -m benchmarks.predict                          an H200; a minute on a CPU
    python -m benchmarks.predict --only 'decode' -o FILE  some rows, with JSON

Rows have the names that they have there. The tables go to stdout. `devices` has the parameters and
where they come from, and how close times on an H100 were.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError

from .. import report, serve
from ..kernels import shapes
from . import attention, serving
from .devices import DEVICES, DeviceModel
from .page import page


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predict",
        description="Predicted times of the attention ops and of serving; nothing is measured.",
    )
    parser.add_argument("--device", choices=tuple(DEVICES), default="h200", help="default: h200")
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="only rows and parts whose name has a match of this regular expression",
    )
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="JSON file")
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    device = DEVICES[args.device]
    matches = report.matcher(args.only)
    rows = [shape for shape in shapes.FULL if matches(shape.name)]
    parts = {part: flags for part, flags in serve.FULL.items() if matches(part)}
    if not rows and not parts:
        raise UsageError(f"--only {args.only!r}: no such row or part")
    if args.output is not None:
        report.check_writable(args.output)
    document = predictions(device, rows, parts)
    print(page(document))
    report.write_json(args.output, document)
    return cli.OK


def predictions(
    device: DeviceModel, rows: Sequence[shapes.Shape], parts: dict[str, str]
) -> dict[str, Any]:
    """The document of a prediction: `rows` like those of `benchmarks.kernels`, `parts` like those
    of `benchmarks.serve`."""
    document = {
        "benchmark": "predict",
        **report.environment(0),
        "predicted_for": device.name,
        "model": dataclasses.asdict(device),
        "rows": [row(device, shape) for shape in rows],
    }
    document["parts"] = {}
    for part, flags in parts.items():
        cli.log(part)
        document["parts"][part] = serving.predict(device, flags)
    return document


def row(device: DeviceModel, shape: shapes.Shape) -> dict[str, Any]:
    """The predicted figures of one row of `benchmarks.kernels`."""
    seconds = attention.seconds(device, shape)
    rate = shapes.rate(shape, seconds)
    return {
        "name": shape.name,
        "work": shape.work,
        "unit": shape.unit,
        "seconds": seconds,
        "rate": rate,
        "share_of_roofline": rate / shapes.roof(shape, serving.roofline(device)),
    }


if __name__ == "__main__":
    sys.exit(main())
