"""1,000 requests at once where 64 may wait and run: the surplus is refused at the door."""

import asyncio
import collections
import statistics
import time

from tests.soak.server import bounds
from tests.soak.server.client import ask, connected, quantile, request, responses

REQUESTS, LIMIT = 1_000, 64
BODY = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}


def test_the_surplus_is_refused_and_the_rest_ends(start_mock, soak):
    running = start_mock(
        engine={"slots": LIMIT, "max_model_len": 512, "num_pages": 128 * LIMIT},
        step_seconds=0.05,
        options={"max_num_queued_reqs": LIMIT},
    )
    statuses: collections.Counter[int] = collections.Counter()
    refused: list[float] = []
    health: list[float] = []
    tokenized = running.metric("swiftkv:tokenize_seconds_count")

    async def one(start: asyncio.Event) -> None:
        async with connected(running.port) as (reader, writer):
            opened.release()
            await start.wait()
            begun = time.monotonic()
            writer.write(request("/v1/completions", BODY))
            answer = await reader.read()
            (found,) = responses(answer)
            statuses[found.status] += 1
            if found.status == 429:
                refused.append(time.monotonic() - begun)
                assert 1 <= int(found.headers["retry-after"]) <= 60
                assert b"queue_full" in found.body
            else:
                assert found.is_whole and b'"completion_tokens":400' in found.body

    async def probe() -> None:
        while True:
            begun = time.monotonic()
            assert (await ask(running.port, "/health", b"", method="GET")).status == 200
            health.append(time.monotonic() - begun)
            await asyncio.sleep(0.02)

    opened = asyncio.Semaphore(0)

    async def all_of_them() -> None:
        start = asyncio.Event()
        clients = [asyncio.ensure_future(one(start)) for _ in range(REQUESTS)]
        for _ in range(REQUESTS):
            await opened.acquire()
        probing = asyncio.ensure_future(probe())
        start.set()
        await asyncio.gather(*clients)
        probing.cancel()

    asyncio.run(all_of_them())
    soak.record(
        "overload",
        refused_p50_ms=1e3 * statistics.median(refused),
        refused_max_ms=1e3 * max(refused),
        refused_each_ms=1e3 * max(refused) / len(refused),
        health_p50_ms=1e3 * statistics.median(health),
        health_p99_ms=1e3 * quantile(health, 0.99),
    )
    assert max(refused) <= soak.limit(bounds.REFUSED_WITHIN_ASSERTED)
    assert quantile(health, 0.99) <= soak.limit(bounds.HEALTH_P99)
    assert statuses == {200: LIMIT, 429: REQUESTS - LIMIT}
    assert running.metric("swiftkv:tokenize_seconds_count") - tokenized == LIMIT
    rejected = running.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs")
    assert rejected == REQUESTS - LIMIT
    running.check_empty()
