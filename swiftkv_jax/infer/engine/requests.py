"""What goes into the engine and what comes out of it. Tokens only: text is its callers'
business."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

from .sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "error"]
"""An end token (or all that was to be scored), `max_tokens`, or logits that are not finite
numbers."""
NOT_FINITE = (
    "the model's logits are not finite numbers: its weights are damaged, or too large "
    "for the type it runs in"
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue, `params.n` times."""

    prompt: Sequence[int]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    rng_stream: int = 0
    """Prompts that share a seed draw differently if their streams differ: the number of the prompt
    in its call."""
    cache_salt: str = ""
    """Cached prefixes are shared only between requests of one salt, so that nobody can find out
    what others have asked."""


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """Tokens whose log-likelihoods are wanted, from position `start` (at least 1: nothing predicts
    the first) to the end."""

    tokens: Sequence[int]
    start: int
    top_logprobs: int = 0
    """How many of the likeliest alternatives to return at each position, at most
    `sampling.MAX_LOGPROBS`."""
    cache_salt: str = ""


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural logarithms of the model's own probabilities, before temperature, penalties and
    filters."""

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token, its log-probability), the likeliest first."""


@dataclasses.dataclass
class Timing:
    """Moments in the life of a request, `time.perf_counter()` seconds; None is not yet."""

    submitted: float = dataclasses.field(default_factory=time.perf_counter)
    started: float | None = None
    """Its first chunk of prefill went to the device."""
    first_token: float | None = None
    last_token: float | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """News of one sample of a request: new tokens, or the scores of a `ScoreRequest`, all at
    once."""

    request: int
    """What `Engine.add_request` returned."""
    sample: int
    tokens: list[int]
    """Without the end token; empty if that was all there was."""
    logprobs: list[Logprob] | None
    """One a token; None if they were not asked for. The end token has none."""
    finish_reason: FinishReason | None
    """Set on a sample's last event."""
    timing: Timing
    cached_tokens: int
    """Prompt tokens whose keys and values were in the cache already."""
    stop_token: int | None = None
    """The token that ended the sample, one of the model's end tokens or of `stop_token_ids`."""
