"""Quality with 8-bit KV caches and 8-bit weights, on the demo model and held-out text; teacher and
student.

    python -m benchmarks.kv_quantization           128 rows, those of the training's evaluation
    python -m benchmarks.kv_quantization --rows 4  a quick look

Every document of the rows is scored by the engine, which reads all keys and values from its cache,
those of a token's own chunk too, as for long prompts and decoded tokens. Change is that of
perplexity against the same model with weights and cache as stored; agreement is the share of
positions at which both have the same likeliest token. The table goes to stdout, JSON to
`benchmarks/results/`, rewritten after every cell. Exit code 1 if a cache format alone costs more
than the bar.
"""

from __future__ import annotations

import argparse
import collections
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from swiftkv_jax import cli, demo
from swiftkv_jax.checkpoints import Quantization, load
from swiftkv_jax.infer import Engine, EngineOptions, ScoreRequest
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.model.cache import KVCacheDtype
from swiftkv_jax.model.model import Model
from swiftkv_jax.train.data.prepare import prepare
from swiftkv_jax.train.data.sources import STDLIB, DataSource
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.setup import open_tokenizer

from . import report

logger = logging.getLogger("swiftkv_jax.benchmarks")

MAX_CHANGE = 0.005
"""Largest relative change of perplexity that a cache format may cause."""
CELLS: tuple[tuple[Quantization, KVCacheDtype], ...] = (
    ("none", "auto"),  # the one that the others are compared with comes first
    ("none", "fp8"),
    ("none", "int8"),
    ("fp8", "auto"),
    ("int8", "auto"),
    ("fp8", "fp8"),
    ("int8", "int8"),
)
"""(format of the weights, format of the cache)."""
ROWS = 128


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=ROWS,
        help=f"held-out rows of {DEMO.max_length} tokens (default: {ROWS})",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights as stored (default: as for inference)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/kv-quantization"),
        help="packed rows (default: runs/kv-quantization)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file (default: a new one in benchmarks/results)",
    )
    args = parser.parse_args(argv)
    return cli.run(lambda: measure(args), parser)


def measure(args: argparse.Namespace) -> int:
    facts = report.environment(seed=0)
    output = args.output or report.default_path(
        "kv-quantization", facts["device"]["kind"], facts["date"]
    )
    report.check_writable(output)
    requests = list(held_out(args.folder, args.rows))
    cells: list[dict[str, Any]] = []
    document = {
        **facts,
        "rows": args.rows,
        "tokens": sum(len(request.tokens) for request in requests),
        "bar": MAX_CHANGE,
        "cells": cells,
    }
    baselines = dict[bool, tuple[float, np.ndarray]]()
    for weights, cache in CELLS:
        model = load(demo.SWIFTKV, dtype=args.dtype, quantization=weights)
        for swiftkv in (False, True):
            start = time.perf_counter()
            cell, likeliest = score(model, cache, swiftkv, requests)
            perplexity, before = baselines.setdefault(swiftkv, (cell["perplexity"], likeliest))
            cell |= {
                "weights": str(model.dtype) if weights == "none" else weights,
                "change": cell["perplexity"] / perplexity - 1,
            }
            cell |= {
                "agreement": float((before == likeliest).mean()),
                "seconds": round(time.perf_counter() - start, 1),
            }
            cells.append(cell)
            logger.info(line(cell))
            report.write_json(output, document)
    print(table(document))
    logger.info(f"written to {output}")
    return verdict(cells)


def held_out(folder: Path, rows: int) -> Iterator[ScoreRequest]:
    """Yield the documents of the first rows of the standard library's held-out packages, but those
    of one token, which predict nothing."""
    store = prepare(
        DataSource(STDLIB), open_tokenizer(DEMO), DEMO.max_length, folder, held_out=True
    )
    for number in range(min(rows, len(store))):
        row = store[number]
        for document in np.split(row.tokens, np.cumsum(row.lengths)[:-1]):
            if len(document) > 1:
                yield ScoreRequest(document.tolist(), 1)


def score(
    model: Model, cache: KVCacheDtype, swiftkv: bool, requests: list[ScoreRequest]
) -> tuple[dict[str, Any], np.ndarray]:
    """Figures of a cell, and the likeliest token at each position."""
    # A small chunk: most of what a token reads was written by an earlier call.
    options = EngineOptions(
        max_model_len=DEMO.max_length,
        max_num_seqs=1,
        chunks=(128,),
        decode_steps=1,
        kv_cache_dtype=cache,
        scoring=True,
    )
    engine = Engine.from_model(model, options, swiftkv=swiftkv)
    logprobs, likeliest = list[float](), collections.defaultdict[int, list[int]](list)
    for number, output in engine.run(requests):
        assert output.logprobs is not None
        logprobs += [entry.logprob for entry in output.logprobs]
        likeliest[number] += output.token_ids
    cell = {
        "model": "student" if swiftkv else "teacher",
        "cache": str(engine.model_runner.cache_dtype),
        "scored_tokens": len(logprobs),
        "perplexity": math.exp(-math.fsum(logprobs) / len(logprobs)),
        "kv_bytes_per_token": engine.model_runner.kv_bytes_per_token,
        "measured_kv_bytes_per_token": measured_bytes(engine),
    }
    return cell, np.concatenate([likeliest[number] for number in range(len(requests))])


def measured_bytes(engine: Engine[ModelRunner]) -> float:
    """Bytes of the whole cache in the memory plan, per token that it has room for."""
    shapes, plan = engine.model_runner.shapes, engine.model_runner.plan
    assert plan is not None
    return plan.cache / (shapes.num_pages * shapes.page_size)


def line(cell: dict[str, Any]) -> str:
    return (
        f"| {cell['model']} | {cell['weights']} | {cell['cache']} | {cell['perplexity']:.4f} | "
        f"{cell['change']:+.3%} "
        f"| {cell['agreement']:.2%} | {cell['measured_kv_bytes_per_token']:.0f} | "
        f"{cell['kv_bytes_per_token']} |"
    )


def table(document: dict[str, Any]) -> str:
    lines = [
        f"perplexity on {document['cells'][0]['scored_tokens']:,} held-out tokens",
        "",
        "| model | weights | KV cache | perplexity | change | agreement | KV bytes/token, "
        "measured | computed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join(
        lines
        + [
            line(cell)
            for cell in sorted(document["cells"], key=lambda cell: cell["model"], reverse=True)
        ]
    )


def verdict(cells: list[dict[str, Any]]) -> int:
    """Exit code: 1 if a cache format alone changes perplexity by more than `MAX_CHANGE`."""
    worst = max(
        (cell for cell in cells if cell["weights"] == cells[0]["weights"]),
        key=lambda cell: abs(cell["change"]),
    )
    met = abs(worst["change"]) <= MAX_CHANGE
    print(
        f"\n{'met' if met else 'MISSED'}: {worst['cache']} cache of the {worst['model']} "
        f"{worst['change']:+.3%}; bar {MAX_CHANGE:.1%}"
    )
    return cli.OK if met else cli.ERROR


if __name__ == "__main__":
    sys.exit(main())
