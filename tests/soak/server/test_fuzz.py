"""10,000 mutated requests and 2,000 drawn from the document that the server gives of itself: every
answer is one, none is an error of the server, and clients that ask properly notice nothing."""

import asyncio
import collections
import json
import random
import statistics
import time

from tests.soak.server.bounds import (
    EXCHANGE_P99,
    FUZZ_GROWTH_MB,
    GOOD_FACTOR_FUZZ,
    MAX_ERROR_BYTES,
)
from tests.soak.server.client import ask, events, latency, quantile, request, responses, talk
from tests.soak.server.generated import Generator
from tests.soak.server.mutated import Mutator, Raw

MUTATED, DRAWN, WARMUP, CLIENTS = 10_000, 2_000, 500, 8
OF_NO_FIELD = ("invalid_json", "invalid_request")
"""Codes of what is no JSON, or no HTTP."""
LAST_EVENTS = (
    "response.completed",
    "response.incomplete",
    "response.failed",
    "message_stop",
    "error",
)
"""Types of the last event of a stream of the Responses and Messages APIs, which have no [DONE]."""
MESSAGE = {"type", "message"}
"""Fields of an error of the Messages API; some have `details`."""
GOOD = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}


def test_nothing_that_clients_send_is_an_error_of_the_server(start_mock, soak):
    running = start_mock(options={"header_timeout": 2.0, "body_timeout": 2.0})
    rng = random.Random(0)
    generator = Generator(json.loads(running.get("/openapi.json")), rng)
    mutator = Mutator(generator, rng)
    requests = [mutator.next() for _ in range(MUTATED)]
    paths = sorted(generator.bodies)
    requests += [
        Raw("drawn", request(path, generator.body(path)))
        for path in (rng.choice(paths) for _ in range(DRAWN))
    ]
    rng.shuffle(requests)
    statuses: collections.Counter[int] = collections.Counter()
    times: list[float] = []
    memory: list[float] = []
    wrong: list[str] = []

    async def run(queue: list[Raw]) -> None:
        while queue:
            if len(queue) == MUTATED + DRAWN - WARMUP:
                memory.append(running.memory())
            one = queue.pop()
            begun = time.monotonic()
            content = await talk(running.port, one.content, seconds=20.0 if one.is_whole else 0.3)
            if one.is_whole:  # a part of a request is waited for
                times.append(time.monotonic() - begun)
            for status, message in judged(one, content):
                statuses[status] += 1
                if message:
                    wrong.append(f"{one.kind}: {message}: {one.content[:500]!r}")

    async def all_of_them() -> tuple[list[float], list[float]]:
        idle = await latency(running.port, GOOD, 3.0, pause=0.1)
        expected = (await ask(running.port, "/v1/completions", GOOD)).body
        queue = list(requests)
        clients = [asyncio.ensure_future(run(queue)) for _ in range(CLIENTS)]
        busy = []
        while not all(one.done() for one in clients):
            busy += await latency(running.port, GOOD, 0.5, pause=1.0)
            answer = (await ask(running.port, "/v1/completions", GOOD)).body
            assert json.loads(answer)["choices"] == json.loads(expected)["choices"]
        await asyncio.gather(*clients)
        return idle, busy

    idle, busy = asyncio.run(all_of_them())
    growth = running.memory() - memory[0]
    assert not wrong, "\n".join([f"{len(wrong)} answers are wrong", *wrong[:20]])
    assert statuses[200] > 1_000 and statuses[400] > 3_000
    soak.record(
        "fuzz",
        exchange_p50_ms=1e3 * statistics.median(times),
        exchange_p99_ms=1e3 * quantile(times, 0.99),
        growth_mb=growth,
        idle_p50_ms=1e3 * statistics.median(idle),
        busy_p50_ms=1e3 * statistics.median(busy),
        busy_p99_ms=1e3 * quantile(busy, 0.99),
    )
    assert growth <= FUZZ_GROWTH_MB
    assert quantile(times, 0.99) <= soak.limit(EXCHANGE_P99)
    factor = soak.limit(GOOD_FACTOR_FUZZ)
    assert statistics.median(busy) <= factor * statistics.median(idle)
    running.check_empty()


def judged(one: Raw, content: bytes) -> list[tuple[int, str]]:
    """(status, what is wrong with it or "") of each answer."""
    try:
        answers = list(responses(content, head=one.head))
    except ValueError as error:
        return [(0, str(error))]
    if not answers and one.is_whole:
        return [(0, "no answer")]
    return [(answer.status, _complaint(one, answer)) for answer in answers]


def _complaint(one: Raw, answer) -> str:
    if answer.status >= 500:
        return f"status {answer.status} {answer.body[:500]!r}"
    if not answer.is_whole:
        return f"cut: {answer.body[-200:]!r}" if one.is_whole else ""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        last = events(answer.body)[-1]
        if last != "[DONE]" and last.get("type") not in LAST_EVENTS:
            return f"a stream ends with {last!r}"
        failed = any(kind in answer.body.decode() for kind in ("server_error", "api_error"))
        return "an error of the server" if failed else ""
    if answer.status < 400 or one.head:
        return ""
    if len(answer.body) > MAX_ERROR_BYTES:
        return f"{len(answer.body)} bytes"
    try:
        found = json.loads(answer.body)
        error = found["error"]
    except (ValueError, KeyError, TypeError):
        return f"not of the shape of errors: {answer.body[:200]!r}"
    if found.keys() == {"type", "error", "request_id"} and error.keys() - {"details"} == MESSAGE:
        names = ": " in error["message"] or "`" in error["message"]  # of /v1/messages
        return f"names no field: {error}" if answer.status == 400 and not names else ""
    if error.keys() != {"message", "type", "param", "code"}:
        return f"not of the shape of errors: {error}"
    of_all = error["code"] in OF_NO_FIELD or error["message"].startswith("the body: ")
    if answer.status == 400 and error["param"] is None and not of_all:
        return f"names no field: {error}"
    return ""
