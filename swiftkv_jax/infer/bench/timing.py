"""One repetition of a cell: raw times, from which `summary` derives the rest.

Prompts are random and new in every repetition, so there is never a prefix to be found in the cache.
`prefill` and `decode` run the engine's own programs on the engine's own chunks, but nothing else at
the same time: prefill without decoding, and decoding of rows that all enter at the same length,
after a prefill that is not timed. As in the engine, one call is always queued behind the one that
runs. `offline` and `latency` use the engine as its users do.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections import abc
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import UsageError
from ..engine.engine import Engine
from ..engine.page_pool import PagePool
from ..engine.request_state import RequestState, Sequence
from ..engine.requests import Request, RequestOutput
from ..engine.sampling_params import SamplingParams
from ..engine.scheduler import Scheduler
from ..runner.compilation import CompileCounter
from .cells import Cell, Mode

Raw = dict[str, Any]
"""Seconds, and lists of seconds, by name."""


def measure(mode: Mode, engine: Engine, cell: Cell, seed: int) -> Raw:
    """One repetition. `cpu_seconds` is processor time of this process, all threads: on a busy CPU
    the steadier figure."""
    compiled, found = CompileCounter.read(), engine.prefix_stats.hits
    raw = {"prefill": prefill, "decode": decode, "offline": offline, "latency": latency}[mode](
        engine, cell, seed
    )
    return raw | {
        "seed": seed,
        "compilations": CompileCounter.read() - compiled,
        "prefix_hits": engine.prefix_stats.hits - found,
    }


def prefill(engine: Engine, cell: Cell, seed: int) -> Raw:
    """`seconds` from the first chunk of the prompts to the end of the last, and the time to the
    first token of one alone.

    The last token of a prompt belongs to its first decode step, so T - 1 tokens of each prompt run.
    """
    *requests, alone = _requests(engine, cell, seed, cell.prompts + 1)
    with _clock() as raw:
        _, chunks = _fill(engine, requests)
    start = time.perf_counter()
    first = None
    for _ in engine.run([alone]):
        first = first or time.perf_counter()
    assert first is not None
    return raw | {"ttft": first - start, "chunks": chunks}


def decode(engine: Engine, cell: Cell, seed: int) -> Raw:
    """`seconds` for `steps` tokens of every row, after a first call; `wait` is the part in which
    the host had nothing to do."""
    device, calls = engine.model_runner, cell.output_len // engine.model_runner.shapes.decode_steps
    samples, _ = _fill(engine, _requests(engine, cell, seed, cell.prompts))
    device.enter(samples)
    queued = device.run_decode(samples)
    queued, done = device.run_decode(samples), queued
    device.read(done)
    waited = 0.0
    with _clock() as raw:
        for _ in range(calls - 2):
            queued, done = device.run_decode(samples), queued
            waited += _seconds_to_read(engine, done)
        waited += _seconds_to_read(engine, queued)
    device.leave([sample.slot for sample in samples])
    return raw | {"wait": waited, "steps": (calls - 1) * device.shapes.decode_steps}


def offline(engine: Engine, cell: Cell, seed: int) -> Raw:
    """All requests at once, until the last has ended."""
    requests = _requests(engine, cell, seed, cell.prompts)
    before = dataclasses.replace(engine.stats)
    with _clock() as raw:
        new = sum(len(event.tokens) for event in engine.run(requests))
    return raw | {"new_tokens": new} | _engine_seconds(engine, before)


def latency(engine: Engine, cell: Cell, seed: int) -> Raw:
    """Requests that arrive one by one. Each list has an entry a request, `itl` one for every wait
    between two of its events.

    Times count from when a request arrives, also if it then waits for `max_concurrency`. An event
    brings up to `decode_steps` tokens. TPOT is (e2e - TTFT) / (output tokens - 1), as in `vllm
    bench serve`.
    """
    requests = collections.deque(_requests(engine, cell, seed, cell.prompts))
    arrivals = collections.deque(_arrivals(cell, seed))
    before, inside = dataclasses.replace(engine.stats), {}
    done: list[_Life] = []
    with _clock() as raw:
        start = time.perf_counter()
        while requests or inside:
            while (
                requests
                and arrivals[0] <= time.perf_counter() - start
                and len(inside) < (cell.max_concurrency or cell.prompts)
            ):
                inside[engine.add_request(requests.popleft())] = _Life(start + arrivals.popleft())
            if not inside:
                time.sleep(max(0.0, start + arrivals[0] - time.perf_counter()))
            for event in engine.step() if engine.has_work else ():
                inside[event.request].hear(event)
                if event.finish_reason is not None:
                    done.append(inside.pop(event.request))
    lists = {
        "ttft": [life.ttft for life in done],
        "tpot": [life.tpot for life in done],
        "e2e": [life.e2e for life in done],
    }
    new = sum(life.tokens for life in done)
    return (
        raw
        | lists
        | {"itl": [wait for life in done for wait in life.waits], "new_tokens": new}
        | _engine_seconds(engine, before)
    )


@dataclasses.dataclass
class _Life:
    """A request from its arrival on, `time.perf_counter()` seconds."""

    arrived: float
    tokens: int = 0
    first: float | None = None
    last: float = 0.0
    waits: list[float] = dataclasses.field(default_factory=list)

    def hear(self, event: RequestOutput) -> None:
        now = time.perf_counter()
        if self.first is None:
            self.first = now
        else:
            self.waits.append(now - self.last)
        self.last, self.tokens = now, self.tokens + len(event.tokens)

    @property
    def ttft(self) -> float:
        assert self.first is not None
        return self.first - self.arrived

    @property
    def e2e(self) -> float:
        return self.last - self.arrived

    @property
    def tpot(self) -> float | None:
        """None for a single token."""
        return None if self.tokens < 2 else (self.e2e - self.ttft) / (self.tokens - 1)


def _arrivals(cell: Cell, seed: int) -> list[float]:
    """Seconds after the start, ascending."""
    assert cell.request_rate is not None
    gaps = np.random.default_rng([seed, 1]).exponential(1 / cell.request_rate, cell.prompts)
    return np.cumsum(gaps).tolist()


def _requests(engine: Engine, cell: Cell, seed: int, count: int) -> list[Request]:
    """Greedy, with exactly as many new tokens as the cell says."""
    tokens = np.random.default_rng([seed, 0]).integers(
        0, engine.config.vocab_size, (count, cell.input_len)
    )
    params = SamplingParams(max_tokens=cell.output_len, ignore_eos=True)
    return [Request(prompt, params) for prompt in tokens.tolist()]


def _fill(engine: Engine, requests: abc.Sequence[Request]) -> tuple[list[Sequence], int]:
    """Run the prompts through prefill, and wait: (rows that can enter, chunks). The engine must be
    idle.

    The pages are planned apart from the engine's. What it remembers of earlier prompts is
    overwritten, which nobody will notice, since prompts never come again. Raises `UsageError` if
    the cache cannot hold all at once.
    """
    device, shapes = engine.model_runner, engine.model_runner.shapes
    scheduler = Scheduler(
        [PagePool(shapes.num_pages, shapes.page_size) for _ in range(shapes.lanes)], device.limits
    )
    for number, request in enumerate(requests):
        scheduler.add(RequestState(number, request))
    samples, chunks, queued = [], 0, None
    while (chunk := scheduler.next_chunk()) is not None:
        done, queued = queued, device.run_chunk(chunk)
        samples += chunk.ready
        chunks += 1
        if done is not None:
            device.read(done)
    if queued is not None:
        device.read(queued)
    if len(samples) < len(requests):
        room = f"the KV cache holds {len(samples)} of {len(requests)} rows"
        raise UsageError(f"{room}: lower --batch or --input-len, or raise --kv-cache-memory")
    return samples, chunks


@contextlib.contextmanager
def _clock() -> Iterator[Raw]:
    """How long the block takes."""
    raw: Raw = {}
    start, cpu = time.perf_counter(), time.process_time()
    yield raw
    raw |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}


def _seconds_to_read(engine: Engine, handle) -> float:
    start = time.perf_counter()
    engine.model_runner.read(handle)
    return time.perf_counter() - start


def _engine_seconds(engine: Engine, before) -> Raw:
    """What the engine's clocks say since `before`, and its counters of calls."""
    names = {
        "host": "host_seconds",
        "wait": "wait_seconds",
        "chunks": "chunks",
        "decode_calls": "decode_calls",
    }
    return {
        name: getattr(engine.stats, field) - getattr(before, field) for name, field in names.items()
    }
