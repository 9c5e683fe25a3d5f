"""Predict what `benchmarks.serve` measures on a GPU, by the engine's own schedule and counts of
bytes, products and launches: nothing runs on one.

    python -m benchmarks.predict                        an H200; some minutes on a CPU
    python -m benchmarks.predict --only decode -o FILE  some parts, with JSON

The tables go to stdout. `model` has the parameters and where they come from.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from swiftkv_jax import cli
from swiftkv_jax.infer.bench import summary

from .. import report, serve
from ..markdown import section, table
from ..serve_targets import judge
from . import serving
from .model import DEVICES


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("--device", choices=tuple(DEVICES), default="h200", help="(default: h200)")
    flag("--only", metavar="PATTERN", help="parts whose name has a match of this expression")
    flag("--output", "-o", type=Path, metavar="FILE", help="JSON file")
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    parts = serve.select(serve.FULL | serve.W8A8, args.only)
    if args.output is not None:
        report.check_writable(args.output)
    device = DEVICES[args.device]
    found = {}
    for part, flags in parts.items():
        cli.log(part)
        found[part] = serving.predict(device, flags)
    facts = {"predicted_for": device.name, "model": dataclasses.asdict(device), "parts": found}
    name = f"an {args.device.upper()}, predicted"
    for part, one in found.items():
        print(section(f"Serving on {name}: {part}", summary.table(one["mode"], one["rows"])))
    if targets := judge(found, args.device.upper()):
        figures = table(("figure", "release", "best", "predicted"), targets)
        print(section(f"Targets of serving on {name}", figures))
    report.write_json(args.output, {"benchmark": "predict"} | report.environment(0) | facts)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
