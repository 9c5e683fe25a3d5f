"""One HTTP request and its answer, on raw ASGI (asgi.readthedocs.io, version 3): the body under a
limit, JSON or a stream of events out, and whether the client is still there."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from ..errors import APIError, invalid
from .auth import Client

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


MAX_PATH = 8192
MAX_HEADERS = 100
MAX_HEADER_BYTES = 65536
CONNECTION = "swiftkv.connection"
"""Extension of the scope: the `Connection` of the request."""


class ClientGone(Exception):
    """The client has closed the connection, or does not read it."""


def error_events(error: APIError) -> bytes:
    """The last events of a stream of completions or of a chat."""
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n" + DONE


def named_event(name: str, event: Mapping[str, Any]) -> bytes:
    """One event of a stream whose events have names."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


class HTTPExchange:
    """A request, and the one answer to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, write_timeout: float):
        self._connection = scope["extensions"][CONNECTION]
        self._receive = receive
        self._send = send
        self._write_timeout = write_timeout
        self.scope, self.arrival = scope, time.monotonic()
        """`arrival` is set anew when the body is in."""
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first counts
        self.request_id = self._request_id()
        self.client = Client()
        """The client whose key the request brought."""
        self.extra: dict[str, str] = {}
        """Headers of the answer besides the usual ones."""
        self.status = 0
        """Status of the answer; 0 before it has begun."""
        self.num_bytes_in = self.num_bytes_out = 0
        self.is_gone = False
        """The client has closed the connection."""
        self.log: dict[str, Any] = {}
        """Fields of the request's line in the log."""
        self.on_gone: Callable[[], None] = lambda: None
        self.error_body: Callable[[APIError], dict[str, Any]] = APIError.body
        """The JSON of an error."""
        self.error_events = error_events
        """Events that end a stream that cannot go on."""

    @property
    def method(self) -> str:
        return self.scope["method"]

    def _request_id(self) -> str:
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        return given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else uuid.uuid4().hex

    def check_head(self) -> None:
        """Raise `APIError` for too long a path or too many headers; note a trace (W3C Trace
        Context)."""
        if len(self.scope["raw_path"]) + len(self.scope["query_string"]) > MAX_PATH:
            raise APIError(414, "path_too_long", f"the path has more than {MAX_PATH} bytes")
        if len(self.scope["headers"]) > MAX_HEADERS:
            raise APIError(431, "headers_too_large", f"there are more than {MAX_HEADERS} headers")
        if sum(len(name) + len(value) for name, value in self.scope["headers"]) > MAX_HEADER_BYTES:
            message = f"the headers have more than {MAX_HEADER_BYTES} bytes"
            raise APIError(431, "headers_too_large", message)
        trace = self.headers.get(b"traceparent", b"").decode("latin-1")
        if re.fullmatch("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", trace):
            self.log["traceparent"] = trace

    # In --------------------------------------------------------------------------------

    async def body(self, limit: int, count: Callable[[int], None] = lambda size: None) -> bytes:
        """The body. Raises `APIError` if it is not JSON, or has more than `limit` bytes as soon as
        that is known, and `ClientGone`. `count` is called with the size of each part that comes."""
        content_type = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if content_type != JSON.encode():
            raise APIError(415, "unsupported_media_type", f"the header content-type must be {JSON}")
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise APIError(415, "unsupported_media_type", "bodies must not be compressed")
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise self._too_large(limit)
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            self.num_bytes_in += len(parts[-1])
            if self.num_bytes_in > limit:
                raise self._too_large(limit)
            count(len(parts[-1]))
            if not message.get("more_body"):
                self.arrival = time.monotonic()
                return b"".join(parts)

    @staticmethod
    def _too_large(limit: int) -> APIError:
        return APIError(
            413,
            "body_too_large",
            f"the body has more than {limit} bytes",
            headers={"connection": "close"},
        )

    def timeout(self) -> float | None:
        """Seconds that the client gives the request in `X-Request-Timeout-Ms`. Raises
        `APIError`."""
        if (given := self.headers.get(b"x-request-timeout-ms")) is None:
            return None
        if not given.isdigit() or len(given) > 32 or not int(given):
            raise invalid("X-Request-Timeout-Ms", "must be a whole number of milliseconds above 0")
        return int(given) / 1e3

    def watch(self) -> None:
        """Watch the connection: from now on `is_gone` tells whether the client has left, and
        `on_gone` is called when it does. Nothing else may be received."""
        self._connection.on_lost = self._leave

    def _leave(self) -> None:
        self.is_gone = True
        self.on_gone()

    def close(self) -> None:
        """The connection is that of the next request, which may have begun."""
        if self._connection.on_lost == self._leave:
            self._connection.on_lost = None

    # Out -------------------------------------------------------------------------------

    async def send_json(self, status: int, value: Any) -> None:
        await self.send_bytes(status, msgspec.json.encode(value), JSON)

    async def send_bytes(self, status: int, content: bytes, content_type: str) -> None:
        """A whole answer. Raises `ClientGone`."""
        length = len(content)
        if self.method == "HEAD":
            content = b""
        elapsed = 1e3 * (time.monotonic() - self.arrival)
        self.extra.setdefault("openai-processing-ms", f"{elapsed:.0f}")
        with self._connection.transport.held():
            await self._start(status, content_type, {"content-length": str(length)})
            await self._write(content, more=False)

    async def flush(self) -> None:
        """Wait until the system has all that was sent. Raises `ClientGone`; a connection on which
        nothing moves for the write timeout is closed, and what is unsent dropped."""
        flow, transport = self._connection.flow, self._connection.transport
        unsent = math.inf
        while flow.write_paused:
            if (left := transport.get_write_buffer_size()) >= unsent:
                transport.abort()
                await asyncio.sleep(0.01)  # uvicorn notices
                raise ClientGone("slow")
            unsent = left
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._write_timeout):
                    await flow.drain()

    async def send_error(self, error: APIError) -> None:
        """An answer, or, where a stream has begun, its last events. Raises `ClientGone`."""
        self.log["error"] = error.code
        if not self.status:
            self.extra |= error.headers
            await self.send_json(error.status, self.error_body(error))
        else:
            await self._write(self.error_events(error), more=False)

    async def send_events(self, content: bytes, *, more: bool = True) -> None:
        """Events of a stream; the first call begins it. Raises `ClientGone`."""
        if self.status and more:  # in one part
            await self._write(content, more=True)
            return
        with self._connection.transport.held():
            if not self.status:
                headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
                await self._start(200, EVENTS, headers)
            await self._write(content, more=more)

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        every = {
            "content-type": content_type,
            "x-content-type-options": "nosniff",
            "x-request-id": self.request_id,
            **headers,
            **self.extra,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
        await self._send_next({"type": "http.response.start", "status": status, "headers": raw})
        self.status = status

    async def _write(self, content: bytes, *, more: bool) -> None:
        if self.is_gone:
            raise ClientGone
        self.num_bytes_out += len(content)
        await self._send_next({"type": "http.response.body", "body": content, "more_body": more})

    async def _send_next(self, message: MutableMapping[str, Any]) -> None:
        """Send a part once the system has those before. Raises `ClientGone`."""
        try:
            await self.flush()
            await self._send(message)
        except OSError:
            raise ClientGone from None
