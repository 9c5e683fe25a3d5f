"""Requests on their way: what the scheduler plans, and what the engine and its device are told
of."""

from __future__ import annotations

import dataclasses
from collections import abc
from collections.abc import Iterator

from .requests import Request, ScoreRequest, Timing
from .sampling_params import SamplingParams


class RequestState:
    """A request on its way: its prompt is being cached; then its samples run."""

    def __init__(self, id: int, request: Request | ScoreRequest):
        self.id, self.request = id, request
        self.timing = Timing()
        self.tokens: abc.Sequence[int] = (
            request.prompt if isinstance(request, Request) else request.tokens
        )
        # The last token goes into the first decode step; and nothing is predicted after the last
        # one that is scored.
        self.target = len(self.tokens) - 1
        """Positions to cache."""
        self.scored = (
            range(0) if isinstance(request, Request) else range(request.start - 1, self.target)
        )
        """Positions whose predictions are scored."""
        self.done = 0
        """Positions that are cached, or will be by the time anything else runs."""
        self.cached = 0
        """Of these, found in the cache."""
        self.lane = -1
        self.keys: list[bytes] = []
        self.pages: list[int] = []
        self.samples: list[Sequence] = []
        self.cancelled: set[int] = set()
        """Samples that nobody waits for any more."""
        self.overtaken = 0
        """How many requests that came later have begun before it."""

    @property
    def wanted(self) -> set[int]:
        """Samples that somebody waits for."""
        samples = (
            {sample.index for sample in self.samples}
            if self.samples
            else set(range(self.num_samples))
        )
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
class Sequence:
    """One continuation of a request's prompt, in a slot."""

    task: RequestState
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
class ScheduledTokens:
    """Consecutive tokens of one request in a chunk: positions `start .. stop-1`."""

    task: RequestState
    start: int
    stop: int

    @property
    def scored(self) -> range:
        """Positions of this span whose predictions are scored."""
        wanted = self.task.scored
        return range(
            max(self.start, wanted.start),
            max(self.start, wanted.start, min(self.stop, wanted.stop)),
        )


@dataclasses.dataclass
class Chunk:
    """One step of prefill."""

    spans: list[list[ScheduledTokens]]
    """For each lane."""
    ready: list[Sequence]
    """Samples that can decode once this has run."""
    copies: list[list[tuple[int, int]]]
    """For each lane: after this has run, pages to copy (from, to), so that samples part where their
    prompt ends."""


def spans_of(chunk: Chunk) -> Iterator[tuple[int, ScheduledTokens]]:
    """(lane, span) of all spans."""
    for lane, spans in enumerate(chunk.spans):
        for span in spans:
            yield lane, span
