"""The requests of one `Engine.run`: taken from an iterable when they can run, and numbered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from ...errors import UsageError
from ...process import interrupts
from .checks import iterate
from .request_state import RequestState
from .requests import Request, RequestOutput, ScoreRequest

MAX_ADDED_PER_STEP = 32
"""Requests that are taken from an iterator between two steps: making one may cost the caller time
(tokenising), in which the device may run out of work."""


class Run:
    """Requests in the order of `requests`, numbered from 0. Arguments as those of `Engine.run`;
    `add` queues a request in the engine."""

    def __init__(
        self,
        requests: Iterable[Request | ScoreRequest | None],
        add: Callable[[Request | ScoreRequest], RequestState],
        *,
        in_flight: int | None,
        on_invalid: Callable[[int, UsageError], None] | None,
    ):
        if in_flight is not None and in_flight < 1:
            raise UsageError(f"`in_flight`={in_flight} must be at least 1")
        self.unfinished: dict[int, tuple[int, RequestState]] = {}
        """Request id -> (number of the request, its state)."""
        self._source, self._numbers, self._exhausted = iterate(requests), itertools.count(), False
        self._add = add
        self._in_flight = in_flight
        self._on_invalid = on_invalid
        self._at_once = in_flight is None and isinstance(requests, Sequence)

    @property
    def is_over(self) -> bool:
        return self._exhausted and not self.unfinished

    def add_requests(self) -> None:
        """Queue the requests that there is room for, up to the next None."""
        added = 0
        room = self._room()
        while not self._exhausted and (room is None or added < room):
            try:
                request = next(self._source)
            except StopIteration:
                self._exhausted = True
                return
            if request is None:
                return
            self._add_one(request)
            added += 1

    def _room(self) -> int | None:
        """Requests that may be added before the next step; None: any number."""
        if self._at_once:
            return None
        if self._in_flight is None:
            return MAX_ADDED_PER_STEP
        return min(MAX_ADDED_PER_STEP, self._in_flight - len(self.unfinished))

    def _add_one(self, request: Request | ScoreRequest) -> None:
        number = next(self._numbers)
        try:
            with interrupts.held_back():
                state = self._add(request)
                self.unfinished[state.request_id] = number, state
        except UsageError as error:
            if self._on_invalid is None:
                raise UsageError(f"request {number}: {error}") from error
            self._on_invalid(number, error)

    def number_of(self, output: RequestOutput) -> int | None:
        """Number of the request that an output belongs to; None for a request that is not of this
        run, or a sample that was aborted."""
        number, state = self.unfinished.get(output.request_id, (None, None))
        return None if state is None or output.sample in state.aborted else number

    def keep(self, request_ids: Collection[int]) -> None:
        """Forget the requests that are not among `request_ids`: they have ended."""
        for request_id in self.unfinished.keys() - request_ids:
            del self.unfinished[request_id]
