"""The host tier of the prefix cache: which pages that have left the device are in host memory.

This is the index; the model runner has the bytes. Moves of pages are planned in an order in which
they can run: a page is saved before it is written anew, and its slot is written anew only after it
has been loaded. The runner starts them in that order without waiting for any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

LOADS_PER_CHUNK = 64
"""Most pages that are loaded before a chunk of prefill; the others of a prefix follow in the next
ones, so that no decode call waits for all of a long one."""


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


class HostMemory(Protocol):
    """The part of a model runner that holds the bytes."""

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
        self._room = loads_per_chunk

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def __len__(self) -> int:
        """Return the number of pages in host memory."""
        return len(self._slot_of)

    @property
    def counts(self) -> TierCounts:
        return TierCounts("host", len(self), self.saved, self.loaded)

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
        if self._moves:
            self._memory.move_pages(self._moves)
            self._moves = []

    def clear(self) -> list[bytes]:
        """Forget all pages; returns their keys."""
        keys = [*self._slot_of]
        self._free += self._slot_of.values()
        self._slot_of.clear()
        self._loading.clear()
        self._held.clear()
        return keys
