"""How a server ends: signals, a step that fails, a step that hangs."""

import http.client
import json
import socket
import threading
import time

import pytest

from swiftkv_jax.infer.engine.page_store import MAX_UNWRITTEN
from swiftkv_jax.serve import server
from swiftkv_jax.serve.service.engine_thread import Ended, EngineThread, Event
from swiftkv_jax.serve.service.generation import Generation
from tests.infer.engine.mock_requests import ask, prompt_of
from tests.infer.mock_model_runner import mock_engine
from tests.serve.conftest import later, read_all, until
from tests.serve.test_ends import BODY, SLOW


def test_what_was_admitted_ends_before_the_server(start):
    running = start(**SLOW)
    body = BODY | {"max_tokens": 60}
    asked = [later(running.events, "/v1/completions", body) for _ in range(12)]
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
    found = [one.result(30) for one in asked]
    last = time.monotonic()
    running.check_end()
    assert time.monotonic() - last < 3
    for one in idle:
        one.close()
    for events in found:
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"


def test_a_server_goes_on_from_what_the_one_before_wrote(start, tmp_path):
    engine = {"num_pages": 72, "host_pages": 200, "folder": tmp_path}
    body = BODY | {"prompt": "abcd" * 25, "max_tokens": 4}
    cached, pages, texts = [], [], []
    for _ in range(2):
        running = start(engine=engine)
        status, answer = running.post("/v1/completions", body)
        assert status == 200
        texts.append(answer["choices"][0]["text"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        pages.append(running.app.service.engine.snapshot.load.tiers[1].pages)
        running.stop()
        running.check_end()
        running.runner.host_pages.store.close()
    assert cached == [0, 96] and texts[0] == texts[1] and pages[1] >= 24


def test_the_same_place_of_another_key_finds_nothing_on_disk(start, tmp_path):
    """`--api-key` names keys by their places, and the next server may have others there."""
    engine = {"num_pages": 72, "host_pages": 200, "folder": tmp_path}
    body = BODY | {"prompt": "abcd" * 25, "max_tokens": 4}
    cached = []
    for keys in (["key-of-a-0"], ["key-of-b-0", "key-of-a-0"]):
        named = {f"key{number}": key for number, key in enumerate(keys, start=1)}
        running = start(engine=engine, api_keys=named)
        for key in keys:
            _, answer = running.post("/v1/completions", body, x_api_key=key)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        running.stop()
        running.check_end()
        running.runner.host_pages.store.close()
    assert cached == [0, 0, 96]


def test_before_it_drains_it_may_tell_balancers(start):
    """`/ready` fails, and what they still send is answered."""
    running = start(shutdown_delay=0.4)
    assert running.request("GET", "/ready")[0] == 200
    running.stop()
    running.until(lambda: running.request("GET", "/ready")[0] == 503)
    assert running.app.service.state == "ready"
    assert running.post("/v1/completions", BODY | {"max_tokens": 2})[0] == 200
    running.check_end()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_half_a_body_holds_nothing_up(path, start):
    running = start(shutdown_timeout=60.0)
    half = f"POST {path} HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(half.encode() + b"content-length: 1000000\r\n\r\n{")
        running.until(lambda: len(running.app.service._reading) == 1)
        running.stop()
        connection.settimeout(20)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"draining"' in answer
    running.check_end()
    assert not running.app.service._reading


@pytest.mark.parametrize("busy", [False, True])
def test_a_grammar_that_is_still_compiled_holds_nothing_up(busy, start, monkeypatch):
    """Its thread cannot be stopped, and Python would wait for it."""
    ended = []
    monkeypatch.setattr(server, "end", lambda code, followers: ended.append(code))
    running = start()
    close = running.app.grammars.close
    monkeypatch.setattr(running.app.grammars, "close", lambda: close() and not busy)
    running.stop()
    running.check_end()
    assert ended == [0] * busy


def test_the_time_for_a_shutdown_is_limited(start):
    running = start(shutdown_timeout=0.3, step_seconds=0.1)
    asked = later(running.events, "/v1/completions", BODY)
    running.until(lambda: running.app.service.engine.snapshot.load.num_running == 1)
    running.stop()
    running.check_end()
    *_, event, done = asked.result(10)
    assert done == "[DONE]" and event["error"]["code"] == "draining"


def test_requests_leave_time_to_write_what_is_cached(start, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "PERSIST_SHARE", 0.9)
    engine = {"num_pages": 72, "host_pages": 200, "folder": tmp_path}
    running = start(engine=engine, shutdown_timeout=4.0, step_seconds=0.1)
    running.post("/v1/completions", BODY | {"prompt": "abcd" * 25, "max_tokens": 1})
    connection = running.busy(BODY)
    running.stop()
    running.check_end()
    assert b"503" in connection.recv(4096)
    connection.close()
    store = running.runner.host_pages.store
    assert store.saved >= 25
    store.close()


@pytest.mark.parametrize("delay", [0.0, 60.0])
def test_a_second_signal_ends_at_once(start, delay):
    """It writes nothing to disk then."""
    running = start(shutdown_timeout=60, shutdown_delay=delay, step_seconds=0.1)
    written = []
    running.app.service.engine.persist = written.append
    connection = running.busy(BODY)
    running.stop()
    running.stop()
    running.check_end()
    assert b"503" in connection.recv(4096) and not written
    connection.close()


def test_a_second_signal_ends_what_is_written(start, monkeypatch):
    codes, ended = [], threading.Event()
    monkeypatch.setattr(server, "end", lambda code, followers: codes.append(code) or ended.set())
    running = start(shutdown_timeout=60)
    running.app.service.engine.persist = lambda seconds: running.stop() or ended.wait(20)
    running.stop()
    running.check_end()
    assert codes == [0]


def test_an_engine_that_fails_ends_the_server(start):
    running = start(**SLOW)
    asked = later(running.post, "/v1/completions", BODY)
    running.until(lambda: running.app.service.engine.snapshot.load.num_running == 1)

    def fail(output):
        raise RuntimeError("the device is gone")

    running.runner.read = fail
    status, answer = asked.result(10)
    assert status == 500 and answer["error"]["code"] == "engine_failed"
    assert "device" not in json.dumps(answer)
    running.check_end(1)


def test_a_server_whose_time_limits_fail_ends(start, monkeypatch, caplog):
    running = start(**SLOW)
    connection = running.busy(BODY)

    def fail(now: float) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(running.app.service, "tick", fail)
    running.check_end(1)
    assert "RuntimeError: planted" in caplog.text
    connection.close()


def test_an_engine_that_fails_while_it_drains_is_no_success(start):
    running = start(**SLOW)
    connection = running.busy(BODY)
    running.stop()
    running.until(lambda: running.app.service.state == "draining")

    def fail(output):
        raise MemoryError

    running.runner.read = fail
    running.check_end(5)
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_sent_whole_before_the_server_ends(start, stream):
    """The engine has finished, and the client reads late."""
    running = start(send_buffer=4096)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "stream": stream}
    body |= {"n": 8, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    connection = running.connect(body, "/v1/chat/completions")
    engine = running.app.service.engine
    running.until(lambda: engine.snapshot.stats.new_tokens == 1600)
    content = connection.recv(4096)
    running.stop()
    time.sleep(1.2)  # uvicorn gives what it has a second
    content += read_all(connection)
    assert content.endswith(b"0\r\n\r\n" if stream else b"}") and len(content) > 600_000
    running.check_end()
    connection.close()


def test_an_engine_that_stalls_is_not_ready(start):
    running = start(stall_timeout=1.0)
    released = threading.Event()
    read = running.runner.read
    running.runner.read = lambda output: released.wait(20) and read(output)
    connection = running.connect(BODY)
    service = running.app.service
    running.until(lambda: service.state == "stalled", 10)
    assert running.request("GET", "/ready")[0] == 503
    assert running.request("GET", "/health")[0] == 200
    assert running.post("/v1/completions", BODY)[0] == 503
    slow = running.runner.run_decode
    running.runner.run_decode = lambda *args: time.sleep(0.1) or slow(*args)
    running.runner.read = read
    released.set()
    running.until(lambda: service.state == "ready", 10)
    assert service.num_admitted == 1, "while the request still runs"
    connection.close()
    running.check_empty()


def test_an_idle_engine_that_gets_a_request_has_not_stalled():
    """However long it had nothing to do, and however late its thread wakes up."""
    engine, _ = mock_engine()
    ended = threading.Event()
    thread = EngineThread(engine, lambda events: ended.set(), lambda error: None)
    thread.start()
    wake, thread._wake.set = thread._wake.set, lambda: None
    time.sleep(0.3)
    thread.submit(0, ask(prompt_of(0, 5)))
    assert thread.stalled_seconds == 0.0
    thread._wake.set = wake
    wake()
    assert ended.wait(10) and thread.stalled_seconds < 0.2
    assert thread.stop(10)


def test_an_idle_server_writes_what_it_has(tmp_path, monkeypatch):
    """A kill, or the next burst, would lose it."""
    engine, runner = mock_engine(num_pages=16, host_pages=64, folder=tmp_path)
    store, host = runner.host_pages.store, engine.pools[0].host
    assert store is not None and host is not None
    encode, go_on = store._encode, threading.Event()
    monkeypatch.setattr(store, "_encode", lambda page: go_on.wait(10) and encode(page))
    events: list[Event] = []
    thread = EngineThread(engine, events.extend, lambda error: None)
    thread.start()
    for number in range(8):
        thread.submit(number, ask(prompt_of(number, 33)))
    until(lambda: sum(isinstance(event, Ended) for _, event in events) == 8)
    until(lambda: thread._last_step is None)
    assert len(host) > 2 * MAX_UNWRITTEN
    go_on.set()
    until(lambda: store.saved == len(host))
    assert not store.misses and thread.stop(10)
    store.close()


def test_events_of_the_loop_are_one_call_a_step(start):
    """Not one for each sequence."""
    running = start()
    service = running.app.service
    calls = []
    on_events = service._on_events
    service._on_events = lambda events: calls.append(len(events)) or on_events(events)
    steps = service.engine.snapshot.num_steps
    running.post("/v1/completions", BODY | {"n": 8, "max_tokens": 60})
    assert len(calls) <= service.engine.snapshot.num_steps - steps and 8 <= max(calls) <= 9


def test_first_tokens_come_before_those_of_the_rows_that_run(start, monkeypatch):
    running = start(step_seconds=0.01)
    steps: list[list[bool]] = []
    on_events, push = running.app.service._on_events, Generation.push

    def stepped(events):
        steps.append([])
        on_events(events)

    def pushed(generation, part, event):
        steps[-1].append(generation.times.first_token > 0)
        return push(generation, part, event)

    running.app.service._on_events = stepped
    monkeypatch.setattr(Generation, "push", pushed)
    busy = running.busy(BODY | {"max_tokens": 100, "stream": True})
    running.post("/v1/completions", BODY | {"max_tokens": 2})
    busy.close()
    running.check_empty()
    assert all(step == sorted(step) for step in steps)
    assert [False, True, True] in steps, "the new token, one that runs, the end of the new one"


def test_tokens_stay_in_order_while_the_loop_is_busy(start):
    """Several steps wait for it then, some with first tokens among those of rows that run."""
    running = start(step_seconds=0.001)
    bodies = [BODY | {"prompt": "x" * length} for length in range(1, 5)]
    alone = [running.post("/v1/completions", body)[1]["choices"] for body in bodies]
    found: list[object] = []

    def ask(number: int) -> None:
        for body, choices in zip(bodies[number:], alone[number:], strict=True):
            _, answer = running.post("/v1/completions", body)
            found.append(answer["choices"] == choices)

    asked = [later(ask, number % 4) for number in range(8)]
    loop = running.app.service._loop
    while not all(one.done() for one in asked):
        loop.call_soon_threadsafe(time.sleep, 0.02)
        time.sleep(0.03)
    assert len(found) == 20 and all(found)
