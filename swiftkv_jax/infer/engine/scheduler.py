"""What the engine runs next: which tokens go into the next chunk of prefill, which rows decode, who
gets which pages.

Plain bookkeeping without JAX. Requests wait in one queue. One is admitted when all it can ever need
is there, slots for its samples and pages for its prompt and every token it may generate, so nothing
is ever taken back from a running request. Pages serve long and short requests alike: a request
takes what its own length needs. They begin in the order in which they came, but for this: while one
has no room, later ones that do may go before it, `MAX_SKIPS` of them and no more.

With rows split over devices there is a *lane* a device: its own pages and slots, and its own part
of each chunk. A request lives on one lane.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import abc

from .page_pool import PagePool
from .request_state import Chunk, RequestState, ScheduledTokens, Sequence, spans_of
from .requests import Request

MAX_SKIPS = 32
"""Requests that may overtake one which has no room yet, and how far down the queue they are looked
for."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The shapes that were compiled, for each lane."""

    max_num_seqs: int
    """Slots."""
    chunk_tokens: int
    """Tokens of the longest chunk."""
    max_pieces: int
    """Parts of pages that a chunk writes (see `packed`)."""
    context_pages: int | None = None
    """Pages that one chunk can read; None for all of them."""
    scored_tokens: int = 0
    """Tokens of a chunk that can be scored."""


