"""HTTP/1.1 connections with deadlines. uvicorn has one for idle connections after an answer; those
before the first request, half headers and half bodies it keeps for ever."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import APIError, invalid
from ..options import MAX_BODY_SIZE, ServerOptions
from .exchange import CONNECTION, MAX_HEADER_BYTES
from .parser import Parser

BYTES_PER_SECOND = 65536
"""A body may take a second longer for each of so many bytes."""
LINGER_SECONDS = 5.0
"""Time for the rest of a body whose request has been answered: a connection closed with unread
bytes is reset, and the client may lose the answer."""


class Transport:
    """asyncio's transport; uvicorn writes each part of an answer by itself."""

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._held: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold what is written meanwhile, and send it at the end in one system call."""
        self._held = []
        try:
            yield
        finally:
            self._release()

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def close(self) -> None:
        self._release()
        self._transport.close()

    def _release(self) -> None:
        held = self._held
        self._held = None
        if held:
            self._transport.write(b"".join(held))


class Connection(H11Protocol):
    """One connection. Subclassed by `with_options`, since uvicorn makes it."""

    options: ServerOptions
    transport: Transport  # pyright: ignore[reportIncompatibleVariableOverride]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.conn = Parser(MAX_HEADER_BYTES)
        self.on_lost: Callable[[], None] | None = None
        """Called when the connection has ended."""
        self._phase = ""
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        """Runs out at the deadline, or before it and is set anew: a new deadline is an assignment.
        """
        app = self.app
        root = self.options.root_path

        async def run(scope: Any, receive: Any, send: Any) -> None:
            scope["extensions"] = {CONNECTION: self}
            if root and f"{scope['path']}/".startswith(f"{root}/"):  # a proxy may have removed it
                scope["path"] = scope["path"].removeprefix(root) or "/"
            await app(scope, receive, send)

        self.app = run
        super().connection_made(Transport(transport))  # type: ignore[arg-type]
        # What is sent next waits until the system has what was sent before: `flow.drain`.
        # Not 0: uvloop's TLS would count an empty buffer as full.
        transport.set_write_buffer_limits(high=1, low=0)
        if len(self.connections) > self.options.max_connections:
            message = f"there are {self.options.max_connections} connections"
            error = APIError(503, "too_many_connections", message, headers={"retry-after": "1"})
            self._refuse(error)
            return
        self._enter("idle", self.options.keep_alive_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's own timer, in whole seconds
        self._follow()
        if self.conn.our_state is h11.DONE and self._phase == "body":  # nothing reads the rest
            self._enter("body", LINGER_SECONDS)

    def _follow(self) -> None:
        """Set the deadline of what the connection waits for."""
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        buffered = len(self.conn.trailing_data[0])
        if state is h11.SEND_BODY:
            if self._phase != "body":
                length = dict(self.headers).get(b"content-length", b"")
                size = self.options.max_body_size or MAX_BODY_SIZE
                if length.isdigit():
                    size = min(size, int(length))
                self._enter("body", self.options.body_timeout + size / BYTES_PER_SECOND)
        elif state is h11.IDLE:
            phase, seconds = "idle", self.options.keep_alive_timeout
            if buffered:
                phase, seconds = "headers", self.options.header_timeout
            if self._phase != phase:
                self._enter(phase, seconds)
        else:
            self._enter("", math.inf)
            # uvicorn stops reading while a request runs, and would not notice that the client
            # leaves.
            if self.flow.read_paused and buffered < MAX_HEADER_BYTES:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, or whose headers are too long."""
        self._refuse(invalid(None, msg, "invalid_request"))

    def _refuse(self, error: APIError) -> None:
        content = msgspec.json.encode(error.body())
        reason = {400: "Bad Request", 503: "Service Unavailable"}[error.status]
        head = (
            f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n"
            f"x-request-id: {uuid.uuid4().hex}\r\n"
        )
        head += "".join(f"{name}: {value}\r\n" for name, value in error.headers.items()) + "\r\n"
        self.transport.write(head.encode() + content)
        self.transport.close()

    def _enter(self, phase: str, seconds: float) -> None:
        """Give the next phase its time."""
        self._phase, self._deadline = phase, self.loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and seconds < math.inf:
            self._timer = self.loop.call_at(self._deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if (left := self._deadline - self.loop.time()) <= 0:
            self.transport.abort()
        elif left < math.inf:
            self._timer = self.loop.call_at(self._deadline, self._expire)


def with_options(options: ServerOptions) -> type[Connection]:
    """The class of a server's connections."""
    return type("Connection", (Connection,), {"options": options})
