"""What /metrics says: vLLM's names, labels and buckets, and under `swiftkv:` what only this server
has. Counted on the thread of the connections, in plain integers."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..engine.requests import RequestOutput
from .generation import Generation, Part
from .histogram import Histogram, token_buckets

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from .service import Service

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


class Metrics:
    """Counters and histograms of a server, a collector of prometheus_client."""

    def __init__(self, service: Service, model_name: str):
        self._service, self._model_name = service, model_name
        self.finished: collections.Counter[str] = collections.Counter()
        """`finish_reason` of sequences, with `abort` and `error`."""
        self.disconnects: collections.Counter[str] = collections.Counter()
        self.http: collections.Counter[tuple[str, int]] = collections.Counter()
        """(route, status) -> answers."""
        self.wasted_tokens = self.slow_clients = 0
        self.generation_tokens = 0
        self.loop_lag = 0.0
        self.num_connections: Callable[[], int] = lambda: 0
        self.ttft, self.itl = Histogram(TTFT_BUCKETS), Histogram(TPOT_BUCKETS)
        self.tpot, self.e2e = Histogram(TPOT_BUCKETS), Histogram(LATENCY_BUCKETS)
        self.phases = {
            name: Histogram(LATENCY_BUCKETS) for name in ("queue", "inference", "prefill", "decode")
        }
        self.prompt_lengths = self.answer_lengths = self.max_tokens = Histogram(())
        self.samples = Histogram(N_BUCKETS)
        self.tokenize = Histogram(TTFT_BUCKETS)

    def set_longest(self, max_model_len: int) -> None:
        """Now that the model is known."""
        buckets = token_buckets(max_model_len)
        self.prompt_lengths, self.answer_lengths, self.max_tokens = (
            Histogram(buckets) for _ in range(3)
        )

    # Events ---------------------------------------------------------------------------

    def observe_event(self, generation: Generation, part: Part, event: Any) -> None:
        """An event of a request, before it is added to it."""
        if not isinstance(event, RequestOutput):
            return
        now = time.monotonic()
        if not generation.first_token and part.is_first(event):
            self.ttft.observe(now - generation.arrival)
        if not part.choices:
            return
        tokens = len(event.token_ids) + (event.stop_token is not None)
        self.generation_tokens += tokens
        choice = part.choices[event.sample]
        if generation.abort_reason is not None or choice.finish_reason is not None:
            self.wasted_tokens += tokens
        if choice.last_token and tokens:
            self.itl.observe((now - choice.last_token) / tokens, tokens)
        choice.last_token = now

    def observe_end(self, generation: Generation) -> None:
        """Nothing of a request is held any more, however it ended."""
        failed = generation.error is not None and generation.error.status == 500
        other = "error" if failed else "abort"
        for choice in generation.choices:
            self.finished[choice.finish_reason or other] += 1
            self.answer_lengths.observe(choice.num_tokens)
        self._observe_times(generation)

    def _observe_times(self, generation: Generation) -> None:
        now = time.monotonic()
        self.e2e.observe(now - generation.arrival)
        for part in generation.parts:
            self.prompt_lengths.observe(len(part.prompt.token_ids))
            if part.choices:
                self.samples.observe(len(part.choices))
                self.max_tokens.observe(part.request.params.max_tokens)  # type: ignore[union-attr]
        started = generation.started or now
        self.phases["queue"].observe(started - generation.arrival)
        if generation.started:
            first, last = generation.first_token, generation.last_token
            self.phases["inference"].observe(last - started)
            self.phases["prefill"].observe(first - started)
            self.phases["decode"].observe(last - first)
            longest = max((choice.num_tokens for choice in generation.choices), default=0)
            if longest > 1:
                self.tpot.observe((last - first) / (longest - 1))

    # Exposition -----------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        labels, values = ["model_name", "engine"], [self._model_name, "0"]

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=labels)
            family.add_metric(values, value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=labels)
            family.add_metric(values, value)
            return family

        def counters(
            name: str, text: str, label: str, found: dict[str, int], known: Sequence[str]
        ) -> Metric:
            family = CounterMetricFamily(name, text, labels=[*labels, label])
            for one in dict.fromkeys([*known, *sorted(found)]):
                family.add_metric([*values, one], found.get(one, 0))
            return family

        def histogram(name: str, text: str, found: Histogram) -> Metric:
            family = HistogramMetricFamily(name, text, labels=labels)
            family.add_metric(values, found.cumulated(), found.sum)
            return family

        service, engine = self._service, self._service.engine
        if engine is not None and service.admission is not None:
            snapshot = engine.snapshot
            load, stats, prefix = snapshot.load, snapshot.stats, snapshot.prefix
            yield gauge("vllm:num_requests_running", "Sequences that decode.", load.num_running)
            yield gauge("vllm:num_requests_waiting", "Requests that wait.", service.num_waiting)
            reasons = GaugeMetricFamily(
                "vllm:num_requests_waiting_by_reason",
                "Requests that wait: for capacity; none is put off for another reason.",
                labels=[*labels, "reason"],
            )
            reasons.add_metric([*values, "capacity"], service.num_waiting)
            reasons.add_metric([*values, "deferred"], 0)
            yield reasons
            yield gauge(
                "vllm:kv_cache_usage_perc",
                "Share of the pages that requests hold; 1 is all.",
                load.pages_in_use / max(load.num_pages, 1),
            )
            yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", prefix.queries)
            yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", prefix.hits)
            yield counter("vllm:prompt_tokens", "Prompt tokens cached.", stats.prompt_tokens)
            yield counter("vllm:prompt_tokens_cached", "Prompt tokens found.", prefix.hits)
            facts = service.cache_facts
            info = GaugeMetricFamily(
                "vllm:cache_config_info", "The KV cache.", labels=[*labels, *facts]
            )
            info.add_metric([*values, *facts.values()], 1)
            yield info
            yield histogram(
                "vllm:iteration_tokens_total",
                "Of an engine step, cached and new.",
                engine.iteration_tokens,
            )
            yield counter(
                "vllm:num_preemptions",
                "Requests that made room for earlier ones.",
                stats.preemptions,
            )
            yield counter(
                "swiftkv:compilations", "Programs compiled while serving.", stats.compilations
            )
            yield counter("swiftkv:step_host_seconds", "Host time of steps.", stats.host_seconds)
            yield counter(
                "swiftkv:device_wait_seconds",
                "Steps' time of waiting for the device.",
                stats.wait_seconds,
            )
            yield counter(
                "swiftkv:engine_idle_seconds", "Time without work.", snapshot.idle_seconds
            )
            yield counter(
                "swiftkv:prefilled_tokens",
                "Tokens that ran through prefill.",
                stats.prefilled_tokens,
            )
            yield gauge(
                "swiftkv:queued_tokens", "Prompt tokens not cached yet.", service.admission.tokens
            )
            if service.kv_events is not None and (batches := service.kv_events.batches) is not None:
                yield counter(
                    "swiftkv:kv_event_batches",
                    "Steps with events of the prefix cache.",
                    batches.num_batches,
                )
                yield counter(
                    "swiftkv:kv_event_batches_dropped",
                    "Those for which the publisher's queue had no room.",
                    batches.num_dropped,
                )
            yield counters(
                "vllm:admission_rejections",
                "Requests refused.",
                "reason",
                service.admission.rejected,
                ("max_num_queued_reqs", "max_num_queued_tokens"),
            )
        yield counter("vllm:generation_tokens", "Tokens generated.", self.generation_tokens)
        yield counters(
            "vllm:request_success",
            "Sequences ended.",
            "finished_reason",
            self.finished,
            ("stop", "length", "abort", "error"),
        )
        for name, text, found in (
            ("vllm:time_to_first_token_seconds", "From the last byte of the body.", self.ttft),
            ("vllm:inter_token_latency_seconds", "Between tokens.", self.itl),
            ("vllm:request_time_per_output_token_seconds", "Of a request.", self.tpot),
            ("vllm:e2e_request_latency_seconds", "From the last byte of the body.", self.e2e),
            ("vllm:request_prompt_tokens", "Of a prompt.", self.prompt_lengths),
            ("vllm:request_generation_tokens", "Of a sequence.", self.answer_lengths),
            ("vllm:request_params_max_tokens", "Of a request.", self.max_tokens),
            ("vllm:request_params_n", "Of a request.", self.samples),
            ("swiftkv:tokenize_seconds", "Of a request.", self.tokenize),
            *(
                (f"vllm:request_{name}_time_seconds", "Of a request.", found)
                for name, found in self.phases.items()
            ),
        ):
            yield histogram(name, text, found)
        yield counter("swiftkv:wasted_tokens", "Tokens of aborted requests.", self.wasted_tokens)
        yield counter("swiftkv:slow_clients", "Streams aborted unread.", self.slow_clients)
        yield counters(
            "swiftkv:client_disconnects", "Clients that left.", "state", self.disconnects, STATES
        )
        yield gauge("swiftkv:loop_lag_seconds", "Delay of the connections' thread.", self.loop_lag)
        yield gauge("swiftkv:connections", "Open connections.", self.num_connections())
        answers = CounterMetricFamily(
            "swiftkv:http_requests", "Answers.", labels=["route", "status"]
        )
        for (route, status), count in sorted(self.http.items()):
            answers.add_metric([route, str(status)], count)
        yield answers

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """(text, content type): Prometheus' format, or OpenMetrics where that is accepted."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once(self))  # type: ignore[arg-type]
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type


class _Once:
    """Describes nothing, so that registering does not collect."""

    def __init__(self, metrics: Metrics):
        self.collect = metrics.collect

    def describe(self) -> list[Any]:
        return []


STATES = ("queued", "prefilling", "decoding")


def state_of(generation: Generation) -> str:
    """What a request is at."""
    if not generation.is_submitted:
        return "queued"
    return "decoding" if generation.first_token else "prefilling"
