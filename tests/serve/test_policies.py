"""Requests with a priority."""

import threading

import pytest

from tests.serve.conftest import Running, Start

COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def running(start: Start) -> Running:
    return start(scheduling_policy="priority")


@pytest.mark.parametrize(("priority", "status"), [(-(2**31), 200), (2**31, 400), (None, 200)])
def test_priorities_are_of_32_bits(running, priority, status):
    assert running.post(COMPLETION, {"prompt": "hello", "priority": priority})[0] == status


def test_lower_priorities_run_first(start):
    running = start(scheduling_policy="priority", engine={"slots": 1}, step_seconds=0.02)
    service, ended = running.app.service, []

    def ask(name: str, priority: int, max_tokens: int) -> None:
        body = {"prompt": name, "max_tokens": max_tokens, "ignore_eos": True, "priority": priority}
        assert running.post(COMPLETION, body)[0] == 200
        ended.append(name)

    threads = []
    # The first runs, two wait in the engine, and the others in the queue of the server.
    for count, (name, priority) in enumerate(
        [("runs", 0), ("taken", 0), ("taken", 0), ("late", 1), ("first", 0), ("urgent", -1)]
    ):
        threads.append(threading.Thread(target=ask, args=(name, priority, 60 if not count else 6)))
        threads[-1].start()
        running.until(lambda count=count: service.num_admitted > count)
        running.until(lambda count=count: len(service._queue) == max(count - 2, 0))
        running.until(lambda: service.engine.snapshot.load.num_running == 1)
    for thread in threads:
        thread.join()
    assert ended == ["runs", "taken", "taken", "urgent", "first", "late"]
    running.check_empty()
