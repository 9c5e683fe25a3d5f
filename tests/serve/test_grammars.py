"""Compiling of grammars: who leaves, who takes long, who asks for the same again."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from swiftkv_jax.infer.structured.structured_outputs import json_grammar
from swiftkv_jax.serve.api import generate
from swiftkv_jax.serve.text import grammars
from swiftkv_jax.serve.text.grammar_process import COMPILE_SECONDS
from swiftkv_jax.serve.text.grammars import MAX_CACHED, WORKERS, GrammarQueue
from swiftkv_jax.serve.text.prompts import LONG

BODY = {"prompt": "hello", "max_tokens": 5}
ENDLESS = "start: A\nA: " + " & ".join(f"/(.{{{p}}})*/" for p in (2, 3, 5, 7, 11, 13, 17, 19, 23))
"""A grammar with as many states as the product of these numbers."""
COMPLETIONS = "/v1/completions"


class Slow:
    """A compiler that waits for `go`, and notes what it has begun."""

    def __init__(self, compile_grammar):
        self._compile, self.go, self.begun = compile_grammar, threading.Event(), []

    def compile_grammar(self, grammar: str):
        self.begun.append(grammar)
        assert self.go.wait(20)
        return self._compile(grammar)

    def close(self):
        pass


@pytest.fixture
def slow(compiler) -> Iterator[Any]:
    made = Slow(compiler.compile_grammar)
    yield made
    made.go.set()


@pytest.fixture
def of_server(running, slow, monkeypatch):
    """`slow`, as the compiler of `running`."""
    monkeypatch.setattr(running.app, "grammars", GrammarQueue(slow, queue_timeout=20.0))
    return slow


def test_grammars_of_clients_that_have_left_are_not_compiled(running, of_server):
    """They fill no queue, nor what is admitted; and prompts are not held up meanwhile."""
    forms = [{"structured_outputs": {"regex": "a" * (number + 1)}} for number in range(20)]
    held = [running.connect(BODY | form) for form in forms]
    admission = running.app.service.admission
    running.until(lambda: admission.sequences == len(forms))
    running.until(lambda: len(of_server.begun) == WORKERS)
    for one in held[:-1]:
        one.close()
    running.until(lambda: admission.sequences == 1)
    assert running.post(COMPLETIONS, BODY)[0] == 200
    assert running.post("/tokenize", {"prompt": "hello"})[0] == 200
    assert len(of_server.begun) == WORKERS
    of_server.go.set()
    assert b" 200 " in held[-1].recv(4096)
    held[-1].close()
    assert len(of_server.begun) <= WORKERS + 1


def test_the_time_of_a_request_counts_while_its_grammar_waits(running, of_server):
    body = BODY | {"structured_outputs": {"regex": "abc"}}
    status, answer = running.post(COMPLETIONS, body, x_request_timeout_ms="200")
    assert status == 504 and answer["error"]["code"] == "request_timeout"
    assert not of_server.go.is_set() and running.app.service.admission.sequences == 0


def test_a_grammar_that_takes_long_is_refused(start):
    """Its work is one that llguidance does not limit; others go on, and no thread stays busy."""
    running = start(checks_grammars=True)
    form = {"structured_outputs": {"grammar": ENDLESS}}
    begun = time.monotonic()
    held = [running.connect(BODY | form | {"seed": seed}) for seed in range(2)]
    running.until(lambda: running.app.grammars._compiling)
    assert running.post(COMPLETIONS, BODY | {"structured_outputs": {"regex": "n+"}})[0] == 200
    assert time.monotonic() - begun < COMPILE_SECONDS
    for one in held:
        one.settimeout(20)
        answer = one.recv(4096)
        assert b" 400 " in answer and b"takes more than 2 s to compile" in answer
        assert b'"param":"structured_outputs"' in answer and b"invalid_grammar" in answer
        one.close()
    assert time.monotonic() - begun < COMPILE_SECONDS + 3
    running.until(lambda: not running.app.grammars.is_busy)


def test_long_schemas_are_read_in_a_thread(running, monkeypatch):
    """So that no other request waits."""
    threads, read = [], generate.form_of

    def noting(*arguments):
        threads.append(threading.current_thread().name)
        return read(*arguments)

    monkeypatch.setattr(generate, "form_of", noting)
    for length in (10, LONG):
        schema = {"type": "object", "description": "x" * length}
        form = {"structured_outputs": {"json": schema}}
        assert running.post(COMPLETIONS, BODY | form)[0] == 200
    short, long = threads
    assert not short.startswith("tokenizer") and long.startswith("tokenizer")


def test_each_waits_for_a_turn_by_its_own_time(slow):
    """Who joins another has not waited as long."""

    async def run() -> None:
        queue, good = GrammarQueue(slow, queue_timeout=1.0), json_grammar(True)
        busy = [asyncio.ensure_future(queue.matcher_of(str(n), "p")) for n in range(WORKERS)]
        await asyncio.sleep(0.05)
        first = asyncio.ensure_future(queue.matcher_of(good, "p"))
        await asyncio.sleep(0.7)
        second = asyncio.ensure_future(queue.matcher_of(good, "p"))
        with pytest.raises(grammars.APIError) as caught:
            await first
        assert (caught.value.status, caught.value.code) == (408, "queue_timeout")
        slow.go.set()
        assert await second and slow.begun.count(good) == 1
        await asyncio.gather(*busy, return_exceptions=True)

    asyncio.run(run())


def test_waiting_for_a_turn_has_an_end(slow):
    async def run() -> None:
        queue = GrammarQueue(slow, queue_timeout=0.2)
        busy = [asyncio.ensure_future(queue.matcher_of(str(n), "p")) for n in range(WORKERS)]
        await asyncio.sleep(0.05)
        with pytest.raises(grammars.APIError) as caught:
            async with asyncio.timeout(3):
                await queue.matcher_of("another", "p")
        assert (caught.value.status, caught.value.code) == (408, "queue_timeout")
        for one in busy:
            one.cancel()

    asyncio.run(run())
    assert len(slow.begun) == WORKERS


def test_equal_grammars_are_compiled_once_and_few_are_kept(running, of_server):
    of_server.go.set()
    form = {"structured_outputs": {"regex": "[a-d]{3}"}, "seed": 1}
    texts = {running.post(COMPLETIONS, BODY | form)[1]["choices"][0]["text"] for _ in range(5)}
    assert len(texts) == 1 and len(of_server.begun) == 1, "no answer has moved the one that is kept"
    for number in range(MAX_CACHED):
        other = {"structured_outputs": {"regex": f"x{number}"}}
        assert running.post(COMPLETIONS, BODY | other)[0] == 200
    assert len(running.app.grammars._cached) == MAX_CACHED
    running.post(COMPLETIONS, BODY | form)
    assert len(of_server.begun) == MAX_CACHED + 2


def test_those_who_ask_at_once_wait_for_one_compilation(slow):
    """It goes on for those that stay, and ends with the last that leaves."""

    async def run() -> None:
        queue = GrammarQueue(slow, queue_timeout=20.0)
        good = json_grammar(True)
        asking = [asyncio.ensure_future(queue.matcher_of(good, "p")) for _ in range(3)]
        busy = asyncio.ensure_future(queue.matcher_of("busy", "p"))  # the threads have no room now
        left = [asyncio.ensure_future(queue.matcher_of("left", "p")) for _ in range(2)]
        bad = [asyncio.ensure_future(queue.matcher_of("bad", name)) for name in "qr"]
        await asyncio.sleep(0.1)
        for one in (asking[0], busy, *left):
            one.cancel()
        await asyncio.sleep(0.1)
        slow.go.set()
        first, second = await asyncio.gather(*asking[1:])
        assert first is second is await queue.matcher_of(good, "p")
        errors = await asyncio.gather(*bad, return_exceptions=True)
        assert [error.param for error in errors] == ["q", "r"]  # type: ignore[union-attr]
        assert slow.begun.count(good) == slow.begun.count("bad") == 1 and "left" not in slow.begun
        assert not queue._compiling
        with pytest.raises(grammars.APIError):  # a failure is not kept
            await queue.matcher_of("bad", "s")
        assert slow.begun.count("bad") == 2

    asyncio.run(run())
