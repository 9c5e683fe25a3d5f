"""A chunk of prefill while it is planned, within the shapes that were compiled."""

from __future__ import annotations

from .page_pool import RELEASED
from .request_state import RequestState, ScheduledTokens
from .shapes import Shapes


class ChunkBuilder:
    """One data-parallel shard's part of a chunk while it is planned."""

    def __init__(self, shapes: Shapes):
        self._page_size = shapes.page_size
        self._context_pages = shapes.contexts[-1]
        self._tokens = shapes.chunks[-1]
        self._tiles = shapes.tiles(self._tokens)[-1]
        self._context: set[int] = set()
        self.scheduled: list[ScheduledTokens] = []

    def has_room(self) -> bool:
        return self._tokens > 0 and self._tiles > 0

    def add(self, state: RequestState) -> int:
        """Plan the next tokens of a request, as many as fit. Returns the position up to which it is
        planned now."""
        start = state.num_computed_tokens
        stop = min(
            state.prefill_stop, start + self._tokens, self._last_of_tiles(start, self._tiles)
        )
        if state.own_pages:  # in tiles of their own
            own = max(start - state.own_start, 0)
            stop = min(stop, state.own_start + self._last_of_tiles(own, self._tiles))
        scheduled = ScheduledTokens(state, start, stop)
        if stop <= start or not self._add_context(scheduled.read_pages(self._page_size)):
            return start
        self.scheduled.append(scheduled)
        self._tokens -= scheduled.num_tokens
        self._tiles -= scheduled.num_tiles(self._page_size)
        state.num_computed_tokens = stop
        return stop

    def _last_of_tiles(self, start: int, tiles: int) -> int:
        """The position after the last of `pages` pages, the first of which holds position
        `start`."""
        return (start // self._page_size + tiles) * self._page_size

    def _add_context(self, pages: list[int]) -> bool:
        """Add pages that the chunk reads; False if these are too many."""
        if self._context_pages is None:
            return True
        context = self._context.union(page for page in pages if page != RELEASED)
        if len(context) > self._context_pages:
            return False
        self._context = context
        return True
