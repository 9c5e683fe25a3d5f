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
    number: int = 0
    """Number of the page in its sequences, where it is loaded."""


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
    page_bytes: int


class HostPagesBase(Protocol):
    """Pages in host memory."""

    store: PageStore | None
    """Their files; None without `EngineOptions.prefix_cache_dir`."""
    page_bytes: int
    """Bytes of a page, on all devices together."""

    def get(self, slot: int) -> Any:
        """The page in a slot, for `store` to write."""
        ...

    def put(self, slot: int, page: Any) -> None:
        """Put a page that `store` has read into a slot."""
        ...

    def drop(self, slot: int) -> None:
        """Free the memory of the page in a slot, if there is one."""
        ...


class HostMemory(Protocol):
    """The part of a model runner that holds the bytes."""

    @property
    def host_pages(self) -> HostPagesBase: ...

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Start copies of pages, in this order and before all that is sent later."""
        ...

    def fingerprint(self) -> bytes:
        """A digest of all that the bytes of a page depend on besides its tokens."""
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
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        # The longest unused first.
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        # Page of the device -> (key, number in its sequences).
        self._loading: dict[int, tuple[bytes, int]] = {}
        self._held: set[bytes] = set()
        self._moves: list[PageMove] = []
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        """Pages in host memory that `store` has still to be given."""
        self._reading: dict[bytes, int] = {}
        """Pages that are being read from disk, and the slots that are kept for them."""
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
        size = self._memory.host_pages.page_bytes
        found = [TierCounts("host", len(self), self.saved, self.loaded, {}, size)]
        if (store := self.store) is not None:
            counts = store.saved, store.loaded, store.misses
            found.append(TierCounts("disk", len(store), *counts, store.page_bytes))
        return found

    def save(self, key: bytes, page: int) -> bool:
        """Keep a page of the device that will be written anew. Returns False if all slots are
        held."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            self._held.discard(self._loading.pop(page, (b"", 0))[0])
            return True
        if (slot := self._take_slot()) is None:
            return False
        self._slot_of[key] = slot
        self._moves.append(PageMove(True, page, slot))
        if self.store is not None:
            self._unwritten[key] = None
        self.saved += 1
        return True

    def _take_slot(self) -> int | None:
        """A free slot, or that of the longest unused page; None if all are held."""
        if self._free:
            return self._free.pop()
        if (dropped := self._oldest) is None:
            return None
        if dropped in self._unwritten:
            del self._unwritten[dropped]
            assert self.store is not None
            self.store.count_miss("queue")
        slot = self._slot_of.pop(dropped)
        self.on_drop(dropped)
        return slot

    @property
    def _oldest(self) -> bytes | None:
        """The longest unused page, which gives its slot to the next; None if all are held."""
        return next((one for one in self._slot_of if one not in self._held), None)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make those of a prefix's pages that are here the last used ones, its first page the very
        last: the end is dropped before the beginning."""
        for key in reversed(keys):
            if key in self._slot_of:
                self._slot_of.move_to_end(key)

    def hold(self, keys: Sequence[bytes]) -> None:
        """Keep these pages until they are loaded (`begin_load`)."""
        self.touch(keys)
        self._held.update(keys)

    def begin_load(self, key: bytes, page: int, number: int) -> None:
        """Load a page that is held, `number` of its sequences, into a page of the device, as soon
        as `load` is asked for it."""
        self._loading[page] = key, number

    def load(self, pages: Iterable[int]) -> bool:
        """Plan the loads of those of a sequence's `pages` that wait for theirs, as far as there is
        room. Returns False if some still wait."""
        if not self._loading:
            return True
        for page in pages:
            if page in self._loading:
                if not self._room:
                    return False
                key, number = self._loading.pop(page)
                self._held.remove(key)
                self._moves.append(PageMove(False, page, self._slot_of[key], number))
                self.loaded += 1
                self._room -= 1
        return True

    def flush(self) -> None:
        """Start the moves that are planned, before anything else is sent to the device. There is
        room for the loads of the next chunk then."""
        self._room = self.loads_per_chunk
        self._start_moves()
        self.take_read(wait=False)  # the requests that they are for may be gone
        while self._unwritten and self._write(next(iter(self._unwritten))):
            self._unwritten.popitem(last=False)

    def _start_moves(self) -> None:
        if self._moves:
            self._memory.move_pages(self._moves)
            self._moves = []

    def _write(self, key: bytes) -> bool:
        """Begin to write a page of host memory to disk. Returns False if too many wait."""
        assert self.store is not None
        return self.store.write(key, self._memory.host_pages.get(self._slot_of[key]))

    def clear(self) -> list[bytes]:
        """Forget all pages, for the weights have changed; returns their keys."""
        keys = [*self._slot_of]
        self._free += [*self._slot_of.values(), *self._reading.values()]
        for one in (self._slot_of, self._loading, self._held, self._unwritten, self._reading):
            one.clear()
        if (store := self.store) is not None:
            store.fingerprint = self._memory.fingerprint()
        return keys

    # Disk ---------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], ahead: int = 0) -> set[bytes] | None:
        """Begin to read those pages of a prefix that are on disk alone; `keys` are all that the
        device has not. Those at the end for which there are no slots are left. Returns the keys of
        the others, or None while pages of other prefixes that are being read have the slots, or
        with the pages `ahead` of prefixes that wait before it these would fill half of them: what
        comes meanwhile would push out what was read. None is read while the disk has stalled: each
        would take the slot of a page that is here."""
        assert self.store is not None
        self.take_read(wait=False)
        if self._reading and not self._is_reading:
            return set()
        room = len(self._free) + len(self._slot_of) - len(self._held)
        if room < len(keys) and self._is_reading:
            return None
        keys = keys[:room]
        wanted = [key for key in keys if key not in self._slot_of]
        if wanted and ahead and ahead + len(keys) > self._num_slots // 2:
            return None
        self.touch(keys)
        if not wanted:
            return set()
        if not self._reading:
            self._progress_at = time.monotonic()
        self._start_moves()  # those that are planned are of what is in the slots now
        for key in wanted:
            if key not in self._reading:
                slot = self._take_slot()
                assert slot is not None
                self._memory.host_pages.drop(slot)
                self._reading[key] = slot
                self.store.read(key)
        return {*wanted}

    @property
    def _is_reading(self) -> bool:
        """True if pages are being read, by a disk that has not stalled."""
        return bool(self._reading) and time.monotonic() - self._progress_at < STALLED_SECONDS

    def is_reading(self, key: bytes) -> bool:
        """Return whether a page is being read, by a disk that has not stalled."""
        return key in self._reading and self._is_reading

    def take_read(self, *, wait: bool) -> None:
        """Put pages that have been read into their slots. With `wait` wait for one, if any is
        read."""
        if not self._reading:
            return
        assert self.store is not None
        if wait:
            self.store.wait_read(READ_SECONDS)
        found = self.store.take_read()
        if found:
            self._progress_at = time.monotonic()
        for key, page in found:
            if (slot := self._reading.pop(key, None)) is None:
                continue  # it was asked for before `clear`
            if page is None or key in self._slot_of:
                self._free.append(slot)
            else:
                self._slot_of[key] = slot
                self._memory.host_pages.put(slot, page)

    def persist(self, pages: Mapping[bytes, int], seconds: float) -> None:
        """Write pages of the device (key -> page), then those in host memory, to disk, the last
        used first, as many as there is room for. After so many seconds the rest is left."""
        if (store := self.store) is None:
            return
        deadline = time.monotonic() + seconds
        self._start_moves()
        self._unwritten.clear()  # those for which there is room are among `keys`
        keys = [*dict.fromkeys([*pages, *reversed(self._slot_of)])][: store.capacity]
        store.touch(keys)  # none of them makes room for another
        first = [self._oldest] if not self._free and self._oldest in keys else []
        for key in [*first, *keys]:  # that of the first is the slot of all pages of the device
            if not store.wait_written(MAX_UNWRITTEN // 2, deadline):
                break
            if key in self._slot_of:  # the page of the device may still wait for its load
                self._write(key)
            elif key in pages and key not in store:
                if self.save(key, pages[key]):
                    self.flush()
                    self._slot_of.move_to_end(key, last=False)
        store.wait_written(0, deadline)
        store.touch(keys)
