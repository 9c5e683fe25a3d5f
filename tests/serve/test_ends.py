"""How requests end before their answer: clients that leave, limits of time, load, shutdown."""

import functools
import json
import random
import time

import pytest

from swiftkv_jax.infer.engine.sampler_output import NON_FINITE
from swiftkv_jax.serve.service.generation import Choice
from tests.serve.conftest import Running, later, read_all

BODY = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
SLOW = {"step_seconds": 0.02}


def left(running: Running, *states: str) -> float:
    """Clients that have left in one of these states."""
    return sum(running.metric("swiftkv:client_disconnects_total", state=one) for one in states)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_what_runs(start, stream):
    running = start(**SLOW)
    connection = running.busy(BODY | {"stream": stream, "n": 3}, rows=3)
    load = running.app.service.engine
    connection.close()
    steps = load.snapshot.num_steps
    running.check_empty()
    assert load.snapshot.num_steps - steps <= 4
    assert left(running, "prefilling", "decoding") == 1
    assert running.metric("vllm:request_success_total", finished_reason="abort") == 3


def test_who_leaves_the_queue_is_never_run(start):
    running = start(engine={"slots": 2}, **SLOW)
    busy = running.busy(BODY | {"n": 2}, rows=2)
    service = running.app.service
    others = [running.connect(BODY) for _ in range(45)]
    running.until(lambda: service.num_admitted == 46)
    assert len(service._queue) > 0, "the engine gets no more than it looks at"
    for one in others:
        one.close()
    running.until(lambda: service.num_admitted == 1)
    stats = service.engine.snapshot.stats
    assert stats.prefilled_tokens == len("hello") - 1, "only the first has been run"
    assert left(running, "queued", "prefilling") == 45
    busy.close()
    running.check_empty()


def test_many_clients_that_leave_at_any_moment_disturb_none_that_stay(start):
    running = start(step_seconds=0.005, max_num_queued_reqs=500)
    alone = {
        prompt: running.post("/v1/completions", BODY | {"prompt": prompt})[1]["choices"]
        for prompt in ("steady", "also steady")
    }
    rng, staying, leaving = random.Random(1), [], []
    for prompt in [*alone] * 3:
        asked = later(running.post, "/v1/completions", BODY | {"prompt": prompt})
        staying.append((prompt, asked))
        for _ in range(10):
            body = BODY | {"prompt": "x" * rng.randrange(1, 50), "stream": rng.random() < 0.7}
            leaving.append(running.connect(body | {"n": rng.choice([1, 1, 2])}))
            time.sleep(rng.random() * 0.02)
            if rng.random() < 0.7:
                leaving.pop(rng.randrange(len(leaving))).close()
    for one in leaving:
        one.close()
    for prompt, asked in staying:
        status, answer = asked.result(20)
        assert status == 200 and answer["choices"] == alone[prompt]
    running.check_empty()
    stats = running.app.service.engine.snapshot.stats
    assert stats.compilations == 0


def test_clients_that_leave_at_the_last_moment_hold_nothing(start):
    """Their last output may be on its way while they leave."""
    running = start()
    rng = random.Random(2)
    for _ in range(150):
        one = running.connect(BODY | {"max_tokens": 4, "stream": rng.random() < 0.5})
        time.sleep(rng.random() * 0.01)
        one.close()
    running.until(running.app.service.idle.is_set)  # the last ones may just be coming in
    running.check_empty()


def test_logits_that_are_not_finite_are_an_error(start):
    running = start()
    read = running.runner.read

    def broken(output):
        found = read(output)
        if found is not None:  # once: the mock does not notice that it is the row's end
            running.runner.read = read
            found.token[0, 0] = NON_FINITE
        return found

    running.runner.read = broken
    status, answer = running.post("/v1/completions", BODY | {"n": 2})
    assert status == 500 and answer["error"]["code"] == "not_finite"
    running.check_empty()
    assert running.metric("vllm:request_success_total", finished_reason="error") >= 1
    assert running.post("/v1/completions", BODY)[0] == 200


