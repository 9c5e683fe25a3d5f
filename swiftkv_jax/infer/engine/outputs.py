"""Turns the results of a model runner into outputs of requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .constrained import ConstrainedCall
from .request_state import Chunk, RequestState, SequenceState
from .requests import (
    NOT_FINITE,
    FinishReason,
    Logprob,
    LogprobArrays,
    Request,
    RequestOutput,
    ScoreRequest,
)
from .sampler_output import NON_FINITE, AsyncOutput, SamplerOutput
from .shapes import DecodeCall

MAX_SCORES = 2048
"""Most scores in one output: making their objects and their JSON must not delay other work for
long."""


@dataclasses.dataclass
class Sent:
    """Calls that one step has sent to the device."""

    chunks: list[tuple[Chunk, AsyncOutput | None]] = dataclasses.field(default_factory=list)
    sequences: list[SequenceState] = dataclasses.field(default_factory=list)
    call: DecodeCall = DecodeCall(0)
    """The size of their call."""
    tokens: AsyncOutput | None = None
    constrained: tuple[ConstrainedCall, AsyncOutput] | None = None
    """None also once it is read."""


def sequence_output(
    sequence: SequenceState, sampled: SamplerOutput, row: int, eos_token_ids: Sequence[int]
) -> tuple[RequestOutput, int]:
    """Add the new tokens in one row of `sampled` to `sequence`: (their output, how many there
    are)."""
    state = sequence.request_state
    params = sequence.params
    tokens = sampled.token[row].tolist()
    steps = [step for step, token in enumerate(tokens) if token >= 0]
    emitted = [tokens[step] for step in steps]
    sequence.token_ids += emitted
    sequence.num_remaining_tokens -= len(emitted)
    broken = NON_FINITE in tokens
    ended = not broken and (
        emitted[-1] in params.stop_token_ids
        or (emitted[-1] in eos_token_ids and not params.ignore_eos)
    )
    complete = False
    if sequence.matcher is not None and not broken:
        for token in emitted[:-1] if ended else emitted:
            sequence.matcher.accept(token)
        complete = not ended and sequence.matcher.is_ended
    state.timing.last_token = time.perf_counter()
    state.timing.first_token = state.timing.first_token or state.timing.last_token
    token_ids = emitted
    logprobs = stop_logprob = None
    if params.logprobs is not None:
        logprobs = [_logprob(sampled, (row, step), params.logprobs) for step in steps]
    stop_token = None
    if ended:
        stop_token = emitted[-1]
        token_ids = emitted[:-1]
        if logprobs:
            stop_logprob = logprobs.pop()
    reason: FinishReason | None = None
    if broken:
        reason = "error"
    elif ended or complete:
        reason = "stop"
    elif not sequence.num_remaining_tokens:
        reason = "length"
    output = RequestOutput(
        request_id=state.request_id,
        sample=sequence.index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        timing=dataclasses.replace(state.timing),
        num_cached_tokens=state.num_cached_tokens,
        stop_token=stop_token,
        stop_logprob=stop_logprob,
        error=NOT_FINITE if broken else "",
        drafts=sequence.drafts,
    )
    return output, len(emitted)


def failed_output(state: RequestState, error: str, *, sample: int = 0) -> RequestOutput:
    """The last output of a sample, or of a `ScoreRequest`, that cannot go on."""
    request = state.request
    asked = isinstance(request, Request) and request.params.logprobs is not None
    return RequestOutput(
        request_id=state.request_id,
        sample=sample,
        token_ids=[],
        logprobs=[] if asked else None,
        finish_reason="error",
        timing=dataclasses.replace(state.timing),
        num_cached_tokens=state.num_cached_tokens,
        error=error,
    )


class Scores:
    """The scores of a `ScoreRequest` that are in no output yet: fewer than `MAX_SCORES`."""

    def __init__(self, state: RequestState):
        assert isinstance(state.request, ScoreRequest)
        self._state = state
        self._top = state.request.top_logprobs
        self._likeliest: list[int] = []
        self._logprobs: list[LogprobArrays] = []

    def add(self, scores: SamplerOutput, entries: range, *, last: bool) -> Iterator[RequestOutput]:
        """Add `entries` of the scores that a chunk returned, and yield complete outputs. `last`
        says that these are the request's last ones."""
        while entries:
            room = MAX_SCORES - len(self._likeliest)
            taken = entries[:room]
            entries = entries[room:]
            rows = slice(taken.start, taken.stop)
            self._likeliest += scores.token[rows].tolist()
            # Copies: a view would keep all that the chunk returned.
            values = scores.top_ids[rows, : self._top], scores.top_logprobs[rows, : self._top]
            self._logprobs.append(
                LogprobArrays(*(np.array(value) for value in (scores.logprob[rows], *values)))
            )
            ended = last and not entries
            if ended or len(taken) == room:
                yield self._output("stop" if ended else None)

    def _output(self, reason: FinishReason | None) -> RequestOutput:
        state = self._state
        likeliest = self._likeliest
        parts = self._logprobs
        self._likeliest = []
        self._logprobs = []
        state.timing.first_token = state.timing.last_token = time.perf_counter()
        return RequestOutput(
            request_id=state.request_id,
            sample=0,
            token_ids=likeliest,
            logprobs=LogprobArrays(
                np.concatenate([part.logprob for part in parts]),
                np.concatenate([part.top_ids for part in parts]),
                np.concatenate([part.top_logprobs for part in parts]),
            ),
            finish_reason=reason,
            timing=dataclasses.replace(state.timing),
            num_cached_tokens=state.num_cached_tokens,
        )


def score_outputs(
    chunk: Chunk,
    scores: SamplerOutput,
    requests: Mapping[int, RequestState],
    unfinished: dict[int, Scores],
) -> Iterator[RequestOutput]:
    """Complete outputs of the scores that a chunk returned, for those of its requests that are
    still among `requests`; the caller ends one after its last output. `unfinished` holds the scores
    of requests by their ids."""
    stop = 0
    for _, scheduled in chunk.scheduled_tokens():
        state = scheduled.request_state
        start, stop = stop, stop + len(scheduled.scored)
        if not state.scored or state.request_id not in requests:
            continue
        if not np.isfinite(scores.logprob[start:stop]).all():
            yield failed_output(state, NOT_FINITE)
            continue
        found = unfinished.setdefault(state.request_id, Scores(state))
        last = scheduled.stop == state.prefill_stop
        yield from found.add(scores, range(start, stop), last=last)


def _logprob(sampled: SamplerOutput, index: tuple[int, ...], top: int) -> Logprob:
    ids = sampled.top_ids[index][:top].tolist()
    values = sampled.top_logprobs[index][:top].tolist()
    return Logprob(float(sampled.logprob[index]), tuple(zip(ids, values, strict=True)))
