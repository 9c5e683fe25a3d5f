"""One cell of the benchmark: an engine alone, and behind a server in the same process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swiftkv_jax.infer import Engine, Request, SamplingParams
from swiftkv_jax.infer.bench import cells, timing
from swiftkv_jax.infer.bench.serve import MAX_CPU_SHARE
from swiftkv_jax.serve import server
from swiftkv_jax.serve.options import ServerOptions

from .client_floor import answering_at_once
from .engines import CHUNK, CHUNK_SECONDS, TimedModelRunner, make_tokenizer
from .host import OtherProcesses, interpreter_seconds

logger = logging.getLogger("swiftkv_jax.benchmarks")

HALF_LOAD = 2
"""Requests of a client that arrive at half of the throughput."""
ALONE = 16
"""Requests that find nothing running."""
FLOOR_PAUSE = 0.1
"""Seconds between two requests to the server that answers at once."""
ADDED = ("ttft_alone_p50", "ttft_half_p50", "ttft_half_p99")
"""Times of which the cell has the difference."""


class Cell:
    """One engine, alone and behind a server in the same process. With `text` the prompts that HTTP
    brings are texts of as many tokens."""

    def __init__(
        self, engine: Engine[Any], args: argparse.Namespace, *, clients: int, text: bool = False
    ):
        self.engine, self.args, self.clients, self.text = engine, args, clients, text
        runner = engine.model_runner
        self.timed = runner if isinstance(runner, TimedModelRunner) else None

    def measure(self) -> dict[str, Any]:
        """Medians of the repetitions, and the repetitions."""
        runs: dict[str, list[dict[str, float]]] = {"bare": [], "served": []}
        speed = interpreter_seconds()
        rate, others = None, OtherProcesses()  # the rate is the same in all repetitions
        for seed in range(self.args.repetitions):
            runs["bare"].append(self.bare(seed, rate))
            rate = rate or runs["bare"][0]["request_rate"]
            runs["served"].append(self.served(seed, rate))
            logger.info(
                "repetition %d of %d: %.0f tokens/s alone, %.0f served",
                seed + 1,
                self.args.repetitions,
                *(runs[kind][-1]["tokens_per_s"] for kind in ("bare", "served")),
            )
        medians = {
            kind: {name: statistics.median(run[name] for run in all_) for name in all_[0]}
            for kind, all_ in runs.items()
        }
        bare, served = medians["bare"], medians["served"]
        added = {f"added_{name}": served[name] - bare[name] for name in ADDED if name in bare}
        facts = {
            "rows": self.engine.options.max_num_seqs,
            "single_step_rows": self.engine.model_runner.shapes.single_step_rows,
            "clients": self.clients,
            "prompts": "text" if self.text else "token ids",
            "load": os.getloadavg(),
            "cores_of_other_processes": others.cores(),
            "interpreter_seconds": [speed, interpreter_seconds()],
            "client_is_the_limit": served["client_cpu_share"] > MAX_CPU_SHARE,
        }
        return facts | added | medians | {"runs": runs}

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
        loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        options = ServerOptions(max_num_queued_reqs=4 * self.clients)
        tokenizer = make_tokenizer(self.engine.config.vocab_size)
        loaded = server.Loaded(self.engine, tokenizer, {}, CHUNK / CHUNK_SECONDS)
        serving = asyncio.ensure_future(
            server.serve(
                options,
                "timed",
                listener,
                lambda report: loaded,
                handle_signals=False,
                on_start=lambda app, signal: stop.append(signal),
            )
        )
        await asyncio.sleep(0.5)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            return await asyncio.to_thread(self._ask, url, seed, rate, loop_clock)
        finally:
            stop[0]()
            await serving

    def _ask(self, url: str, seed: int, rate: float, loop_clock: int) -> dict[str, float]:
        """The figures of the server at `url`; `loop_clock` counts its event loop's processor
        time."""
        args, count = self.args, self.args.requests * self.clients
        self._begin()
        cpu, loop = time.process_time(), time.clock_gettime(loop_clock)
        full = self._client(
            url, seed, f"--num-prompts {count} --max-concurrency {self.clients}", args.output_len
        )
        cpu, loop = time.process_time() - cpu, time.clock_gettime(loop_clock) - loop
        figures = self._figures(full["output_tokens"], full["seconds"], cpu)
        figures["client_cpu_share"] = full["client_cpu_share"]
        figures["loop_seconds_per_chunk"] = loop / sum(
            len(one["arrivals"]) for one in full["requests"]
        )
        figures["ttft_alone_p50"] = self._ttft_alone(url, seed, args.pause)
        with answering_at_once() as floor:
            figures["ttft_client"] = self._ttft_alone(floor, seed, FLOOR_PAUSE)
        if args.half_load:
            arrivals = f"--num-prompts {HALF_LOAD * self.clients} --request-rate {rate}"
            latency = self._client(url, seed, arrivals, args.output_len)
            times = [one["arrivals"][0] - one["sent"] for one in latency["requests"]]
            figures |= _half_load(times)
        return figures

    def _ttft_alone(self, url: str, seed: int, pause: float) -> float:
        """The median of requests so far apart that each finds nothing running."""
        evenly = f"--num-prompts {ALONE} --request-rate {1 / pause} --burstiness 1e6"
        return self._client(url, seed, evenly, 2)["ttft"]["p50"]

    def _client(self, url: str, seed: int, arguments: str, output_len: int) -> dict[str, Any]:
        """What `infer bench serve` reports, run as a process."""
        with tempfile.TemporaryDirectory() as folder:
            output, prompts = Path(folder, "result.json"), Path(folder, "prompts.jsonl")
            command = [sys.executable, "-m", "swiftkv_jax.infer", "bench", "serve"]
            command += f"--base-url {url} --model timed --seed {seed} --num-warmups 1".split()
            command += ["--output", str(output)]
            command += f"--vocab-size {self.engine.config.vocab_size - 1}".split()
            command += f"--input-len {self.args.input_len} --output-len {output_len}".split()
            command += arguments.split()
            if self.text:
                count = int(command[command.index("--num-prompts") + 1])
                prompts.write_text(self._texts(count, seed), encoding="utf-8")
                command += ["--dataset", str(prompts)]
            ran = subprocess.run(
                command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
            )
            result = json.loads(output.read_text(encoding="utf-8")) if output.exists() else None
        limited = result is not None and result["client_cpu_share"] > MAX_CPU_SHARE
        if result is None or result["failed"] or (ran.returncode and not limited):
            raise RuntimeError(f"`bench serve`: {ran.stdout.strip()} {ran.stderr.strip()}")
        return result

    def _texts(self, count: int, seed: int) -> str:
        """Lines of JSON with random prompts: each letter is a token of `make_tokenizer`."""
        rng = random.Random(seed)
        letters = [chr(code) for code in range(97, 123)]
        texts = ("".join(rng.choices(letters, k=self.args.input_len)) for _ in range(count))
        return "".join(json.dumps({"prompt": text}) + "\n" for text in texts)

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
