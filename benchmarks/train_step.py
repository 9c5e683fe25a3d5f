"""The distillation step: how fast it is, and what memory it takes.

    python -m benchmarks.train_step                     on a GPU or a TPU: times it there
    python -m benchmarks.train_step --only '^32 layers' some of the variants
    python -m benchmarks.train_step --shapes smoke      tiny shapes, also on a CPU

Without a GPU it compiles the steps for an H200:

    PYTHONPATH=.venv/compilers JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \\
        python -m benchmarks.train_step

Without a device every variant of the step at the shape of Llama-3.1-8B is compiled for an H200: its
compiler's memory against the planned. With a device every variant runs in a process of its own, so
that its peak of memory is its own and a failure leaves the others alone: the step of `python -m
swiftkv_jax.train` with random bfloat16 weights on packed rows of 8,192 tokens. MFU counts the
model's FLOPs and `busy` also those that are computed again, both of the published peak where it is
known and of what a large product reaches here. The table goes to stdout, JSON to
`benchmarks/results/` (of a smoke run only to `--output`), rewritten after every row. Exit code 1 if
a variant fails or nothing was measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan.hardware import GIB, hardware_of
from swiftkv_jax.plan.roofline import Roofline
from swiftkv_jax.plan.topology import topology_mesh

from . import report
from .report import TOPOLOGY
from .timing import SMOKE_PLAN, Plan
from .train_variants import SIZES, Variant, compile_step, described, documents, run_step
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
    matches = report.matcher(args.only)
    variants = [variant for variant in size.variants if matches(variant.name)]
    if not variants:
        names = "; ".join(variant.name for variant in size.variants)
        raise UsageError(f"--only {args.only!r}: no such variant; variants: {names}")
    # From another process: one that has started JAX's backend would keep a device from variants.
    facts = alone(report.environment, seed)
    device = facts["device"]["platform"] != "cpu"
    here = device or args.shapes == "smoke"  # else the device is described, not there
    document, path = report.begin(args, "train_step", seed, None if here else TOPOLOGY, facts)
    document |= {"length": size.length, "documents": documents(size.length), "rows": []}
    cli.log(f"{document['compiled_for']}, seed {seed}, writing {path or 'nothing'}")
    roofline = alone(report.roofline, args.shapes) if here else None
    if roofline is not None:
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
    shapes: str, variant: Variant, seed: int, roofline: Roofline | None, kind: str
) -> dict[str, Any]:
    """The compiler's figures, and with `roofline` those of the device, one of `kind`; a failure is
    recorded as `error`."""
    try:
        if roofline is None:
            return _with_error(
                compile_step(SIZES[shapes], variant, topology_mesh(TOPOLOGY, (1, 1)))
            )
        row = alone(run_step, SIZES[shapes], variant, seed, _plan(shapes), seconds=VARIANT_SECONDS)
    except WorkerError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": report.reason(error)}
    return _with_error(row | utilisation(row, roofline, kind))


def _plan(shapes: str) -> Plan:
    return SMOKE_PLAN if shapes == "smoke" else Plan()


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


def _with_error(row: dict[str, Any]) -> dict[str, Any]:
    """With the distance of the planned memory from the device's, or where there is none from the
    compiler's."""
    peak = row.get("peak_bytes") or row["compiled_peak_bytes"]
    return row | {"plan_error": row["planned_bytes"] / peak - 1} if "planned_bytes" in row else row


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
    line = f"{row['name']:52} "
    if "seconds" in row:
        line += f"{report.duration(row['seconds']):>9} {row['tokens_per_second']:9,.0f} tokens/s, "
        line += "".join(
            f"{name.replace('_', ' ')} {row[name]:.1%}, "
            for name in ("mfu_of_peak", "mfu_of_product", "busy_of_product")
            if name in row
        )
    memory = {
        "peak": row.get("peak_bytes"),
        "compiled": row["compiled_peak_bytes"],
        "planned": row.get("planned_bytes"),
    }
    line += (
        ", ".join(
            f"{name} {value / GIB:.2f}" for name, value in memory.items() if value is not None
        )
        + " GiB"
    )
    return line + (f" ({row['plan_error']:+.1%})" if "plan_error" in row else "")


if __name__ == "__main__":
    sys.exit(main())
