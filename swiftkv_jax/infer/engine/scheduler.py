"""The scheduler: which tokens go into the next chunk of prefill, which sequences decode, and which
pages and slots a request gets.

Requests wait in one queue. A request is admitted when there are slots for its samples, and pages
for its prompt and the first `reserve_tokens` new tokens; for more of them it gets pages as it
decodes. When there are none, the running request that came last is preempted: its pages and slot
become free, and it waits first in the queue, to run its prompt and its answer so far through
prefill. The request that came first is never preempted, so all requests end. Where every layer has
a window, pages before the widest go back before each chunk and each decode call. Pages serve long
and short requests alike: a request reserves what its own length needs. Requests are admitted in the
order of their arrival, with one exception: while there is no room for one, up to `max_skips` later
ones for which there is room go before it.

With rows split over devices each data-parallel shard (`dp_rank`) has its own pages and slots, and
its own part of each chunk. A request stays on one shard.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Iterator, Sequence

from ...model.config import NO_OWN
from .chunk_builder import ChunkBuilder
from .page_pool import ON_HOST, PageNeeds, PagePool, all_pages
from .request_state import Chunk, RequestState, SequenceState
from .shapes import DecodeCall, Shapes

MAX_SKIPS = 32
"""Most later requests that are admitted before one for which there is no room yet; also how far
down the queue the scheduler looks for them."""


class Scheduler:
    """The queue of requests, and the slots and pages of all shards."""

    def __init__(
        self,
        pools: Sequence[PagePool],
        shapes: Shapes,
        *,
        reserve_tokens: int,
        max_skips: int = MAX_SKIPS,
    ):
        """`reserve_tokens` as in `EngineOptions`, at least the most tokens of one decode call: a
        sequence decodes in the step in which its prefill ends."""
        self.pools = list(pools)
        self.shapes = shapes
        self.max_skips = max_skips
        self.reserve_tokens = reserve_tokens
        self.page_size = shapes.page_size
        self.waiting = collections.OrderedDict[RequestState, None]()
        """Requests that are not admitted yet, in the order of their arrival."""
        self.prefilling: list[RequestState] = []
        """Admitted requests whose prefill is not completely planned."""
        self.running: dict[int, SequenceState] = {}
        """Slot -> the sequence that decodes in it. Slots of shard i begin at i * `Shapes.slots`."""
        self.ending: dict[SequenceState, None] = {}
        """Sequences whose last tokens are in flight: what uses their slots next is sent later."""
        self.pending_removals: list[int] = []
        """Slots of aborted sequences that the model runner still decodes."""
        self.num_preemptions = 0
        self.num_times_skipped = 0
        self._without_pages: set[SequenceState] = set()
        """Sequences that wait for pages in this step."""
        slots = itertools.batched(range(len(pools) * shapes.slots), shapes.slots)
        self._free_slots = [list(reversed(some)) for some in slots]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.num_running)

    def is_unfinished(self, sequence: SequenceState) -> bool:
        """True if a sequence that decodes may emit more tokens."""
        return sequence in self.ending or self.running.get(sequence.slot) is sequence

    def add(self, state: RequestState) -> None:
        """Queue a request."""
        shareable = state.prefill_token_ids[: state.own_start]
        if (keys := state.request.page_keys) is None or not self.pools[0].share:
            keys = self._keys(state, shareable)
        state.page_keys = list(keys[: len(shareable) // self.page_size])
        self.waiting[state] = None

    # Prefill ------------------------------------------------------------------

    def schedule_prefill(self) -> Chunk | None:
        """Plan a chunk, first of the requests whose prefill has begun, then of those that wait, in
        order; None if there is nothing to run.

        A request's pages can be shared as soon as they are planned: in each layer a chunk writes
        all of its keys and values before it reads any.
        """
        builders = [ChunkBuilder(self.shapes) for _ in self.pools]
        chunk = Chunk([builder.scheduled for builder in builders], [], [[] for _ in builders])
        for state in list(self.prefilling):
            self._extend(state, builders[state.dp_rank], chunk)
        self._admit_waiting(builders, chunk)
        for _, scheduled in chunk.scheduled_tokens():
            state = scheduled.request_state
            if scheduled.stop == state.prefill_stop and not state.sequences:
                # The last chunk of a score: the next chunk may overwrite its pages.
                self._release(state.dp_rank, state.pages, state.own_pages)
        # Not a set: every process must release pages in the same order.
        finished = dict.fromkeys(sequence.request_state for sequence in chunk.finished_prefill)
        for state in finished:
            for sequence in list(state.sequences):
                # Aborted during prefill. Until now the other samples read its pages.
                if sequence.index in state.aborted:
                    self.finish(sequence)
        for pool in self.pools:
            pool.move_pages()
        return chunk if chunk.finished_prefill or any(chunk.shards) else None

    def _admit_waiting(self, builders: list[ChunkBuilder], chunk: Chunk) -> None:
        """Admit requests from the queue while the chunk has room."""
        skipped = ahead = 0
        while skipped < min(len(self.waiting), self.max_skips + 1) and any(
            builder.has_room() for builder in builders
        ):
            *before, state = itertools.islice(self.waiting, skipped + 1)
            # Not the first alone: a preempted request may wait before one that was skipped often.
            if any(one.num_times_skipped >= self.max_skips for one in before):
                return
            if (dp_rank := self._admit(state, builders, ahead)) is None:
                skipped += 1
                ahead += len(state.page_keys)
                continue
            del self.waiting[state]
            for earlier in before:
                earlier.num_times_skipped += 1
            self.num_times_skipped += skipped
            self.prefilling.append(state)
            self._extend(state, builders[dp_rank], chunk)

    def _extend(self, state: RequestState, builder: ChunkBuilder, chunk: Chunk) -> None:
        """Plan as much of a request as the chunk has room for. When all of it is planned, its
        sequences can decode."""
        if state.timing.started is None:
            state.timing.started = time.perf_counter()
        pool, begun = self.pools[state.dp_rank], state.num_computed_tokens // self.page_size
        if not pool.load(state.pages):
            return
        # Not earlier: another request in the same chunk would write pages that this one reads.
        for pages in [one.pages for one in state.sequences] or [state.pages]:
            pool.release_hidden(pages, state.num_computed_tokens)
        full = builder.add(state) // self.page_size
        pool.cache(state.page_keys, state.pages, state, start=begun, stop=full)
        if state.num_computed_tokens < state.prefill_stop:
            return
        self.prefilling.remove(state)
        for sequence in state.sequences:
            if sequence.index not in state.aborted:
                chunk.finished_prefill.append(sequence)
                self.running[sequence.slot] = sequence
            if sequence.index:
                chunk.page_copies[state.dp_rank] += sequence.copied_pages(self.pools[state.dp_rank])

    def _admit(self, state: RequestState, builders: list[ChunkBuilder], ahead: int) -> int | None:
        """Give a request slots and pages on the shard with the longest cached prefix, or else with
        most free pages. Returns its `dp_rank`; None if no shard has enough of both, and room in its
        part of the chunk. `ahead` are the pages of the prompts that wait before it."""
        candidates = [
            dp_rank
            for dp_rank, slots in enumerate(self._free_slots)
            if state.num_samples <= len(slots) and builders[dp_rank].has_room()
        ]
        # Some tokens must run through all layers: at most the pages before them are reused.
        usable = state.upper.start if state.upper else state.prefill_target
        keys = state.page_keys[: usable // self.page_size]
        state.fetching = self.pools[0].fetch(keys, state.fetching, ahead)
        if state.fetching != set():
            return None
        cached = {dp_rank: self.pools[dp_rank].match(keys) for dp_rank in candidates}

        def preference(dp_rank: int) -> tuple[int, int]:
            return -len(cached[dp_rank]), -self.pools[dp_rank].available

        for dp_rank in sorted(candidates, key=preference):
            if self._allocate(state, dp_rank, cached[dp_rank]):
                return dp_rank
        return None

    def _allocate(self, state: RequestState, dp_rank: int, cached: list[int]) -> bool:
        """Reserve pages of one shard and make the sequences of a request. If there are too few
        pages, returns False and reserves nothing."""
        pool = self.pools[dp_rank]
        needs = state.pages_at_first(pool, self.reserve_tokens)
        more = pool.total(needs) - len(cached) + state.pages_of_others(pool)
        if short := pool.shortage(cached, more):
            self._reclaim(dp_rank, short)
        if (reserved := pool.reserve(cached, more, state.page_keys, state)) is None:
            return False
        unused = iter(reserved)
        state.dp_rank = dp_rank
        state.pages, state.own_pages = pool.take(unused, needs)
        state.num_computed_tokens = len(cached) * self.page_size
        self._make_sequences(state, needs, unused)
        if not state.num_preemptions:
            state.num_cached_tokens = state.num_computed_tokens
            pool.stats.queries += len(state.prefill_token_ids)
            pool.stats.hits += state.num_cached_tokens
            pool.stats.host_hits += cached.count(ON_HOST) * self.page_size
        return True

    def _make_sequences(self, state: RequestState, needs: PageNeeds, unused: Iterator[int]) -> None:
        """Make a sequence in a slot for each sample of a request. The first has the request's
        pages; the others share those that prefill fills, and take the rest from `unused`."""
        pool, slots = self.pools[state.dp_rank], self._free_slots[state.dp_rank]
        shared = state.shared_by_samples(pool)
        rest = PageNeeds(*(a - b for a, b in zip(needs, shared, strict=True)))
        for index in range(state.num_samples):
            pages, own_pages = state.pages, state.own_pages
            if index:
                pages, own_pages = pages[: shared.pages], own_pages[: shared.own_pages]
                pool.share_pages(all_pages(pages, own_pages))
                more_pages, more_own_pages = pool.take(unused, rest)
                pages, own_pages = pages + more_pages, own_pages + more_own_pages
            sequence = SequenceState(
                state, index, slots.pop(), pages, own_pages, state.num_remaining_tokens
            )
            sequence.drafts = state.drafts
            sequence.matcher = None if state.matcher is None else state.matcher.copy()
            state.sequences.append(sequence)

    # Decoding -----------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that decode, with those that hold no slot any more."""
        return len(self.running) + len(self.ending)

    @property
    def most_running(self) -> int:
        """Largest number of sequences that decode on one shard."""
        counts = collections.Counter(slot // self.shapes.slots for slot in self.running)
        return max(counts.values(), default=0)

    def grow(self, steps: int) -> list[SequenceState]:
        """Give running sequences pages for a decode call of `steps` in the order of their arrival,
        and where there are enough, for the most that a wide one emits. If pages run out, preempt
        the sequence that came last. Returns those that got pages. A sequence may still get none, if
        requests in prefill or samples that share a prompt hold the pages; it skips the call."""
        self._without_pages.clear()
        self._free_ending()  # calls may have emitted more than the fewest tokens
        for sequence in self.running.values():
            position = sequence.request_state.prefill_target + len(sequence.token_ids)
            self._pool(sequence).release_hidden(sequence.pages, position)
        most = max(steps, self.shapes.most_new_tokens)
        needing = [one for one in self.running.values() if not self.have_pages([one], most)]
        needing.sort(key=lambda one: (one.request_state.request_id, one.index))
        grown = []
        for sequence in needing:
            if self.running.get(sequence.slot) is not sequence:
                continue  # preempted
            state, pool = sequence.request_state, self._pool(sequence)
            least, missing = sequence.missing_pages(pool, steps)
            while pool.available < least and (
                self._reclaim(state.dp_rank, least - pool.available) or self._preempt_after(state)
            ):
                pass
            if pool.available < least:
                self._without_pages.add(sequence)
                continue
            for more in range(self.reserve_tokens, 0, -self.page_size):
                wanted, needs = sequence.missing_pages(pool, steps + more)
                if wanted <= pool.available:
                    least, missing = wanted, needs
                    break
            if not least:
                continue
            unused = pool.reserve([], least)
            assert unused is not None
            pages, own_pages = pool.take(iter(unused), missing)
            sequence.pages += pages
            sequence.own_pages += own_pages
            grown.append(sequence)
        return grown

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
        start = len(preempted.page_keys) * self.page_size
        shareable = preempted.prefill_token_ids[start : preempted.own_start]
        preempted.page_keys = self._keys(preempted, shareable, preempted.page_keys)
        self.waiting[preempted] = None
        self.waiting.move_to_end(preempted, last=False)
        self.num_preemptions += 1
        return True

    def ready_to_decode(self) -> list[SequenceState]:
        """Sequences without a grammar that can emit tokens in the next call."""
        return [one for one in self._with_pages if one.matcher is None]

    def have_pages(self, sequences: Sequence[SequenceState], tokens: int) -> bool:
        """True if these sequences have pages for so many tokens more."""
        return not any(one.missing_pages(self._pool(one), tokens)[0] for one in sequences)

    def plan_decode(self, sequences: Sequence[SequenceState], call: DecodeCall) -> None:
        """Count what `call` emits of these sequences. Those that are sure to reach their
        `max_tokens` in it free their slots at once, and their pages when it is read."""
        for sequence in sequences:
            sequence.in_flight = sequence.in_flight.after_sending(call)
        self._free_ending()

    def _free_ending(self) -> None:
        """Free the slots of running sequences that the calls in flight end."""
        for sequence in [one for one in self.running.values() if one.is_ending]:
            del self.running[sequence.slot]
            self._free_slot(sequence)
            self.ending[sequence] = None

    def schedule_constrained(self) -> list[SequenceState]:
        """Sequences that follow a grammar. They emit one token in a call, because the next mask
        depends on it, and have no token in flight here."""
        return [one for one in self._with_pages if one.matcher is not None]

    @property
    def _with_pages(self) -> list[SequenceState]:
        return [one for one in self.running.values() if one not in self._without_pages]

    def finish(self, sequence: SequenceState, *, aborted: bool = False) -> None:
        """Free the slot and pages of a sequence that has ended. Later requests can share the pages,
        unless generated tokens kept their own keys and values. An `aborted` sequence still has to
        be removed from the model runner."""
        state, pool = sequence.request_state, self._pool(sequence)
        decoded = sequence.token_ids or sequence.in_flight.least
        if decoded and state.own_start == NO_OWN and self.is_unfinished(sequence):
            whole = state.prefill_target // self.page_size
            rest = state.prefill_token_ids[whole * self.page_size :]
            tokens = [*rest, *sequence.token_ids[:-1]]
            keys = self._keys(state, tokens, state.page_keys[:whole])
            pool.cache(keys, sequence.pages, sequence)
        if sequence in self.ending:
            del self.ending[sequence]
        else:
            if self.running.pop(sequence.slot, None) is not None and aborted:
                self.pending_removals.append(sequence.slot)
            self._free_slot(sequence)
        self._release(state.dp_rank, sequence.pages, sequence.own_pages)
        state.sequences.remove(sequence)

    def _free_slot(self, sequence: SequenceState) -> None:
        self._free_slots[sequence.request_state.dp_rank].append(sequence.slot)

    def _reclaim(self, dp_rank: int, count: int) -> bool:
        """Release the pages of sequences that are ending, if `count` pages or more come free. What
        these sequences generate is not cached then."""
        pool = self.pools[dp_rank]
        ending = [one for one in self.ending if one.request_state.dp_rank == dp_rank]
        if count > sum(pool.num_sole(all_pages(one.pages, one.own_pages)) for one in ending):
            return False
        for sequence in ending:
            self._release(dp_rank, sequence.pages, sequence.own_pages)
            sequence.pages, sequence.own_pages = [], []
        return True

    def _keys(
        self, state: RequestState, tokens: Sequence[int], after: Sequence[bytes] = ()
    ) -> list[bytes]:
        """`PagePool.keys` of a request's `tokens`."""
        return self.pools[0].keys(tokens, state.cache_salt, after, state.prompt_digest)

    def _pool(self, sequence: SequenceState) -> PagePool:
        return self.pools[sequence.request_state.dp_rank]

    def abort(self, state: RequestState) -> None:
        """End a request, whether it waits, is in prefill or decodes. Calls in flight may still read
        its pages; later calls may overwrite them."""
        if state in self.waiting:
            del self.waiting[state]
            return
        if state in self.prefilling:
            self.prefilling.remove(state)
            if not state.sequences:
                self._release(state.dp_rank, state.pages, state.own_pages)
        for sequence in list(state.sequences):
            self.finish(sequence, aborted=True)

    def _release(self, dp_rank: int, pages: list[int], own_pages: list[tuple[int, ...]]) -> None:
        self.pools[dp_rank].release(all_pages(pages, own_pages))
