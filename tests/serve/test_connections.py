"""Connections that behave badly, on raw sockets: what they hold ends in time."""

import asyncio
import contextlib
import json
import socket
import time
from unittest.mock import AsyncMock, Mock

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from swiftkv_jax.serve.api.run import _SilenceTimer
from swiftkv_jax.serve.http import connection as connection_module
from swiftkv_jax.serve.http.connection import Transport
from swiftkv_jax.serve.http.exchange import CONNECTION, ClientGone, HTTPExchange
from tests.serve.conftest import read_all
from tests.serve.test_ends import BODY, SLOW, left

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BIG = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 200,
    "n": 8,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}


def until_closed(connection: socket.socket) -> float:
    """Seconds until the server closes it."""
    begun = time.monotonic()
    read_all(connection)
    return time.monotonic() - begun


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_an_answer_are_written_together(running, monkeypatch, stream):
    """Head and first event, last event and end: a system call less each."""
    written = []

    class Noting:
        def __init__(self, transport):
            self.transport = transport

        def __getattr__(self, name):
            return getattr(self.transport, name)

        def write(self, data):
            written.append(bytes(data))
            self.transport.write(data)

    before = Transport.__init__
    monkeypatch.setattr(
        Transport,
        "__init__",
        lambda self, transport: before(self, Noting(transport)),  # type: ignore[arg-type]
    )
    body = BODY | {"max_tokens": 20, "ignore_eos": True, "stream": stream}
    assert running.request("POST", "/v1/completions", body)[0] == 200
    assert all(written) and written[0].startswith(b"HTTP/1.1 200")
    if stream:
        assert b"data: " in written[0]  # all of it, where the machine is busy
        assert b"[DONE]" in written[-1] and written[-1].endswith(b"0\r\n\r\n")
    else:
        assert len(written) == 1


def test_a_connection_that_closes_sends_all_of_its_answer(running):
    request = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with running.send(request) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200") and b'"version"' in answer


def test_silence_is_timed_from_the_last_restart():
    async def run() -> list[bool]:
        event = asyncio.Event()
        timer = _SilenceTimer(event, 0.2)
        for _ in range(3):  # never silent for so long
            await asyncio.sleep(0.12)
            timer.restart()
        found = [event.is_set(), timer.take()]
        begun = time.monotonic()
        for _ in range(2):
            await asyncio.wait_for(event.wait(), 5)
            event.clear()
            found += [timer.take(), timer.take()]
        assert 0.35 < time.monotonic() - begun < 2
        timer.cancel()
        await asyncio.sleep(0.3)
        return [*found, event.is_set()]

    assert asyncio.run(run()) == [False, False, True, False, True, False, False]


def test_half_a_body_behind_another_request_has_a_deadline(start):
    running = start(body_timeout=0.4, keep_alive_timeout=30)
    half = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD + b"Content-Length: 50\r\n\r\n{"
    with running.send(half) as connection:
        assert until_closed(connection) < 5
    running.check_empty()


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/nowhere"])
def test_the_rest_of_an_announced_body_is_not_waited_for(start, monkeypatch, path):
    """Whatever length a client without a key announces."""
    monkeypatch.setattr(connection_module, "LINGER_SECONDS", 0.3)
    running = start(api_keys={"a": "key-of-a-0"}, body_timeout=30, keep_alive_timeout=30)
    head = b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
    with running.send(head) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 ")
        assert until_closed(connection) < 5
    running.check_empty()


