"""A line in the log every ten seconds while there is work: throughput, queue and cache."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple

from .service import Service

logger = logging.getLogger(__name__)

SECONDS = 10.0


class Counts(NamedTuple):
    """Counts up to a time."""

    time: float
    prompt_tokens: int
    new_tokens: int
    queries: int
    """Prompt tokens that were looked up in the prefix cache."""
    hits: int
    idle_seconds: float

    @classmethod
    def of(cls, service: Service) -> Counts:
        snapshot = service.engine.snapshot
        return cls(
            time.monotonic(),
            snapshot.stats.prompt_tokens,
            service.metrics.generation_tokens,
            snapshot.prefix.queries,
            snapshot.prefix.hits,
            snapshot.idle_seconds,
        )


async def log_load(service: Service) -> None:
    """Write a line every ten seconds in which something ran. Returns once the engine has failed."""
    before = Counts.of(service)
    while service.state != "failed":
        await asyncio.sleep(SECONDS)
        now = Counts.of(service)
        if service.num_admitted or now[1:3] != before[1:3]:
            logger.info("%s", line(service, before, now))
        before = now


def line(service: Service, before: Counts, now: Counts) -> str:
    """Return the line: rates between two times, and what runs now."""
    load = service.engine.snapshot.load
    seconds = max(now.time - before.time, 1e-3)
    queries = now.queries - before.queries
    hits = f"{(now.hits - before.hits) / queries:.0%}" if queries else "-"
    idle = min((now.idle_seconds - before.idle_seconds) / seconds, 1.0)
    return (
        f"{(now.prompt_tokens - before.prompt_tokens) / seconds:.0f} prompt tokens/s, "
        f"{(now.new_tokens - before.new_tokens) / seconds:.0f} new tokens/s, "
        f"{load.num_running} running, {service.num_waiting} waiting, "
        f"pages {load.pages_in_use / max(load.num_pages, 1):.0%}, "
        f"prefix cache hits {hits}, without work {idle:.0%}"
    )
