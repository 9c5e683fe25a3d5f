"""Events of the engine that wait to be processed: a few at a time, so that connections are served
in between. On the thread of the connections."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Collection, Iterable

from .engine_thread import Event

SLICE_EVENTS = 32
"""Events processed at a time: about 0.4 ms of 8 tokens each."""


class Backlog:
    """Processes what is added in slices, in order, each once the tasks that are due have run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: Callable[[list[Event]], None]):
        self._loop = loop
        self._process = process
        self._events: collections.deque[Event] = collections.deque()
        self._slice_is_due = False

    def __len__(self) -> int:
        return len(self._events)

    def add(self, events: Iterable[Event]) -> None:
        self._events.extend(events)
        self._continue()

    def process_of(self, request_ids: Collection[int]) -> None:
        """Process all events of these requests now."""
        found = [event for event in self._events if event[0] in request_ids]
        if found:
            others = (event for event in self._events if event[0] not in request_ids)
            self._events = collections.deque(others)
            self._process(found)

    def process_all(self) -> None:
        while self._events:
            self._process_slice()

    def _continue(self) -> None:
        if self._events and not self._slice_is_due:
            self._slice_is_due = True
            self._loop.call_soon(self._process_slice)

    def _process_slice(self) -> None:
        self._slice_is_due = False
        # A quarter, where there are many: a slow loop would never catch up otherwise.
        count = min(max(SLICE_EVENTS, len(self._events) // 4), len(self._events))
        if not count:
            return
        try:
            self._process([self._events.popleft() for _ in range(count)])
        finally:
            self._continue()
