"""The host tier of the prefix cache: which pages that have left the device are in host memory.

This is the index; the model runner has the bytes, and `PageStore` writes and reads their files.
Moves of pages are planned in an order in which they can run: a page is saved before it is written
anew, and its slot is written anew only after it has been loaded. The runner starts them in that
order without waiting for any.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .page_store import MAX_UNWRITTEN, PageStore

LOADS_PER_CHUNK = 64
"""Most pages that are loaded before a chunk of prefill; the others of a prefix follow in the next
ones, so that no decode call waits for all of a long one."""

READ_SECONDS = 0.002
"""Time for which a step without other work waits for the disk."""

STALLED_SECONDS = 2.0
"""Time without a page read after which requests do not wait for the disk."""


class PageMove(NamedTuple):
    """A copy of one page, from the device to host memory or back."""

    saves: bool
    """True from the device."""
    page: int
    """Page of the device's pool."""
    slot: int
    """Place in host memory."""


class TierCounts(NamedTuple):
    """Pages of a tier of the prefix cache beyond the device."""

    tier: str
    pages: int
    """Pages that it has now."""
    saved: int
    """Pages that were copied to it."""
    loaded: int
    """Pages that were copied back."""
    misses: Mapping[str, int]
    """Pages that could not be read or written, by the reason."""


class HostPagesBase(Protocol):
    """Pages in host memory."""

    store: PageStore | None
    """Their files; None without `EngineOptions.prefix_cache_dir`."""

    def get(self, slot: int) -> Any:
        """The page in a slot, for `store` to write."""
        ...

    def put(self, slot: int, page: Any) -> None:
        """Put a page that `store` has read into a slot."""
        ...

    def fingerprint(self) -> bytes:
        """A digest of all that the bytes of a page depend on besides its tokens."""
        ...


