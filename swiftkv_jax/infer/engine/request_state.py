"""The state of requests between their arrival and their last output: what the scheduler plans and
what the engine passes to the model runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...model.config import NO_OWN
from .grammar import Matcher
from .page_pool import PageNeeds, PagePool, all_pages
from .requests import Drafts, Request, ScoreRequest, Timing
from .sampling_params import SamplingParams
from .shadow_drafts import ShadowDrafts
from .shapes import DecodeCall


class RequestState:
    """A request in the engine: first its prompt is cached, then its sequences decode."""

    def __init__(
        self,
        request_id: int,
        request: Request | ScoreRequest,
        own_start: int = NO_OWN,
        exact_head: int = 0,
    ):
        self.request_id = request_id
        self.request = request
        self.own_start = own_start
        """`own_start`: position from which on tokens keep their own upper keys and values; `NO_OWN`
        if none does."""
        self.exact_head = exact_head
        """`Config.exact_head`: prefill computes it."""
        self.adapter = 0
        """Number of its adapter (`Adapters`); 0 for none."""
        self.prompt_digest = b""
        """`Adapter.prompt_digest`."""
        self.timing = Timing()
        self.prefill_token_ids: Sequence[int] = request.tokens
        """Tokens that exist before decoding: the prompt and, after a preemption, the tokens
        generated until then. All but the last run through prefill; the last is the first input of
        decoding. A `ScoreRequest` has no other tokens."""
        self.scored = range(request.start - 1, self.prefill_target)
        """Positions whose predictions are scored; none of a prompt."""
        self.num_computed_tokens = 0
        """Positions that are cached once the chunks planned so far have run."""
        self.num_cached_tokens = 0
        """Positions that were found in the prefix cache."""
        self.dp_rank = -1
        """Data-parallel shard that holds the request; -1 before it is admitted."""
        self.page_keys: list[bytes] = []
        """Keys of the full pages of `prefill_token_ids` that other requests may share
        (`PagePool.keys`): those before `own_start`."""
        self.fetching: set[bytes] | None = None
        """Keys of pages that are still to be read from disk; None before any could be asked for."""
        self.pages: list[int] = []
        """Pages of the first sequence, or of the scored tokens; `RELEASED` for those that no later
        token sees."""
        self.own_pages: list[tuple[int, ...]] = []
        """Where upper layers attend to two caches: own pages, for each `page_size` positions from
        `own_start` on a tuple of `Config.pages_per_own_page` pages."""
        self.sequences: list[SequenceState] = []
        """Sequences that have not ended; empty before the request is admitted."""
        self.num_remaining_tokens = 0
        """Tokens that a sample may still emit when the request is admitted."""
        self.matcher: Matcher | None = None
        """Grammar that a sample follows, in its state when the request is admitted."""
        self.drafts = Drafts()
        """Those of a sample before the request is admitted."""
        if isinstance(request, Request):
            self.num_remaining_tokens = request.params.max_tokens
            self.matcher = request.grammar
        self.num_preemptions = 0
        self.aborted: set[int] = set()
        """Indices of aborted samples."""
        self.num_times_skipped = 0
        """Number of later requests that were admitted before this one."""

    @property
    def prefill_target(self) -> int:
        """Number of positions to cache: all but the last. The last token is the input of the first
        decode step; of a score, no token follows it."""
        return len(self.prefill_token_ids) - 1

    @property
    def prefill_stop(self) -> int:
        """Number of positions that prefill computes: the `prefill_target`, and an exact head."""
        return max(self.prefill_target, self.exact_head)

    @property
    def upper(self) -> range:
        """Positions that run through all layers before decoding: those that are scored, and those
        that keep their own upper keys and values."""
        start = min(self.own_start, self.scored.start if self.scored else self.own_start)
        return range(min(start, self.prefill_target), self.prefill_target)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens at the end of `prefill_token_ids` that were generated before a preemption."""
        return len(self.prefill_token_ids) - len(self.request.tokens)

    @property
    def cache_salt(self) -> str:
        return self.request.cache_salt

    @property
    def cache_adapter(self) -> str:
        """Name of an adapter on which its pages depend; "" for none."""
        return self.request.adapter if self.prompt_digest else ""

    def token_ids_at(self, start: int, stop: int) -> Sequence[int]:
        """Tokens at positions `start .. stop-1` that exist before decoding."""
        return self.prefill_token_ids[start:stop]

    @property
    def active_indices(self) -> set[int]:
        """Indices of the samples that have neither ended nor been aborted."""
        running = {sequence.index for sequence in self.sequences}
        return (running or {*range(self.num_samples)}) - self.aborted

    @property
    def num_samples(self) -> int:
        """Samples of a prompt; 0 for a `ScoreRequest`."""
        return self.request.num_samples

    def pages_of_one(self, pool: PagePool) -> PageNeeds:
        """Pages that one sequence can fill: its last new token is never cached."""
        last = max(self.prefill_target + self.num_remaining_tokens, self.prefill_stop)
        return pool.needs(last, self.own_start)

    def pages_at_first(self, pool: PagePool, reserve_tokens: int) -> PageNeeds:
        """Pages of one sequence that are reserved before it runs. Samples of one prompt cannot be
        preempted, and reserve all."""
        new = self.num_remaining_tokens
        if self.num_samples == 1:
            new = min(new, reserve_tokens)
        return pool.needs(max(self.prefill_target + new, self.prefill_stop), self.own_start)

    def shared_by_samples(self, pool: PagePool) -> PageNeeds:
        """Pages that prefill fills, which all samples share."""
        stop = self.prefill_stop
        size = pool.page_size
        own = pool.num_own(stop, self.own_start)
        return PageNeeds(stop // size, own // size)

    def pages_of_others(self, pool: PagePool) -> int:
        """Pages that all sequences but the first need in addition to the shared ones."""
        unshared = pool.total(self.pages_of_one(pool)) - pool.total(self.shared_by_samples(pool))
        return max(self.num_samples - 1, 0) * unshared

    def preempt(self, sequence: SequenceState) -> None:
        """Let the only sequence wait again. Its tokens so far are cached again before it
        continues."""
        self.prefill_token_ids = [*self.prefill_token_ids, *sequence.token_ids]
        self.num_remaining_tokens = sequence.num_remaining_tokens
        self.matcher = sequence.matcher
        self.drafts = sequence.drafts
        self.num_computed_tokens = 0
        self.dp_rank = -1
        self.fetching = None
        self.pages = []
        self.own_pages = []
        self.num_preemptions += 1


class InFlight(NamedTuple):
    """Tokens that calls in flight emit of a sequence."""

    least: int = 0
    """Fewest tokens, unless one of them ends the sequence."""
    most: int = 0

    def after_sending(self, call: DecodeCall) -> InFlight:
        return InFlight(self.least + call.steps, self.most + call.most)

    def after_reading(self, call: DecodeCall) -> InFlight:
        return InFlight(self.least - call.steps, self.most - call.most)


@dataclasses.dataclass(eq=False)
class SequenceState:
    """One continuation of a request's prompt, in a slot."""

    request_state: RequestState
    index: int
    """Number of the sample within the request."""
    slot: int
    pages: list[int]
    own_pages: list[tuple[int, ...]]
    """See `RequestState`."""
    num_remaining_tokens: int
    """Tokens that the sequence may still emit."""
    in_flight: InFlight = InFlight()
    """Tokens that calls in flight emit, of `num_remaining_tokens` at most."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """Tokens emitted so far, including an end token."""
    matcher: Matcher | None = None
    """Grammar that the sequence follows; None: no grammar."""
    shadow: ShadowDrafts | None = None
    """None before the first call, and where nothing asks for it."""
    drafts: Drafts = Drafts()

    @property
    def cache_salt(self) -> str:
        return self.request_state.cache_salt

    @property
    def cache_adapter(self) -> str:
        return self.request_state.cache_adapter

    def token_ids_at(self, start: int, stop: int) -> Sequence[int]:
        """Tokens at positions `start .. stop-1` of its prompt and of what it has emitted."""
        before = self.request_state.prefill_token_ids
        after = self.token_ids[max(start - len(before), 0) : max(stop - len(before), 0)]
        return [*before[start:stop], *after]

    def copied_pages(self, pool: PagePool) -> list[tuple[int, int]]:
        """Pages (source, target) that a further sample copies: those with the end of the prompt.
        They are partly filled, so they cannot be shared."""
        state = self.request_state
        filled = pool.needs(state.prefill_stop, state.own_start)
        shared = state.shared_by_samples(pool)
        copies = []
        if filled.pages > shared.pages:
            copies.append((state.pages[shared.pages], self.pages[shared.pages]))
        if (last := shared.own_pages) < filled.own_pages:
            copies += zip(state.own_pages[last], self.own_pages[last], strict=True)
        return copies

    @property
    def is_ending(self) -> bool:
        """Return whether the calls in flight emit all that it may emit."""
        return self.num_remaining_tokens <= self.in_flight.least

    @property
    def has_drafts(self) -> bool:
        """Return whether its steps may emit several tokens, where the engine speculates."""
        return self.request.speculative

    @property
    def predicted_places(self) -> tuple[int, int]:
        """First place of `Request.prediction` in the text that drafts are taken from, and the one
        after its last: see `drafts.history_of`."""
        start = len(self.request.prompt)
        return start, start + len(self.request.prediction)

    @property
    def request(self) -> Request:
        assert isinstance(self.request_state.request, Request)
        return self.request_state.request

    def missing_pages(self, pool: PagePool, steps: int) -> tuple[int, PageNeeds]:
        """Pages that it needs in addition to emit up to `steps` more tokens: (their number, by
        kind)."""
        new = min(self.in_flight.most + steps, self.num_remaining_tokens)
        cached = self.request_state.prefill_target + len(self.token_ids)
        needs = pool.needs(cached + new, self.request_state.own_start)
        missing = PageNeeds(
            max(needs.pages - len(self.pages), 0), max(needs.own_pages - len(self.own_pages), 0)
        )
        return pool.total(missing), missing

    @property
    def params(self) -> SamplingParams:
        return self.request.params


def num_tiles(positions: range, page_size: int) -> int:
    """Pages that `positions` touch."""
    if not positions:
        return 0
    return -(-positions.stop // page_size) - positions.start // page_size


@dataclasses.dataclass(frozen=True)
class ScheduledTokens:
    """Consecutive tokens of one request in a chunk: positions `start .. stop-1`."""

    request_state: RequestState
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def own(self) -> range:
        """Tokens of this chunk whose own upper keys and values go into `RequestState.own_pages`,
        counted from the first of the request."""
        start = self.request_state.own_start
        if not self.request_state.own_pages:
            return range(0)
        return range(max(self.start - start, 0), max(self.stop - start, 0))

    def read_pages(self, page_size: int) -> list[int]:
        """Pages that these tokens read: those up to their last position, then own pages. `RELEASED`
        for pages that they do not see."""
        state = self.request_state
        own = -(-self.own.stop // page_size)
        last = -(-self.stop // page_size)
        return all_pages(state.pages[:last], state.own_pages[:own])

    def num_tiles(self, page_size: int) -> int:
        """Query tiles (see `prefill_chunk`) of these tokens, or of `own`, whichever has more."""
        return max(
            num_tiles(range(self.start, self.stop), page_size), num_tiles(self.own, page_size)
        )

    @property
    def scored(self) -> range:
        """Positions of this chunk whose predictions are scored."""
        return self._within(self.request_state.scored)

    @property
    def upper(self) -> range:
        """Positions of this chunk that run through all layers."""
        return self._within(self.request_state.upper)

    def _within(self, positions: range) -> range:
        start = max(self.start, positions.start)
        return range(start, max(start, min(self.stop, positions.stop)))


@dataclasses.dataclass
class Chunk:
    """One step of prefill."""

    shards: list[list[ScheduledTokens]]
    """Scheduled tokens of each data-parallel shard."""
    finished_prefill: list[SequenceState]
    """Sequences that can decode once the chunk has run."""
    page_copies: list[list[tuple[int, int]]]
    """Pages (source, target) that each data-parallel shard copies after the chunk has run: the
    samples of a prompt share its full pages and copy the one that is partly filled."""

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for _, scheduled in self.scheduled_tokens())

    def scheduled_tokens(self) -> Iterator[tuple[int, ScheduledTokens]]:
        """(dp_rank, scheduled tokens) of all shards."""
        for dp_rank, shard in enumerate(self.shards):
            for scheduled in shard:
                yield dp_rank, scheduled