def test_a_body_has_no_more_time_than_the_longest_takes(start, monkeypatch):
    monkeypatch.setattr(connection_module, "BYTES_PER_SECOND", 1e5)
    running = start(body_timeout=0.2, keep_alive_timeout=30, max_body_size=10_000)
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{"
    with running.send(chunked) as connection:
        assert until_closed(connection) < 5
    running.check_empty()


def test_announced_bodies_hold_no_room(start):
    running = start(max_num_queued_reqs=4, max_num_queued_tokens=100)
    held = [running.send(HEAD + b"Content-Length: 1000\r\n\r\n") for _ in range(8)]
    time.sleep(0.1)
    assert running.post("/v1/completions", BODY | {"max_tokens": 3})[0] == 200
    for one in held:
        one.close()
    running.check_empty()


@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize", b"/detokenize"])
def test_bytes_of_bodies_are_counted_as_they_come(start, path):
    running = start(max_queued_bytes=5000, max_body_size=4000)
    head = HEAD.replace(b"/v1/completions", path) + b"Transfer-Encoding: chunked\r\n\r\n"
    held = running.send(head + b"bb8\r\n" + b" " * 3000 + b"\r\n")
    running.until(lambda: running.app.service.admission.bytes == 3000)
    with running.send(head + b"bb8\r\n" + b" " * 3000 + b"\r\n") as connection:
        assert b" 429 " in connection.recv(4096)
    held.close()
    running.check_empty()


def test_a_connection_is_idle_after_a_body_that_was_refused(start):
    """It does not die by the deadline of that body."""
    running = start(api_keys={"a": "key-of-a-0"}, body_timeout=0.3, keep_alive_timeout=30)
    content = json.dumps(BODY).encode()
    length = f"Content-Length: {len(content)}\r\n\r\n".encode()
    with running.send(HEAD + length) as connection:
        assert b" 401 " in connection.recv(65536)
        connection.sendall(content)
        time.sleep(0.8)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b'"ok"' in read_all(connection, b'"ok"')


def test_who_leaves_is_noticed_behind_bytes_that_nothing_reads(start):
    running = start(**SLOW)
    connection = running.busy(BODY)
    connection.sendall(b"\r\n")
    time.sleep(0.05)
    connection.close()
    begun = time.monotonic()
    running.check_empty()
    assert time.monotonic() - begun < 1 and left(running, "prefilling", "decoding") == 1


def test_who_leaves_before_a_refusal_is_sent_is_no_error(start, caplog):
    """The refusals before it, which nobody reads, are in its way."""
    running = start(send_buffer=4096)
    content = json.dumps(BODY | {"temperature": 9}).encode()
    one = HEAD + f"Content-Length: {len(content)}\r\n\r\n".encode() + content
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.5)
        connection.connect(("127.0.0.1", running.port))
        with contextlib.suppress(OSError):
            for _ in range(400):
                connection.sendall(one)
        time.sleep(0.3)  # until nothing more can be written
    running.until(lambda: running.app.service.metrics.num_connections() == 0)
    running.check_empty()
    assert "Traceback" not in caplog.text


def test_what_is_not_read_is_not_kept(start):
    """Whole answers as well as streams: the connection ends, not only the request."""
    running = start(write_timeout=0.3, send_buffer=4096)
    for stream in (False, True):
        with running.connect(BIG | {"stream": stream}, "/v1/chat/completions"):
            running.until(lambda: running.app.service.metrics.num_connections() == 1)
            running.until(lambda: running.app.service.metrics.num_connections() == 0)
    running.check_empty()
    running.until(lambda: running.metric("swiftkv:slow_clients_total") == 2)


@pytest.mark.parametrize(("sizes", "is_slow"), [([9, 6, 5, 2], False), ([9, 6, 5, 5], True)])
def test_who_reads_a_little_is_not_slow(sizes, is_slow):
    """The write timeout is that of a step forward, not of a whole answer."""
    flow = FlowControl(transport := Mock())
    transport.get_write_buffer_size.side_effect = sizes

    async def run() -> None:
        flow.pause_writing()
        if not is_slow:
            asyncio.get_running_loop().call_later(0.07, flow.resume_writing)
        scope = {"extensions": {CONNECTION: Mock(flow=flow, transport=transport)}, "headers": []}
        await HTTPExchange(scope, AsyncMock(), AsyncMock(), write_timeout=0.02).flush()

    with pytest.raises(ClientGone, match="slow") if is_slow else contextlib.nullcontext():
        asyncio.run(run())
    assert transport.abort.called == is_slow


def test_a_client_may_set_a_deadline(start):
    running = start(step_seconds=0.05)
    for given, status in (("300", 504), ("0", 400), ("soon", 400)):
        headers = {"x-request-timeout-ms": given}
        found, _, content = running.request("POST", "/v1/completions", BODY, headers)
        assert found == status, content
    running.check_empty()
