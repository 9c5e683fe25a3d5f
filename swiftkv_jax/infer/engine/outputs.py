"""From what a model runner returns to the outputs of requests. Imports no JAX."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as Seq

from .model_runner_base import NON_FINITE, AsyncOutput, SamplerOutput
from .request_state import Chunk, RequestState, Sequence
from .requests import NOT_FINITE, FinishReason, Logprob, RequestOutput, ScoreRequest


@dataclasses.dataclass
class Sent:
    """Calls that one step has sent to the device."""

    chunks: list[tuple[Chunk, AsyncOutput | None]] = dataclasses.field(default_factory=list)
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    steps: int = 0
    """Tokens that each of them may emit."""
    tokens: AsyncOutput | None = None
    constrained: list[Sequence] = dataclasses.field(default_factory=list)
    constrained_tokens: AsyncOutput | None = None


def sequence_output(
    sequence: Sequence, sampled: SamplerOutput, row: int, eos_token_ids: Seq[int]
) -> tuple[RequestOutput, int]:
    """(output of the new tokens in one row of `sampled`, which `sequence` has then; how many they
    are)."""
    state, params = sequence.request_state, sequence.params
    tokens = sampled.token[row].tolist()
    emitted = [token for token in tokens if token >= 0]
    sequence.token_ids += emitted
    sequence.num_remaining_tokens -= len(emitted)
    broken = NON_FINITE in tokens
    ended = not broken and (
        emitted[-1] in params.stop_token_ids
        or (emitted[-1] in eos_token_ids and not params.ignore_eos)
    )
    complete = False
    if sequence.matcher is not None and not (broken or ended):
        sequence.matcher.accept(emitted[-1])
        complete = sequence.matcher.is_ended
    state.timing.last_token = time.perf_counter()
    state.timing.first_token = state.timing.first_token or state.timing.last_token
    logprobs = stop_logprob = None
    if params.logprobs is not None:
        logprobs = [_logprob(sampled, (row, step), params.logprobs) for step in range(len(emitted))]
        stop_logprob = logprobs.pop() if ended else None
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
        token_ids=emitted[:-1] if ended else emitted,
        logprobs=logprobs,
        finish_reason=reason,
        timing=dataclasses.replace(state.timing),
        num_cached_tokens=state.num_cached_tokens,
        stop_token=emitted[-1] if ended else None,
        stop_logprob=stop_logprob,
        error=NOT_FINITE if broken else "",
    )
    return output, len(emitted)


def failed_output(sequence: Sequence, error: str) -> RequestOutput:
    """The last output of a sequence that cannot go on."""
    state = sequence.request_state
    return RequestOutput(
        request_id=state.request_id,
        sample=sequence.index,
        token_ids=[],
        logprobs=None if sequence.params.logprobs is None else [],
        finish_reason="error",
        timing=dataclasses.replace(state.timing),
        num_cached_tokens=state.num_cached_tokens,
        error=error,
    )


@dataclasses.dataclass
class Scores:
    """The scores of a `ScoreRequest` so far."""

    likeliest: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)

    def add(self, state: RequestState, scores: SamplerOutput, entries: range) -> None:
        """Add some entries of what a chunk returned."""
        assert isinstance(state.request, ScoreRequest)
        top = state.request.top_logprobs
        self.likeliest += scores.token[entries.start : entries.stop].tolist()
        self.logprobs += [_logprob(scores, (entry,), top) for entry in entries]

    def output(self, state: RequestState) -> RequestOutput:
        """All of them."""
        state.timing.first_token = state.timing.last_token = time.perf_counter()
        return RequestOutput(
            request_id=state.request_id,
            sample=0,
            token_ids=self.likeliest,
            logprobs=self.logprobs,
            finish_reason="stop",
            timing=dataclasses.replace(state.timing),
            num_cached_tokens=state.num_cached_tokens,
        )


def _logprob(sampled: SamplerOutput, index: tuple[int, ...], top: int) -> Logprob:
    ids, values = sampled.top_ids[index][:top].tolist(), sampled.top_logprobs[index][:top].tolist()
    return Logprob(float(sampled.logprob[index]), tuple(zip(ids, values, strict=True)))