class HostMemory(Protocol):
    """The part of a model runner that holds the bytes."""

    @property
    def host_pages(self) -> HostPagesBase: ...

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Start copies of pages, in this order and before all that is sent later."""
        ...


class HostTier:
    """`num_slots` slots for pages in host memory. A page that is loaded again keeps its slot."""

    def __init__(
        self,
        num_slots: int,
        memory: HostMemory,
        *,
        loads_per_chunk: int = LOADS_PER_CHUNK,
    ):
        self.on_drop: Callable[[bytes], object] = lambda key: None
        """Called with the key of a page that gives its slot to another."""
        self.loads_per_chunk = loads_per_chunk
        self.saved = 0
        """Pages that were copied to host memory."""
        self.loaded = 0
        """Pages that were copied back."""
        self._memory = memory
        self._free = list(range(num_slots - 1, -1, -1))
        # The longest unused first.
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._loading: dict[int, bytes] = {}
        self._held: set[bytes] = set()
        self._moves: list[PageMove] = []
        self._unwritten: list[tuple[bytes, int]] = []
        self._reading: set[bytes] = set()
        self._progress_at = 0.0
        """Time at which a page of `_reading` was read last, or the first of them was asked for."""
        self._room = loads_per_chunk

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def __len__(self) -> int:
        """Return the number of pages in host memory."""
        return len(self._slot_of)

    @property
    def store(self) -> PageStore | None:
        """The disk tier behind it, if there is one."""
        return self._memory.host_pages.store

    @property
    def counts(self) -> list[TierCounts]:
        found = [TierCounts("host", len(self), self.saved, self.loaded, {})]
        if (store := self.store) is not None:
            found.append(TierCounts("disk", len(store), store.saved, store.loaded, store.misses))
        return found

    def save(self, key: bytes, page: int) -> bool:
        """Keep a page of the device that will be written anew. Returns False if all slots are
        held."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            self._held.discard(self._loading.pop(page, b""))
            return True
        if (slot := self._new_slot(key)) is None:
            return False
        self._moves.append(PageMove(True, page, slot))
        self._unwritten.append((key, slot))
        self.saved += 1
        return True

    def _new_slot(self, key: bytes) -> int | None:
        """Give a page a slot, that of the longest unused one if none is free; None if all are
        held."""
        if self._free:
            slot = self._free.pop()
        else:
            dropped = next((one for one in self._slot_of if one not in self._held), None)
            if dropped is None:
                return None
            slot = self._slot_of.pop(dropped)
            self.on_drop(dropped)
        self._slot_of[key] = slot
        return slot

    def hold(self, keys: Sequence[bytes]) -> None:
        """Keep these pages until they are loaded (`begin_load`)."""
        for key in reversed(keys):  # the end is dropped before the beginning
            self._slot_of.move_to_end(key)
        self._held.update(keys)

    def begin_load(self, key: bytes, page: int) -> None:
        """Load a page that is held into a page of the device, as soon as `load` is asked for it."""
        self._loading[page] = key

    def load(self, pages: Iterable[int]) -> bool:
        """Plan the loads of those of a sequence's `pages` that wait for theirs, as far as there is
        room. Returns False if some still wait."""
        if not self._loading:
            return True
        for page in pages:
            if page in self._loading:
                if not self._room:
                    return False
                key = self._loading.pop(page)
                self._held.remove(key)
                self._moves.append(PageMove(False, page, self._slot_of[key]))
                self.loaded += 1
                self._room -= 1
        return True

    def flush(self) -> None:
        """Start the moves that are planned, before anything else is sent to the device. There is
        room for the loads of the next chunk then."""
        self._room = self.loads_per_chunk
        self._start_moves()

    def _start_moves(self) -> None:
        if not self._moves:
            return
        self._memory.move_pages(self._moves)
        self._moves = []
        if (store := self.store) is not None:
            for key, slot in self._unwritten:
                if self._slot_of.get(key) == slot:
                    store.write(key, self._memory.host_pages.get(slot))
        self._unwritten = []

    def clear(self) -> list[bytes]:
        """Forget all pages, for the weights have changed; returns their keys."""
        keys = [*self._slot_of]
        self._free += self._slot_of.values()
        self._slot_of.clear()
        self._loading.clear()
        self._held.clear()
        self._reading.clear()
        if (store := self.store) is not None:
            store.fingerprint = self._memory.host_pages.fingerprint()
        return keys

    # Disk ---------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes]) -> set[bytes]:
        """Begin to read pages from disk, as many as there are slots; returns their keys."""
        assert self.store is not None
        wanted = {*keys[: len(self._slot_of) + len(self._free)]}
        if not self._reading:
            self._progress_at = time.monotonic()
        for key in keys:
            if key in wanted and key not in self._reading:
                self._reading.add(key)
                self.store.read(key)
        return wanted

    def is_reading(self, key: bytes) -> bool:
        """Return whether a page is being read, by a disk that has not stalled."""
        stalled = time.monotonic() - self._progress_at >= STALLED_SECONDS
        return key in self._reading and not stalled

    def take_read(self, *, wait: bool) -> None:
        """Give slots to the pages that have been read. With `wait` wait for one, if any is read."""
        if not self._reading:
            return
        assert self.store is not None
        if wait:
            self.store.wait_read(READ_SECONDS)
        found = self.store.take_read()
        if found:
            self._progress_at = time.monotonic()
            self._start_moves()  # those that are planned are of what is in the slots now
        for key, page in found:
            self._reading.discard(key)
            if page is not None and key not in self._slot_of:
                if (slot := self._new_slot(key)) is not None:
                    self._memory.host_pages.put(slot, page)

    def persist(self, pages: Iterable[tuple[bytes, int]], seconds: float) -> None:
        """Write pages (key, page of the device) and those in host memory to disk, in that order,
        unless they are there. After so many seconds the rest is left."""
        if (store := self.store) is None:
            return
        deadline = time.monotonic() + seconds
        for key, page in pages:
            if not store.wait_written(MAX_UNWRITTEN // 2, deadline):
                return
            # Those of the host are written below; such a page may still wait for its load.
            if key not in store and key not in self._slot_of:
                self.save(key, page)
                self.flush()
        for key, slot in reversed([*self._slot_of.items()]):
            if not store.wait_written(MAX_UNWRITTEN // 2, deadline):
                return
            store.write(key, self._memory.host_pages.get(slot))
        store.wait_written(0, deadline)
