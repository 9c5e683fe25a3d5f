"""What a step gives is made text a few events at a time, first tokens before all others."""

import asyncio
import sys

import pytest

from swiftkv_jax.serve import server
from swiftkv_jax.serve.service import backlog
from swiftkv_jax.serve.service.backlog import Backlog
from swiftkv_jax.serve.service.service import Service

BODY = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "seed": 1, "n": 8}


def test_answers_do_not_depend_on_slices(start, monkeypatch):
    alone = start(engine={"steps": 8}).post("/v1/completions", BODY)[1]["choices"]
    monkeypatch.setattr(backlog, "SLICE_EVENTS", 2)
    sizes: list[int] = []
    process = Service._process

    def counted(self, events):
        sizes.append(len(events))
        process(self, events)

    monkeypatch.setattr(Service, "_process", counted)
    running = start(engine={"steps": 8})
    assert running.post("/v1/completions", BODY)[1]["choices"] == alone
    assert len(sizes) > 10 and sorted(sizes)[-2] <= 8, "but for the first tokens"
    texts = dict.fromkeys(range(8), "")
    for event in running.events("/v1/completions", BODY)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {one["index"]: one["text"] for one in alone}
    running.check_empty()


def test_a_backlog_is_caught_up_with():
    """A quarter at a time, with tasks in between, in order."""

    async def run() -> tuple[list[list], int]:
        slices: list[list] = []
        found = Backlog(asyncio.get_running_loop(), slices.append)
        found.add([(number, None) for number in range(4096)])  # type: ignore[misc]
        turns = 0
        while found:
            await asyncio.sleep(0)
            turns += 1
        return slices, turns

    slices, turns = asyncio.run(run())
    assert [one for each in slices for one, _ in each] == list(range(4096))
    assert len(slices[0]) == 1024 and 5 < len(slices) < 25 and turns >= len(slices)


def test_events_of_one_request_before_those_of_others():
    async def run() -> list[list]:
        slices: list[list] = []
        found = Backlog(asyncio.get_running_loop(), slices.append)
        found.add([(number % 3, number) for number in range(9)])  # type: ignore[misc]
        found.process_of({7})
        found.process_of({1})
        found.process_all()
        return slices

    first, rest = asyncio.run(run())
    assert [number for _, number in first] == [1, 4, 7]
    assert [number for _, number in rest] == [0, 2, 3, 5, 6, 8]


def test_a_slice_that_fails_does_not_hold_up_the_next():
    async def run() -> list[int]:
        sizes: list[int] = []

        def process(events):
            sizes.append(len(events))
            raise ValueError("a test")

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)
        found = Backlog(loop, process)
        found.add([(0, None)] * 70)  # type: ignore[list-item]
        await asyncio.sleep(0.05)
        return sizes

    assert asyncio.run(run()) == [32, 32, 6]


@pytest.mark.parametrize("leaves", [True, False])
def test_what_came_before_an_end_is_processed_before_it(start, monkeypatch, leaves):
    """Before an abort and before a failure of the engine."""
    running = start(step_seconds=0.02)
    service = running.app.service
    connection = running.connect(BODY | {"n": 1, "max_tokens": 200, "stream": True})
    running.until(lambda: any(one.num_tokens > 3 for one in list(service._admitted)))
    seen: list[str | None] = []
    before = service._on_events

    def end_at_once(events):
        service._on_events = before
        before(events)
        (generation,) = service._admitted
        monkeypatch.setattr(
            type(generation), "push", lambda self, *_: seen.append(self.abort_reason) or False
        )
        if leaves:
            service.abort(generation, "client")
        else:
            service.fail(RuntimeError("a test"))
        monkeypatch.undo()

    service._on_events = end_at_once
    running.until(lambda: bool(seen))
    assert seen == [None]
    connection.close()
    if leaves:
        running.check_empty()
    else:
        running.thread.join(20)
        assert running.code == [1]


def test_threads_hand_over_the_interpreter_in_time(start):
    """While a server runs; its end leaves Python as it was."""
    before = sys.getswitchinterval()
    running = start()
    assert sys.getswitchinterval() == pytest.approx(server.SWITCH_SECONDS)
    running.stop()
    running.thread.join(20)
    assert sys.getswitchinterval() == before
