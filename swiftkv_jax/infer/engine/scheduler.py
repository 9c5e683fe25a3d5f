"""The scheduler: which tokens go into the next chunk of prefill, which sequences decode, and which
pages and slots a request gets. Imports no JAX.

Requests wait in one queue. A request is admitted when there are slots for its samples, and pages
for its prompt and the first `reserve_tokens` new tokens; for more of them it gets pages as it
decodes. When there are none, the running request that came last is preempted: its pages and slot
become free, and it waits first in the queue, to run its prompt and its answer so far through
prefill. So the request that came first always runs on, and all end. Where every layer has a window,
pages before the widest go back before each chunk and each decode call. Pages serve long and short
requests alike: a request reserves what its own length needs. Requests are admitted in the order of
their arrival with one exception: while one has no room, later ones that have may go before it, at
most `max_skips` of them.

With rows split over devices each data-parallel shard (`dp_rank`) has its own pages and slots, and
its own part of each chunk. A request stays on one shard.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections import abc

from ...config import NO_OWN
from .page_pool import RELEASED, PagePool
from .request_state import Chunk, RequestState, ScheduledTokens, Sequence

MAX_SKIPS = 32
"""Requests that may be admitted before an earlier one that has no room yet; also how far down the
queue the scheduler looks for them."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The shapes that were compiled, of each data-parallel shard."""

    max_num_seqs: int
    """Slots."""
    chunk_tokens: int
    """Tokens of the longest chunk."""
    max_tiles: int
    """Query tiles of a chunk (see `prefill_chunk`)."""
    context_pages: int | None = None
    """Pages that one chunk can read; None for all of them."""
    upper_tokens: int = 0
    """Tokens of a chunk that can run through all layers."""


