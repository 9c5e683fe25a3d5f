"""What 8-bit KV caches and 8-bit weights cost in quality, on the demo model and held-out text;
teacher and student.

    python -m benchmarks.kv_formats               128 rows, those of the training command's own evaluation
    python -m benchmarks.kv_formats --rows 4      a quick look

Every document of the rows is scored by the engine, which reads all keys and values from its cache,
those of a token's own chunk too: what is measured is what a long prompt or a decoded token sees.
Change is that of perplexity against the same model with weights and cache as stored; agreement is
how often both think the same token likeliest. The table goes to stdout, JSON to
`benchmarks/results/`, rewritten after every cell. Exit code 1 if a cache format alone costs more
than the bar.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from swiftkv_jax import cli, demo
from swiftkv_jax.cache import KVCacheDtype
from swiftkv_jax.checkpoints import Quantization, load
from swiftkv_jax.cli.exit import log
from swiftkv_jax.infer.engine.engine import Engine, engine_for
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.requests import ScoreRequest
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.model import Model
from swiftkv_jax.train.data.prepare import prepare
from swiftkv_jax.train.data.sources import STDLIB, DataSource
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.setup import open_tokenizer

from . import report

BAR = 0.005
"""Of perplexity: what a cache format may cost."""
CELLS: tuple[tuple[Quantization, KVCacheDtype], ...] = (
    ("none", "auto"),  # what the others are compared with: first
    ("none", "fp8"),
    ("none", "int8"),
    ("fp8", "auto"),
    ("int8", "auto"),
    ("fp8", "fp8"),
    ("int8", "int8"),
)
"""(weights, cache)."""
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
        default=Path("runs/kv-formats"),
        help="packed rows (default: runs/kv-formats)",
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
    facts = report.environment(seed=0)
    output = args.output or report.default_path(
        "kv-formats", facts["device"]["kind"], facts["date"]
    )
    report.check_writable(output)
    requests = list(held_out(args.folder, args.rows))
    cells: list[dict[str, Any]] = []
    document = {
        **facts,
        "rows": args.rows,
        "tokens": sum(len(request.tokens) for request in requests),
        "bar": BAR,
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
            log(line(cell))
            report.write_json(output, document)
    print(table(document))
    log(f"written to {output}")
    return verdict(cells)


def held_out(folder: Path, rows: int) -> Iterator[ScoreRequest]:
    """The documents of the first rows of the standard library's held-out packages; a document of
    one token predicts nothing."""
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
    """The cell's own numbers, and the token thought likeliest at each position."""
    # A small chunk: most of what a token reads was written by an earlier call, and read back.
    options = EngineOptions(
        max_model_len=DEMO.max_length,
        max_num_seqs=1,
        chunks=(128,),
        decode_steps=1,
        kv_cache_dtype=cache,
        scoring=True,
    )
    engine = engine_for(model, options, swiftkv=swiftkv)
    logprobs, likeliest = list[float](), dict[int, list[int]]()
    for event in engine.run(requests):
        assert event.logprobs is not None
        logprobs += [entry.logprob for entry in event.logprobs]
        likeliest[event.request] = event.tokens
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
    """Of the whole cache, as the memory plan has it, for each token that it has room for."""
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
    """Exit code 1 if a cache format alone changes perplexity by more than the bar."""
    worst = max(
        (cell for cell in cells if cell["weights"] == cells[0]["weights"]),
        key=lambda cell: abs(cell["change"]),
    )
    met = abs(worst["change"]) <= BAR
    print(
        f"\n{'met' if met else 'MISSED'}: {worst['cache']} cache of the {worst['model']} "
        f"{worst['change']:+.3%}; bar {BAR:.1%}"
    )
    return cli.OK if met else cli.ERROR


if __name__ == "__main__":
    sys.exit(main())
