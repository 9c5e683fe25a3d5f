"""What the engine runs next: which tokens go into the next chunk of prefill, which rows decode, who gets which pages.

Plain bookkeeping without JAX. Requests wait in one queue, first come, first served. One is admitted when all it can ever
need is there, slots for its samples and pages for its prompt and every token it may generate, so nothing is ever taken back
from a running request. Pages serve long and short requests alike: a request takes what its own length needs.

With rows split over devices there is a *lane* a device: its own pages and slots, and its own part of each chunk. A request
lives on one lane.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence

from .pages import Chained, PagePool
from .requests import Request, ScoreRequest, Timing
from .sampling import SamplingParams


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


class Task:
    """A request on its way: its prompt is being cached; then its samples run."""

    def __init__(self, id: int, request: Request | ScoreRequest):
        self.id, self.request = id, request
        self.timing = Timing()
        self.tokens: Sequence[int] = request.prompt if isinstance(request, Request) else request.tokens
        # The last token goes into the first decode step; and nothing is predicted after the last one that is scored.
        self.target = len(self.tokens) - 1
        """Positions to cache."""
        self.scored = range(0) if isinstance(request, Request) else range(request.start - 1, self.target)
        """Positions whose predictions are scored."""
        self.done = 0
        """Positions that are cached, or will be by the time anything else runs."""
        self.cached = 0
        """Of these, found in the cache."""
        self.lane = -1
        self.keys: list[Chained] = []
        self.pages: list[int] = []
        self.samples: list[Sample] = []
        self.cancelled: set[int] = set()
        """Samples that nobody waits for any more."""

    @property
    def wanted(self) -> set[int]:
        """Samples that somebody waits for."""
        samples = {sample.index for sample in self.samples} if self.samples else set(range(self.num_samples))
        return samples - self.cancelled

    @property
    def num_samples(self) -> int:
        return self.request.params.n if isinstance(self.request, Request) else 0

    def row_pages(self, page_size: int) -> int:
        """Pages that one sample can ever fill: the last token it generates is never cached."""
        new = self.request.params.max_tokens if isinstance(self.request, Request) else 0
        return -(-(self.target + new) // page_size)

    def other_pages(self, page_size: int) -> int:
        """Pages that the other samples need besides those full of the prompt, which all share."""
        return max(self.num_samples - 1, 0) * (self.row_pages(page_size) - self.target // page_size)


@dataclasses.dataclass(eq=False)
class Sample:
    """One continuation of a request's prompt, in a slot."""

    task: Task
    index: int
    slot: int
    pages: list[int]
    left: int
    """Tokens it may still emit."""
    unseen: int = 0
    """Of these, how many calls on their way may emit."""
    tokens: list[int] = dataclasses.field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        assert isinstance(self.task.request, Request)
        return self.task.request.params


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive tokens of one request in a chunk: positions `start .. stop-1`."""

    task: Task
    start: int
    stop: int

    @property
    def scored(self) -> range:
        """Positions of this span whose predictions are scored."""
        wanted = self.task.scored
        return range(max(self.start, wanted.start), max(self.start, wanted.start, min(self.stop, wanted.stop)))


@dataclasses.dataclass
class Chunk:
    """One step of prefill."""

    spans: list[list[Span]]
    """For each lane."""
    ready: list[Sample]
    """Samples that can decode once this has run."""
    copies: list[list[tuple[int, int]]]
    """For each lane: after this has run, pages to copy (from, to), so that samples part where their prompt ends."""


class Scheduler:
    """The queue, and everybody's slots and pages."""

    def __init__(self, pools: Sequence[PagePool], limits: Limits):
        self.pools, self.limits = list(pools), limits
        self.page_size = pools[0].page_size
        self.waiting: deque[Task] = deque()
        self.prefilling: list[Task] = []
        self.running: dict[int, Sample] = {}
        """Slot -> who decodes in it. Slots of lane i are numbered from i * max_num_seqs."""
        self.leaving: list[int] = []
        """Slots of cancelled samples, which the device still believes to run."""
        slots = limits.max_num_seqs
        self._slots = [list(range((lane + 1) * slots - 1, lane * slots - 1, -1)) for lane in range(len(pools))]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, task: Task) -> None:
        task.keys = self.pools[0].keys(task.tokens, task.request.salt)
        self.waiting.append(task)

    # Prefill ------------------------------------------------------------------------------------------------------

    def next_chunk(self) -> Chunk | None:
        """Fill a chunk with what was begun, then with what waits, in order; None if there is nothing to run.

        A request's pages can be shared as soon as they are planned: in each layer a chunk writes all of its keys and
        values before it reads any.
        """
        packing = [_Packing(self.limits, self.page_size) for _ in self.pools]
        chunk = Chunk([lane.spans for lane in packing], [], [[] for _ in packing])
        for task in list(self.prefilling):
            self._extend(task, packing[task.lane], chunk)
        while self.waiting and (lane := self._admit(self.waiting[0], packing)) is not None:
            task = self.waiting.popleft()
            self.prefilling.append(task)
            self._extend(task, packing[lane], chunk)
        for _, span in spans_of(chunk):
            if span.stop == span.task.target and not span.task.samples:  # a score ends here; its pages are others' from the next chunk on
                self.pools[span.task.lane].release(span.task.pages)
        for task in {sample.task for sample in chunk.ready}:
            for sample in [sample for sample in task.samples if sample.index in task.cancelled]:
                self.finish(sample)  # cancelled before it could begin; only now are its pages not read any more
        return chunk if chunk.ready or any(chunk.spans) else None

    def _extend(self, task: Task, packing: _Packing, chunk: Chunk) -> None:
        """As much of a task as the chunk has room for; when that was the rest of it, its samples are ready."""
        if task.timing.started is None:
            task.timing.started = time.perf_counter()
        stop = packing.add(task)
        full = stop // self.page_size
        self.pools[task.lane].remember(task.keys[:full], task.pages[:full])
        if task.done == task.target:
            self.prefilling.remove(task)
            for sample in task.samples:
                if sample.index not in task.cancelled:
                    chunk.ready.append(sample)
                    self.running[sample.slot] = sample
                if sample.index and task.target % self.page_size:
                    chunk.copies[task.lane].append((task.pages[full], sample.pages[full]))

    def _admit(self, task: Task, packing: list[_Packing]) -> int | None:
        """Give a task slots and pages on the lane with most of its prefix, or most room; None if no lane has enough, or room
        in its chunk."""
        # What is scored must run through the layers, so at most what comes before it is reused.
        usable = min(task.target, task.scored.start if task.scored else task.target) // self.page_size
        matches = [pool.match(task.keys[:usable]) for pool in self.pools]
        by_preference = sorted(range(len(self.pools)), key=lambda lane: (-len(matches[lane]), -self.pools[lane].available))
        for lane in by_preference:
            if packing[lane].has_room(task) and self._take(task, lane, matches[lane]):
                return lane
        return None

    def _take(self, task: Task, lane: int, shared: list[int]) -> bool:
        pool, slots, samples = self.pools[lane], self._slots[lane], task.num_samples
        whole, common, others = task.row_pages(self.page_size), task.target // self.page_size, task.other_pages(self.page_size)
        if samples > len(slots) or (pages := pool.reserve(shared, whole - len(shared) + others)) is None:
            return False
        task.lane, task.pages, spare = lane, pages[:whole], iter(pages[whole:])
        task.cached = task.done = len(shared) * self.page_size
        for index in range(samples):
            own = task.pages
            if index:
                own = [*pool.share_pages(task.pages[:common]), *(next(spare) for _ in range(whole - common))]
            assert isinstance(task.request, Request)
            task.samples.append(Sample(task, index, slots.pop(), own, left=task.request.params.max_tokens))
        pool.stats.queries += len(task.tokens)
        pool.stats.hits += task.cached
        return True

    # Decoding -----------------------------------------------------------------------------------------------------

    def next_decode(self, steps: int) -> list[Sample]:
        """The samples that can emit something in a call of `steps`: all but those that calls on their way will have ended."""
        samples = [sample for sample in self.running.values() if sample.left > sample.unseen]
        for sample in samples:
            sample.unseen += min(steps, sample.left - sample.unseen)
        return samples

    def finish(self, sample: Sample, *, cancelled: bool = False) -> None:
        """A sample has ended; what it has cached can be shared. One that is `cancelled` still has to leave the device."""
        task, pool = sample.task, self.pools[sample.task.lane]
        if self.running.pop(sample.slot, None) is not None:
            if cancelled:
                self.leaving.append(sample.slot)
            tokens = [*task.tokens, *sample.tokens[:-1]]
            keys = pool.keys(tokens, task.request.salt, known=task.keys[: task.target // self.page_size])
            pool.remember(keys, sample.pages)
        pool.release(sample.pages)
        self._slots[task.lane].append(sample.slot)
        task.samples.remove(sample)

    def cancel(self, task: Task) -> None:
        """Whatever has become of it, it ends here. What runs on the device still sees its pages; what runs later may not."""
        if task in self.waiting:
            self.waiting.remove(task)
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
        self._tokens, self._pieces, self._scored = limits.chunk_tokens, limits.max_pieces, limits.scored_tokens
        self._context: set[int] = set()
        self.spans: list[Span] = []

    def has_room(self, task: Task) -> bool:
        """Whether anything of a task that is not begun may fit."""
        return self._tokens > 0 and self._pieces > 0 and (not task.scored or self._scored > 0)

    def add(self, task: Task) -> int:
        """Plan what fits of the rest of `task`. Returns up to which position it is planned now."""
        size = self._page_size
        stop = min(task.target, task.done + self._tokens, (task.done // size + self._pieces) * size)
        if task.scored:
            stop = min(stop, max(task.done, task.scored.start) + self._scored)
        if stop <= task.done or not self._within_context(task.pages[: -(-stop // size)]):
            return task.done
        span = Span(task, task.done, stop)
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


def spans_of(chunk: Chunk) -> Iterator[tuple[int, Span]]:
    """(lane, span) of all spans."""
    for lane, spans in enumerate(chunk.spans):
        for span in spans:
            yield lane, span
