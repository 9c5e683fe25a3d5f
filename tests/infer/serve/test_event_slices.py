"""What a step gives is made text a few events at a time, first tokens before all others."""

import threading

import pytest

from swiftkv_jax.infer.serve import service
from swiftkv_jax.infer.serve.service import Service

BODY = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "seed": 1, "n": 8}


@pytest.fixture
def sliced(start, monkeypatch):
    """(a server that processes two events at a time, how many at a time it did)"""
    monkeypatch.setattr(service, "SLICE_EVENTS", 2)
    sizes: list[int] = []
    process = Service._process

    def counted(self, events):
        sizes.append(len(events))
        process(self, events)

    monkeypatch.setattr(Service, "_process", counted)
    return start(engine={"steps": 8}), sizes


def test_answers_do_not_depend_on_slices(sliced, start):
    running, sizes = sliced
    alone = start(engine={"steps": 8}).post("/v1/completions", BODY)[1]["choices"]
    del sizes[:]
    assert running.post("/v1/completions", BODY)[1]["choices"] == alone
    assert len(sizes) > 10 and sorted(sizes)[-2] <= 8, "but for the first tokens"
    texts = dict.fromkeys(range(8), "")
    for event in running.events("/v1/completions", BODY)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {one["index"]: one["text"] for one in alone}
    running.check_empty()


def test_a_backlog_is_caught_up_with(start):
    """A quarter at a time."""
    running, sizes = start(), []
    found = running.app.service
    done = threading.Event()

    def work():
        found._process = lambda events: sizes.append(len(events))
        found._backlog.extend([(-1, None)] * 4096)
        found._process_slice()
        found._loop.call_later(0.3, done.set)

    found._loop.call_soon_threadsafe(work)
    assert done.wait(10)
    del found._process
    assert not found._backlog and sum(sizes) == 4096
    assert sizes[0] == 1024 and len(sizes) < 25
    assert running.post("/v1/completions", BODY)[0] == 200


def test_what_came_before_a_failure_is_processed_before_it(start):
    running = start()
    found, sizes, done = running.app.service, [], threading.Event()

    def work():
        found._process = lambda events: sizes.append((len(events), found.state))
        found._backlog.extend([(-1, None)] * 100)
        found.fail(RuntimeError("a test"))
        done.set()

    found._loop.call_soon_threadsafe(work)
    assert done.wait(10)
    assert sum(size for size, _ in sizes) == 100 and {state for _, state in sizes} == {"ready"}
    running.thread.join(20)
    assert running.code == [1]
