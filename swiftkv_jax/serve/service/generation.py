"""One request while it is answered: its samples as text, and how it ended. All on the thread of the
connections; the engine's has ids alone."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...errors import UsageError
from ...infer.engine.requests import (
    NOT_FINITE,
    Drafts,
    Logprob,
    Request,
    RequestOutput,
    ScoreRequest,
)
from ...infer.text import TextStream, text_decoder
from ..errors import APIError, invalid, of_usage
from ..text.call_parser import AnswerPart, CallParser, ToolCallDelta
from ..text.prompts import Prompt
from ..text.reasoning import END, ReasoningDelta, ReasoningParser, tokens_through
from .admission import QUANTUM, Reservation
from .engine_thread import Ended
from .times import Times

PRIORITY_SECONDS = 10.0
"""Seconds of waiting that count as much as a difference of 1 in priority: no request waits for
ever."""


@dataclasses.dataclass
class TextDelta:
    """The text, calls and tokens of a choice that are new since the last event."""

    parts: list[ReasoningDelta | AnswerPart] = dataclasses.field(default_factory=list)
    """Reasoning, content and calls, in their order."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """Tokens whose text is out, an end token included."""
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    """An entry for each of them, if they were asked for."""

    def __bool__(self) -> bool:
        return bool(self.parts or self.token_ids)

    @property
    def text(self) -> str:
        """All of the content."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        """All of the reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningDelta))

    def joined_parts(self) -> Iterator[ReasoningDelta | AnswerPart]:
        """The parts, neighbouring ones of text as one."""
        for kind, run in itertools.groupby(self.parts, type):
            if kind is str:
                yield "".join(part for part in run if isinstance(part, str))
            elif kind is ReasoningDelta:
                texts = (part.text for part in run if isinstance(part, ReasoningDelta))
                yield ReasoningDelta("".join(texts))
            else:
                yield from run

    @property
    def calls(self) -> list[ToolCallDelta]:
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]


