"""Options that change what the server does with requests: `max_tokens` is clamped, priorities
count."""

import threading

import pytest

from tests.infer.serve.conftest import Running, Start

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {COMPLETION: {"prompt": "hello"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}


@pytest.fixture(scope="module")
def running(start: Start) -> Running:
    return start(clamp_max_tokens=True, scheduling_policy="priority")


@pytest.mark.parametrize("path", HELLO)
def test_max_tokens_is_cut_to_what_fits(running, path):
    status, answer = running.post(path, HELLO[path] | {"max_tokens": 10**6, "ignore_eos": True})
    assert status == 200, answer
    assert answer["usage"]["total_tokens"] == running.app.service.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_prompt_without_room_is_refused_nevertheless(running):
    prompt = [1] * running.app.service.max_model_len
    status, answer = running.post(COMPLETION, {"prompt": prompt, "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_max_tokens_is_cut_to_the_servers_limit(start):
    running = start(clamp_max_tokens=True, max_tokens_limit=7)
    body = HELLO[COMPLETION] | {"max_tokens": 20, "ignore_eos": True}
    status, answer = running.post(COMPLETION, body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 7)


@pytest.mark.parametrize(("priority", "status"), [(-(2**31), 200), (2**31, 400), (None, 200)])
def test_priorities_are_of_32_bits(running, priority, status):
    assert running.post(COMPLETION, HELLO[COMPLETION] | {"priority": priority})[0] == status


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
