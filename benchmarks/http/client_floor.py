"""A server that answers at once: what the client measures of it is the client's own time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import cast

from swiftkv_jax.serve import server

_TEXT = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
_USAGE = {"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens": 1}}


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


_EVENTS = [b"data: %s\n\n" % json.dumps(event).encode() for event in (_TEXT, _USAGE)]
ANSWER = b"".join(
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        *map(_chunk, [*_EVENTS, b"data: [DONE]\n\n"]),
        b"0\r\n\r\n",
    ]
)
"""A stream of one token, in one write."""


class _AnswersAtOnce(asyncio.Protocol):
    def __init__(self):
        self._content = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._content += data
        head, found, body = self._content.partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        if found and len(body) >= int(length[1] if length else 0):
            self._content = b""
            self._transport.write(ANSWER)


@contextlib.contextmanager
def answering_at_once() -> Iterator[str]:
    """The address of such a server, in a thread of its own."""
    started, address = threading.Event(), []
    ends: list[Callable[[], object]] = []

    async def run() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        listening = await loop.create_server(_AnswersAtOnce, "127.0.0.1", 0)
        address.extend(listening.sockets[0].getsockname())
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        started.set()
        async with listening:
            await stop.wait()

    def in_thread() -> None:
        with asyncio.Runner(loop_factory=server.loop_factory()) as runner:
            runner.run(run())

    thread = threading.Thread(target=in_thread, daemon=True)
    thread.start()
    try:
        if not started.wait(30):
            raise TimeoutError("no server that answers at once")
        yield f"http://127.0.0.1:{address[1]}"
    finally:
        for end in ends:
            end()
        thread.join(30)
