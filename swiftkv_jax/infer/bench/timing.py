"""One repetition of a cell: raw times, from which `summary` derives the rest.

Prompts are random and new in every repetition, so nothing is found in the prefix cache. `prefill`
runs the engine's steps without decoding. `decode` runs steps of rows that all begin at the same
length, after a prefill that is not timed. As always in the engine, one call is queued behind the
one that runs. `offline` and `latency` use the engine as its users do.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import UsageError
from ..engine.engine import Engine
from ..engine.requests import Request
from ..engine.sampling_params import SamplingParams
from ..engine.stats import Stats
from ..runner.compilation import CompileCounter
from .cells import DRAFTS, Cell, Mode, Timed, arrival_times, times_of

Raw = dict[str, Any]
"""Seconds, and lists of seconds, by name."""


def measure(mode: Mode, engine: Engine, cell: Cell, seed: int) -> Raw:
    """Run one repetition. `cpu_seconds` is processor time of this process, all threads: on a busy
    CPU the steadier figure."""
    compiled = CompileCounter.read()
    found = engine.prefix_stats.hits
    raw = {"prefill": prefill, "decode": decode, "offline": offline, "latency": latency}[mode](
        engine, cell, seed
    )
    return raw | {
        "seed": seed,
        "compilations": CompileCounter.read() - compiled,
        "prefix_hits": engine.prefix_stats.hits - found,
    }


def prefill(engine: Engine, cell: Cell, seed: int) -> Raw:
    """`seconds` from the first chunk to the end of the last, and `ttft`, the time to the first
    token of one prompt alone.

    The last token of a prompt is the input of the first decode step, so T - 1 tokens of each prompt
    run.
    """
    *requests, alone = _requests(engine, cell, seed, cell.prompts + 1)
    before = engine.stats.copy()
    with _stopwatch() as raw:
        ids = _prefill(engine, requests)
    raw |= _engine_counts(engine, before)
    for request_id in ids:
        engine.abort_request(request_id)
    start = time.perf_counter()
    first = None
    for _ in engine.run([alone]):
        first = first or time.perf_counter()
    assert first is not None
    return raw | {"ttft": first - start}


def decode(engine: Engine, cell: Cell, seed: int) -> Raw:
    """`seconds` for `steps` tokens of every row, after a first call; with drafts, on average."""
    if cell.output_len < 2 * (most := engine.model_runner.shapes.most_new_tokens):
        raise UsageError(
            f"`output_len`={cell.output_len} must be at least {2 * most}: two calls with drafts"
        )
    requests = _requests(engine, cell, seed, cell.prompts)
    if cell.prediction_error is not None:
        requests = _with_predictions(engine, requests, cell.prediction_error, seed)
    _prefill(engine, requests)
    engine.step()  # sends the first call
    engine.step()  # sends the second and reads the first
    before = engine.stats.copy()
    with _stopwatch() as raw:
        while engine.has_work:
            engine.step()
    steps = (engine.stats.new_tokens - before.new_tokens) / cell.prompts
    return raw | {"steps": steps} | _engine_counts(engine, before)


def offline(engine: Engine, cell: Cell, seed: int) -> Raw:
    """`seconds` for all requests, which are added at once."""
    requests = _requests(engine, cell, seed, cell.prompts)
    before = engine.stats.copy()
    with _stopwatch() as raw:
        new = sum(len(output.token_ids) for _, output in engine.run(requests))
    return raw | {"new_tokens": new} | _engine_counts(engine, before)


def latency(engine: Engine, cell: Cell, seed: int) -> Raw:
    """`times_of` requests that arrive one by one.

    Times count from the arrival, also if the request then waits for `max_concurrency`. An output
    has up to `decode_steps` tokens.
    """
    requests = collections.deque(_requests(engine, cell, seed, cell.prompts))
    assert cell.request_rate is not None
    arrivals = collections.deque(arrival_times(cell.prompts, cell.request_rate, seed))
    before = engine.stats.copy()
    inside = dict[int, Timed]()
    done: list[Timed] = []
    with _stopwatch() as raw:
        start = time.perf_counter()
        while requests or inside:
            while (
                requests
                and arrivals[0] <= time.perf_counter() - start
                and len(inside) < (cell.max_concurrency or cell.prompts)
            ):
                request_id = engine.add_request(requests.popleft())
                inside[request_id] = Timed(start + arrivals.popleft())
            if not inside:
                time.sleep(max(0.0, start + arrivals[0] - time.perf_counter()))
                continue
            for output in engine.step():
                timed = inside[output.request_id]
                timed.arrivals.append(time.perf_counter())
                timed.num_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    done.append(inside.pop(output.request_id))
    new = sum(timed.num_tokens for timed in done)
    return raw | times_of(done) | {"new_tokens": new} | _engine_counts(engine, before)


def _requests(engine: Engine, cell: Cell, seed: int, count: int) -> list[Request]:
    """`count` random prompts, continued greedily by exactly `cell.output_len` tokens."""
    tokens = np.random.default_rng([seed, 0]).integers(
        0, engine.config.vocab_size, (count, cell.input_len)
    )
    params = SamplingParams(max_tokens=cell.output_len, ignore_eos=True)
    return [Request(prompt, params) for prompt in tokens.tolist()]


def _with_predictions(
    engine: Engine, requests: Sequence[Request], error: float, seed: int
) -> list[Request]:
    """The requests with their own answers as predictions, of which a share `error` of the tokens
    are random."""
    answers: list[list[int]] = [[] for _ in requests]
    for number, output in engine.run(requests):
        answers[number] += output.token_ids
    predictions = np.array(answers)
    rng = np.random.default_rng([seed, 2])
    wrong = rng.random(predictions.shape) < error
    predictions[wrong] = rng.integers(0, engine.config.vocab_size, wrong.sum())
    return [
        dataclasses.replace(request, prediction=prediction, cache_salt="predicted")
        for request, prediction in zip(requests, predictions.tolist(), strict=True)
    ]


def _prefill(engine: Engine, requests: Sequence[Request]) -> list[int]:
    """Cache the prompts and wait for the end: ids of requests that are ready to decode.

    The engine must be idle before. Raises `UsageError` if the cache cannot hold all at once.
    """
    ids = [engine.add_request(request) for request in requests]
    chunks = None
    while engine.stats.chunks != chunks:
        chunks = engine.stats.chunks
        engine.step(decode=False)
    if engine.num_running < len(requests):
        held = f"the KV cache holds {engine.num_running} of {len(requests)} rows"
        for request_id in ids:
            engine.abort_request(request_id)
        raise UsageError(f"{held}: lower `batch` or `input_len`, or raise `kv_cache_memory`")
    return ids


@contextlib.contextmanager
def _stopwatch() -> Iterator[Raw]:
    """Adds the seconds that the block takes."""
    raw: Raw = {}
    start = time.perf_counter()
    cpu = time.process_time()
    yield raw
    raw |= {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
    }


def _engine_counts(engine: Engine, before: Stats) -> Raw:
    """Seconds, calls, and where the engine makes any, drafts that it has counted since `before`."""
    names = {
        "idle": "idle_seconds",
        "chunks": "chunks",
        "decode_calls": "decode_calls",
    }
    now = engine.stats
    found = {name: getattr(now, field) - getattr(before, field) for name, field in names.items()}
    if engine.options.speculative is not None:
        then = before.speculation
        found |= {name: getattr(now.speculation, name) - getattr(then, name) for name in DRAFTS}
    return found
