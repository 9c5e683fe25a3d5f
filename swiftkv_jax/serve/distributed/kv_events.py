"""Events of the prefix cache in vLLM's wire format, over ZeroMQ, for routers that read it (llm-d,
Dynamo).

A message is three frames: the topic, a sequence number of 8 bytes (big endian) and a batch in
MessagePack, [seconds since 1970, [event, ...], data-parallel rank], each event a map whose `type`
is BlockStored, BlockRemoved or AllBlocksCleared (vLLM from 0.24 on, `distributed/kv_events.py`).
A block is a page of the KV cache, its hash the first 8 bytes of the page's key.
"""

from __future__ import annotations

import collections
import errno
import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...errors import UsageError
from ...infer.engine.cache_events import CacheEvent, PagesStored
from ..lora_modules import public_name
from ..options import KVEventsConfig

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message without a payload after the last one that is sent again."""
POLL_SECONDS = 0.1
"""Time after which the thread looks for requests of a replay, while nothing happens."""
LINGER_MS = 500
"""Time that a closed socket has for what it has not sent."""


class _Event(msgspec.Struct, tag=True, omit_defaults=True):
    """An event, with vLLM's fields."""


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before them; None at the beginning of a sequence."""
    token_ids: list[int]
    """Tokens of all of them."""
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    """The adapter on which they depend; None for those of the model."""
    extra_keys: list[tuple[str] | None] | None = None
    """Values on which the hash of each block depends besides tokens: the cache salt, in the first
    block of a sequence."""


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


MEDIUM = "GPU"
"""vLLM's word for the cache that the model reads, wherever that is."""
_encode = msgspec.msgpack.Encoder().encode


def encode_batch(events: Sequence[CacheEvent] | None, page_size: int, time: float) -> bytes:
    """A batch of events in their order. None is the start of a server: nothing is cached."""
    found = [AllBlocksCleared()] if events is None else [_event(one, page_size) for one in events]
    return _encode(KVEventBatch(time, found, 0))


def _event(event: CacheEvent, page_size: int) -> BlockStored | BlockRemoved:
    if not isinstance(event, PagesStored):
        return BlockRemoved([block_hash(event.key)], MEDIUM)
    extra = None
    if event.parent is None and event.cache_salt:
        extra = [(event.cache_salt,), *[None] * (len(event.keys) - 1)]
    return BlockStored(
        [block_hash(key) for key in event.keys],
        None if event.parent is None else block_hash(event.parent),
        event.token_ids.tolist(),
        page_size,
        None,
        MEDIUM,
        public_name(event.adapter) or None,
        extra,
    )


def block_hash(key: bytes) -> int:
    """Hash of a page in events, 64 bits."""
    return int.from_bytes(key[:8], "big")


class Batches:
    """Batches between the engine's thread and the publisher's."""

    def __init__(self, config: KVEventsConfig, page_size: int):
        self._page_size = page_size
        self._waiting: queue.Queue[tuple[int, float, Sequence[CacheEvent] | None]]
        self._waiting = queue.Queue(config.max_queue_size)
        self._numbers = itertools.count()
        self._sent: collections.deque[tuple[int, bytes]]
        self._sent = collections.deque(maxlen=config.buffer_steps)
        self.num_batches = self.num_dropped = 0
        """Batches of the engine, and those of them for which there was no room."""

    def put(self, events: Sequence[CacheEvent] | None) -> None:
        """Queue a batch, `events` as of `encode_batch`, from the engine's thread. Never waits: one
        for which there is no room is dropped, and its sequence number is missing."""
        self.num_batches += 1
        try:
            self._waiting.put_nowait((next(self._numbers), time.time(), events))
        except queue.Full:
            self.num_dropped += 1

    def get(self, timeout: float) -> tuple[int, bytes] | None:
        """(sequence number, payload) of the next batch, which `replay` has from then on; None if
        there is none in `timeout` seconds."""
        try:
            number, at, events = self._waiting.get(timeout=timeout)
        except queue.Empty:
            return None
        found = number, encode_batch(events, self._page_size, at)
        self._sent.append(found)
        return found

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """The last `buffer_steps` batches from sequence number `start` on."""
        return (one for one in self._sent if one[0] >= start)


# The publisher -----------------------------------------------------------------------


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
