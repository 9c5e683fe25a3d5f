"""The distillation step: how fast it is, and what memory it takes.

    python -m benchmarks.train_step                     on a GPU or a TPU: times it there
    python -m benchmarks.train_step --only '^32 layers' some of the variants
    python -m benchmarks.train_step --shapes smoke      tiny shapes, also on a CPU

Every variant runs in a process of its own, so that its peak of memory is its own and a failure
leaves the others alone: the step of `python -m swiftkv_jax.train` at the shape of Llama-3.1-8B,
with random bfloat16 weights on packed rows of 8,192 tokens. MFU counts the model's FLOPs and `busy`
also those that are computed again, both of the published peak where it is known and of what a large
product reaches here. The table goes to stdout, JSON to `benchmarks/results/` (of a smoke run only
to `--output`), rewritten after every row. Exit code 1 if a variant fails or nothing was measured.
Without a device, `swiftkv train --dry-run --topology h200:1` compiles a step and plans its memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from swiftkv_jax import cli
from swiftkv_jax.plan.hardware import GIB, hardware_of
from swiftkv_jax.plan.roofline import Roofline

from . import report
from .timing import SMOKE_PLAN, Plan
from .train_variants import SIZES, Variant, described, documents, run_step
from .worker import WorkerError, alone

MEMORY_ERROR = 0.10
"""Target: how far off the planned memory may be."""
VARIANT_SECONDS = 300
"""Time for a variant, of which compilation takes most; then its process is ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description="FLOPs, speed and memory of the training step.",
    )
    report.add_flags(parser, tables=tuple(SIZES), seconds=420)
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    start = time.monotonic()
    seed = report.new_seed(args.seed)
    size = SIZES[args.shapes]
    names = report.select([variant.name for variant in size.variants], args.only, "variant")
    variants = [variant for variant in size.variants if variant.name in names]
    # From another process: one that has started JAX's backend would keep a device from variants.
    facts = alone(report.environment, seed)
    document, path = report.begin(args, "train_step", seed, facts)
    document |= {"length": size.length, "documents": documents(size.length), "rows": []}
    cli.log(f"{document['device']['kind']}, seed {seed}, writing {path or 'nothing'}")
    roofline = alone(report.roofline, args.shapes)
    report.add_roofline(document, roofline)
    for number, variant in enumerate(variants):
        row = described(size, variant)
        spent = time.monotonic() - start
        if spent > args.seconds:
            row["skipped"] = f"the budget of {args.seconds:g} s was spent"
        else:
            cli.log(f"{variant.name} ({number + 1} of {len(variants)}, {spent:.0f} s)")
            row |= measure_row(args.shapes, variant, seed, roofline, facts["device"]["kind"])
        document["rows"].append(row)
        print(_line(row), flush=True)
        report.write_json(path, document)
    document["targets"] = judge(document) if args.shapes == "full" else []
    document["seconds"] = time.monotonic() - start
    for target in document["targets"]:
        print(f"target: {target['measure']}: {target['verdict']}")
    report.write_json(path, document)
    if failed := [row["name"] for row in document["rows"] if "error" in row]:
        cli.log(f"error: broken: {', '.join(failed)}")
    measured = any("compiled_peak_bytes" in row for row in document["rows"])
    return cli.OK if measured and not failed else cli.ERROR


# Rows -------------------------------------------------------------------------


def measure_row(
    shapes: str, variant: Variant, seed: int, roofline: Roofline, kind: str
) -> dict[str, Any]:
    """The figures of a variant on the device, one of `kind`; a failure is recorded as `error`."""
    plan = SMOKE_PLAN if shapes == "smoke" else Plan()
    try:
        row = alone(run_step, SIZES[shapes], variant, seed, plan, seconds=VARIANT_SECONDS)
    except WorkerError as error:
        return {"error": str(error)}
    peak = row.get("peak_bytes") or row["compiled_peak_bytes"]
    row["plan_error"] = row["planned_bytes"] / peak - 1
    return row | utilisation(row, roofline, kind)


def utilisation(row: dict[str, Any], roofline: Roofline, kind: str) -> dict[str, float]:
    """Shares of the published peak, where it is known, and of the measured rate of a large
    product."""
    shares = {
        "mfu_of_product": row["model_tflops"] / (roofline.flops / 1e12),
        "busy_of_product": row["computed_tflops"] / (roofline.flops / 1e12),
    }
    if hardware := hardware_of(kind):
        peak = hardware.flops / 1e12
        shares |= {
            "mfu_of_peak": row["model_tflops"] / peak,
            "busy_of_peak": row["computed_tflops"] / peak,
        }
    return shares


# Tables -----------------------------------------------------------------------


def judge(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets of the release with what was found."""
    verdicts = []
    for row in document["rows"]:
        if "plan_error" not in row:
            continue
        met = "met" if abs(row["plan_error"]) <= MEMORY_ERROR else "MISSED"
        what = f"memory planned within {MEMORY_ERROR:.0%}, {row['name']}"
        verdicts.append({"measure": what, "verdict": f"{met}, {row['plan_error']:+.1%}"})
    return verdicts


def _line(row: dict[str, Any]) -> str:
    if "error" in row or "skipped" in row:
        return f"{row['name']:52} {row.get('error') or row['skipped']}"
    line = f"{row['name']:52} {report.duration(row['seconds']):>9} "
    line += f"{row['tokens_per_second']:9,.0f} tokens/s, "
    line += "".join(
        f"{name.replace('_', ' ')} {row[name]:.1%}, "
        for name in ("mfu_of_peak", "mfu_of_product", "busy_of_product")
        if name in row
    )
    line += "".join(
        f"{name} {row[f'{field}_bytes'] / GIB:.2f}, "
        for name, field in (("peak", "peak"), ("compiled", "compiled_peak"), ("planned", "planned"))
        if row.get(f"{field}_bytes") is not None
    )
    return f"{line.removesuffix(', ')} GiB ({row['plan_error']:+.1%})"


if __name__ == "__main__":
    sys.exit(main())
