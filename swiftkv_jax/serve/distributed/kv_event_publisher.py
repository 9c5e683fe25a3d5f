"""The thread that publishes events of the prefix cache over ZeroMQ."""

from __future__ import annotations

import errno
import logging
import threading
from typing import Any

from ...errors import UsageError
from ..options import KVEventsConfig
from .kv_events import Batches

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message without a payload after the last one that is sent again."""
POLL_SECONDS = 0.1
"""Time after which the thread looks for requests of a replay, while nothing happens."""
LINGER_MS = 500
"""Time that a closed socket has for what it has not sent."""


class KVEventPublisher:
    """A PUB socket that sends each batch as (topic, sequence number, payload), and, with
    `replay_endpoint`, a ROUTER socket: a DEALER that sends (nothing, sequence number) gets
    (nothing, sequence number, payload) of each batch from there on, and (nothing, `END_OF_REPLAY`,
    nothing)."""

    def __init__(self, config: KVEventsConfig):
        """Bind or connect the sockets. Raises `UsageError` without the package pyzmq or for an
        endpoint that is none, `OSError` for one that cannot be bound."""
        try:
            import zmq  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UsageError(
                "`kv_events_config` needs the package pyzmq: "
                "pip install 'swiftkv-jax[serve,kv-events]'"
            ) from None
        self._config, self._topic = config, config.topic.encode()
        self._error = zmq.ZMQError
        self._context = zmq.Context()
        self._replay: Any = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.batches: Batches | None = None
        """Since `start`."""
        try:
            self._pub = self._socket(zmq.PUB, config.endpoint, "endpoint", config.hwm)
            if config.replay_endpoint is not None:
                # A replay is sent at once, so all of it has to have room.
                size = config.buffer_steps + 1
                endpoint = config.replay_endpoint
                self._replay = self._socket(zmq.ROUTER, endpoint, "replay_endpoint", size)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _socket(self, kind: int, endpoint: str, name: str, hwm: int) -> Any:
        found = self._context.socket(kind)
        found.set_hwm(hwm)
        found.linger = LINGER_MS
        try:
            if name == "replay_endpoint" or _is_bound(endpoint):
                found.bind(endpoint)
            else:
                found.connect(endpoint)
        except self._error as error:
            found.close(linger=0)
            if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                raise OSError(error.errno, f"{name} {endpoint}: {error.strerror}") from None
            message = f"`kv_events_config`: `{name}`={endpoint!r}: {error.strerror}"
            raise UsageError(message) from None
        return found

    def start(self, page_size: int) -> Batches:
        """Publish what is put into the batches from now on; the first says that nothing is
        cached."""
        self.batches = Batches(self._config, page_size)
        self.batches.put(None)
        self._thread = threading.Thread(
            target=self._run, args=(self.batches,), name="kv events", daemon=True
        )
        self._thread.start()
        return self.batches

    def close(self) -> None:
        """Send what is queued, for a second at most, and close the sockets."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(2 * POLL_SECONDS + LINGER_MS / 1000)
        if self._thread is None or not self._thread.is_alive():
            self._context.destroy()

    # In the thread ------------------------------------------------------------------

    def _run(self, batches: Batches) -> None:
        while True:
            try:
                if self._replay is not None and self._replay.poll(0):
                    self._answer(batches)
                found = batches.get(POLL_SECONDS)
                if found is not None:
                    number, payload = found
                    self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
                elif self._stopping:
                    return
            except self._error as error:
                logger.warning("an event of the prefix cache was not sent: %s", error)

    def _answer(self, batches: Batches) -> None:
        """Send again what a subscriber has missed."""
        *sender, number = self._replay.recv_multipart()
        if len(sender) != 2 or sender[1] or len(number) != 8:
            logger.warning("a request of a replay is not a sequence number of 8 bytes")
            return
        for missed, payload in batches.replay(int.from_bytes(number, "big")):
            self._replay.send_multipart((*sender, missed.to_bytes(8, "big"), payload))
        self._replay.send_multipart((*sender, END_OF_REPLAY, b""))


def _is_bound(endpoint: str) -> bool:
    """Return whether an endpoint is bound rather than connected to, as vLLM decides it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
