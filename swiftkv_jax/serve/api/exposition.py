"""The text of /metrics: vLLM's names and labels, and `swiftkv:` names for what vLLM lacks."""

from __future__ import annotations

import functools
import importlib.metadata
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from ... import __version__
from ...infer.engine.host_tier import TierCounts
from ...infer.engine.page_pool import PrefixStats
from ...infer.engine.speculation import DraftStats
from ..service.admission import Admission
from ..service.engine_thread import Snapshot
from ..service.histogram import Histogram
from ..service.metrics import STATES
from ..service.service import Service

LABELS = ("model_name", "engine")
Row = tuple[Any, ...]
"""(kind, name, description, value, labels): with one label the value is a number for each of its
values, with several for each tuple of theirs."""
_STATS = (
    ("compilations", "compilations", "Programs compiled while serving."),
    ("step_host_seconds", "host_seconds", "Host time of steps."),
    ("device_wait_seconds", "wait_seconds", "Steps' time of waiting for the device."),
    (
        "device_idle_seconds",
        "idle_seconds",
        "At most: time without work for a device.",
    ),
    ("prefilled_tokens", "prefilled_tokens", "Tokens that ran through prefill."),
    (
        "upper_layer_tokens_skipped",
        "lower_layer_tokens",
        "Prefilled, lower layers only.",
    ),
    ("prefill_padding_tokens", "padding_tokens", "Padding of prefill calls to a compiled size."),
    ("requests_skipped", "num_times_skipped", "Times that a later request was admitted first."),
)
"""Counters of the engine: name after `swiftkv:`, field of `Stats`, description."""


_DRAFT_STATS = (
    ("vllm:spec_decode_num_drafts", "drafts", "Steps of a sequence with drafts."),
    ("vllm:spec_decode_num_draft_tokens", "draft_tokens", "Drafts."),
    ("vllm:spec_decode_num_accepted_tokens", "accepted_tokens", "Drafts that were right."),
    ("swiftkv:verify_calls", "verify_calls", "Decode calls with room for drafts."),
)
"""Counters of drafts: name, field of `DraftStats`, description."""


