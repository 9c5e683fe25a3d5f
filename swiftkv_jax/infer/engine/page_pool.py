"""The page pool: allocation of pages of the KV cache, prefix caching, and eviction.

Under SwiftKV, as in a plain Llama, every entry of the cache depends on the tokens up to its own and
on nothing else, not even on whether its token ran through the upper layers. So a full page can be
shared by all sequences that begin with the same tokens, whether prefill, decoding or scoring wrote
it. The exception are tokens that keep their own upper keys and values (`Config.generated_kv`):
those depend on where the prompt ended, so a page that holds any is never shared, and no answer
depends on what is cached.

A page's key is a BLAKE2b digest (RFC 7693) of 256 bits of the key of the page before it and its own
tokens: equal for equal tokens up to its end, and different for others, since no collision of
BLAKE2b is known. The first depends on the matrices, not the name, of an adapter that changes keys
or values of prompts. Each engine has its own pools, so all else is the same for all keys.

Where every layer has a window, a sequence gives back the pages before the widest: `RELEASED` stands
in their places, so the others keep their positions. A prefix is then found by its last pages.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...model.config import Config
from .cache_events import CacheEvents, TokenSource
from .host_tier import HostMemory, HostTier, TierCounts
from .options import EngineOptions
from .page_keys import page_keys
from .shapes import Shapes

RELEASED = -1
"""Mark in a page table of a page that the sequence no longer needs."""
ON_HOST, ON_DISK = -2, -3
"""Marks in the result of `PagePool.match` of a page in host memory, or on disk."""


@dataclasses.dataclass
class PrefixStats:
    """Counters of the prefix cache."""

    queries: int = 0
    """Prompt tokens looked up."""
    hits: int = 0
    """Prompt tokens whose pages were found."""
    evictions: int = 0
    """Cached pages that were evicted."""
    host_hits: int = 0
    """Prompt tokens among `hits` whose pages came from host memory."""

    @staticmethod
    def total(stats: Iterable[PrefixStats]) -> PrefixStats:
        columns = zip(*map(dataclasses.astuple, stats), strict=True)
        return PrefixStats(*map(sum, columns))


class PageNeeds(NamedTuple):
    """Numbers of pages that a sequence needs."""

    pages: int
    """Pages for all of its positions."""
    own_pages: int
    """Own pages: tuples of pages for the upper keys and values that its tokens keep."""


class PagePool:
    """`num_pages` pages of `page_size` positions. A page is free, used by one or more sequences, or
    unused but cached."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        share: bool = True,
        window: int | None = None,
        pages_per_own_page: int = 0,
    ):
        """Create a pool of free pages. With `share` False no page is cached. `window` is the
        largest number of positions that a token sees, including its own (see `Config.window`);
        None: all. `pages_per_own_page` is `Config.pages_per_own_page` where upper layers attend to
        two caches, else 0."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.pages_per_own_page = pages_per_own_page
        self.share = share
        self.window = window
        self.stats = PrefixStats()
        self.events: CacheEvents | None = None
        """Records changes of the prefix cache; None: they are not recorded."""
        self.host: HostTier | None = None
        """Keeps pages that are evicted; None: they are lost."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # Cached pages without users, the longest unused first.
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `reserve` can return: free ones, and cached ones without users."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """Pages that sequences use."""
        return self.num_pages - self.available

    @property
    def tier_counts(self) -> list[TierCounts]:
        """Pages of each tier beyond the device."""
        return [] if self.host is None else self.host.counts

    def needs(self, positions: int, own_start: int) -> PageNeeds:
        """Pages for `positions` positions, of which those from `own_start` on keep their own upper
        keys and values."""
        own = self.num_own(positions, own_start)
        return PageNeeds(-(-positions // self.page_size), -(-own // self.page_size))

    def num_own(self, positions: int, own_start: int) -> int:
        """Positions from `own_start` on, where upper layers attend to two caches."""
        return max(positions - own_start, 0) * (self.pages_per_own_page > 0)

    def total(self, needs: PageNeeds) -> int:
        """Pages, of both kinds."""
        return needs.pages + self.pages_per_own_page * needs.own_pages

    def take(
        self, pages: Iterator[int], needs: PageNeeds
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """The next `needs` of `pages`: (pages, own pages)."""
        first = [*itertools.islice(pages, needs.pages)]
        own = itertools.islice(pages, needs.own_pages * self.pages_per_own_page)
        return first, [*itertools.batched(own, max(self.pages_per_own_page, 1))]

    def keep_on_host(self, host: HostTier) -> None:
        """Let `host` keep the pages that are evicted."""
        self.host = host
        host.on_drop = functools.partial(PagePool._drop, weakref.proxy(self))

    # Prefixes -----------------------------------------------------------------

    def keys(
        self, tokens: Sequence[int], salt: str = "", after: Sequence[bytes] = (), digest=b""
    ) -> list[bytes]:
        """`page_keys` of these pages; empty without prefix caching."""
        return page_keys(tokens, self.page_size, salt, after, digest) if self.share else []

    def match(self, keys: Sequence[bytes], on_disk: Container[bytes] = ()) -> list[int]:
        """The cached pages of the longest prefix of `keys` after which the next token finds all
        pages that it sees; `RELEASED` for pages that it does not see, `ON_HOST` for those that have
        to be loaded. They are not reserved (see `reserve`). Pages whose keys are `on_disk` count
        too, as `ON_DISK`. Any thread may ask: keys are looked up, one at a time, and nothing else
        is read."""
        pages: list[int] = []
        missing, length = -1, 0  # the last page that is not cached; pages of the prefix
        for number, key in enumerate(keys):
            page = self._page_of.get(key, RELEASED)
            if page == RELEASED and self.host is not None and key in self.host:
                page = ON_HOST
            elif page == RELEASED and key in on_disk:
                page = ON_DISK
            if page == RELEASED:
                missing = number
                if self.window is None:
                    break
            pages.append(page)
            if missing < self.first_visible((number + 1) * self.page_size):
                length = number + 1
        first = self.first_visible(length * self.page_size)
        return [RELEASED] * first + pages[first:length]

    def fetch(
        self, keys: Sequence[bytes], fetching: set[bytes] | None, ahead: int = 0
    ) -> set[bytes] | None:
        """Read into host memory what a prefix lacks there and on the device, as far as it is on
        disk. Returns the keys of pages that are still to be read, None if nothing could be begun
        yet; `fetching` is what the call before returned for this prefix, None for the first one.
        `ahead` is as in `HostTier.fetch`."""
        if self.host is None or (store := self.host.store) is None:
            return set()
        if fetching is None:
            marks = zip(keys, self.match(keys, store), strict=False)
            missing = [key for key, mark in marks if mark in (ON_HOST, ON_DISK)]
            fetching = self.host.fetch(missing, ahead)
        if fetching != set():
            self.host.take_read(wait=not self.used)
            self.host.touch(keys)
        return fetching and {key for key in fetching if self.host.is_reading(key)}

    def persist(self, seconds: float) -> None:
        """Write all cached pages to disk, the last used first, in so many seconds at most. Pages
        in use are left out."""
        if self.host is not None:
            pages = {self._key_of[page]: page for page in reversed(self._unused)}
            self.host.persist(pages, seconds)

    def first_visible(self, position: int) -> int:
        """Number of the first page that a token at `position` sees."""
        if self.window is None:
            return 0
        return max(position - self.window + 1, 0) // self.page_size

    def cache(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        source: TokenSource | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        """Cache pages `start .. stop-1` (None: all) of a sequence; `keys` are the keys of its
        pages. If two pages are equal, only the first is cached. `source` has the tokens, for
        `events`."""
        cached = []
        least = min(len(keys), len(pages))
        for number in range(start, least if stop is None else min(stop, least)):
            key = keys[number]
            page = pages[number]
            if page != RELEASED and key not in self._page_of and page not in self._key_of:
                self._register(key, page)
                cached.append(number)
        self._record_stored(keys, cached, source)

    def clear(self) -> None:
        """Drop all cached pages, none of which may be in use; those in host memory too."""
        assert not self.used
        dropped = [] if self.host is None else self.host.clear()
        dropped += map(self._uncache, self._unused)
        self._free += self._unused
        self._unused.clear()
        if self.events is not None:
            for key in dict.fromkeys(dropped):
                self.events.remove(key)

    # Pages --------------------------------------------------------------------

    def reserve(
        self,
        shared: Sequence[int],
        count: int,
        keys: Sequence[bytes] = (),
        source: TokenSource | None = None,
    ) -> list[int] | None:
        """Reserve the `shared` pages and `count` unused ones: the page table of a sequence. If
        there are too few, returns None and reserves nothing. `keys` are those that `shared` were
        matched by, and `source` has the tokens: a page `ON_HOST` gets a page of the device, for
        `load` to fill."""
        if self.shortage(shared, count):
            return None
        if self.host is not None and self.host.store is not None:
            self.host.store.use(keys[: len(shared)])
        loads = [number for number, page in enumerate(shared) if page == ON_HOST]
        table = [*self.share_pages(shared)]
        if loads:
            assert self.host is not None
            self.host.hold([keys[number] for number in loads])
            for number in loads:
                table[number] = self._allocate()
                self._register(keys[number], table[number])
                self.host.begin_load(keys[number], table[number], number)
            self._record_stored(keys, loads, source)
        return [*table, *(self._allocate() for _ in range(count))]

    def load(self, pages: Sequence[int]) -> bool:
        """Plan the loads of a sequence's `pages` that come from host memory. Returns whether the
        next chunk can read all of them; those without room wait for a later one."""
        return self.host is None or self.host.load(pages)

    def move_pages(self) -> None:
        """Start the copies that were planned: pages that have been evicted are saved before what is
        sent next writes them, and those that it reads are loaded."""
        if self.host is not None:
            self.host.flush()

    def shortage(self, shared: Sequence[int], count: int) -> int:
        """Pages that have to come free before `reserve` can succeed."""
        unused = sum(page >= 0 and self._users[page] == 0 for page in shared)
        count += shared.count(ON_HOST)
        return max(count - (self.available - unused), 0)

    def num_sole(self, pages: Sequence[int]) -> int:
        """How many of a sequence's `pages` nothing else uses."""
        return sum(page != RELEASED and self._users[page] == 1 for page in pages)

    def share_pages(self, pages: Sequence[int]) -> Sequence[int]:
        """Count one more user of `pages`."""
        for page in pages:
            if page >= 0:
                self._unused.pop(page, None)
                self._users[page] += 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Take one user of each of `pages` away; a page without users can be evicted. The last page
        of a sequence is evicted before its first, because more sequences can share the first."""
        for page in reversed(pages):
            if page == RELEASED:
                continue
            self._users[page] -= 1
            if self._users[page] < 0:
                raise RuntimeError(f"page {page} was released more often than it was used")
            if self._users[page] == 0:
                if page in self._key_of:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def release_hidden(self, pages: list[int], position: int) -> None:
        """Release those of a sequence's pages that no token from `position` on sees, and mark them
        in `pages`."""
        for number in reversed(range(self.first_visible(position))):
            if pages[number] == RELEASED:
                return
            self.release(pages[number : number + 1])
            pages[number] = RELEASED

    def _allocate(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._unused.popitem(last=False)
            self._evict(page)
        self._users[page] = 1
        return page

    def _evict(self, page: int) -> None:
        key = self._uncache(page)
        if self.host is None or not self.host.save(key, page):
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        """Record that the device, or host memory, has no longer a page; the other may have it."""
        if self.events is not None and key not in self._page_of:
            self.events.remove(key)

    def _register(self, key: bytes, page: int) -> None:
        self._page_of[key] = page
        self._key_of[page] = key

    def _uncache(self, page: int) -> bytes:
        """Forget a cached page; returns its key."""
        key = self._key_of.pop(page)
        del self._page_of[key]
        self.stats.evictions += 1
        return key

    def _record_stored(
        self, keys: Sequence[bytes], numbers: list[int], source: TokenSource | None
    ) -> None:
        """Record that pages `numbers` of a sequence are cached, unless host memory kept them."""
        if self.events is None or source is None:
            return
        if self.host is not None:
            numbers = [number for number in numbers if not self.events.has(keys[number])]
        if numbers:
            self.events.store(keys, numbers, source)


def page_pools(
    config: Config, shapes: Shapes, options: EngineOptions, host: HostMemory
) -> list[PagePool]:
    """The pool of each data-parallel shard. `host` is the model runner."""
    # A tap reads the state of the token before, which its page has.
    window = config.window and max(config.window, 1 + config.boundary_taps)
    pools = [
        PagePool(
            shapes.num_pages,
            shapes.page_size,
            share=options.enable_prefix_caching,
            window=window,
            pages_per_own_page=shapes.pages_per_own_page,
        )
        for _ in range(shapes.dp_size)
    ]
    if shapes.host_pages:
        (pool,) = pools
        pool.keep_on_host(HostTier(shapes.host_pages, host))
    return pools


def record_events(pools: Sequence[PagePool]) -> CacheEvents:
    """Start recording what enters and leaves the prefix caches of all shards."""
    events = CacheEvents(pools[0].page_size)
    for pool in pools:
        pool.events = events
    return events


def all_pages(pages: Sequence[int], own_pages: Iterable[Sequence[int]]) -> list[int]:
    """Join the two kinds of pages of a sequence, which `PagePool.take` has split."""
    return [*pages, *itertools.chain.from_iterable(own_pages)]