def test_more_than_there_is_room_for_is_refused_at_once(start):
    running = start(max_num_queued_reqs=4, **SLOW)
    held = [running.connect(BODY | {"stream": True}) for _ in range(4)]
    running.until(lambda: running.app.service.num_admitted == 4)
    begun = time.monotonic()
    status, headers, content = running.request("POST", "/v1/completions", BODY)
    assert status == 429 and time.monotonic() - begun < 1
    error = json.loads(content)["error"]
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert running.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
    status, _, _ = running.request("GET", "/health")
    assert status == 200
    for one in held:
        one.close()
    running.check_empty()
    assert running.post("/v1/completions", BODY | {"max_tokens": 3})[0] == 200


def test_samples_and_tokens_count(start):
    running = start(max_num_queued_reqs=6, max_num_queued_tokens=300, **SLOW)
    status, answer = running.post("/v1/completions", BODY | {"n": 7})
    assert status == 400 and answer["error"]["param"] == "n", "it will never fit"
    held = running.connect(BODY | {"n": 5})
    running.until(lambda: running.app.service.num_admitted == 1)
    assert running.post("/v1/completions", BODY | {"n": 2})[0] == 429
    held.close()
    running.check_empty()


def test_cached_tokens_do_not_count(start):
    running = start(max_num_queued_tokens=100, engine={"page_size": 4})
    body = {"prompt": "a" * 80, "max_tokens": 2}
    assert running.post("/v1/completions", body)[0] == 200
    running.check_empty()
    admission = running.app.service.admission
    admission.add(60, 0, 0, "")  # those of prompts that wait
    statuses = [
        running.post("/v1/completions", body | {"prompt": first * 80 + "c"})[0] for first in "ab"
    ]
    admission.add(-60, 0, 0, "")
    assert statuses == [200, 429]
    running.check_empty()


def test_a_key_has_its_own_limit(start):
    keys = {"a": "key-of-a-0", "b": "key-of-b-0"}
    running = start(api_keys=keys, max_reqs_per_key=2, **SLOW)
    status, answer = running.post(
        "/v1/completions", BODY | {"n": 3}, authorization="Bearer key-of-a-0"
    )
    assert status == 400 and answer["error"]["param"] == "n"
    body = BODY | {"n": 2, "max_tokens": 3}
    status, _ = running.post("/v1/completions", body, x_api_key="key-of-b-0")
    assert status == 200


def test_many_requests_of_one_key_do_not_delay_another(start):
    """They wait where keys take turns, not in the engine."""
    keys = {"a": "key-of-a-0", "b": "key-of-b-0"}
    running = start(api_keys=keys, engine={"slots": 2}, **SLOW)
    body, service = BODY | {"max_tokens": 12}, running.app.service
    of_a = functools.partial(running.post, x_api_key="key-of-a-0")
    others = [later(of_a, "/v1/completions", body) for _ in range(16)]
    running.until(lambda: service.num_admitted == 16)
    assert running.post("/v1/completions", body, x_api_key="key-of-b-0")[0] == 200
    assert service.num_admitted > 8
    assert {other.result(20)[0] for other in others} == {200}
    running.check_empty()


def test_one_large_request_of_a_key_does_not_delay_another(start):
    """Its prompts take turns with those of others."""
    keys = {"a": "key-of-a-0", "b": "key-of-b-0"}
    running = start(api_keys=keys, engine={"slots": 2}, **SLOW)
    body, service = BODY | {"max_tokens": 6}, running.app.service
    large = body | {"prompt": ["hello"] * 40}
    of_a = functools.partial(running.post, x_api_key="key-of-a-0")
    other = later(of_a, "/v1/completions", large)
    running.until(lambda: service.admission.sequences == 40)
    assert running.post("/v1/completions", body, x_api_key="key-of-b-0")[0] == 200
    assert service._num_submitted < 20 and not other.done()
    assert other.result(20)[0] == 200
    running.check_empty()


def test_who_leaves_with_half_of_its_prompts_begun_frees_all(start):
    running = start(engine={"slots": 2}, **SLOW)
    connection = running.busy(BODY | {"prompt": ["hello"] * 8}, rows=2)
    service = running.app.service
    assert 2 <= service._num_submitted < 8 and service.num_waiting
    connection.close()
    running.check_empty()
    assert service._num_submitted < 8 and not len(service._queue)
    assert running.metric("vllm:request_success_total", finished_reason="abort") == 8


