"""What a server does besides being fast: does it stop for clients that leave, refuse what it cannot
take, end what it has begun, and honour what it is asked for?

Seen from outside. Parameters are compared with what this package computes from the same weights
without a server: `honoured` is the same answer, `ignored` the one without the parameter.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import swiftkv_jax as skv

if TYPE_CHECKING:
    from .server import Server

LONG = 300
"""Tokens of an answer that is still being written when its client leaves."""
REST_SECONDS = 3
SHORT = 32
CROWD = 100
"""Clients at once; this package's server is started with room for 32."""
BUSY_SHARE = 0.3
"""Of a core: a server that uses less does nothing for the client that has left."""


def probe(server: Server, model: Path, prompt: str) -> dict[str, str]:
    """Question -> answer, in words. Ends the server."""
    prompt = prompt[:200]
    found = parameters(server, model, prompt)
    found["stops when a client leaves a stream"] = _stops(server, prompt, stream=True)
    found["stops when a client leaves a whole answer"] = _stops(server, prompt, stream=False)
    found[f"refuses some of {CROWD} clients at once"] = _refuses(server, prompt)
    found["ends a stream whole after SIGTERM"] = _drains(server, prompt)
    return found


# Parameters -------------------------------------------------------------------


def parameters(server: Server, model: Path, prompt: str) -> dict[str, str]:
    served = skv.load(model, dtype="float32")
    tokenizer = served.tokenizer
    ids = tokenizer(prompt)["input_ids"]

    def expected(**params: Any) -> str:
        params = {"max_tokens": SHORT, "temperature": 0.0} | params
        return tokenizer.decode(skv.generate(served, [ids], **params)[0])

    greedy = expected()
    stop = greedy[len(greedy) // 2 :][:3]
    before = greedy[: greedy.index(stop)]
    token = tokenizer("return")["input_ids"][-1]

    def text(answer: Any, number: int = 0) -> str:
        return answer["choices"][number]["text"]

    # What to send, what is right, and what an answer that pays no heed to it would be
    cases: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Any, Any]] = {
        "`temperature` 0": ({}, text, greedy, None),
        "`max_tokens`": ({"max_tokens": 3}, lambda a: a["usage"]["completion_tokens"], 3, SHORT),
        "`stop`": ({"stop": [stop]}, text, before, greedy),
        "`n`": ({"n": 2}, lambda a: len(a["choices"]), 2, 1),
        "`echo`": ({"echo": True}, text, prompt + greedy, greedy),
        "`logprobs`": (
            {"logprobs": 2},
            lambda a: len((a["choices"][0].get("logprobs") or {}).get("tokens", ())),
            SHORT,
            0,
        ),
        "a prompt of token ids": ({"prompt": ids}, text, greedy, None),
        "two prompts": (
            {"prompt": [prompt, prompt]},
            lambda a: [text(a, 0), text(a, 1)],
            [greedy, greedy],
            None,
        ),
    }
    for name, value in (
        ("logit_bias", {token: 100.0}),
        ("presence_penalty", 2.0),
        ("frequency_penalty", 1.5),
    ):
        cases[f"`{name}`"] = ({name: value}, text, expected(**{name: value}), greedy)
    found = {}
    for name, (body, read, right, unheeded) in cases.items():
        full = {"prompt": prompt, "max_tokens": SHORT, "temperature": 0} | body
        found[name] = _verdict(server, full, read, right, unheeded)
    found["`seed`"] = _seeds(server, prompt)
    status, _ = server.ask({"prompt": prompt, "max_tokens": 1, "no_such_field": 1})
    found["a field that does not exist"] = f"refused ({status})" if status >= 400 else "ignored"
    return found


def _verdict(
    server: Server, body: dict[str, Any], read: Callable[[Any], Any], right: Any, unheeded: Any
) -> str:
    if right == unheeded:
        return "makes no difference here"
    status, answer = server.ask(body)
    if status >= 400:
        return f"refused ({status})" if status < 500 else f"fails ({status})"
    try:
        found = read(answer)
    except LookupError:
        return "another answer"
    if found == right:
        return "honoured"
    return "ignored" if found == unheeded else "another answer"


def _seeds(server: Server, prompt: str) -> str:
    """The same draws for the same seed, others for another."""
    body = {"prompt": prompt, "max_tokens": SHORT, "temperature": 1.0}
    answers = [server.ask(body | {"seed": seed}) for seed in (1, 1, 2)]
    if any(status >= 400 for status, _ in answers):
        return f"refused ({answers[0][0]})"
    first, again, other = (answer["choices"][0]["text"] for _, answer in answers)
    return "honoured" if first == again != other else "ignored"


# Load -------------------------------------------------------------------------


def _stops(server: Server, prompt: str, *, stream: bool) -> str:
    """Whether the processor rests `REST_SECONDS` after the client has left: what was sent to the
    device before that runs to its end, here up to two calls of eight steps."""
    body = {"prompt": prompt, "max_tokens": LONG, "temperature": 0, "stream": stream}
    connection = _post(server, body)
    if stream:
        connection.getresponse().readline()
    time.sleep(1)
    _leave(connection)
    time.sleep(REST_SECONDS)
    before = server.cpu_seconds()
    time.sleep(2)
    busy = (server.cpu_seconds() - before) / 2
    _wait_until_idle(server)
    return "yes" if busy < BUSY_SHARE else f"no ({busy:.1f} cores busy)"


def _post(server: Server, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=600)
    headers = {"content-type": "application/json"}
    content = json.dumps({"model": server.model} | body)
    connection.request("POST", "/v1/completions", content, headers)
    return connection


def _leave(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _wait_until_idle(server: Server) -> None:
    busy = True
    while busy:
        before = server.cpu_seconds()
        time.sleep(1)
        busy = server.cpu_seconds() - before > BUSY_SHARE


def _refuses(server: Server, prompt: str) -> str:
    def one(_: int) -> tuple[int, float]:
        start = time.perf_counter()
        status, _ = server.ask({"prompt": prompt, "max_tokens": 1, "temperature": 0})
        return status, time.perf_counter() - start

    with concurrent.futures.ThreadPoolExecutor(CROWD) as pool:
        statuses = list(pool.map(one, range(CROWD)))
    refused = [seconds for status, seconds in statuses if status in (429, 503)]
    longest = max(seconds for status, seconds in statuses)
    if not refused:
        return f"no (the last waits {longest:.1f} s)"
    return f"yes ({len(refused)} within {max(refused):.2f} s; the last waits {longest:.1f} s)"


def _drains(server: Server, prompt: str) -> str:
    """SIGTERM at the first text of a stream."""
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0}
    try:
        answer = server.stream(body, on_text=server.process.terminate)
    except (OSError, http.client.HTTPException) as error:
        return f"no ({type(error).__name__})"
    if answer.finish_reason is None:
        return "no (cut without a word)"
    code = server.process.wait(timeout=60)
    return f"yes (exit code {code})"
