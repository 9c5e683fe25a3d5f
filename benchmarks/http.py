"""What HTTP costs: the same requests through the server and through the engine alone, on a device
that only keeps time.

    python -m benchmarks.http                 rows 64 and 256, decode calls of 1, 4 and 8 steps
    python -m benchmarks.http --quick         one short cell, to see that it runs

The engine is the real one; its model runner sleeps for as long as an H200 would take with
Llama-3.1-8B: 4 ms for a decode step, 25 ms for a chunk of 2,048 tokens. So the figures show what
the host can bear, on any CPU. The client is a process of its own. Each cell takes turns between
the two, and reports medians: share of the bare throughput, and how long the device waited for the
host. JSON goes to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftkv_jax import cli
from swiftkv_jax.config import Config
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.infer.engine.model_runner_base import AsyncOutput, SamplerOutput
from swiftkv_jax.infer.engine.request_state import Chunk, Sequence
from swiftkv_jax.infer.engine.scheduler import Limits
from swiftkv_jax.infer.runner.shapes import Shapes
from swiftkv_jax.infer.serve import server
from swiftkv_jax.infer.serve.options import ServerOptions

from . import report
from .markdown import table

STEP_SECONDS, CHUNK_SECONDS, CHUNK = 0.004, 0.025, 2048
VOCAB, MAX_MODEL_LEN, PAGE = 1024, 4096, 128


class TimedModelRunner:
    """A model runner that takes a device's time, and nothing else. Tokens are 100, 101, ..."""

    def __init__(self, slots: int, steps: int):
        pages = slots * (MAX_MODEL_LEN // PAGE) // 4
        self.shapes = Shapes(
            dp_size=1,
            page_size=PAGE,
            num_pages=pages,
            table_pages=MAX_MODEL_LEN // PAGE,
            slots=slots,
            decode_rows=(slots,),
            decode_steps=steps,
            greedy_programs=False,
            chunks=(CHUNK,),
            spare_tiles=(64,),
            contexts=(None,),
            scoring=False,
        )
        self.limits = Limits(slots, CHUNK, CHUNK // PAGE + 64)
        self._remaining: dict[int, int] = {}
        self._busy_until = 0.0
        self.idle_seconds = 0.0
        """Time that the device had nothing to do between two calls."""

    def prepare(self) -> None: ...

    def num_compilations(self) -> int:
        return 0

    def remove_sequences(self, slots: Seq[int]) -> None:
        for slot in slots:
            self._remaining.pop(slot, None)

    def add_sequences(self, sequences: Seq[Sequence]) -> None:
        self._remaining |= {one.slot: one.num_remaining_tokens for one in sequences}

    def update_pages(self, sequences: Seq[Sequence]) -> None:
        pass

    def run_decode_constrained(self, sequences: Seq[Sequence], masks: np.ndarray) -> AsyncOutput:
        raise NotImplementedError("grammars are not timed")

    def run_chunk(self, chunk: Chunk) -> AsyncOutput | None:
        tokens = sum(one.num_tokens for _, one in chunk.scheduled_tokens())
        self._call(CHUNK_SECONDS * tokens / CHUNK)
        return None

    def run_decode(self, sequences: Seq[Sequence], steps: int) -> AsyncOutput:
        left = np.array([self._remaining[one.slot] for one in sequences])
        for one in sequences:
            self._remaining[one.slot] -= min(steps, self._remaining[one.slot])
        ids = 100 + (left[:, None] + np.arange(steps)) % 26
        ready = self._call(STEP_SECONDS * steps)
        return AsyncOutput((ready, np.where(np.arange(steps) < left[:, None], ids, -1)), "tokens")

    def read(self, output: AsyncOutput) -> SamplerOutput | None:
        ready, token = output.result
        if (wait := ready - time.perf_counter()) > 0:
            time.sleep(wait)
        nothing = np.zeros(())
        return SamplerOutput(token, nothing, nothing, nothing)

    def _call(self, seconds: float) -> float:
        """When a call will be over that begins now, or after the one before."""
        now = time.perf_counter()
        if self._busy_until:
            self.idle_seconds += max(now - self._busy_until, 0.0)
        self._busy_until = max(now, self._busy_until) + seconds
        return self._busy_until

    def begin(self) -> None:
        """Count from now on."""
        self._busy_until = self.idle_seconds = 0.0


CONFIG = Config(
    vocab_size=VOCAB,
    embed_dim=8,
    mlp_dim=8,
    num_layers=2,
    num_key_value_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=MAX_MODEL_LEN,
)


def make_tokenizer() -> Any:
    """1,024 tokens of letters."""
    letters = [chr(code) for code in range(97, 123)]
    words = [a + b for a in letters for b in letters]
    vocab = {word: i for i, word in enumerate([*letters, *words][: VOCAB - 1])}
    vocab |= {f"x{i}": i for i in range(len(vocab), VOCAB - 1)} | {"<|end|>": VOCAB - 1}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


class Cell:
    """One engine, with a server in a thread."""

    def __init__(self, rows: int, steps: int):
        self.rows, self.steps = rows, steps
        self.clients = rows + rows // 2
        """More than there are slots: else all wait for the slowest to send its next request."""
        self.runner = TimedModelRunner(rows, steps)
        options = EngineOptions(
            max_model_len=MAX_MODEL_LEN, max_num_seqs=rows, enable_prefix_caching=False
        )
        self._engine: Engine[Any] = Engine(
            self.runner, config=CONFIG, eos_token_ids=(VOCAB - 1,), options=options
        )

    def bare(self, args: argparse.Namespace) -> dict[str, float]:
        """The engine alone."""
        rng = np.random.default_rng(0)
        params = SamplingParams(max_tokens=args.output_len, ignore_eos=True)
        count = args.requests * self.clients
        prompts = rng.integers(0, VOCAB - 1, (count, args.input_len)).tolist()
        requests = [Request(prompt, params) for prompt in prompts]
        self.runner.begin()
        begin, cpu = time.perf_counter(), time.process_time()
        tokens = sum(
            len(output.token_ids)
            for _, output in self._engine.run(requests, in_flight=self.clients)
        )
        seconds = time.perf_counter() - begin
        return self._figures(tokens, seconds, time.process_time() - cpu)

    def served(self, args: argparse.Namespace, port: int) -> dict[str, float]:
        """The same over HTTP."""
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "swiftkv_jax.infer", "bench", "serve"]
            command += f"--base-url http://127.0.0.1:{port} --vocab-size {VOCAB - 1}".split()
            command += f"--input-len {args.input_len} --output-len {args.output_len}".split()
            command += f"--num-prompts {args.requests * self.clients} --num-warmups 1".split()
            command += f"--max-concurrency {self.clients} -o {file.name}".split()
            cpu = time.process_time()
            subprocess.run(command, capture_output=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
            found = json.loads(Path(file.name).read_text(encoding="utf-8"))
        if found["failed"]:
            raise RuntimeError(f"requests failed: {found['errors']}")
        figures = self._figures(found["output_tokens"], found["seconds"], time.process_time() - cpu)
        return figures | {
            "client_cpu_share": found["client_cpu_share"],
            "ttft_p50": found["ttft"]["p50"],
        }

    def _figures(self, tokens: int, seconds: float, cpu: float) -> dict[str, float]:
        return {
            "tokens_per_s": tokens / seconds,
            "idle_share": self.runner.idle_seconds / seconds,
            "cpu_share": cpu / seconds,
        }

    def measure(self, args: argparse.Namespace) -> dict[str, Any]:
        """Both, by turns."""
        bare, served = [], []
        for _ in range(args.repetitions):
            bare.append(self.bare(args))
            with asyncio.Runner(loop_factory=server.loop_factory()) as runner:
                served.append(runner.run(self._serve(args)))
        found = {
            kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            for kind, runs in (("bare", bare), ("served", served))
        }
        share = found["served"]["tokens_per_s"] / found["bare"]["tokens_per_s"]
        facts = {"rows": self.rows, "steps": self.steps, "share": share}
        return facts | found | {"runs": {"bare": bare, "served": served}}

    async def _serve(self, args: argparse.Namespace) -> dict[str, float]:
        listener = server.listen("127.0.0.1", 0)
        stop = []
        loop = asyncio.get_running_loop()

        def on_start(app: Any, signal: Any) -> None:
            stop.append(signal)

        options = ServerOptions(max_num_queued_reqs=4 * self.rows)
        loaded = server.Loaded(self._engine, make_tokenizer(), {}, CHUNK / CHUNK_SECONDS)
        serving = asyncio.ensure_future(
            server.serve(
                options,
                "timed",
                listener,
                lambda say: loaded,
                handle_signals=False,
                on_start=on_start,
            )
        )
        await asyncio.sleep(0.5)
        self.runner.begin()
        port = listener.getsockname()[1]
        try:
            return await loop.run_in_executor(None, self.served, args, port)
        finally:
            stop[0]()
            await serving


def main(argv: list[str] | None = None) -> int:
    arguments = cli.ArgumentParser(
        prog="python -m benchmarks.http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = arguments.add_argument
    add(
        "--rows",
        default="64,256",
        help="slots; there are half as many more clients (default: %(default)s)",
    )
    add("--steps", default="1,4,8", help="steps of a decode call (default: %(default)s)")
    add("--input-len", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add("--output-len", type=int, default=250, metavar="N", help="(default: %(default)s)")
    add("--requests", type=int, default=4, metavar="N", help="of a client (default: %(default)s)")
    add("--repetitions", "-r", type=int, default=5, metavar="N", help="(default: %(default)s)")
    add("--quick", action="store_true", help="one short cell")
    add("--output", type=Path, metavar="FILE", help="JSON (default: in benchmarks/results)")
    args = arguments.parse_args(argv)
    if args.quick:
        args.rows, args.steps, args.output_len, args.requests, args.repetitions = "8", "8", 32, 1, 1
    return cli.run(lambda: measure(args), arguments)


def measure(args: argparse.Namespace) -> int:
    facts = report.environment(seed=0)
    cells = []
    for rows in map(int, args.rows.split(",")):
        for steps in map(int, args.steps.split(",")):
            cells.append(Cell(rows, steps).measure(args))
            print(summary(cells[-1:]).splitlines()[-1], flush=True)
    document = facts | {
        "step_seconds": STEP_SECONDS,
        "chunk_seconds": CHUNK_SECONDS,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "requests": args.requests,
        "cells": cells,
    }
    print("\n" + summary(cells))
    if not args.quick or args.output:
        path = args.output or report.default_path("http", "timed-device", facts["date"])
        report.write_json(path, document)
        print(f"\nwritten to {path}")
    return cli.OK


def summary(cells: Seq[dict[str, Any]]) -> str:
    """A row for each cell."""
    rows = [
        (
            str(cell["rows"]),
            str(cell["steps"]),
            f"{cell['bare']['tokens_per_s']:,.0f}",
            f"{cell['served']['tokens_per_s']:,.0f}",
            f"{cell['share']:.1%}",
            f"{cell['bare']['idle_share']:.1%}",
            f"{cell['served']['idle_share']:.1%}",
            f"{1e3 * cell['served']['ttft_p50']:.0f} ms",
        )
        for cell in cells
    ]
    header = (
        "slots, steps a call, bare tokens/s, over HTTP, share, device idle bare, over HTTP, "
        "TTFT p50"
    )
    return table(header.split(", "), rows)


if __name__ == "__main__":
    sys.exit(main())
