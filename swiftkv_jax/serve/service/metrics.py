"""Counts of a server's requests, in vLLM's buckets: on the thread of the connections, in plain
integers."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

from ...infer.engine.requests import Request, RequestOutput
from .generation import EngineRequest, Generation
from .histogram import Histogram, RecentMaximum, token_buckets

# Buckets of vLLM 0.33, `v1/metrics/loggers.py`, in seconds or tokens.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
N_BUCKETS = (1, 2, 5, 10, 20)
EACH = "Of a request."
BODY = "From the last byte of the body."
LENGTHS = {
    "params_max_tokens": EACH,
    "prompt_tokens": "Of a prompt.",
    "prefill_kv_computed_tokens": "Of a prompt, those that were not cached.",
    "generation_tokens": "Of a sequence.",
    "max_num_generation_tokens": "Of the longest sequence of a prompt.",
}
LAG_SECONDS = 60
"""Prometheus scrapes at least once a minute by default."""


class Metrics:
    """Counters and histograms of a server."""

    def __init__(self):
        self.finished: collections.Counter[str] = collections.Counter()
        """Sequences by how they ended, in vLLM's words: stop (with calls of tools too), length,
        abort or error."""
        self.disconnects: collections.Counter[str] = collections.Counter()
        self.http: collections.Counter[tuple[str, int]] = collections.Counter()
        """(route, status) -> answers."""
        self.wasted_tokens = self.slow_clients = 0
        """Tokens behind the end of an answer or after an abort; streams aborted unread."""
        self.generation_tokens = 0
        """Tokens of answers, as `usage` counts them."""
        self.loop_lag = RecentMaximum(LAG_SECONDS)
        """Delays of the connections' thread in seconds."""
        self.num_connections: Callable[[], int] = lambda: 0
        self.ttft = Histogram("vllm:time_to_first_token_seconds", BODY, TTFT_BUCKETS)
        self.itl = Histogram("vllm:inter_token_latency_seconds", "Between tokens.", TPOT_BUCKETS)
        self.tpot = Histogram("vllm:request_time_per_output_token_seconds", EACH, TPOT_BUCKETS)
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", BODY, LATENCY_BUCKETS)
        self.phases = {
            name: Histogram(f"vllm:request_{name}_time_seconds", EACH, LATENCY_BUCKETS)
            for name in ("queue", "inference", "prefill", "decode")
        }
        self.samples = Histogram("vllm:request_params_n", EACH, N_BUCKETS)
        self.tokenize = Histogram("swiftkv:tokenize_seconds", EACH, TTFT_BUCKETS)
        self.lengths = {
            name: Histogram(f"vllm:request_{name}", text) for name, text in LENGTHS.items()
        }

    def set_longest(self, max_model_len: int) -> None:
        """Choose the buckets of lengths, now that the model is known."""
        for histogram in self.lengths.values():
            histogram.set_buckets(token_buckets(max_model_len))

    @property
    def histograms(self) -> list[Histogram]:
        """All of them."""
        found = [value for value in vars(self).values() if isinstance(value, Histogram)]
        return [*found, *self.phases.values(), *self.lengths.values()]

    # Events ---------------------------------------------------------------------------

    def observe_event(self, generation: Generation, part: EngineRequest, event: Any) -> None:
        """An event of a request, before it is added to it."""
        if not isinstance(event, RequestOutput):
            return
        now = time.monotonic()
        if not generation.times.first_token and part.is_first(event):
            self.ttft.observe(now - generation.times.arrival)
        if not part.choices:
            return
        tokens = _num_tokens(event)
        choice = part.choices[event.sample]
        if choice.last_token and tokens:
            self.itl.observe((now - choice.last_token) / tokens, tokens)
        choice.last_token = now

    def count_tokens(self, generation: Generation, part: EngineRequest, event: Any) -> None:
        """The tokens of an event that has been added to its sample: those that are in the answer,
        and those behind its end or after an abort."""
        if not isinstance(event, RequestOutput) or not part.choices:
            return
        choice = part.choices[event.sample]
        taken = choice.num_tokens - choice.num_counted
        choice.num_counted = choice.num_tokens
        self.generation_tokens += taken
        tokens = _num_tokens(event)
        is_aborted = generation.abort_reason is not None
        self.wasted_tokens += tokens if is_aborted else tokens - taken

    def observe_end(self, generation: Generation) -> None:
        """Count a request that has ended, however it did."""
        failed = generation.error is not None and generation.error.status == 500
        other = "error" if failed else "abort"
        for choice in generation.choices:
            reason = choice.finish_reason or other
            self.finished["stop" if reason == "tool_calls" else reason] += 1
            self.lengths["generation_tokens"].observe(choice.num_tokens)
        for part in generation.parts:
            self._observe_part(part)
        times = generation.times
        self.e2e.observe(times.total)
        self.phases["queue"].observe(times.queue)
        if times.started:
            self.phases["inference"].observe(times.inference)
            self.phases["prefill"].observe(times.prefill)
            self.phases["decode"].observe(times.decode)
            if generation.longest > 1:
                self.tpot.observe(times.decode / (generation.longest - 1))

    def _observe_part(self, part: EngineRequest) -> None:
        length = len(part.prompt.token_ids)
        lengths = self.lengths
        lengths["prompt_tokens"].observe(length)
        if part.is_prefilled:
            lengths["prefill_kv_computed_tokens"].observe(length - part.num_cached_tokens)
        if isinstance(part.request, Request):
            self.samples.observe(len(part.choices))
            lengths["params_max_tokens"].observe(part.request.params.max_tokens)
            longest = max(choice.num_tokens for choice in part.choices)
            lengths["max_num_generation_tokens"].observe(longest)


def _num_tokens(event: RequestOutput) -> int:
    return len(event.token_ids) + (event.stop_token is not None)


STATES = ("queued", "prefilling", "decoding")


def state_of(generation: Generation) -> str:
    """Return the phase of a request: one of `STATES`."""
    if not generation.times.submitted:
        return "queued"
    if not generation.times.first_token:
        return "prefilling"
    return "decoding"
