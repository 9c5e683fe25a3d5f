"""Mixed requests for half an hour, of which clients leave 5 %: does the server grow or slow down?

    python -m tests.soak.server.long_run                 half an hour
    python -m tests.soak.server.long_run --minutes 5     less: then the slope tells little

The server is a process with the real engine on a model runner without a model. Its resident memory
is sampled every two seconds; one client at a time times the waits between the events of a stream.
What happens before --settle has ended does not count. JSON goes to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from swiftkv_jax import cli
from tests.soak.server import bounds
from tests.soak.server.client import ask, connected, request, responses, talk
from tests.soak.server.conftest import MockServer, wait_until_ready

CLIENTS, LEAVES, SAMPLE_SECONDS, WINDOW_SECONDS = 16, 0.05, 2.0, 60.0
SERVER = {
    "engine": {"slots": 32, "num_pages": 4096, "max_model_len": 512, "steps": 4},
    "step_seconds": 0.02,
    "counts": False,
}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def body_of(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body)"""
    text = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 200)))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 100), "stream": rng.random() < 0.6}
    if rng.random() < 0.2:
        body |= {"n": 2, "seed": rng.randrange(100)}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3}
    if rng.random() < 0.5 or "logprobs" in body:
        return CHAT, body | {"messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.1:
        body |= {"structured_outputs": {"regex": "[a-d]{3,20}"}}
    return COMPLETIONS, body | {"prompt": text}


async def client(port: int, seed: int, until: float, counts: collections.Counter[str]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until:
        path, body = body_of(rng)
        if rng.random() < LEAVES:
            counts["left"] += 1
            async with connected(port, request(path, body)) as (reader, _):
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(rng.random()):
                        await reader.read(2**16)
        else:
            (answer,) = responses(await talk(port, request(path, body), seconds=120))
            counts["answered" if answer.status == 200 and answer.is_whole else "failed"] += 1
        await asyncio.sleep(rng.random() * 0.2)


async def time_events(port: int, begun: float, until: float, waits: list[tuple[float, float]]):
    """Adds (when, seconds since the event before) of streams, one after another."""
    body = {"prompt": "steady", "max_tokens": 200, "ignore_eos": True, "stream": True}
    while time.monotonic() < until:
        async with connected(port, request(COMPLETIONS, body)) as (reader, _):
            before = None
            while more := await reader.read(2**16):
                now = time.monotonic()
                if b'"text"' in more:
                    if before is not None:
                        waits.append((now - begun, now - before))
                    before = now


async def sample(server: MockServer, begun: float, until: float, memory: list[tuple[float, float]]):
    while time.monotonic() < until:
        memory.append((time.monotonic() - begun, server.memory()))
        await asyncio.sleep(SAMPLE_SECONDS)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line nearest to them, by least squares."""
    xs, ys = zip(*points, strict=True)
    return statistics.linear_regression(xs, ys).slope


def windows(waits: Sequence[tuple[float, float]], settle: float) -> list[float]:
    """The median wait of each minute after `settle` seconds."""
    by_window: collections.defaultdict[int, list[float]] = collections.defaultdict(list)
    for at, wait in waits:
        if at >= settle:
            by_window[int((at - settle) // WINDOW_SECONDS)].append(wait)
    return [statistics.median(by_window[number]) for number in sorted(by_window)]


def drift(medians: Sequence[float]) -> float:
    """By how much of itself the last third of the medians is above the first."""
    third = max(len(medians) // 3, 1)
    first, last = statistics.median(medians[:third]), statistics.median(medians[-third:])
    return last / first - 1


def run(minutes: float, settle: float) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.soak.server.mock_server", json.dumps(SERVER)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    counts: collections.Counter[str] = collections.Counter()
    waits: list[tuple[float, float]] = []
    memory: list[tuple[float, float]] = []

    async def all_of_them(server: MockServer) -> None:
        begun = time.monotonic()
        until = begun + 60 * minutes
        await asyncio.gather(
            sample(server, begun, until, memory),
            time_events(server.port, begun, until, waits),
            *(client(server.port, seed, until, counts) for seed in range(CLIENTS)),
        )
        assert (await ask(server.port, "/health", b"", method="GET")).status == 200

    try:
        assert process.stdout is not None
        server = MockServer(int(process.stdout.readline()), process)
        wait_until_ready(server)
        asyncio.run(all_of_them(server))
    finally:
        process.kill()
        process.wait(20)
    settled = [point for point in memory if point[0] >= 60 * settle]
    medians = windows(waits, 60 * settle)
    return {
        "minutes": minutes,
        "settle_minutes": settle,
        "requests": dict(counts),
        "mb_per_hour": 3600 * slope(settled),
        "mb_first": settled[0][1],
        "mb_last": settled[-1][1],
        "itl_p50_seconds": medians,
        "itl_drift": drift(medians),
        "memory_mb": [[round(at), mb] for at, mb in memory[:: max(len(memory) // 200, 1)]],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.ArgumentParser(
        prog="python -m tests.soak.server.long_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, metavar="M", help="(default: %(default)g)")
    add(
        "--settle",
        type=float,
        metavar="M",
        help="minutes at the beginning that do not count (default: 5, of a shorter run a third)",
    )
    add("--output", type=Path, metavar="FILE", help="JSON (default: in benchmarks/results)")
    args = parser.parse_args(argv)
    settle = min(5.0, args.minutes / 3) if args.settle is None else args.settle
    return cli.run(lambda: measure(args.minutes, settle, args.output), parser)


def measure(minutes: float, settle: float, output: Path | None) -> int:
    facts = report.environment(seed=0)
    document = facts | run(minutes, settle)
    path = output or report.default_path(bounds.LONG_RUN, "cpu", facts["date"])
    report.write_json(path, document)
    print(f"{json.dumps(document, indent=1)}\nwritten to {path}")
    return cli.ERROR if document["requests"].get("failed") else cli.OK


if __name__ == "__main__":
    sys.exit(main())
