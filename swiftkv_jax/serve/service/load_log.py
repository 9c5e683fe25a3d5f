"""A line in the log every ten seconds while there is work: throughput, queue and cache."""

from __future__ import annotations

import asyncio
import logging
import time

from .engine_thread import Snapshot
from .service import Service

logger = logging.getLogger(__name__)

SECONDS = 10.0
Counts = tuple[float, Snapshot, int]
"""(time, the engine, tokens of answers)"""


async def log_load(service: Service) -> None:
    """Write a line every ten seconds in which something ran. Returns once the engine has failed."""
    before = _counts(service)
    while service.state != "failed":
        await asyncio.sleep(SECONDS)
        now = _counts(service)
        prompts = [counts[1].stats.prompt_tokens for counts in (before, now)]
        if service.num_admitted or prompts[0] != prompts[1] or now[2] != before[2]:
            logger.info("%s", line(service, before, now))
        before = now


def _counts(service: Service) -> Counts:
    return time.monotonic(), service.engine.snapshot, service.metrics.generation_tokens


def line(service: Service, before: Counts, now: Counts) -> str:
    """Return the line: rates between two times, and what runs now."""
    load = service.engine.snapshot.load
    start, first, old_tokens = before
    end, last, new_tokens = now
    seconds = max(end - start, 1e-3)
    queries = last.prefix.queries - first.prefix.queries
    hits = "-"
    if queries:
        hits = f"{(last.prefix.hits - first.prefix.hits) / queries:.0%}"
    idle = min((last.idle_seconds - first.idle_seconds) / seconds, 1.0)
    return (
        f"{(last.stats.prompt_tokens - first.stats.prompt_tokens) / seconds:.0f} prompt tokens/s, "
        f"{(new_tokens - old_tokens) / seconds:.0f} new tokens/s, "
        f"{load.num_running} running, {service.num_waiting} waiting, "
        f"pages {load.pages_in_use / max(load.num_pages, 1):.0%}, "
        f"prefix cache hits {hits}, without work {idle:.0%}"
    )
