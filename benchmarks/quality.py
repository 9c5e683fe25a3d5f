"""The quality of each cut, before and after distillation, on the demo model and the standard
library's source.

    python -m benchmarks.quality                       every cut that the demo model's eight layers
                                                       allow, three seeds
    python -m benchmarks.quality --steps 8 --cuts 4:1  a quick look at one

A cut K:g keeps the keys and values of K layers and lets the other layers share theirs in groups of
g. Every cell is a run of `python -m swiftkv_jax.train` with the demo's recipe, and every number its
own evaluation of teacher and student on the same held-out packages. Seeds change the order of the
training rows; the start is always the same. Interrupted runs are continued by the same command. The
table goes to stdout, JSON to `benchmarks/results/`, rewritten after every run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from swiftkv_jax import cli, demo
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.errors import UsageError
from swiftkv_jax.mesh import emulate_cpu_devices, parse_mesh
from swiftkv_jax.train.__main__ import main as train
from swiftkv_jax.train.data.prepare import prepare
from swiftkv_jax.train.data.sources import STDLIB, DataSource
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.setup import open_tokenizer

from . import report

CUTS = ((6, 1), (6, 2), (5, 1), (4, 1), (4, 2), (4, 4), (3, 1))
"""75, 62.5, 50 and 37.5 % of eight layers, with every group size of 1, 2 and 4 that divides the
others."""
TARGET = ((4, 1), 0.015)
"""Half the layers, without groups: within this share of the teacher's perplexity."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cuts",
        type=_cut,
        nargs="+",
        metavar="K:G",
        default=CUTS,
        help="(default: all that the layers allow)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cut (default: 3)")
    parser.add_argument(
        "--steps",
        type=int,
        default=64,
        help="optimiser steps of 8 rows of 512 tokens (default: 64)",
    )
    parser.add_argument("--mesh", default="4x1", help="emulated on a CPU (default: 4x1)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/quality"),
        help="where the runs go (default: runs/quality)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file (default: a new one in benchmarks/results)",
    )
    args = parser.parse_args(argv)
    return cli.run(lambda: measure(args))


def measure(args: argparse.Namespace) -> int:
    emulate_cpu_devices(math.prod(parse_mesh(args.mesh)))
    facts = report.environment(seed=0)
    output = args.output or report.default_path("quality", facts["device"]["kind"], facts["date"])
    report.check_writable(output)
    data = prepared(args.folder)
    layers = open_any(demo.LLAMA).config.num_layers
    tokens = args.steps * DEMO.batch_size * DEMO.max_length
    cells: list[dict[str, Any]] = []
    document = {
        **facts,
        "steps": args.steps,
        "training_tokens": tokens,
        "layers": layers,
        "cells": cells,
    }
    for cut in args.cuts:
        runs = [distil(args, data, cut, seed) for seed in range(args.seeds)]
        cells.append(summary(cut, layers, runs))
        report.write_json(output, document)
    print(table(cells, args.steps, tokens))
    cli.log(f"written to {output}")
    return verdict(cells)


def prepared(folder: Path) -> list[str]:
    """Flags for training and held-out rows, packed once for all runs."""
    tokenizer = open_tokenizer(DEMO)
    stores = [
        prepare(DataSource(STDLIB), tokenizer, DEMO.max_length, folder / "data", held_out=held_out)
        for held_out in (False, True)
    ]
    return ["--data", str(stores[0].path), "--eval-data", str(stores[1].path)]


def distil(
    args: argparse.Namespace, data: list[str], cut: tuple[int, int], seed: int
) -> dict[str, Any]:
    """One run, or the rest of an interrupted one: its evaluations before the first step and after
    the last, and its seconds."""
    output = args.folder / f"{cut[0]}-{cut[1]}-seed{seed}-{args.steps}"
    flags = {
        "num-key-value-layers": cut[0],
        "key-value-group-size": cut[1],
        "seed": seed,
        "max-steps": args.steps,
        "mesh": args.mesh,
    }
    start = time.perf_counter()
    command = [
        *data,
        "--output-dir",
        str(output),
        *(part for name, value in flags.items() for part in (f"--{name}", str(value))),
    ]
    if code := train(command):
        raise UsageError(f"the run in {output} failed (exit code {code})")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    before, after = (row for row in rows if "eval_loss" in row)
    return {
        "seed": seed,
        "before": before,
        "after": after,
        "seconds": round(time.perf_counter() - start, 1),
    }


def summary(cut: tuple[int, int], layers: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and the spread: the sample standard deviation."""

    def over_seeds(name: str) -> dict[str, float]:
        values = [run["after"][name] for run in runs]
        return {
            "mean": statistics.mean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        }

    before = runs[0]["before"]
    return {
        "num_key_value_layers": cut[0],
        "share": cut[0] / layers,
        "key_value_group_size": cut[1],
        "teacher_perplexity": before["eval_teacher_perplexity"],
        "before": {
            "perplexity": before["eval_student_perplexity"],
            "agreement": before["eval_agreement"],
        },
        "after": {
            "perplexity": over_seeds("eval_student_perplexity"),
            "agreement": over_seeds("eval_agreement"),
        },
        "runs": runs,
    }


def table(cells: list[dict[str, Any]], steps: int, tokens: int) -> str:
    teacher = cells[0]["teacher_perplexity"]
    lines = [
        f"held-out perplexity and next-token agreement with the teacher (perplexity "
        f"{teacher:.3f}), before and after {steps} steps "
        f"({tokens:,} tokens); mean and standard deviation of {len(cells[0]['runs'])} seeds",
        "",
        "| K of layers | g | perplexity before | after | above the teacher | agreement before | "
        "after |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        perplexity, agreement = cell["after"]["perplexity"], cell["after"]["agreement"]
        lines.append(
            f"| {cell['num_key_value_layers']} ({cell['share']:.1%}) | "
            f"{cell['key_value_group_size']} | {cell['before']['perplexity']:.3f} "
            f"| {perplexity['mean']:.3f} ± {perplexity['std']:.3f} | "
            f"{perplexity['mean'] / teacher - 1:+.2%} "
            f"| {cell['before']['agreement']:.1%} | {agreement['mean']:.1%} ± "
            f"{agreement['std']:.1%} |"
        )
    return "\n".join(lines)


def verdict(cells: list[dict[str, Any]]) -> int:
    """Exit code 1 if the target was measured and missed."""
    cut, allowed = TARGET
    for cell in cells:
        if (cell["num_key_value_layers"], cell["key_value_group_size"]) == cut:
            above = cell["after"]["perplexity"]["mean"] / cell["teacher_perplexity"] - 1
            print(
                f"\n{'met' if above <= allowed else 'MISSED'}: half the layers end {above:+.2%} "
                f"above the teacher; target {allowed:.1%}"
            )
            return cli.OK if above <= allowed else cli.ERROR
    return cli.OK


def _cut(text: str) -> tuple[int, int]:
    layers, _, group = text.partition(":")
    if not (layers.isdecimal() and group.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected K:G, for example 4:1")
    return int(layers), int(group)


if __name__ == "__main__":
    sys.exit(main())
