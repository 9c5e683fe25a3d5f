"""Who owns which page of the KV pool: allocation, sharing of prompt prefixes, and which unused page
is forgotten first.

Plain bookkeeping without JAX. Under SwiftKV, as in a plain Llama, every entry of the cache depends
on the tokens up to its own and on nothing else, not even on whether its token went through the
upper layers: so a full page may be shared by all rows that begin with the same tokens, whoever
wrote it, prefill, decoding or scoring. A page's key is a BLAKE2b digest, 256 bits, of the key of
the page before it and its own tokens: equal for equal tokens up to its end, and for no others that
anybody could find (RFC 7693). The pool belongs to one engine, so model, weights, cut and format are
the same for all keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


@dataclasses.dataclass
class PrefixStats:
    """How the prefix cache does."""

    queries: int = 0
    """Prompt tokens looked up."""
    hits: int = 0
    """Of these, tokens whose pages were there."""
    evictions: int = 0
    """Pages forgotten for others."""


class PagePool:
    """`num_pages` pages of `page_size` positions. A page is free, used by one or more rows, or
    unused but remembered."""

    def __init__(self, num_pages: int, page_size: int, *, share: bool = True):
        """`share` False remembers nothing."""
        self.num_pages, self.page_size, self.share = num_pages, page_size, share
        self.stats = PrefixStats()
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = (
            OrderedDict()
        )  # remembered pages without users, the longest unused first

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out: free ones, and remembered ones that nobody uses."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        return self.num_pages - self.available

    # Prefixes -----------------------------------------------------------------

    def keys(
        self, tokens: Sequence[int], cache_salt: str = "", known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """The key of each full page of `tokens`; `known` are those of its first pages. None at all
        if nothing is shared."""
        keys = list(known)
        if self.share:
            key = keys[-1] if keys else _digest(cache_salt.encode())
            for start in range(
                len(keys) * self.page_size, len(tokens) - self.page_size + 1, self.page_size
            ):
                key = _digest(key + array("i", tokens[start : start + self.page_size]).tobytes())
                keys.append(key)
        return keys

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The remembered pages of the longest chain that `keys` begin with. Takes none of them: see
        `reserve`."""
        pages = []
        for key in keys:
            if (page := self._page_of.get(key)) is None:
                break
            pages.append(page)
        return pages

    def remember(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """`pages` hold the tokens of `keys`, one each: they can be shared from now on. Of two equal
        pages the first is remembered."""
        for key, page in zip(keys, pages, strict=False):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key] = page
                self._key_of[page] = key

    # Pages --------------------------------------------------------------------

    def reserve(self, shared: Sequence[int], count: int) -> list[int] | None:
        """`shared` pages, and `count` others that nobody else uses: a row's table. None, and
        nothing taken, if they are not there."""
        if count > self.available - sum(self._users[page] == 0 for page in shared):
            return None
        return [*self.share_pages(shared), *(self._take() for _ in range(count))]

    def share_pages(self, pages: Sequence[int]) -> Sequence[int]:
        """One more row uses `pages`."""
        for page in pages:
            self._unused.pop(page, None)
            self._users[page] += 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """A row is done with its pages. The end of a row is forgotten before its beginning, which
        more rows can share."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] < 0:
                raise RuntimeError(f"page {page} was released more often than it was taken")
            if self._users[page] == 0:
                if page in self._key_of:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._unused.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self.stats.evictions += 1
        self._users[page] = 1
        return page


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
