"""Connections that send slowly, or too much, or do not read: they end on time, and a client that
behaves notices little."""

import asyncio
import collections
import contextlib
import select
import socket
import statistics
import time

from tests.soak.server import bounds
from tests.soak.server.client import connected, latency, quantile, request, responses

SLOW, TIMEOUT = 2_000, 8.0
GOOD = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'Content-Length: 4000\r\n\r\n{"prompt"'
KINDS = ("nothing", "half a head", "half a body", "a byte a second")
MB = 10**6
MAX_BODY = 2 * 2**20
"""Bytes of a body for the shortest `max_model_len`."""
BUFFER = 4096
"""Bytes of a small buffer of the kernel."""


def test_slow_connections_end_on_time(start_mock, soak):
    running = start_mock(
        options={
            "header_timeout": TIMEOUT,
            "body_timeout": TIMEOUT,
            "keep_alive_timeout": TIMEOUT,
        }
    )
    ends: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    answered: list[bytes] = []

    async def slow(kind: str) -> None:
        content = {"half a head": HEAD, "half a body": HEAD + BODY, "nothing": b""}.get(kind, b"P")
        async with connected(running.port, content) as (reader, writer):
            opened.release()
            begun = time.monotonic()
            sending = None
            if kind == "a byte a second":
                sending = asyncio.ensure_future(drip(writer))
            with contextlib.suppress(ConnectionResetError):
                if content := await reader.read():
                    answered.append(content)
            ends[kind].append(time.monotonic() - begun)
            if sending is not None:
                sending.cancel()

    async def drip(writer: asyncio.StreamWriter) -> None:
        for one in HEAD[1:]:
            await asyncio.sleep(1.0)
            writer.write(bytes([one]))

    opened = asyncio.Semaphore(0)

    async def all_of_them() -> tuple[list[float], list[float], float]:
        idle = await latency(running.port, GOOD, 4.0, pause=0.02)
        memory = running.memory()
        clients = [
            asyncio.ensure_future(slow(KINDS[number % len(KINDS)])) for number in range(SLOW)
        ]
        for _ in range(SLOW):
            await opened.acquire()
        busy = await latency(running.port, GOOD, TIMEOUT / 2, pause=0.02)
        memory = running.memory() - memory
        async with asyncio.timeout(TIMEOUT + 60):
            await asyncio.gather(*clients)
        return idle, busy, memory

    idle, busy, memory = asyncio.run(all_of_them())
    every_end = [seconds for found in ends.values() for seconds in found]
    soak.record(
        "slow",
        timeout_s=TIMEOUT,
        kb_each=1e3 * memory / SLOW,
        first_end_s=min(every_end),
        last_end_s=max(every_end),
        idle_p50_ms=1e3 * statistics.median(idle),
        idle_p99_ms=1e3 * quantile(idle, 0.99),
        busy_p50_ms=1e3 * statistics.median(busy),
        busy_p99_ms=1e3 * quantile(busy, 0.99),
    )
    factor = soak.limit(bounds.GOOD_FACTOR_SLOW_ASSERTED)
    assert statistics.median(busy) <= factor * statistics.median(idle)
    assert not answered and sum(map(len, ends.values())) == SLOW
    assert all(min(seconds) > TIMEOUT - 3 for seconds in ends.values())
    assert all(max(seconds) < TIMEOUT + 5 for seconds in ends.values())
    running.check_empty()
    deadline = time.monotonic() + 10
    while running.metric("swiftkv:connections") > 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_readers_that_never_read_are_ended(start_mock, soak):
    readers, timeout = 50, 3.0
    running = start_mock(
        engine={"slots": 64, "max_model_len": 512, "num_pages": 8192},
        send_buffer=4096,
        options={"write_timeout": timeout},
    )
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 250, "stream": True}
    body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    before = running.memory()
    with contextlib.ExitStack() as stack:
        for _ in range(readers):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", running.port))
            one.sendall(request("/v1/chat/completions", body))
        most, deadline = before, time.monotonic() + 60
        while running.metric("swiftkv:slow_clients_total") < readers:
            assert time.monotonic() < deadline
            most = max(most, running.memory())
            time.sleep(0.2)
        running.check_empty()
    soak.record("readers", mb_each=(most - before) / readers)
    assert (most - before) / readers <= bounds.READER_MB


def test_what_is_too_large_is_refused_before_it_is_read(start_mock, soak):
    """With small buffers of the kernels, so that what was sent is nearly what was read."""
    running = start_mock(receive_buffer=BUFFER)
    part, before, most = b" " * 4096, running.memory(), 0.0

    def send(head: bytes, size: int, filler: bytes) -> tuple[int, bytes]:
        """(bytes that the kernel took before the connection ended, what came back)"""
        nonlocal most
        sent, answer = 0, bytearray()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            connection.connect(("127.0.0.1", running.port))
            connection.setblocking(False)
            content, until = head, time.monotonic() + 30
            while sent < size:
                assert time.monotonic() < until
                readable, writable, _ = select.select([connection], [connection], [], 5)
                assert readable or writable, "neither read nor refused"
                try:
                    if readable:
                        if not (more := connection.recv(65536)):
                            break
                        answer += more
                    if writable:
                        count = connection.send(content)
                        sent, content = sent + count, content[count:] or filler
                except BlockingIOError:
                    pass
                except OSError:
                    break
                most = max(most, running.memory() - before)
        return sent, bytes(answer)

    length = HEAD + b"Content-Length: 100000000\r\n\r\n"
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (len(part), part)
    head, most_sent = b"GET /health HTTP/1.1\r\nHost: x\r\n", {}
    cases = (
        ("a body of 100 MB", length, 100 * MB, part),
        ("a head of 64 MB", head + b"X-A: ", 64 * MB, b"a" * 65536),
        ("a line of 64 MB", b"GET /", 64 * MB, b"a" * 65536),
        ("a body of unknown length", chunked, 100 * MB, chunk),
    )
    for what, head, size, filler in cases:
        sent, answer = send(head, size, filler)
        statuses = [one.status for one in responses(answer)]
        most_sent[what] = sent
        assert statuses in ([], [413], [400], [431])
    asyncio.run(refused_at_once(running.port, length))
    unknown = most_sent.pop("a body of unknown length")
    sent = max(most_sent.values())
    soak.record(
        "too_large", sent_kib=sent / 1024, unknown_length_kib=unknown / 1024, growth_mb=most
    )
    assert sent <= bounds.READ_BEFORE_REFUSAL_ASSERTED
    # Of a body that does not say its length, as much is read as may be sent.
    assert unknown <= MAX_BODY + bounds.READ_BEFORE_REFUSAL_ASSERTED
    assert most <= 20
    running.check_empty()


async def refused_at_once(port: int, head: bytes) -> None:
    """By its announced length, before a byte of the body is sent."""
    async with connected(port, head) as (reader, _):
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in answer
