"""The text of /metrics: vLLM's names and labels, and `swiftkv:` names for what vLLM lacks."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from ... import __version__
from ..service.histogram import Histogram
from ..service.metrics import STATES
from ..service.service import Service

LABELS = ("model_name", "engine")
_STATS = (
    ("vllm:num_preemptions", "preemptions", "Requests that made room for earlier ones."),
    ("swiftkv:compilations", "compilations", "Programs compiled while serving."),
    ("swiftkv:step_host_seconds", "host_seconds", "Host time of steps."),
    ("swiftkv:device_wait_seconds", "wait_seconds", "Steps' time of waiting for the device."),
    ("swiftkv:prefilled_tokens", "prefilled_tokens", "Tokens that ran through prefill."),
    (
        "swiftkv:upper_layer_tokens_skipped",
        "lower_layer_tokens",
        "Tokens of prefill that skipped the upper layers.",
    ),
    (
        "swiftkv:prefill_padding_tokens",
        "padding_tokens",
        "Tokens of prefill calls up to their compiled size.",
    ),
    (
        "swiftkv:requests_skipped",
        "num_times_skipped",
        "Times that a waiting request was skipped for a later one.",
    ),
)
"""Counters of the engine: name, field of `Stats`, description."""


def exposition(service: Service, accept: str) -> tuple[bytes, str]:
    """(text, content type): Prometheus' format, or OpenMetrics where that is accepted."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service))  # type: ignore[arg-type]
    try:
        encode, content_type = choose_encoder(accept)
    except Exception:  # of its parser, for a header that it does not understand
        encode, content_type = choose_encoder("")
    if isinstance(encode, functools.partial):
        # The names need no escaping, and that by underscores would replace their colons.
        encode = functools.partial(encode, escaping=ALLOWUTF8)
    return encode(registry), content_type


class _Collector:
    """A collector of prometheus_client."""

    def __init__(self, service: Service):
        self._service = service
        self._values = (service.model_name, "0")

    def describe(self) -> list[Any]:
        """Return nothing, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        versions = {"version": __version__, "jax": importlib.metadata.version("jax")}
        build = GaugeMetricFamily("swiftkv:build_info", "Versions.", labels=[*LABELS, *versions])
        build.add_metric([*self._values, *versions.values()], 1)
        yield build
        yield from self._of_engine()
        yield from self._of_requests()

    def _of_engine(self) -> Iterator[Metric]:
        """Yield the engine's metrics; none before there is an engine."""
        service = self._service
        engine = self._service.engine
        if engine is None or service.admission is None:
            return
        snapshot = engine.snapshot
        load = snapshot.load
        stats = snapshot.stats
        prefix = snapshot.prefix
        running = load.num_running + load.num_prefilling
        text = "Sequences that decode, and requests in prefill."
        yield self._gauge("vllm:num_requests_running", text, running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", service.num_waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait: for capacity; none is put off for another reason.",
            labels=[*LABELS, "reason"],
        )
        reasons.add_metric([*self._values, "capacity"], service.num_waiting)
        reasons.add_metric([*self._values, "deferred"], 0)
        yield reasons
        usage = load.pages_in_use / max(load.num_pages, 1)
        for of in ("", "gpu_"):  # vLLM's names, and its older ones, which some routers still read
            usage_name = f"vllm:{of or 'kv_'}cache_usage_perc"
            yield self._gauge(usage_name, "Share of the pages that requests hold.", usage)
            name = f"vllm:{of}prefix_cache"
            yield self._counter(f"{name}_queries", "Prompt tokens looked up.", prefix.queries)
            yield self._counter(f"{name}_hits", "Prompt tokens found.", prefix.hits)
        text = "Prompt tokens processed, those found in the prefix cache included."
        yield self._counter("vllm:prompt_tokens", text, stats.prompt_tokens)
        text = "Prompt tokens found in the prefix cache."
        yield self._counter("vllm:prompt_tokens_cached", text, prefix.hits)
        facts = service.cache_facts
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=[*LABELS, *facts]
        )
        info.add_metric([*self._values, *facts.values()], 1)
        yield info
        yield self._histogram(engine.iteration_tokens)
        for name, field, text in _STATS:
            yield self._counter(name, text, getattr(stats, field))
        idle = snapshot.idle_seconds
        yield self._counter("swiftkv:engine_idle_seconds", "Time without work.", idle)
        yield self._gauge(
            "swiftkv:queued_tokens", "Prompt tokens not cached yet.", service.admission.tokens
        )
        if service.kv_events is not None and (batches := service.kv_events.batches) is not None:
            yield self._counter(
                "swiftkv:kv_event_batches",
                "Steps with events of the prefix cache.",
                batches.num_batches,
            )
            yield self._counter(
                "swiftkv:kv_event_batches_dropped",
                "Those for which the publisher's queue had no room.",
                batches.num_dropped,
            )
        yield self._counters(
            "vllm:admission_rejections",
            "Requests refused.",
            "reason",
            service.admission.rejected,
            ("max_num_queued_reqs", "max_num_queued_tokens"),
        )

    def _of_requests(self) -> Iterator[Metric]:
        metrics = self._service.metrics
        yield self._counter(
            "vllm:generation_tokens", "Tokens of answers.", metrics.generation_tokens
        )
        yield self._counters(
            "vllm:request_success",
            "Sequences ended.",
            "finished_reason",
            metrics.finished,
            ("stop", "length", "abort", "error"),
        )
        for found in metrics.histograms:
            yield self._histogram(found)
        yield self._counter(
            "swiftkv:wasted_tokens", "Tokens behind an answer's end.", metrics.wasted_tokens
        )
        yield self._counter("swiftkv:slow_clients", "Streams aborted unread.", metrics.slow_clients)
        yield self._counters(
            "swiftkv:client_disconnects", "Clients that left.", "state", metrics.disconnects, STATES
        )
        yield self._gauge(
            "swiftkv:loop_lag_seconds",
            "Longest delay of the connections' thread in the last minute.",
            metrics.loop_lag.value,
        )
        yield self._gauge("swiftkv:connections", "Open connections.", metrics.num_connections())
        answers = CounterMetricFamily(
            "swiftkv:http_requests", "Answers.", labels=["route", "status"]
        )
        for (route, status), count in sorted(metrics.http.items()):
            answers.add_metric([route, str(status)], count)
        yield answers

    def _value(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        family = kind(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    _gauge = functools.partialmethod(_value, GaugeMetricFamily)
    _counter = functools.partialmethod(_value, CounterMetricFamily)

    def _counters(
        self, name: str, text: str, label: str, found: dict[str, int], known: Sequence[str]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*LABELS, label])
        for one in dict.fromkeys([*known, *sorted(found)]):
            family.add_metric([*self._values, one], found.get(one, 0))
        return family

    def _histogram(self, found: Histogram) -> Metric:
        family = HistogramMetricFamily(found.name, found.text, labels=LABELS)
        family.add_metric(self._values, found.cumulated(), found.sum)
        return family