def exposition(service: Service, accept: str, lora_facts: Mapping[str, str]) -> tuple[bytes, str]:
    """(text, content type): Prometheus' format, or OpenMetrics where that is accepted. `lora_facts`
    are `ServedAdapters.facts`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service, lora_facts))  # type: ignore[arg-type]
    try:
        encode, content_type = choose_encoder(accept)
    except Exception:  # of its parser, for a header that it does not understand
        encode, content_type = choose_encoder("")
    if isinstance(encode, functools.partial):
        # The names need no escaping, and that by underscores would replace their colons.
        encode = functools.partial(encode, escaping=ALLOWUTF8)
    return encode(registry), content_type


def _of_drafts(stats: DraftStats, most: int) -> Iterator[Row]:
    """`most` is the number of drafts of a step."""
    for name, field, text in _DRAFT_STATS:
        yield Counter, name, text, getattr(stats, field)
    by_place = dict(zip(map(str, range(most)), stats.accepted_per_position, strict=False))
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    yield Counter, name, "Drafts that were right, by their place.", by_place, "position"


def _of_tiers(tiers: Sequence[TierCounts], prefix: PrefixStats) -> Iterator[Row]:
    if not tiers:
        return
    name, missed = "vllm:external_prefix_cache", prefix.queries - prefix.hits + prefix.host_hits
    yield Counter, f"{name}_queries", "Prompt tokens not found on the device.", missed
    yield Counter, f"{name}_hits", "Those that were found in host memory.", prefix.host_hits
    pages = {one.tier: one.pages for one in tiers}
    text = "Pages of the prefix cache beyond the device."
    yield Gauge, "swiftkv:tier_pages", text, pages, "tier"
    copied = {
        (one.tier, direction): getattr(one, direction) * one.page_bytes
        for one in tiers
        for direction in ("saved", "loaded")
    }
    text = "Bytes copied to a tier, and back from it."
    yield Counter, "swiftkv:tier_bytes", text, copied, "tier", "direction"
    misses: dict[str, int] = dict.fromkeys(("read", "damaged", "write", "queue"), 0)
    for one in tiers:
        misses.update(one.misses)
    text = "Pages that could not be read from disk or written to it."
    yield Counter, "swiftkv:tier_misses", text, misses, "reason"


class _Collector:
    """A collector of prometheus_client."""

    def __init__(self, service: Service, lora_facts: Mapping[str, str]):
        self._service, self._lora_facts = service, lora_facts
        self._values = (service.model_name, "0")

    def describe(self) -> list[Any]:
        """Return nothing, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        versions = {"version": __version__, "jax": importlib.metadata.version("jax")}
        yield self._info("swiftkv:build_info", "Versions.", versions)
        if self._service.is_open:
            engine = self._service.engine
            yield self._info("vllm:cache_config_info", "The KV cache.", self._service.cache_facts)
            if self._lora_facts:  # readers of several servers look for the latest
                text, now = "Adapters of requests, and the time.", time.time()
                yield self._info("vllm:lora_requests_info", text, self._lora_facts, now)
            yield self._histogram(engine.iteration_tokens)
            for row in self._of_engine(engine.snapshot, self._service.admission):
                yield self._family(*row)
        for row in self._of_requests():
            yield self._family(*row)
        yield from map(self._histogram, self._service.metrics.histograms)
        answers = Counter("swiftkv:http_requests", "Answers.", labels=["route", "status"])
        for (route, status), count in sorted(self._service.metrics.http.items()):
            answers.add_metric([route, str(status)], count)
        yield answers

    def _of_engine(self, snapshot: Snapshot, admission: Admission) -> Iterator[Row]:
        load = snapshot.load
        prefix = snapshot.prefix
        waiting = self._service.num_waiting
        running = load.num_running + load.num_prefilling
        text = "Sequences that decode, and requests in prefill."
        yield Gauge, "vllm:num_requests_running", text, running
        yield Gauge, "vllm:num_requests_waiting", "Requests that wait.", waiting
        name = "vllm:num_requests_waiting_by_reason"
        text = "Requests that wait: for capacity; none is put off for another reason."
        yield Gauge, name, text, {"capacity": waiting, "deferred": 0}, "reason"
        usage = load.pages_in_use / max(load.num_pages, 1)
        for of in ("", "gpu_"):  # vLLM's names, and its older ones, which some routers still read
            name = f"vllm:{of or 'kv_'}cache_usage_perc"
            yield Gauge, name, "Share of the pages that requests hold.", usage
            name = f"vllm:{of}prefix_cache"
            yield Counter, f"{name}_queries", "Prompt tokens looked up.", prefix.queries
            local = prefix.hits - prefix.host_hits
            yield Counter, f"{name}_hits", "Prompt tokens found on the device.", local
        yield from _of_tiers(load.tiers, prefix)
        text = "Prompt tokens processed, those found in the prefix cache included."
        yield Counter, "vllm:prompt_tokens", text, snapshot.stats.prompt_tokens
        text = "Prompt tokens found in the prefix cache."
        yield Counter, "vllm:prompt_tokens_cached", text, prefix.hits
        text = "Requests that made room for earlier ones."
        yield Counter, "vllm:num_preemptions", text, snapshot.stats.preemptions
        for name, field, text in _STATS:
            yield Counter, f"swiftkv:{name}", text, getattr(snapshot.stats, field)
        if number := self._service.num_speculative_tokens:
            yield from _of_drafts(snapshot.stats.speculation, number)
        yield Counter, "swiftkv:engine_idle_seconds", "Time without work.", snapshot.idle_seconds
        text = "Prompt tokens not cached yet."
        yield Gauge, "swiftkv:queued_tokens", text, admission.tokens
        events = self._service.kv_events
        if events is not None and (batches := events.batches) is not None:
            text = "Steps with events of the prefix cache."
            yield Counter, "swiftkv:kv_event_batches", text, batches.num_batches
            text = "Those for which the publisher's queue had no room."
            yield Counter, "swiftkv:kv_event_batches_dropped", text, batches.num_dropped
        refused = dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), 0)
        refused |= admission.rejected
        yield Counter, "vllm:admission_rejections", "Requests refused.", refused, "reason"

    def _of_requests(self) -> Iterator[Row]:
        metrics = self._service.metrics
        yield Counter, "vllm:generation_tokens", "Tokens of answers.", metrics.generation_tokens
        ended = dict.fromkeys(("stop", "length", "abort", "error"), 0) | metrics.finished
        yield Counter, "vllm:request_success", "Sequences ended.", ended, "finished_reason"
        text = "Tokens behind an answer's end."
        yield Counter, "swiftkv:wasted_tokens", text, metrics.wasted_tokens
        yield Counter, "swiftkv:slow_clients", "Streams aborted unread.", metrics.slow_clients
        left = dict.fromkeys(STATES, 0) | metrics.disconnects
        yield Counter, "swiftkv:client_disconnects", "Clients that left.", left, "state"
        text = "Longest delay of the connections' thread in the last minute."
        yield Gauge, "swiftkv:loop_lag_seconds", text, metrics.loop_lag.value
        yield Gauge, "swiftkv:connections", "Open connections.", metrics.num_connections()

    def _family(
        self,
        kind: type[Gauge | Counter],
        name: str,
        text: str,
        value: float | Mapping[str | tuple[str, ...], float],
        *labels: str,
    ) -> Metric:
        family = kind(name, text, labels=[*LABELS, *labels])
        for one, count in (value if isinstance(value, Mapping) else {(): value}).items():
            family.add_metric([*self._values, *((one,) if isinstance(one, str) else one)], count)
        return family

    def _info(self, name: str, text: str, facts: Mapping[str, str], value: float = 1) -> Metric:
        """Facts, as labels of a number."""
        family = Gauge(name, text, labels=[*LABELS, *facts])
        family.add_metric([*self._values, *facts.values()], value)
        return family

    def _histogram(self, found: Histogram) -> Metric:
        family = HistogramMetricFamily(found.name, found.text, labels=LABELS)
        family.add_metric(self._values, found.cumulated(), found.sum)
        return family
