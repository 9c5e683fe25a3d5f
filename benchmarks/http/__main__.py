"""What HTTP costs: the same requests through the server and through the engine alone.

    python -m benchmarks.http                 a timed device, 64 and 256 slots, 4 and 8 steps
    python -m benchmarks.http --medium        a model of 16 layers on this machine's CPU
    python -m benchmarks.http --quick         one short cell, to see that it runs

The engine is the real one. The model runner of the timed device sleeps for as long as an H200 would
take with Llama-3.1-8B: 4 ms for a decode step, 25 ms for a chunk of 2,048 tokens. So its figures
show what the host can bear, on any CPU. The client is a process of its own.

Each cell takes turns between the two and reports medians: throughput with more clients than slots,
how long the device waited for the host, and what HTTP adds to the time to the first token, for
requests that run alone and with arrivals at half of the bare engine's throughput. JSON goes to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swiftkv_jax import cli
from swiftkv_jax.infer import Engine, Request, SamplingParams
from swiftkv_jax.infer.bench import cells, timing
from swiftkv_jax.infer.serve import server
from swiftkv_jax.infer.serve.options import ServerOptions

from .. import report
from .engines import (
    CHUNK,
    CHUNK_SECONDS,
    STEP_SECONDS,
    TimedModelRunner,
    make_tokenizer,
    medium_engine,
    timed_engine,
)
from .summary import summary

logger = logging.getLogger("swiftkv_jax.benchmarks")

HALF_LOAD = 2
"""Requests of a client that arrive at half of the throughput."""
ALONE = 16
"""Requests that find nothing running."""


class Cell:
    """One engine, alone and behind a server in the same process."""

    def __init__(self, engine: Engine[Any], args: argparse.Namespace, *, clients: int):
        self.engine, self.args, self.clients = engine, args, clients
        runner = engine.model_runner
        self.timed = runner if isinstance(runner, TimedModelRunner) else None

    def measure(self) -> dict[str, Any]:
        """Medians of the repetitions, and the repetitions."""
        runs: dict[str, list[dict[str, float]]] = {"bare": [], "served": []}
        rate = None  # the same in all repetitions
        for seed in range(self.args.repetitions):
            runs["bare"].append(self.bare(seed, rate))
            rate = rate or runs["bare"][0]["request_rate"]
            runs["served"].append(self.served(seed, rate))
        found = {
            kind: {name: statistics.median(run[name] for run in all_) for name in all_[0]}
            for kind, all_ in runs.items()
        }
        bare, served = found["bare"], found["served"]
        added = {
            f"added_{name}": served[name] - bare[name]
            for name in ("ttft_alone_p50", "ttft_half_p50", "ttft_half_p99")
            if name in bare
        }
        facts = {"rows": self.engine.options.max_num_seqs, "clients": self.clients}
        return (
            facts
            | {"share": served["tokens_per_s"] / bare["tokens_per_s"]}
            | added
            | found
            | {"runs": runs}
        )

    def bare(self, seed: int, rate: float | None) -> dict[str, float]:
        """The engine alone."""
        args, vocab = self.args, self.engine.config.vocab_size
        params = SamplingParams(max_tokens=args.output_len, ignore_eos=True)
        count = args.requests * self.clients
        prompts = np.random.default_rng(seed).integers(0, vocab - 1, (count, args.input_len))
        requests = [Request(prompt, params) for prompt in prompts.tolist()]
        self._begin()
        begin, cpu = time.perf_counter(), time.process_time()
        tokens = sum(
            len(output.token_ids) for _, output in self.engine.run(requests, in_flight=self.clients)
        )
        seconds = time.perf_counter() - begin
        found = self._figures(tokens, seconds, time.process_time() - cpu)
        half: float = found["tokens_per_s"] / args.output_len / 2 if rate is None else rate
        found["request_rate"] = half
        found["ttft_alone_p50"] = statistics.median(map(self._alone, prompts[:ALONE].tolist()))
        if args.half_load:
            count = HALF_LOAD * self.clients
            poisson = cells.Cell(args.input_len, args.output_len, count, half)
            found |= _half_load(timing.latency(self.engine, poisson, seed)["ttft"])
        return found

    def _alone(self, prompt: list[int]) -> float:
        """Time to the first token of a request that finds nothing running."""
        time.sleep(self.args.pause)
        params, first = SamplingParams(max_tokens=2, ignore_eos=True), None
        begin = time.perf_counter()
        self.engine.add_request(Request(prompt, params))
        while self.engine.has_work:
            if self.engine.step() and first is None:
                first = time.perf_counter() - begin
        assert first is not None
        return first

    def served(self, seed: int, rate: float) -> dict[str, float]:
        """The same over HTTP."""
        with (
            contextlib.redirect_stderr(io.StringIO()),  # a line of each request
            asyncio.Runner(loop_factory=server.loop_factory()) as runner,
        ):
            return runner.run(self._serve(seed, rate))

    async def _serve(self, seed: int, rate: float) -> dict[str, float]:
        listener, stop = server.listen("127.0.0.1", 0), []
        options = ServerOptions(max_num_queued_reqs=4 * self.clients)
        tokenizer = make_tokenizer(self.engine.config.vocab_size)
        loaded = server.Loaded(self.engine, tokenizer, {}, CHUNK / CHUNK_SECONDS)
        serving = asyncio.ensure_future(
            server.serve(
                options,
                "timed",
                listener,
                lambda say: loaded,
                handle_signals=False,
                on_start=lambda app, signal: stop.append(signal),
            )
        )
        await asyncio.sleep(0.5)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            return await asyncio.to_thread(self._ask, url, seed, rate)
        finally:
            stop[0]()
            await serving

    def _ask(self, url: str, seed: int, rate: float) -> dict[str, float]:
        args, count = self.args, self.args.requests * self.clients
        self._begin()
        cpu = time.process_time()
        full = self._client(
            url, seed, f"--num-prompts {count} --max-concurrency {self.clients}", args.output_len
        )
        cpu = time.process_time() - cpu
        found = self._figures(full["output_tokens"], full["seconds"], cpu)
        found["client_cpu_share"] = full["client_cpu_share"]
        evenly = f"--request-rate {1 / args.pause} --burstiness 1e6"
        alone = self._client(url, seed, f"--num-prompts {ALONE} {evenly}", 2)
        found["ttft_alone_p50"] = alone["ttft"]["p50"]
        if args.half_load:
            latency = self._client(
                url,
                seed,
                f"--num-prompts {HALF_LOAD * self.clients} --request-rate {rate}",
                args.output_len,
            )
            times = [one["arrivals"][0] - one["sent"] for one in latency["requests"]]
            found |= _half_load(times)
        return found

    def _client(self, url: str, seed: int, arguments: str, output_len: int) -> dict[str, Any]:
        """What `infer bench serve` reports, run as a process."""
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "swiftkv_jax.infer", "bench", "serve"]
            command += f"--base-url {url} --seed {seed} --num-warmups 1 -o {file.name}".split()
            command += f"--vocab-size {self.engine.config.vocab_size - 1}".split()
            command += f"--input-len {self.args.input_len} --output-len {output_len}".split()
            ran = subprocess.run(
                [*command, *arguments.split()],
                capture_output=True,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            if ran.returncode:  # a request failed, or the client itself was the limit
                raise RuntimeError(f"`bench serve`: {ran.stdout.strip()} {ran.stderr.strip()}")
            found = json.loads(Path(file.name).read_text(encoding="utf-8"))
        return found

    def _begin(self) -> None:
        if self.timed is not None:
            self.timed.begin()

    def _figures(self, tokens: int, seconds: float, cpu: float) -> dict[str, float]:
        found = {"tokens_per_s": tokens / seconds, "cpu_share": cpu / seconds}
        if self.timed is not None:
            found["idle_share"] = self.timed.idle_seconds / seconds
        return found


def _half_load(times: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return {"ttft_half_p50": float(p50), "ttft_half_p99": float(p99)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--medium", action="store_true", help="a real model on the CPU, with 8 slots")
    add("--rows", default="64,256", help="slots of the timed device (default: %(default)s)")
    add("--steps", default="4,8", help="of a decode call (default: %(default)s; medium: 1)")
    add("--input-len", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add("--output-len", type=int, metavar="N", help="(default: 250; medium: 64)")
    # Of a short run much is its end, where answers that began one after another leave slots empty.
    add("--requests", type=int, metavar="N", help="of a client (default: 12; medium: 4)")
    add("--repetitions", "-r", type=int, default=3, metavar="N", help="(default: %(default)s)")
    add("--quick", action="store_true", help="one short cell")
    add("--output", type=Path, metavar="FILE", help="JSON (default: in benchmarks/results)")
    args = parser.parse_args(argv)
    if args.medium:
        args.rows, args.steps = "8", "1"
    if args.quick:
        args.rows, args.steps, args.output_len, args.requests, args.repetitions = "8", "8", 32, 1, 1
    args.requests = args.requests or (4 if args.medium else 12)
    args.output_len = args.output_len or (64 if args.medium else 250)
    args.half_load, args.pause = not args.medium, 1.5 if args.medium else 0.1
    return cli.run(lambda: measure(args), parser)


def measure(args: argparse.Namespace) -> int:
    facts, found = report.environment(seed=0), []
    for rows in map(int, args.rows.split(",")):
        for steps in map(int, args.steps.split(",")):
            engine: Engine[Any] = (
                medium_engine(rows, steps, args.input_len + args.output_len)
                if args.medium
                else timed_engine(rows, steps)
            )
            # More clients than slots: else all wait for the slowest to send its next request.
            cell = Cell(engine, args, clients=rows + rows // 2)
            found.append({"steps": steps} | cell.measure())
            logger.info(summary(found[-1:]).splitlines()[-1])
    device = "medium" if args.medium else "timed-device"
    document = facts | {
        "engine": device,
        "step_seconds": None if args.medium else STEP_SECONDS,
        "chunk_seconds": None if args.medium else CHUNK_SECONDS,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "requests": args.requests,
        "repetitions": args.repetitions,
        "cells": found,
    }
    print(summary(found))
    if not args.quick or args.output:
        path = args.output or report.default_path(f"http-{device}", "cpu", facts["date"])
        report.write_json(path, document)
        logger.info("written to %s", path)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
