"""256 clients that leave at any moment, and some that never read, beside others that stay: nothing
is held afterwards, all is counted, and those that stay get what they get alone."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import socket
import threading
import time
from typing import Any

from tests.serve.process import SMALL, serving
from tests.soak.server.client import ask, connected, events, request, responses, talk
from tests.soak.server.conftest import MockServer, metric

CLIENTS, SECONDS, STEADY, STEPS = 256, 60.0, 8, 3
COMPLETIONS = "/v1/completions"
MOMENTS = ("within the head", "within the body", "at once", "soon", "first event", "mid", "end")
NEVER_READS = 0.1
LOGGED = ("prompt_tokens", "completion_tokens", "finish_reasons")
USAGE = {"stream_options": {"include_usage": True}}
STEADY_PROMPTS = ("steady", "also steady", "the third")


@dataclasses.dataclass
class Crowd:
    """What the clients of a run did and got."""

    moments: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """At which they left."""
    asked: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Request id -> body."""
    usages: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Request id -> usage, and reasons of the end, that a client got which stayed."""
    same: int = 0
    """Answers of those that stay that were as alone."""

    def request(self, body: dict[str, Any]) -> tuple[str, bytes]:
        """(id, bytes)"""
        name = f"client-{len(self.asked)}"
        self.asked[name] = body
        return name, request(COMPLETIONS, body, headers={"X-Request-Id": name})

    def got(self, name: str, found: list[Any]) -> None:
        """The events of an answer that is whole."""
        assert found[-1] == "[DONE]"
        choices = [choice for event in found[:-1] for choice in event["choices"]]
        reasons = {one["finish_reason"] for one in choices} - {None}
        self.usages[name] = found[-2]["usage"] | {"finish_reasons": sorted(reasons)}


def body_of(rng: random.Random, most: int) -> dict[str, Any]:
    prompt = "".join(rng.choices("abcdefgh ", k=rng.randint(1, most // 2)))
    found = {"prompt": prompt, "max_tokens": rng.randint(1, most // 3), "stream": True}
    found |= USAGE
    if rng.random() < 0.3:
        found |= {"n": 2, "temperature": 1.0, "seed": rng.randrange(100)}
    if rng.random() < 0.1:
        found |= {"structured_outputs": {"regex": "[a-d]{3,20}"}}
    return found


async def leave(port: int, rng: random.Random, most: int, crowd: Crowd) -> None:
    """Ask, and leave at a random moment."""
    name, content = crowd.request(body_of(rng, most))
    moments = crowd.moments
    if rng.random() < NEVER_READS:
        moments["never reads"] += 1
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, content)
            await asyncio.sleep(rng.random() * 8)
        return
    moment = rng.choice(MOMENTS)
    moments[moment] += 1
    if moment.startswith("within"):
        head = content.index(b"\r\n\r\n") + 4
        cut = rng.randrange(head) if moment.endswith("head") else rng.randrange(head, len(content))
        async with connected(port, content[:cut]):
            await asyncio.sleep(rng.random() * 0.2)
        return
    async with connected(port, content) as (reader, _):
        if moment == "soon":
            await asyncio.sleep(rng.random() * 2)
        if moment in ("at once", "soon"):
            return
        answer, limit = b"", {"first event": 1, "mid": rng.randint(2, 20), "end": 10**9}[moment]
        with contextlib.suppress(OSError):
            while answer.count(b"data: ") < limit and (more := await reader.read(2**16)):
                answer += more
        if moment == "end":
            (found,) = responses(answer)
            assert found.is_whole and found.status in (200, 429), found
            if found.status == 200:
                crowd.got(name, events(found.body))


async def steady(port: int, prompt: str, max_tokens: int, crowd: Crowd) -> Any:
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    name, content = crowd.request(asked | USAGE)
    content = await talk(port, content, seconds=120)
    (answer,) = responses(content)
    assert answer.status == 200, answer
    found = events(answer.body)
    crowd.got(name, found)
    return "".join(event["choices"][0]["text"] for event in found[:-1] if event["choices"])


async def chaos(port: int, *, clients: int, seconds: float, most: int, tokens: int) -> Crowd:
    crowd = Crowd()
    alone = {prompt: await steady(port, prompt, tokens, crowd) for prompt in STEADY_PROMPTS}
    until = time.monotonic() + seconds

    async def leaving(seed: int) -> None:
        rng = random.Random(seed)
        await asyncio.sleep(rng.random())
        while time.monotonic() < until:
            await leave(port, rng, most, crowd)

    async def staying(seed: int) -> None:
        while time.monotonic() < until:
            prompt = STEADY_PROMPTS[seed % len(STEADY_PROMPTS)]
            assert await steady(port, prompt, tokens, crowd) == alone[prompt]
            crowd.same += 1

    await asyncio.gather(*map(leaving, range(clients)), *map(staying, range(STEADY)))
    return crowd


def test_clients_that_leave_leave_nothing_behind(start_mock, soak):
    running = start_mock(
        engine={"slots": 64, "num_pages": 2048, "max_model_len": 256, "steps": STEPS},
        step_seconds=0.02,
        send_buffer=4096,
        options={
            "max_num_queued_reqs": 1024,
            "max_num_queued_tokens": 100_000,
            "header_timeout": 3.0,
            "write_timeout": 5.0,
            "log_json": True,
        },
    )
    crowd = asyncio.run(chaos(running.port, clients=CLIENTS, seconds=SECONDS, most=200, tokens=40))
    moments, same = crowd.moments, crowd.same
    found = running.check_empty()
    ends = {
        reason: running.metric("vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert found["admitted"] == sum(ends.values()) and ends["error"] == 0
    assert ends["abort"] > 100 and ends["length"] + ends["stop"] > 100
    assert min(moments[one] for one in (*MOMENTS, "never reads")) > 10 and same > STEADY
    assert 0 < found["most_late_tokens"] <= 2 * STEPS
    check_log(running, crowd)
    soak.record(
        "chaos",
        clients=moments.total(),
        sequences=found["admitted"],
        aborted=int(ends["abort"]),
        stayed=len(crowd.usages),
    )
    check_sums(running)


def check_log(running: MockServer, crowd: Crowd) -> None:
    """The metrics are the sums of the log's lines, and each client that stayed finds in its line
    what it got."""
    admitted = {line["id"]: line for line in running.log()}
    assert admitted.keys() <= crowd.asked.keys() and crowd.usages.keys() <= admitted.keys()
    for name, usage in crowd.usages.items():
        assert {key: admitted[name][key] for key in LOGGED} == {key: usage[key] for key in LOGGED}
    samples = sum(crowd.asked[name].get("n", 1) for name in admitted)
    expected = {
        "request_prompt_tokens_sum": sum(one["prompt_tokens"] for one in admitted.values()),
        "request_params_n_sum": samples,
        "request_success_total": samples,
    }
    assert {name: running.metric(f"vllm:{name}") for name in expected} == expected
    # A line of a client that left is written before the tokens of the calls that were under way.
    logged = sum(one["completion_tokens"] for one in admitted.values())
    tokens = running.metric("vllm:generation_tokens_total")
    assert tokens == running.metric("vllm:request_generation_tokens_sum")
    assert logged <= tokens <= logged + running.metric("swiftkv:wasted_tokens_total")


def check_sums(running) -> None:
    """What the metrics count of clients that stay is what these got."""
    names = (
        "generation_tokens_total",
        "request_success_total",
        "request_generation_tokens_sum",
        "request_prompt_tokens_sum",
        "request_params_n_sum",
    )
    before = [running.metric(f"vllm:{name}") for name in names]
    rng, got = random.Random(5), [0] * len(names)

    async def count() -> None:
        for _ in range(200):
            n = rng.choice((1, 1, 3))
            asked = {"prompt": "x" * rng.randint(1, 40), "max_tokens": rng.randint(1, 30), "n": n}
            answer = await ask(running.port, COMPLETIONS, asked)
            assert answer.status == 200
            usage = json.loads(answer.body)["usage"]
            tokens, prompt = usage["completion_tokens"], usage["prompt_tokens"]
            for at, one in enumerate((tokens, n, tokens, prompt, n)):
                got[at] += one

    asyncio.run(count())
    running.check_empty()
    after = [running.metric(f"vllm:{name}") for name in names]
    assert dict(zip(names, [b - a for a, b in zip(before, after, strict=True)], strict=True)) == (
        dict(zip(names, got, strict=True))
    )


def test_a_model_compiles_nothing_while_clients_leave(checkpoint, soak):
    options = [*SMALL, "--max-num-seqs", "8", "--max-num-queued-reqs", "512"]
    options += ["--max-num-queued-tokens", "100000"]
    with serving(checkpoint, *options) as server:
        log = threading.Thread(target=collections.deque, args=(server.lines, 0), daemon=True)
        log.start()  # a pipe that is full would stop the server
        port = int(server.url.rpartition(":")[2])
        crowd = asyncio.run(chaos(port, clients=64, seconds=30.0, most=90, tokens=24))
        moments, same = crowd.moments, crowd.same
        deadline = time.monotonic() + 30
        while any(
            metric(server.url, name)
            for name in (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
                "swiftkv:queued_tokens",
            )
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert metric(server.url, "swiftkv:compilations_total") == 0
        assert metric(server.url, "vllm:request_success_total", finished_reason="error") == 0
        assert same > STEADY
        soak.record("chaos_model", clients=moments.total(), same=same)
