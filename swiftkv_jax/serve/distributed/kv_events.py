"""Events of the prefix cache in vLLM's wire format, for routers that read it (llm-d, Dynamo): what
a message holds, and the queue in which messages wait for the publisher.

A message is three frames: the topic, a sequence number of 8 bytes (big endian) and a batch in
MessagePack, [seconds since 1970, [event, ...], data-parallel rank], each event a map whose `type`
is BlockStored, BlockRemoved or AllBlocksCleared (vLLM from 0.24 on, `distributed/kv_events.py`).
A block is a page of the KV cache, its hash the first 8 bytes of the page's key.
"""

from __future__ import annotations

import collections
import itertools
import queue
import time
from collections.abc import Iterator, Sequence

import msgspec

from ...infer.engine.cache_events import CacheEvent, PagesStored
from ..options import KVEventsConfig


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
    lora_name: None
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
        None,
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
