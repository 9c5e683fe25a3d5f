"""How requests end before their answer: clients that leave, limits of time, load, shutdown."""

import asyncio
import http.client
import json
import random
import socket
import threading
import time

import pytest

from tests.infer.serve.conftest import Running

BODY = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
SLOW = {"step_seconds": 0.02}


def connect(running: Running, body: dict, path: str = "/v1/completions") -> socket.socket:
    """A connection that has sent a request."""
    content = json.dumps(body).encode()
    found = socket.create_connection(("127.0.0.1", running.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    found.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return found


def metric(running: Running, name: str, **labels: str) -> float:
    """A value that /metrics reports."""
    from prometheus_client.parser import text_string_to_metric_families

    _, _, content = running.request("GET", "/metrics")
    for family in text_string_to_metric_families(content.decode()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"there is no {name}")


def left(running: Running, *states: str) -> float:
    """Clients that have left in one of these states."""
    return sum(metric(running, "swiftkv:client_disconnects_total", state=one) for one in states)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_what_runs(start, stream):
    running = start(**SLOW)
    connection = connect(running, BODY | {"stream": stream, "n": 3})
    load = running.app.service.engine
    running.until(lambda: load.snapshot.load.num_running == 3)
    connection.close()
    steps = load.snapshot.num_steps
    running.check_empty()
    assert load.snapshot.num_steps - steps <= 4
    assert left(running, "prefilling", "decoding") == 1
    assert metric(running, "vllm:request_success_total", finished_reason="abort") == 3


def test_who_leaves_the_queue_is_never_run(start):
    running = start(engine={"slots": 2}, **SLOW)
    busy = connect(running, BODY | {"n": 2})
    service = running.app.service
    running.until(lambda: service.engine.snapshot.load.num_running == 2)
    others = [connect(running, BODY) for _ in range(45)]
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
    rng, found = random.Random(1), []

    def stay(prompt: str) -> None:
        found.append((prompt, running.post("/v1/completions", BODY | {"prompt": prompt})))

    threads = [threading.Thread(target=stay, args=(prompt,)) for prompt in alone for _ in range(3)]
    leaving = []
    for thread in threads:
        thread.start()
        for _ in range(10):
            body = BODY | {"prompt": "x" * rng.randrange(1, 50), "stream": rng.random() < 0.7}
            leaving.append(connect(running, body | {"n": rng.choice([1, 1, 2])}))
            time.sleep(rng.random() * 0.02)
            if rng.random() < 0.7:
                leaving.pop(rng.randrange(len(leaving))).close()
    for one in leaving:
        one.close()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for prompt, (status, answer) in found:
        assert status == 200 and answer["choices"] == alone[prompt]
    running.check_empty()
    stats = running.app.service.engine.snapshot.stats
    assert stats.compilations == 0


def test_more_than_there_is_room_for_is_refused_at_once(start):
    running = start(max_num_queued_reqs=4, **SLOW)
    held = [connect(running, BODY | {"stream": True}) for _ in range(4)]
    running.until(lambda: running.app.service.num_admitted == 4)
    begun = time.monotonic()
    status, headers, content = running.request("POST", "/v1/completions", BODY)
    assert status == 429 and time.monotonic() - begun < 1
    error = json.loads(content)["error"]
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert metric(running, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
    status, _, _ = running.request("GET", "/health")
    assert status == 200
    for one in held:
        one.close()
    running.check_empty()
    assert running.post("/v1/completions", BODY)[0] == 200


def test_samples_and_tokens_count(start):
    running = start(max_num_queued_reqs=6, max_num_queued_tokens=300, **SLOW)
    status, answer = running.post("/v1/completions", BODY | {"n": 7})
    assert status == 429, answer
    held = connect(running, BODY | {"n": 5})
    running.until(lambda: running.app.service.num_admitted == 1)
    assert running.post("/v1/completions", BODY | {"n": 2})[0] == 429
    held.close()
    running.check_empty()


def test_a_key_has_its_own_limit(start):
    keys = {"a": "key-of-a-0", "b": "key-of-b-0"}
    running = start(api_keys=keys, max_reqs_per_key=2, **SLOW)
    status, answer = running.post(
        "/v1/completions", BODY | {"n": 3}, authorization="Bearer key-of-a-0"
    )
    assert status == 429 and answer["error"]["code"] == "per_key_limit"
    status, _ = running.post("/v1/completions", BODY | {"n": 2}, x_api_key="key-of-b-0")
    assert status == 200


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
    busy = connect(running, BODY)
    running.until(lambda: running.app.service.engine.snapshot.load.num_running == 1)
    status, headers, content = running.request("POST", "/v1/completions", BODY)
    assert status == 408 and json.loads(content)["error"]["code"] == "queue_timeout"
    assert "retry-after" in headers
    busy.close()
    running.check_empty()


def test_silence_is_broken_by_comments(start):
    running = start(sse_keep_alive=0.1, engine={"slots": 1}, step_seconds=0.05)
    busy = connect(running, BODY)
    running.until(lambda: running.app.service.engine.snapshot.load.num_running == 1)
    waiting = connect(running, BODY | {"stream": True})
    content = waiting.recv(4096)
    while b": keep-alive\n\n" not in content:
        content += waiting.recv(4096)
    assert b"HTTP/1.1 200" in content and b"data:" not in content
    busy.close()
    while b"[DONE]" not in content:
        content += waiting.recv(4096)
    waiting.close()


def test_a_client_that_does_not_read_is_ended(start):
    running = start(write_timeout=0.3, send_buffer=4096)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "stream": True}
    body |= {"n": 8, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    connection = connect(running, body, "/v1/chat/completions")
    running.until(lambda: metric(running, "swiftkv:slow_clients_total") == 1)
    running.check_empty()
    connection.close()


# Shutdown ---------------------------------------------------------------------------


def test_what_was_admitted_ends_before_the_server(start):
    running = start(**SLOW)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(running.events("/v1/completions", BODY)))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    running.until(lambda: running.app.service.num_admitted == 12)
    idle = [http.client.HTTPConnection("127.0.0.1", running.port) for _ in range(10)]
    for one in idle:
        one.request("GET", "/health")
        one.getresponse().read()
    running.stop()
    running.until(lambda: running.app.service.state == "draining")
    assert running.request("GET", "/ready")[0] == 503
    status, headers, content = running.request("POST", "/v1/completions", BODY)
    assert status == 503 and json.loads(content)["error"]["code"] == "draining"
    assert headers["x-should-retry"] == "true"
    for thread in threads:
        thread.join(30)
    last = time.monotonic()
    running.thread.join(10)
    assert time.monotonic() - last < 3 and running.code == [0]
    for one in idle:
        one.close()
    assert len(found) == 12
    for events in found:
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"


def test_the_time_for_a_shutdown_is_limited(start):
    running = start(shutdown_timeout=0.3, step_seconds=0.1)
    found = []
    thread = threading.Thread(target=lambda: found.append(running.events("/v1/completions", BODY)))
    thread.start()
    running.until(lambda: running.app.service.engine.snapshot.load.num_running == 1)
    running.stop()
    running.thread.join(10)
    thread.join(10)
    assert running.code == [0]
    assert found[0][-1] == "[DONE]" and found[0][-2]["error"]["code"] == "draining"


def test_a_second_signal_ends_at_once(start):
    running = start(shutdown_timeout=60, step_seconds=0.1)
    connection = connect(running, BODY)
    running.until(lambda: running.app.service.engine.snapshot.load.num_running == 1)
    running.stop()
    running.stop()
    running.thread.join(5)
    assert running.code == [0]
    assert b"503" in connection.recv(4096)
    connection.close()


def test_an_engine_that_fails_ends_the_server(start):
    running = start(**SLOW)
    found = []
    thread = threading.Thread(target=lambda: found.append(running.post("/v1/completions", BODY)))
    thread.start()
    running.until(lambda: running.app.service.engine.snapshot.load.num_running == 1)

    def fail(output):
        raise RuntimeError("the device is gone")

    running.runner.read = fail
    thread.join(10)
    ((status, answer),) = found
    assert status == 500 and answer["error"]["code"] == "engine_failed"
    assert "device" not in json.dumps(answer)
    running.thread.join(10)
    assert running.code == [1]


def test_an_engine_that_stalls_is_not_ready(start):
    running = start(stall_timeout=1.5)
    released = threading.Event()
    read = running.runner.read
    running.runner.read = lambda output: released.wait(20) and read(output)
    connection = connect(running, BODY)
    service = running.app.service
    running.until(lambda: service.state == "stalled", 10)
    assert running.request("GET", "/ready")[0] == 503
    assert running.request("GET", "/health")[0] == 200
    assert running.post("/v1/completions", BODY)[0] == 503
    running.runner.read = read
    released.set()
    running.until(lambda: service.state == "ready", 10)
    connection.close()
    running.check_empty()


def test_events_of_the_loop_are_one_call_a_step(start):
    """Not one for each sequence."""
    running = start()
    service = running.app.service
    calls = []
    on_events = service._on_events
    service._on_events = lambda events: calls.append(len(events)) or on_events(events)
    steps = service.engine.snapshot.num_steps
    running.post("/v1/completions", BODY | {"n": 8, "max_tokens": 60})
    assert len(calls) <= service.engine.snapshot.num_steps - steps and max(calls) == 8
    assert asyncio.iscoroutinefunction(service.watch)
