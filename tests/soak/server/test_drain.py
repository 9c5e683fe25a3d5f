"""SIGTERM with 32 streams half done, sent to a server as a user starts it and to one without a
model, whose decode calls take as long as it is told."""

import asyncio
import contextlib
import signal
import time

import pytest

from tests.serve.process import SMALL, serving
from tests.soak.server import bounds
from tests.soak.server.client import connected, events, request, responses

STREAMS = 32
BODY = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}


async def streams(port: int, half_done, body: dict) -> tuple[list[bytes], float]:
    """(what each of the streams got, when the last of them had ended). `half_done` is called once
    all of them have begun."""
    begun = asyncio.Semaphore(0)

    async def one() -> bytes:
        async with connected(port, request("/v1/completions", body)) as (reader, _):
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while more := await reader.read(2**16):
                    if b"data: " not in answer and b"data: " in more:
                        begun.release()
                    answer += more
            return answer

    clients = [asyncio.ensure_future(one()) for _ in range(STREAMS)]
    async with asyncio.timeout(120):
        for _ in range(STREAMS):
            await begun.acquire()
        half_done()
        found = await asyncio.gather(*clients)
    return found, time.monotonic()


def last_events(answer: bytes) -> list:
    (found,) = responses(answer)
    assert found.status == 200 and found.is_whole, answer[-300:]
    return events(found.body)[-2:]


def test_streams_of_a_model_end_whole(checkpoint, soak):
    options = [*SMALL, "--max-num-seqs", str(STREAMS)]
    with serving(checkpoint, *options) as server:
        port = int(server.url.rpartition(":")[2])
        stop = lambda: server.process.send_signal(signal.SIGTERM)  # noqa: E731
        found, last = asyncio.run(streams(port, stop, BODY))
        _, rest = server.process.communicate(timeout=30)
        after = time.monotonic() - last
    soak.record("drain", end_after_last_stream_ms=1e3 * after)
    assert server.process.returncode == 0 and "Traceback" not in rest, rest
    for answer in found:
        event, done = last_events(answer)
        assert done == "[DONE]" and event["choices"][0]["finish_reason"] == "length"
    assert after <= soak.limit(bounds.END_AFTER_LAST_STREAM)


@pytest.mark.parametrize("signals", [1, 2])
def test_streams_that_take_too_long_say_so(start_mock, soak, signals):
    """After the time for a shutdown, or at a second signal."""
    running = start_mock(
        engine={"slots": STREAMS, "num_pages": 64 * STREAMS},
        step_seconds=0.2,
        options={"shutdown_timeout": 1.0 if signals == 1 else 60.0},
    )
    asked: list[float] = []

    def stop() -> None:
        asked.append(time.monotonic())
        running.process.send_signal(signal.SIGTERM)
        if signals == 2:
            time.sleep(0.1)
            running.process.send_signal(signal.SIGTERM)

    found, _ = asyncio.run(streams(running.port, stop, BODY))
    assert running.process.wait(30) == 0
    after = time.monotonic() - asked[0]
    soak.record("drain_timeout" if signals == 1 else "drain_second_signal", end_ms=1e3 * after)
    for answer in found:
        event, done = last_events(answer)
        assert done == "[DONE]" and event["error"]["code"] == "draining"
    if signals == 1:
        assert 1.0 <= after <= 1.0 + soak.limit(bounds.END_AFTER_TIMEOUT)
    else:
        assert after <= soak.limit(bounds.END_AFTER_SECOND_SIGNAL)


def test_idle_connections_hold_nothing_up(start_mock, soak):
    running = start_mock()

    async def idle() -> float:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(50):
                content = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
                reader, _ = await stack.enter_async_context(connected(running.port, content))
                await reader.readuntil(b'"ready"}}')
            running.process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            assert await asyncio.to_thread(running.process.wait, 30) == 0
            return time.monotonic() - begun

    after = asyncio.run(idle())
    soak.record("drain_idle", end_ms=1e3 * after)
    assert after <= soak.limit(bounds.END_WHEN_IDLE)