class Choice:
    """One sample of one prompt."""

    def __init__(
        self,
        index: int,
        tokenizer: Any,
        request: Request,
        include_stop: bool,
        parser: CallParser | None = None,
        reasoning: ReasoningParser | None = None,
    ):
        self.index = index
        self._params = request.params
        self._include_stop = include_stop
        self._parser = parser
        self._reasoning = reasoning
        self._tokenizer = tokenizer
        self._num_reasoning_tokens: int | None = None
        """Once the reasoning is over."""
        self._stream = TextStream.of(tokenizer, request)
        self._held = TextDelta()
        self._ready = TextDelta()
        self.num_tokens = 0
        """Tokens of the answer, its end token included."""
        self.num_counted = 0
        """Tokens of these that the metrics have counted."""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.last_token = 0.0
        """`time.monotonic()` of its last token; 0 before the first."""
        self.drafts = Drafts()

    def push(self, output: RequestOutput) -> bool:
        """Add new tokens. True if their text has ended the sample, by a stop string or as its only
        call, which the engine does not know."""
        self.drafts = output.drafts
        stream = self._stream
        held = self._held
        before = len(stream.token_ids)
        text = stream.push(output.token_ids)
        taken = len(stream.token_ids) - before
        ended_by_text = stream.stopped
        if output.finish_reason is not None and not ended_by_text:
            text += stream.finish()
            ended_by_text = stream.stopped
        held.token_ids += output.token_ids[:taken]
        held.logprobs += (output.logprobs or ())[:taken]
        self.num_tokens += taken
        if ended_by_text:
            self.finish_reason = "stop"
            self.stop_reason = stream.stop_reason
            if self._include_stop and stream.stop_reason:
                text += stream.stop_reason
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            if output.stop_token is not None:
                held.token_ids.append(output.stop_token)
                if output.stop_logprob is not None:
                    held.logprobs.append(output.stop_logprob)
                self.num_tokens += 1
                if output.stop_token in self._params.stop_token_ids:
                    self.stop_reason = output.stop_token
        parts = self._parse(text)
        if self._parser is not None:
            ended_by_text |= self._parser.is_complete
        if parts or self.finish_reason is not None:
            ready = self._ready
            ready.parts += parts
            ready.token_ids += held.token_ids
            ready.logprobs += held.logprobs
            self._held = TextDelta()
        return ended_by_text and output.finish_reason is None

    def _parse(self, text: str) -> list[ReasoningDelta | AnswerPart]:
        """Reasoning, content and calls of new text."""
        parts: list[ReasoningDelta | AnswerPart] = []
        if self._reasoning is not None:
            reasoning, text = self._read_reasoning(text, self._reasoning)
            parts += [ReasoningDelta(reasoning)] if reasoning else []
        if (parser := self._parser) is None:
            return parts + ([text] if text else [])
        parts += parser.push(text)
        if parser.is_complete:
            self.finish_reason = self.finish_reason or "stop"
        if self.finish_reason is not None:
            is_cut = self.finish_reason != "stop" or self.stop_reason is not None
            parts += parser.finish(is_cut=is_cut)
            is_whole = self.finish_reason == "stop" and not parser.is_within_call
            if parser.num_calls and is_whole:
                self.finish_reason = "tool_calls"
        return parts

    def _read_reasoning(self, text: str, parser: ReasoningParser) -> tuple[str, str]:
        """(reasoning, what follows it) of new text."""
        reasoning, content = parser.push(text)
        if self.finish_reason is not None:
            last = parser.finish()
            reasoning += last[0]
            content += last[1]
        if parser.has_begun and parser.is_over and self._num_reasoning_tokens is None:
            text_of = text_decoder(self._tokenizer)
            self._num_reasoning_tokens = tokens_through(END, self._stream.token_ids, text_of)
        return reasoning, content

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning, its tags included."""
        if self._reasoning is None or not self._reasoning.has_begun:
            return 0
        found = self._num_reasoning_tokens
        return self.num_tokens if found is None else found

    def take(self) -> TextDelta:
        """Return what has become certain since the last call."""
        delta = self._ready
        self._ready = TextDelta()
        return delta

    @property
    def is_ready(self) -> bool:
        """True if something has become certain, or the sample has ended."""
        return self.finish_reason is not None or bool(self._ready)


@dataclasses.dataclass(eq=False)
class EngineRequest:
    """One prompt of a request as the engine runs it, or the scores of its tokens."""

    request: Request | ScoreRequest
    prompt: Prompt
    choices: list[Choice] = dataclasses.field(default_factory=list)
    grammar_param: str = ""
    """Field of the body that asks for the grammar."""
    scores: list[RequestOutput] = dataclasses.field(default_factory=list)
    """Outputs of a `ScoreRequest`, one after the other."""
    engine_id: int = -1
    """Id in `EngineThread`; -1 before it is submitted."""
    num_uncached_tokens: int = 0
    """Tokens of the prompt that its reservation counts."""
    num_cached_tokens: int = 0
    is_prefilled: bool = False
    is_ended: bool = False
    """The engine holds nothing of it any more."""

    @property
    def is_done(self) -> bool:
        """All of its samples have ended, or all of its scores are there."""
        if isinstance(self.request, ScoreRequest):
            return bool(self.scores) and self.scores[-1].finish_reason is not None
        for choice in self.choices:  # asked for every event: `all` takes twice as long
            if choice.finish_reason is None:
                return False
        return True

    def is_first(self, output: RequestOutput) -> bool:
        """Return whether an output tells that the prompt is cached, as the first one of a sample
        does, and the last scores."""
        return not self.is_prefilled and (bool(self.choices) or output.finish_reason is not None)

    @property
    def logprobs(self) -> list[Logprob]:
        """Log-probabilities of all tokens that were scored."""
        return [logprob for output in self.scores for logprob in output.logprobs or ()]


class Generation:
    """All parts of one request, from admission to the end."""

    def __init__(
        self,
        prompts: list[Prompt],
        parts: list[EngineRequest],
        reservation: Reservation,
        arrival: float,
    ):
        """`arrival` is that of `Times`."""
        self.prompts = prompts
        self.parts = parts
        self.reservation = reservation
        self.times = Times(arrival)
        self.changed = asyncio.Event()
        """There is something new to send."""
        self.error: APIError | None = None
        self.queue_key = ""
        """Key whose turns it takes while it waits."""
        self.priority = 0
        """Lower ones are served first."""
        self.timeout = math.inf
        """Seconds that it may take, by the server's option and the client's header."""
        self.abort_reason: str | None = None
        """Reason why it was aborted."""

    @property
    def is_ended(self) -> bool:
        """The engine holds nothing of it any more."""
        for part in self.parts:
            if not part.is_ended:
                return False
        return True

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def choices(self) -> Iterator[Choice]:
        for part in self.parts:
            yield from part.choices

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def longest(self) -> int:
        """Tokens of its longest sample."""
        return max((choice.num_tokens for choice in self.choices), default=0)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def prediction_tokens(self) -> tuple[int, int] | None:
        """(tokens of a prediction that were right, those that were tried and wrong); None without
        a prediction."""
        requests = [part.request for part in self.parts if isinstance(part.request, Request)]
        if not any(len(one.prediction) for one in requests):
            return None
        tried = sum(choice.drafts.predicted for choice in self.choices)
        right = sum(choice.drafts.predicted_accepted for choice in self.choices)
        return min(right, self.num_tokens), tried - right

    @property
    def num_cached_tokens(self) -> int:
        return sum(part.num_cached_tokens for part in self.parts if part.choices)

    @property
    def is_done(self) -> bool:
        """All that was asked for is there, or it has failed."""
        if self.error is not None:
            return True
        for part in self.parts:
            if not part.is_done:
                return False
        return True

    def push(self, part: EngineRequest, event: RequestOutput | UsageError | Ended) -> bool:
        """Add an event of a part. True if its text has ended its sample, by a stop string or as
        its only call, which the engine does not know."""
        stopped = False
        if isinstance(event, Ended):
            part.is_ended = True
        elif isinstance(event, UsageError):
            self.fail(of_usage(event))
        else:
            self._observe(part, event)
            if event.finish_reason == "error":
                self.fail(
                    APIError(500, "not_finite", NOT_FINITE)
                    if event.error == NOT_FINITE
                    else invalid(part.grammar_param, event.error, "invalid_grammar")
                )
            elif isinstance(part.request, ScoreRequest):
                part.scores.append(event)
            else:
                choice = part.choices[event.sample]
                stopped = choice.finish_reason is None and choice.push(event)
        self.changed.set()
        return stopped

    def _observe(self, part: EngineRequest, event: RequestOutput) -> None:
        """The times of an output."""
        times = self.times
        now = times.last_token = time.monotonic()
        if not part.is_first(event):
            return
        part.is_prefilled = True
        part.num_cached_tokens = event.num_cached_tokens
        self.reservation.release_tokens(part.num_uncached_tokens)
        if not times.first_token:
            times.first_token = now
            timing = event.timing
            waited = (timing.started or timing.submitted) - timing.submitted
            times.started = times.submitted + waited

    def fail(self, error: APIError) -> None:
        """End with an error, unless it has ended."""
        if not self.is_done:
            self.error = error
        self.changed.set()


class WaitingPart(NamedTuple):
    """A part that the engine has not got yet."""

    generation: Generation
    part: EngineRequest

    @property
    def cost(self) -> int:
        """Prompt tokens that its turn takes."""
        sequences = max(len(self.part.choices), 1)
        return max(len(self.part.prompt.token_ids), QUANTUM * sequences)

    @property
    def rank(self) -> float:
        """Its place among those that wait with it; fixed, since all of them age alike."""
        return self.generation.times.arrival + PRIORITY_SECONDS * self.generation.priority