class Scheduler:
    """The queue, and everybody's slots and pages."""

    def __init__(self, pools: abc.Sequence[PagePool], limits: Limits):
        self.pools, self.limits = list(pools), limits
        self.page_size = pools[0].page_size
        self.waiting: dict[RequestState, None] = {}
        """In the order in which they came."""
        self.prefilling: list[RequestState] = []
        self.running: dict[int, Sequence] = {}
        """Slot -> who decodes in it. Slots of lane i are numbered from i * max_num_seqs."""
        self.leaving: list[int] = []
        """Slots of cancelled samples, which the device still believes to run."""
        slots = limits.max_num_seqs
        self._slots = [
            list(range((lane + 1) * slots - 1, lane * slots - 1, -1)) for lane in range(len(pools))
        ]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, task: RequestState) -> None:
        task.keys = self.pools[0].keys(task.tokens, task.request.cache_salt)
        self.waiting[task] = None

    # Prefill ------------------------------------------------------------------

    def next_chunk(self) -> Chunk | None:
        """Fill a chunk with what was begun, then with what waits, in order; None if there is
        nothing to run.

        A request's pages can be shared as soon as they are planned: in each layer a chunk writes
        all of its keys and values before it reads any.
        """
        packing = [_Packing(self.limits, self.page_size) for _ in self.pools]
        chunk = Chunk([lane.spans for lane in packing], [], [[] for _ in packing])
        for task in list(self.prefilling):
            self._extend(task, packing[task.lane], chunk)
        self._begin(packing, chunk)
        for _, span in spans_of(chunk):
            if (
                span.stop == span.task.target and not span.task.samples
            ):  # a score ends here; its pages are others' from the next chunk on
                self.pools[span.task.lane].release(span.task.pages)
        for task in dict.fromkeys(
            sample.task for sample in chunk.ready
        ):  # not a set: every process must free in the same order
            for sample in [sample for sample in task.samples if sample.index in task.cancelled]:
                self.finish(
                    sample
                )  # cancelled before it could begin; only now are its pages not read any more
        return chunk if chunk.ready or any(chunk.spans) else None

    def _begin(self, packing: list[_Packing], chunk: Chunk) -> None:
        """Admit what waits, as long as there is room in the chunk."""
        passed = 0
        while passed < min(len(self.waiting), MAX_SKIPS) and any(
            lane.has_room() for lane in packing
        ):
            if (
                passed and next(iter(self.waiting)).overtaken >= MAX_SKIPS
            ):  # the first is overtaken most
                return
            task = next(itertools.islice(self.waiting, passed, None))
            if (lane := self._admit(task, packing)) is not None:
                del self.waiting[task]
                for ahead in itertools.islice(self.waiting, passed):
                    ahead.overtaken += 1
                self.prefilling.append(task)
                self._extend(task, packing[lane], chunk)
            else:
                passed += 1

    def _extend(self, task: RequestState, packing: _Packing, chunk: Chunk) -> None:
        """As much of a task as the chunk has room for; when that was the rest of it, its samples
        are ready."""
        if task.timing.started is None:
            task.timing.started = time.perf_counter()
        begun = task.done // self.page_size
        full = packing.add(task) // self.page_size
        self.pools[task.lane].remember(task.keys[begun:full], task.pages[begun:full])
        if task.done == task.target:
            self.prefilling.remove(task)
            for sample in task.samples:
                if sample.index not in task.cancelled:
                    chunk.ready.append(sample)
                    self.running[sample.slot] = sample
                if sample.index and task.target % self.page_size:
                    chunk.copies[task.lane].append((task.pages[full], sample.pages[full]))

    def _admit(self, task: RequestState, packing: list[_Packing]) -> int | None:
        """Give a task slots and pages on the lane with most of its prefix, or most room; None if no
        lane has enough, or room in its chunk."""
        lanes = [
            lane
            for lane, slots in enumerate(self._slots)
            if task.num_samples <= len(slots) and packing[lane].has_room_for(task)
        ]
        # What is scored must run through the layers, so at most what comes before it is reused.
        usable = (
            min(task.target, task.scored.start if task.scored else task.target) // self.page_size
        )
        matches = {lane: self.pools[lane].match(task.keys[:usable]) for lane in lanes}
        for lane in sorted(
            lanes, key=lambda lane: (-len(matches[lane]), -self.pools[lane].available)
        ):
            if self._take(task, lane, matches[lane]):
                return lane
        return None

    def _take(self, task: RequestState, lane: int, shared: list[int]) -> bool:
        pool, slots, samples = self.pools[lane], self._slots[lane], task.num_samples
        whole, common, others = (
            task.row_pages(self.page_size),
            task.target // self.page_size,
            task.other_pages(self.page_size),
        )
        if (pages := pool.reserve(shared, whole - len(shared) + others)) is None:
            return False
        task.lane, task.pages, spare = lane, pages[:whole], iter(pages[whole:])
        task.cached = task.done = len(shared) * self.page_size
        for index in range(samples):
            own = task.pages
            if index:
                own = [
                    *pool.share_pages(task.pages[:common]),
                    *(next(spare) for _ in range(whole - common)),
                ]
            assert isinstance(task.request, Request)
            task.samples.append(
                Sequence(task, index, slots.pop(), own, left=task.request.params.max_tokens)
            )
        pool.stats.queries += len(task.tokens)
        pool.stats.hits += task.cached
        return True

    # Decoding -----------------------------------------------------------------

    def next_decode(self, steps: int) -> list[Sequence]:
        """The samples that can emit something in a call of `steps`: all but those that calls on
        their way will have ended."""
        samples = [sample for sample in self.running.values() if sample.left > sample.unseen]
        for sample in samples:
            sample.unseen += min(steps, sample.left - sample.unseen)
        return samples

    def finish(self, sample: Sequence, *, cancelled: bool = False) -> None:
        """A sample has ended; what it has cached can be shared. One that is `cancelled` still has
        to leave the device."""
        task, pool = sample.task, self.pools[sample.task.lane]
        if self.running.pop(sample.slot, None) is not None:
            if cancelled:
                self.leaving.append(sample.slot)
            tokens = [*task.tokens, *sample.tokens[:-1]]
            keys = pool.keys(
                tokens, task.request.cache_salt, known=task.keys[: task.target // self.page_size]
            )
            pool.remember(keys, sample.pages)
        pool.release(sample.pages)
        self._slots[task.lane].append(sample.slot)
        task.samples.remove(sample)

    def abort_request(self, task: RequestState) -> None:
        """Whatever has become of it, it ends here. What runs on the device still sees its pages;
        what runs later may not."""
        if task in self.waiting:
            del self.waiting[task]
            return
        if task in self.prefilling:
            self.prefilling.remove(task)
            if not task.samples:
                self.pools[task.lane].release(task.pages)
        for sample in list(task.samples):
            self.finish(sample, cancelled=True)


class _Packing:
    """One lane's part of a chunk, while it is being filled."""

    def __init__(self, limits: Limits, page_size: int):
        self._limits, self._page_size = limits, page_size
        self._tokens, self._pieces, self._scored = (
            limits.chunk_tokens,
            limits.max_pieces,
            limits.scored_tokens,
        )
        self._context: set[int] = set()
        self.spans: list[ScheduledTokens] = []

    def has_room(self) -> bool:
        return self._tokens > 0 and self._pieces > 0

    def has_room_for(self, task: RequestState) -> bool:
        """Whether anything of a task that is not begun may fit."""
        return self.has_room() and (not task.scored or self._scored > 0)

    def add(self, task: RequestState) -> int:
        """Plan what fits of the rest of `task`. Returns up to which position it is planned now."""
        size = self._page_size
        stop = min(task.target, task.done + self._tokens, (task.done // size + self._pieces) * size)
        if task.scored:
            stop = min(stop, max(task.done, task.scored.start) + self._scored)
        if stop <= task.done or not self._within_context(task.pages[: -(-stop // size)]):
            return task.done
        span = ScheduledTokens(task, task.done, stop)
        self.spans.append(span)
        self._tokens -= stop - task.done
        self._pieces -= -(-stop // size) - task.done // size
        self._scored -= len(span.scored)
        task.done = stop
        return stop

    def _within_context(self, pages: list[int]) -> bool:
        """Whether the chunk can read these pages too; if so it will."""
        if self._limits.context_pages is None:
            return True
        context = self._context.union(pages)
        if len(context) > self._limits.context_pages:
            return False
        self._context = context
        return True