def test_an_answer_whose_text_fails_ends_alone(start, monkeypatch, caplog):
    push = Choice.push

    def failing(choice, output):
        if choice.index == 1:
            raise ValueError("no such token")
        return push(choice, output)

    monkeypatch.setattr(Choice, "push", failing)
    running = start(**SLOW)
    other = running.connect(BODY | {"max_tokens": 60})
    running.until(lambda: running.app.service.num_admitted == 1)
    status, answer = running.post("/v1/completions", BODY | {"n": 2})
    assert status == 500 and answer["error"]["code"] == "internal"
    assert "no such token" in caplog.text
    read_all(other, b'"finish_reason":"length"')
    other.close()
    running.check_empty()


@pytest.mark.parametrize("stream", [False, True])
def test_deadlines(start, stream):
    running = start(request_timeout=0.5, engine={"slots": 1}, step_seconds=0.05)
    if stream:
        events = running.events("/v1/completions", BODY)
        assert events[-2]["error"]["code"] == "request_timeout" and events[-1] == "[DONE]"
        assert len(events) > 2
    else:
        status, headers, content = running.request("POST", "/v1/completions", BODY)
        assert status == 504 and headers["x-should-retry"] == "false"
        assert json.loads(content)["error"]["code"] == "request_timeout"
    running.check_empty()


def test_waiting_has_a_deadline_of_its_own(start):
    running = start(queue_timeout=0.5, engine={"slots": 1}, step_seconds=0.05)
    busy = running.busy(BODY)
    status, headers, content = running.request("POST", "/v1/completions", BODY)
    assert status == 408 and json.loads(content)["error"]["code"] == "queue_timeout"
    assert "retry-after" in headers
    busy.close()
    running.check_empty()


def test_silence_is_broken_by_comments(start):
    running = start(sse_keep_alive=0.1, engine={"slots": 1}, step_seconds=0.05)
    busy = running.busy(BODY)
    waiting = running.connect(BODY | {"stream": True, "max_tokens": 5})
    content = read_all(waiting, b": keep-alive\n\n")
    assert b"HTTP/1.1 200" in content and b"data:" not in content
    busy.close()
    read_all(waiting, b"[DONE]")
    waiting.close()


def test_silence_is_broken_where_tokens_come_and_none_is_sent(start, says):
    """All of the text may be the beginning of the stop string."""
    says("a" * 40)
    running = start(sse_keep_alive=0.1, step_seconds=0.05)
    body = {"messages": [{"role": "user", "content": "a"}], "stop": "a" * 60, "stream": True}
    _, _, content = running.request("POST", "/v1/chat/completions", body)
    assert content.count(b": keep-alive\n\n") >= 3 and content.count(b"data: {") == 2
    assert b'"content":"' + b"a" * 40 + b'"' in content
    running.check_empty()


# Order ----------------------------------------------------------------------------------


def test_priorities_are_of_32_bits(start):
    running = start(scheduling_policy="priority")
    for priority, status in ((-(2**31), 200), (2**31, 400), (None, 200)):
        body = {"prompt": "hello", "priority": priority}
        assert running.post("/v1/completions", body)[0] == status


def test_lower_priorities_run_first(start):
    running = start(scheduling_policy="priority", engine={"slots": 1}, step_seconds=0.02)
    service, ended = running.app.service, []

    def ask(name: str, priority: int, max_tokens: int) -> None:
        body = {"prompt": name, "max_tokens": max_tokens, "ignore_eos": True, "priority": priority}
        assert running.post("/v1/completions", body)[0] == 200
        ended.append(name)

    asked = []
    # The first runs, two wait in the engine, and the others in the queue of the server.
    for count, (name, priority) in enumerate(
        [("runs", 0), ("taken", 0), ("taken", 0), ("late", 1), ("first", 0), ("urgent", -1)]
    ):
        asked.append(later(ask, name, priority, 6 if count else 60))
        running.until(lambda count=count: service.num_admitted > count)
        running.until(lambda count=count: len(service._queue) == max(count - 2, 0))
        running.until(lambda: service.engine.snapshot.load.num_running == 1)
    for one in asked:
        one.result(20)
    assert ended == ["runs", "taken", "taken", "urgent", "first", "late"]
    running.check_empty()
