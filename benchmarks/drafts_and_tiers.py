"""What drafts cost and save, and pages of the prefix cache in host memory, for Llama-3.1-8B with
SwiftKV and random weights.

    python -m benchmarks.drafts_and_tiers                    one H100 or H200
    python -m benchmarks.drafts_and_tiers --shapes smoke     a tiny model, also on a CPU

`costs` are the times of a step of several tokens in those of a step of one, for each number of
rows, as the engine measures them when it starts. `answer` is the time of a token of an answer that
a prediction gives in advance, and without. With random weights the likeliest tokens are close: on a
device whose sums depend on the number of rows, a step of several tokens may choose others, which
`accepted` shows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax import cli
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.infer.engine.host_tier import PageMove
from swiftkv_jax.infer.engine.options import SpeculativeConfig
from swiftkv_jax.plan.hardware import GIB
from swiftkv_jax.plan.presets import LLAMA_8B

from . import report
from .serve import TINY

PAGES = 8
"""Pages that one program moves."""
# The cache has room for one document and one answer.
SHAPES: dict[str, dict[str, Any]] = {
    "full": {
        "config": LLAMA_8B,
        "prompt": 8192,
        "answer": 256,
        "rows": 64,
        "document": 32_768,
        "cache": 259 * 16 * 2**20,
        "host": 24 * GIB,
    },
    "smoke": {
        "config": TINY,
        "prompt": 48,
        "answer": 48,
        "rows": 4,
        "document": 512,
        "cache": 5 * 2**16,
        "host": GIB // 64,
    },
}


class Answer(NamedTuple):
    """An answer and its times."""

    tokens: list[int]
    accepted: int
    """Drafts that were right."""
    first: float
    """Seconds to the first output."""
    each: float
    """Seconds of a token after it."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.drafts_and_tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_flags(parser, tables=tuple(SHAPES), seconds=300, rows=False)
    parser.add_argument("--attention", metavar="NAME", help="as in `swiftkv infer serve`")
    args = parser.parse_args(argv)
    return cli.run(lambda: run(args), parser)


def run(args: argparse.Namespace) -> int:
    document, path = report.begin(args, "drafts_and_tiers", report.new_seed(args.seed))
    start = time.monotonic()
    for part in (drafts, host_memory):
        if time.monotonic() - start > args.seconds:
            cli.log(f"{part.__name__}: left out, no time")
            continue
        document[part.__name__] = part(args, np.random.default_rng(document["seed"]))
        report.write_json(path, document)
    return cli.OK


def engine_of(args: argparse.Namespace, **fields: Any) -> Engine:
    model = dummy_model(SHAPES[args.shapes]["config"], jnp.bfloat16, teacher=False)
    options = EngineOptions(single_step_rows=None, sampling=False, **fields)
    return Engine.from_model(model, options, attention=args.attention, donate=True)


def ask(
    engine: Engine,
    prompt: list[int],
    tokens: int,
    beside: Callable[[], object] = lambda: None,
    **fields: Any,
) -> Answer:
    """Run a request alone; `beside` is called with each of its outputs."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    found = list[int]()
    accepted = 0
    begin = first = time.perf_counter()
    at_first = 0
    for _, output in engine.run([Request(prompt, params, **fields)]):
        if not found:
            first, at_first = time.perf_counter(), len(output.token_ids)
        found += output.token_ids
        accepted = output.drafts.accepted
        beside()
    end = time.perf_counter()
    return Answer(found, accepted, first - begin, (end - first) / max(tokens - at_first, 1))


def drafts(args: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    """Steps of several tokens: their costs, and an answer that is known in advance."""
    shape = SHAPES[args.shapes]
    engine = engine_of(
        args,
        max_model_len=shape["prompt"] + shape["answer"],
        max_num_seqs=shape["rows"],
        kv_cache_memory=4 * shape["cache"],
        speculative=SpeculativeConfig(enable_adaptive_verification=False),
    )
    runner = engine.model_runner
    costs = [
        {"rows": rows, "width": runner.shapes.wide_call(rows).width, "cost": cost}
        for rows, cost in zip(runner.shapes.decode_rows, runner.wide_costs, strict=True)
    ]
    for row in costs:
        print(f"{row['rows']:4} rows of {row['width']:2}: {row['cost']:.3f} steps of one token")
    prompt = rng.integers(0, shape["config"].vocab_size, shape["prompt"]).tolist()
    ask(engine, prompt, shape["answer"])  # whatever happens once
    plain = ask(engine, prompt, shape["answer"], speculative=False)
    predicted = ask(engine, prompt, shape["answer"], prediction=plain.tokens)
    print(
        f"a token of an answer {plain.each * 1e3:.2f} ms, predicted {predicted.each * 1e3:.2f}: "
        f"{predicted.accepted} of {shape['answer']} accepted"
    )
    return {
        "costs": costs,
        "answer": {
            "tokens": shape["answer"],
            "seconds": plain.each,
            "predicted_seconds": predicted.each,
            "accepted": predicted.accepted,
            "same": plain.tokens == predicted.tokens,
        },
    }


def host_memory(args: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    """A document whose pages have left the device: computed anew, and loaded; the rate of the
    copies, and decoding beside them."""
    shape = SHAPES[args.shapes]
    length, vocab_size = shape["document"], shape["config"].vocab_size
    engine = engine_of(
        args,
        max_model_len=length + shape["answer"],
        max_num_seqs=1,
        kv_cache_memory=shape["cache"],
        prefix_cache_host=shape["host"],
    )
    runner = engine.model_runner
    warm_up, one, other = rng.integers(0, vocab_size, (3, length)).tolist()
    ask(engine, warm_up, 1)  # whatever happens once
    cold = ask(engine, one, 1).first
    ask(engine, other, 1)
    hits = engine.prefix_stats.host_hits
    loaded = ask(engine, one, 1).first
    hits = engine.prefix_stats.host_hits - hits
    size = runner.layout.page_bytes(runner.shapes.page_size)

    pages = range(PAGES)

    def move(*saves: bool) -> None:
        for each in saves:
            runner.move_pages([PageMove(each, page, page) for page in pages])
        jax.block_until_ready([runner.host_pages.get(page) for page in pages])

    saving = best(lambda: move(True))
    loading = best(lambda: move(False, True)) - saving  # a page that is saved waits for its load
    rates = {name: PAGES * size / each for name, each in (("saved", saving), ("loaded", loading))}

    def save_one() -> None:
        runner.move_pages([PageMove(True, 0, 0)])

    alone, beside = (
        min(ask(engine, one, shape["answer"], call).each for _ in range(3))
        for call in (lambda: None, save_one)
    )
    print(
        f"{length:,} tokens computed in {cold:.3f} s, loaded in {loaded:.3f}; "
        + ", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in rates.items())
        + f"; a token {alone * 1e3:.2f} ms, {beside * 1e3:.2f} beside a page saved for each"
    )
    return {
        "document": length,
        "hits": hits,
        "cold_seconds": cold,
        "loaded_seconds": loaded,
        "bytes_per_second": rates,
        "decode_seconds": alone,
        "decode_seconds_beside_saving": beside,
    }


def best(call: Callable[[], None]) -> float:
    """Seconds of the fastest of five calls."""
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
