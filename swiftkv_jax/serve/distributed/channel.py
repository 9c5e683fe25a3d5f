"""Messages between the processes of a server: msgpack over TCP, each after its length."""

from __future__ import annotations

import contextlib
import socket
import threading

import msgspec

MAX_MESSAGE_BYTES = 256 * 2**20
LENGTH_BYTES = 4
"""Bytes of a length, the most significant first."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between the system's own packets after it, and how many of them stay
unanswered before the connection has ended: the other machine is gone."""


class ProtocolError(ConnectionError):
    """Error for bytes that are no valid message, or not the expected one."""


class Channel:
    """A connection that carries messages. One thread receives, any may send."""

    def __init__(self, connection: socket.socket, timeout: float):
        """`timeout` in seconds is what one `send` may take, and one `receive` wait."""
        self._socket, self._buffer, self._sending = connection, bytearray(), threading.Lock()
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def send(self, message: msgspec.Struct) -> None:
        """Raises `OSError`, and `ProtocolError` for a message that is too long."""
        content = msgspec.msgpack.encode(message)
        if len(content) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(content)} bytes, above {MAX_MESSAGE_BYTES}")
        with self._sending:
            self._socket.sendall(len(content).to_bytes(LENGTH_BYTES, "big") + content)

    def receive[T](self, decoder: msgspec.msgpack.Decoder[T], limit: int = MAX_MESSAGE_BYTES) -> T:
        """The next message. Raises `TimeoutError` if it has not come in time, after which the call
        may be repeated; `ConnectionError` at the end of the connection, and of its kind
        `ProtocolError` for more than `limit` bytes or what `decoder` refuses."""
        while (content := self._next(limit)) is None:
            received = self._socket.recv(2**18)
            if not received:
                raise ConnectionError("the connection has ended")
            self._buffer += received
        try:
            return decoder.decode(content)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"no message: {error}") from None

    def _next(self, limit: int) -> bytes | None:
        """A whole message from the buffer, or None."""
        if len(self._buffer) < LENGTH_BYTES:
            return None
        stop = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if stop - LENGTH_BYTES > limit:
            raise ProtocolError(f"a message of {stop - LENGTH_BYTES} bytes, above {limit}")
        if len(self._buffer) < stop:
            return None
        content = bytes(self._buffer[LENGTH_BYTES:stop])
        del self._buffer[:stop]
        return content

    def close(self) -> None:
        """End the connection, also for a thread that receives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
