"""What HTTP costs: the same requests through the server and through the engine alone.

    python -m benchmarks.http                 a timed device, 64 and 256 slots, 1, 4 and 8 steps
    python -m benchmarks.http --medium        a model of 16 layers on this machine's CPU
    python -m benchmarks.http --quick         one short cell, to see that it runs

The engine is the real one. The model runner of the timed device sleeps for as long as an H200 would
take with Llama-3.1-8B: 4 ms for a decode step, 25 ms for a chunk of 2,048 tokens. So its figures
show what the host can bear, on any CPU. Calls have one step where few sequences run, as the server
chooses on a GPU. The client is a process of its own.

Each cell takes turns between the two and reports medians: throughput with more clients than slots,
how long the device waited for the host, the event loop's processor time for each chunk, and what
HTTP adds to the time to the first token, for requests that run alone and with arrivals at half of
the bare engine's throughput. The last cell's prompts are text. What the client adds by itself is
measured with a server that answers at once. A busy machine is refused (--max-load). JSON goes to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swiftkv_jax import cli
from swiftkv_jax.infer import Engine

from .. import report
from .bars import table_of_bars
from .cell import Cell
from .engines import CHUNK_SECONDS, STEP_SECONDS, medium_engine, timed_engine
from .host import check_load
from .summary import summary

logger = logging.getLogger("swiftkv_jax.benchmarks")

MAX_LOAD = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--medium", action="store_true", help="a real model on the CPU, with 8 slots")
    add("--rows", default="64,256", help="slots of the timed device (default: %(default)s)")
    add("--steps", default="1,4,8", help="of a decode call (default: %(default)s; medium: 8)")
    add("--input-len", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add("--output-len", type=int, metavar="N", help="(default: 250; medium: 64)")
    # Of a short run much is its end, where answers that began one after another leave slots empty.
    add("--requests", type=int, default=12, metavar="N", help="of a client (default: %(default)s)")
    add("--repetitions", "-r", type=int, default=5, metavar="N", help="(default: %(default)s)")
    add("--no-text", action="store_true", help="no cell with prompts as text")
    add(
        "--max-load",
        type=float,
        default=MAX_LOAD,
        metavar="L",
        help="refuse to start above this load average of a minute; inf starts on any "
        "(default: %(default)s)",
    )
    add("--quick", action="store_true", help="one short cell, on any load")
    add("--output", type=Path, metavar="FILE", help="JSON (default: in benchmarks/results)")
    args = parser.parse_args(argv)
    if args.medium:
        args.rows, args.steps, args.no_text = "8", "8", True
    if args.quick:
        args.rows, args.steps, args.output_len, args.requests, args.repetitions = "8", "8", 32, 1, 1
        args.max_load, args.no_text = math.inf, True
    args.output_len = args.output_len or (64 if args.medium else 250)
    args.half_load, args.pause = not args.medium, 1.5 if args.medium else 0.1
    return cli.run(lambda: measure(args), parser)


def cells(args: argparse.Namespace) -> Iterator[tuple[int, int, bool]]:
    """(slots, steps of a decode call, whether prompts are text)"""
    rows, steps = ([int(part) for part in text.split(",")] for text in (args.rows, args.steps))
    yield from ((a, b, False) for a in rows for b in steps)
    if not args.no_text:
        yield rows[-1], steps[-1], True


def measure(args: argparse.Namespace) -> int:
    check_load(args.max_load)
    facts, results = report.environment(seed=0), []
    for rows, steps, text in cells(args):
        engine: Engine[Any] = (
            medium_engine(rows, steps, args.input_len + args.output_len)
            if args.medium
            else timed_engine(rows, steps)
        )
        # More clients than slots: else all wait for the slowest to send its next request.
        cell = Cell(engine, args, clients=rows + rows // 2, text=text)
        results.append({"steps": steps} | cell.measure())
        logger.info(summary(results[-1:]).splitlines()[-1])
    device = "medium" if args.medium else "timed-device"
    document = facts | {
        "engine": device,
        "step_seconds": None if args.medium else STEP_SECONDS,
        "chunk_seconds": None if args.medium else CHUNK_SECONDS,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "requests": args.requests,
        "repetitions": args.repetitions,
        "cells": results,
    }
    print(f"{summary(results)}\n\n{table_of_bars(document)}")
    if not args.quick or args.output:
        path = args.output or report.default_path(f"http-{device}", "cpu", facts["date"])
        report.write_json(path, document)
        logger.info("written to %s", path)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
