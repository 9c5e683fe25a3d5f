"""Records what enters and leaves the prefix cache, for routers that send a request to the server
that has its prefix cached."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class TokenSource(Protocol):
    """Anything that has the tokens of pages."""

    @property
    def cache_salt(self) -> str: ...
    @property
    def cache_adapter(self) -> str: ...

    def token_ids_at(self, start: int, stop: int) -> Sequence[int]:
        """Tokens at positions `start .. stop-1`."""
        ...


class PagesStored(NamedTuple):
    """Consecutive pages of a sequence that have been added to the cache."""

    keys: list[bytes]
    """Keys of the pages, by `page_pool.page_keys`."""
    parent: bytes | None
    """Key of the page before them; None if they begin the sequence."""
    token_ids: np.ndarray
    """i32[T], the tokens of all of them."""
    cache_salt: str
    adapter: str = ""
    """Name of an adapter on which they depend; "" for none."""


class PageRemoved(NamedTuple):
    """A page that was removed from the cache."""

    key: bytes


CacheEvent = PagesStored | PageRemoved


class CacheEvents:
    """Changes of the prefix cache since the last `take`, in order. A page that several
    data-parallel shards have cached counts once."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._shards: collections.Counter[bytes] = collections.Counter()
        """Key -> shards that have its page cached."""
        self._events: list[CacheEvent] = []

    def store(self, keys: Sequence[bytes], numbers: list[int], source: TokenSource) -> None:
        """Record that a shard has cached the pages `numbers`, ascending, of a sequence with the
        page keys `keys`. `source` has its tokens."""
        new = [number for number in numbers if not self._shards[keys[number]]]
        self._shards.update(keys[number] for number in numbers)
        first = 0
        for last, number in enumerate(new):
            if last + 1 < len(new) and new[last + 1] == number + 1:
                continue
            start = new[first]
            stop = number + 1
            first = last + 1
            size = self._page_size
            tokens = np.array(source.token_ids_at(start * size, stop * size), np.int32)
            parent = keys[start - 1] if start else None
            root = source.cache_salt, source.cache_adapter
            self._events.append(PagesStored(list(keys[start:stop]), parent, tokens, *root))

    def has(self, key: bytes) -> bool:
        """Return whether the page of this key is cached, by the events so far."""
        return self._shards[key] > 0

    def remove(self, key: bytes) -> None:
        """Record that a shard has evicted a page. Pages that were cached before recording began are
        ignored."""
        count = self._shards.pop(key, 0)
        if count == 1:
            self._events.append(PageRemoved(key))
        elif count > 1:
            self._shards[key] = count - 1

    def take(self) -> list[CacheEvent]:
        """The changes since the last call."""
        events = self._events
        self._events = []
        return events