class Scheduler:
    """The queue of requests, and the slots and pages of all shards."""

    def __init__(
        self,
        pools: abc.Sequence[PagePool],
        limits: Limits,
        *,
        reserve_tokens: int,
        max_skips: int = MAX_SKIPS,
    ):
        """`reserve_tokens` as in `EngineOptions`, at least those of a decode call: a sequence runs
        in the step in which its prefill ends."""
        self.pools, self.limits, self.max_skips = list(pools), limits, max_skips
        self.reserve_tokens = reserve_tokens
        self.page_size = pools[0].page_size
        self.waiting: dict[RequestState, None] = {}
        """Requests that are not admitted yet, in the order of their arrival."""
        self.prefilling: list[RequestState] = []
        """Requests that are admitted and not planned to their ends yet."""
        self.running: dict[int, Sequence] = {}
        """Slot -> the sequence that decodes in it. Slots of shard i begin at i * max_num_seqs."""
        self.pending_removals: list[int] = []
        """Slots of aborted sequences that the model runner still decodes."""
        self.num_preemptions = 0
        self._without_pages: set[Sequence] = set()
        """Sequences that wait for pages in this step."""
        slots = limits.max_num_seqs
        self._free_slots = [
            list(range((dp_rank + 1) * slots - 1, dp_rank * slots - 1, -1))
            for dp_rank in range(len(pools))
        ]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, state: RequestState) -> None:
        """Queue a request."""
        shareable = state.prefill_token_ids[: state.own_start]
        if (keys := state.request.page_keys) is None or not self.pools[0].share:
            keys = self.pools[0].keys(shareable, state.request.cache_salt)
        state.page_keys = list(keys[: len(shareable) // self.page_size])
        self.waiting[state] = None

    # Prefill ------------------------------------------------------------------

    def schedule_prefill(self) -> Chunk | None:
        """Plan a chunk, first of the requests whose prefill has begun, then of those that wait, in
        order; None if there is nothing to run.

        A request's pages can be shared as soon as they are planned: in each layer a chunk writes
        all of its keys and values before it reads any.
        """
        builders = [_ChunkBuilder(self.limits, self.page_size) for _ in self.pools]
        chunk = Chunk([builder.scheduled for builder in builders], [], [[] for _ in builders])
        for state in list(self.prefilling):
            self._extend(state, builders[state.dp_rank], chunk)
        self._admit_waiting(builders, chunk)
        for _, scheduled in chunk.scheduled_tokens():
            state = scheduled.request_state
            if scheduled.stop == state.prefill_target and not state.sequences:
                # The last chunk of a score: the next chunk may overwrite its pages.
                self.pools[state.dp_rank].release(state.pages)
        # Not a set: every process must release pages in the same order.
        finished = dict.fromkeys(sequence.request_state for sequence in chunk.finished_prefill)
        for state in finished:
            for sequence in list(state.sequences):
                # Aborted during prefill. Until now the other samples read its pages.
                if sequence.index in state.aborted:
                    self.finish(sequence)
        return chunk if chunk.finished_prefill or any(chunk.shards) else None

    def _admit_waiting(self, builders: list[_ChunkBuilder], chunk: Chunk) -> None:
        """Admit requests from the queue while the chunk has room."""
        skipped = 0
        while skipped < min(len(self.waiting), self.max_skips) and any(
            builder.has_room() for builder in builders
        ):
            # The first in the queue has been skipped most often.
            if skipped and next(iter(self.waiting)).num_times_skipped >= self.max_skips:
                return
            state = next(itertools.islice(self.waiting, skipped, None))
            if (dp_rank := self._admit(state, builders)) is None:
                skipped += 1
                continue
            del self.waiting[state]
            for earlier in itertools.islice(self.waiting, skipped):
                earlier.num_times_skipped += 1
            self.prefilling.append(state)
            self._extend(state, builders[dp_rank], chunk)

    def _extend(self, state: RequestState, builder: _ChunkBuilder, chunk: Chunk) -> None:
        """Plan as much of a request as the chunk has room for; after the last of it, its sequences
        can decode."""
        if state.timing.started is None:
            state.timing.started = time.perf_counter()
        pool, begun = self.pools[state.dp_rank], state.num_computed_tokens // self.page_size
        # Not sooner: within one chunk another request would write what this one reads.
        for pages in [one.pages for one in state.sequences] or [state.pages]:
            pool.release_hidden(pages, state.num_computed_tokens)
        full = builder.add(state) // self.page_size
        pool.cache(state.page_keys, state.pages, state, start=begun, stop=full)
        if state.num_computed_tokens < state.prefill_target:
            return
        self.prefilling.remove(state)
        for sequence in state.sequences:
            if sequence.index not in state.aborted:
                chunk.finished_prefill.append(sequence)
                self.running[sequence.slot] = sequence
            if sequence.index and state.prefill_target % self.page_size:
                copy = state.pages[full], sequence.pages[full]
                chunk.page_copies[state.dp_rank].append(copy)

    def _admit(self, state: RequestState, builders: list[_ChunkBuilder]) -> int | None:
        """Give a request slots and pages on the shard that has most of its prefix cached, or else
        most free pages. Returns its `dp_rank`; None if no shard has the room, or room in its part
        of the chunk."""
        candidates = [
            dp_rank
            for dp_rank, slots in enumerate(self._free_slots)
            if state.num_samples <= len(slots) and builders[dp_rank].has_room_for(state)
        ]
        # Some tokens must run through all layers: at most the pages before them are reused.
        usable = state.upper.start if state.upper else state.prefill_target
        keys = state.page_keys[: usable // self.page_size]
        cached = {dp_rank: self.pools[dp_rank].match(keys) for dp_rank in candidates}

        def preference(dp_rank: int) -> tuple[int, int]:
            return -len(cached[dp_rank]), -self.pools[dp_rank].available

        for dp_rank in sorted(candidates, key=preference):
            if self._allocate(state, dp_rank, cached[dp_rank]):
                return dp_rank
        return None

    def _allocate(self, state: RequestState, dp_rank: int, cached: list[int]) -> bool:
        """Reserve pages and slots of one shard; False, and nothing reserved, if there are too few
        pages."""
        pool, slots = self.pools[dp_rank], self._free_slots[dp_rank]
        count = state.pages_at_first(self.page_size, self.reserve_tokens)
        shared = state.prefill_target // self.page_size
        pages = pool.reserve(cached, count - len(cached) + state.pages_of_others(self.page_size))
        if pages is None:
            return False
        state.dp_rank, state.pages, others = dp_rank, pages[:count], iter(pages[count:])
        state.num_computed_tokens = len(cached) * self.page_size
        if not state.num_preemptions:
            state.num_cached_tokens = state.num_computed_tokens
        for index in range(state.num_samples):
            pages = state.pages
            if index:
                pages = [
                    *pool.share_pages(state.pages[:shared]),
                    *itertools.islice(others, count - shared),
                ]
            matcher = None if state.matcher is None else state.matcher.copy()
            state.sequences.append(
                Sequence(
                    state, index, slots.pop(), pages, state.num_remaining_tokens, matcher=matcher
                )
            )
        if not state.num_preemptions:
            pool.stats.queries += len(state.prefill_token_ids)
            pool.stats.hits += state.num_cached_tokens
        return True

    # Decoding -----------------------------------------------------------------

    @property
    def most_running(self) -> int:
        """Sequences that decode on the shard that has most of them."""
        slots = self.limits.max_num_seqs
        counts = collections.Counter(slot // slots for slot in self.running)
        return max(counts.values(), default=0)

    def grow(self, steps: int) -> list[Sequence]:
        """Give running sequences pages for a decode call of `steps`, those that came first before
        the others; where there are none, preempt the last. Returns those that got pages. One for
        which there are none sits out: the pages are with requests in prefill, or with samples that
        share a prompt."""
        self._without_pages.clear()
        for sequence in self.running.values():
            state = sequence.request_state
            position = state.prefill_target + len(sequence.token_ids)
            self.pools[state.dp_rank].release_hidden(sequence.pages, position)
        needing = [one for one in self.running.values() if self._missing_pages(one, steps) > 0]
        needing.sort(key=lambda one: (one.request_state.request_id, one.index))
        grown = []
        for sequence in needing:
            if self.running.get(sequence.slot) is not sequence:
                continue  # preempted
            state, least = sequence.request_state, self._missing_pages(sequence, steps)
            pool = self.pools[state.dp_rank]
            while pool.available < least and self._preempt_after(state):
                pass
            if pool.available < least:
                self._without_pages.add(sequence)
                continue
            most = self._missing_pages(sequence, steps + self.reserve_tokens)
            pages = pool.reserve([], min(most, pool.available))
            assert pages is not None
            sequence.pages += pages
            grown.append(sequence)
        return grown

    def _missing_pages(self, sequence: Sequence, steps: int) -> int:
        """Pages that a sequence needs besides its own to emit up to `steps` more tokens."""
        new = min(sequence.num_in_flight_tokens + steps, sequence.num_remaining_tokens)
        cached = sequence.request_state.prefill_target + len(sequence.token_ids)
        return -(-(cached + new) // self.page_size) - len(sequence.pages)

    def _preempt_after(self, state: RequestState) -> bool:
        """Preempt the running request of the same shard that came last; False if none came after
        `state`."""
        last = max(
            (
                sequence
                for sequence in self.running.values()
                if sequence.request_state.dp_rank == state.dp_rank
                and sequence.request_state.num_samples == 1
                and sequence.request_state.request_id > state.request_id
            ),
            key=lambda sequence: sequence.request_state.request_id,
            default=None,
        )
        if last is None:
            return False
        preempted = last.request_state
        self.finish(last, aborted=True)
        preempted.preempt(last)
        pool, size = self.pools[state.dp_rank], self.page_size
        shareable = preempted.prefill_token_ids[: preempted.own_start]
        preempted.page_keys = pool.keys(
            shareable[len(preempted.page_keys) * size :],
            preempted.request.cache_salt,
            after=preempted.page_keys,
        )
        self.waiting = {preempted: None, **self.waiting}
        self.num_preemptions += 1
        return True

    def schedule_decode(self, steps: int) -> list[Sequence]:
        """Free sequences that can emit a token in a call of `steps`: all but those that will have
        ended after the calls in flight."""
        sequences = [
            sequence
            for sequence in self.running.values()
            if sequence.matcher is None
            and sequence not in self._without_pages
            and sequence.num_remaining_tokens > sequence.num_in_flight_tokens
        ]
        for sequence in sequences:
            unplanned = sequence.num_remaining_tokens - sequence.num_in_flight_tokens
            sequence.num_in_flight_tokens += min(steps, unplanned)
        return sequences

    def schedule_constrained(self) -> list[Sequence]:
        """Sequences that follow a grammar, which emit one token in a call: the next mask depends on
        it, so none of them has one in flight."""
        return [
            sequence
            for sequence in self.running.values()
            if sequence.matcher is not None and sequence not in self._without_pages
        ]

    def finish(self, sequence: Sequence, *, aborted: bool = False) -> None:
        """Free the slot and pages of a sequence that has ended; the pages can be shared, unless
        generated tokens kept their own keys and values. An `aborted` one still has to be removed
        from the model runner."""
        state, pool = sequence.request_state, self.pools[sequence.request_state.dp_rank]
        if self.running.pop(sequence.slot, None) is not None:
            if aborted:
                self.pending_removals.append(sequence.slot)
            decoded = sequence.token_ids or sequence.num_in_flight_tokens
            if state.own_start == NO_OWN and decoded:
                whole = state.prefill_target // self.page_size
                rest = state.prefill_token_ids[whole * self.page_size :]
                keys = pool.keys(
                    [*rest, *sequence.token_ids[:-1]],
                    state.request.cache_salt,
                    after=state.page_keys[:whole],
                )
                pool.cache(keys, sequence.pages, sequence)
        pool.release(sequence.pages)
        self._free_slots[state.dp_rank].append(sequence.slot)
        state.sequences.remove(sequence)

    def abort(self, state: RequestState) -> None:
        """End a request, whether it waits, is in prefill or decodes. Calls in flight may still read
        its pages; later calls may overwrite them."""
        if state in self.waiting:
            del self.waiting[state]
            return
        if state in self.prefilling:
            self.prefilling.remove(state)
            if not state.sequences:
                self.pools[state.dp_rank].release(state.pages)
        for sequence in list(state.sequences):
            self.finish(sequence, aborted=True)


class _ChunkBuilder:
    """The part of a chunk of one data-parallel shard while it is planned."""

    def __init__(self, limits: Limits, page_size: int):
        self._page_size, self._context_pages = page_size, limits.context_pages
        self._tokens, self._tiles = limits.chunk_tokens, limits.max_tiles
        self._upper = limits.upper_tokens
        self._context: set[int] = set()
        self.scheduled: list[ScheduledTokens] = []

    def has_room(self) -> bool:
        return self._tokens > 0 and self._tiles > 0

    def has_room_for(self, state: RequestState) -> bool:
        """Whether any token of a request whose prefill has not begun may fit."""
        return self.has_room() and (not state.upper or self._upper > 0)

    def add(self, state: RequestState) -> int:
        """Plan the next tokens of a request, as many as fit. Returns the position up to which it is
        planned now."""
        size, start = self._page_size, state.num_computed_tokens
        stop = min(state.prefill_target, start + self._tokens, (start // size + self._tiles) * size)
        if state.upper:
            stop = min(stop, max(start, state.upper.start) + self._upper)
        if stop <= start or not self._add_context(state.pages[: -(-stop // size)]):
            return start
        scheduled = ScheduledTokens(state, start, stop)
        self.scheduled.append(scheduled)
        self._tokens -= scheduled.num_tokens
        self._tiles -= -(-stop // size) - start // size
        self._upper -= len(scheduled.upper)
        state.num_computed_tokens = stop
        return stop

    def _add_context(self, pages: list[int]) -> bool:
        """Let the chunk read these pages too; False if they are too many."""
        if self._context_pages is None:
            return True
        context = self._context.union(page for page in pages if page != RELEASED)
        if len(context) > self._context_pages:
            return False
        self._context = context
        return True
