"""Inputs and outputs of the engine: token ids, no text."""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import numpy as np

from .grammar import Matcher
from .sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "error"]
"""`stop` is an end token (or the end of the scores), `length` is `max_tokens`, `error` is what
`RequestOutput.error` says."""
NOT_FINITE = (
    "the model's logits are not finite numbers: its weights are damaged, or too large "
    "for the type it runs in"
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue, `params.n` times."""

    prompt: Sequence[int]
    """Token ids. Queuing 131,072 of them takes 2 ms of a CPU core as an array, 14 ms as a list, and
    0.1 ms with `page_keys`."""
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    rng_stream: int = 0
    """Random stream of the prompt, usually its number in the call: prompts with one seed and
    different streams draw differently."""
    cache_salt: str = ""
    """Salt of the prefix cache: only requests with the same salt share pages, so the time to the
    first token does not tell what others have asked."""
    page_keys: Sequence[bytes] | None = None
    """`page_pool.page_keys(prompt, page_size, cache_salt)`, with the digest of its adapter, where
    another thread has made them.
    They are not verified; None makes them when the request is queued."""
    grammar: Matcher | None = None
    """Grammar that every sample follows, with `EngineOptions.structured_outputs`; each has a copy
    of it."""
    speculative: bool = True
    """Permission to draft, with `EngineOptions.speculative`: a step may emit several tokens, which
    are the same ones."""
    prediction: Sequence[int] = ()
    """Token ids that the answer may consist of, in part or with changes: drafts are taken from them
    as from the prompt."""
    adapter: str = ""
    """Name of an adapter in `Engine.adapters`; "" runs the model itself."""

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt: as of a `ScoreRequest`, the tokens that there are."""
        return self.prompt

    @property
    def start(self) -> int:
        """The first position that is not given."""
        return len(self.prompt)

    @property
    def num_samples(self) -> int:
        return self.params.n


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """Tokens whose log-likelihoods are returned, from position `start` to the end."""

    tokens: Sequence[int]
    start: int
    """First position that is scored, at least 1: nothing predicts the first token."""
    top_logprobs: int = 0
    """Number of the likeliest alternatives to return at each position, at most
    `sampling_params.MAX_LOGPROBS`."""
    cache_salt: str = ""
    page_keys: Sequence[bytes] | None = None
    """Keys of the full pages of `tokens`, as in `Request`."""
    adapter: str = ""
    """Name of an adapter, as in `Request`."""

    @property
    def num_samples(self) -> int:
        """0: nothing is generated."""
        return 0


def with_own_tokens[T](request: T) -> T:
    """The request with copies of its tokens, which the caller may change. What is no request stays
    as it is, and so does what no list of tokens can be."""
    if isinstance(request, Request):
        prediction = _copied(request.prediction)
        return dataclasses.replace(request, prompt=_copied(request.prompt), prediction=prediction)
    if isinstance(request, ScoreRequest):
        return dataclasses.replace(request, tokens=_copied(request.tokens))
    return request


def _copied(tokens: Sequence[int]) -> Sequence[int]:
    if isinstance(tokens, np.ndarray):
        return tokens.copy()
    if isinstance(tokens, Sequence) and not isinstance(tokens, str | range):
        return tuple(tokens)
    return tokens


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural logarithms of the model's own probabilities, before temperature, penalties and
    filters."""

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token, its log-probability), the likeliest first."""


@dataclasses.dataclass(frozen=True, eq=False)
class LogprobArrays(Sequence[Logprob]):
    """Log-probabilities of T tokens with k alternatives each, as arrays: 8 + 8 k bytes per token.
    Items are made on access."""

    logprob: np.ndarray
    """f32[T]"""
    top_ids: np.ndarray
    """i32[T, k], the likeliest first."""
    top_logprobs: np.ndarray
    """f32[T, k]"""

    def __len__(self) -> int:
        return len(self.logprob)

    @overload
    def __getitem__(self, index: int) -> Logprob: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobArrays: ...
    def __getitem__(self, index: int | slice) -> Logprob | LogprobArrays:
        values = self.logprob[index], self.top_ids[index], self.top_logprobs[index]
        if isinstance(index, slice):
            return LogprobArrays(*values)
        logprob, ids, logprobs = (value.tolist() for value in values)
        return Logprob(logprob, tuple(zip(ids, logprobs, strict=True)))


@dataclasses.dataclass
class Timing:
    """Times of a request in `time.perf_counter()` seconds; None before it has happened. The tokens
    of a `ScoreRequest` are its last scores."""

    submitted: float = dataclasses.field(default_factory=time.perf_counter)
    started: float | None = None
    """Time at which the first chunk of prefill was planned."""
    first_token: float | None = None
    last_token: float | None = None


class Drafts(NamedTuple):
    """Counts of a sequence's drafts, in calls that have been read."""

    steps: int = 0
    """Steps with a draft or more."""
    tokens: int = 0
    accepted: int = 0
    predicted: int = 0
    """Tokens that were taken from `Request.prediction`."""
    predicted_accepted: int = 0

    def plus(self, more: Drafts) -> Drafts:
        return Drafts(*map(operator.add, self, more))


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """New tokens of one sample of a request, or the next scores of a `ScoreRequest`, 2,048 at most:
    scores of longer texts are returned in parts, from the first position to the last."""

    request_id: int
    """Id that `Engine.add_request` returned."""
    sample: int
    """Number of the sample, 0 to `params.n` - 1."""
    token_ids: list[int]
    """New tokens without the end token; empty if there was only that. Of scores, the likeliest
    token at each position."""
    logprobs: Sequence[Logprob] | None
    """An entry for each of `token_ids`; None if they were not asked for. Of scores,
    `LogprobArrays` with an entry for each token of the request."""
    finish_reason: FinishReason | None
    """Reason of the end, on a sample's last output; None before."""
    timing: Timing
    num_cached_tokens: int
    """Prompt tokens whose keys and values were already in the cache."""
    stop_token: int | None = None
    """Token that ended the sample, one of the model's end tokens or of `stop_token_ids`."""
    stop_logprob: Logprob | None = None
    """Its entry, if they were asked for."""
    error: str = ""
    """Cause of the finish reason `error`: `NOT_FINITE`, or what the grammar says."""
    drafts: Drafts = Drafts()
    """Drafts of the sample up to now."""
