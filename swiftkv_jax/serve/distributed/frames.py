"""Messages between the processes of a server: requests and aborts from process 0, a frame
before each step, and back from each follower when it has taken the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...errors import UsageError
from ...infer.engine.engine import Engine
from ...infer.engine.grammar import Matcher
from ...infer.engine.requests import Request, ScoreRequest
from ...infer.engine.sampling_params import SamplingParams
from ...infer.structured.reasoning_grammar import ReasoningGrammar
from ...infer.structured.structured_outputs import GrammarMatcher
from ...infer.structured.token_filter import TokenFilter

Abort = tuple[int, int | None]
"""The engine's id of a request, and a sample of it or None for all."""
SPLIT_BYTES = 16 * 2**20
"""Bytes of requests after which a frame is continued in another."""

# Requests ---------------------------------------------------------------------------------


class Grammar(msgspec.Struct, omit_defaults=True):
    """Parts of `Request.grammar`."""

    grammar: str | None = None
    """Grammar in llguidance's own form."""
    reasoning: tuple[bytes, int | None, tuple[int, ...]] | None = None
    """(end tag, first token, end tokens) of the reasoning that may come before it."""
    is_filter: bool = False
    """True if a `TokenFilter` is around it, with the fields that follow."""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


class Sent(msgspec.Struct, omit_defaults=True):
    """A `Request`, or a `ScoreRequest` without `params`."""

    tokens: bytes
    """i32."""
    params: SamplingParams | None = None
    grammar: Grammar | None = None
    prediction: bytes = b""
    """i32."""
    others: dict[str, Any] = {}
    """The other fields, by name."""


_APART = {"prompt", "tokens", "params", "grammar", "prediction"}


def sent_of(request: Request | ScoreRequest) -> Sent:
    """A request as it is sent. Raises `TypeError` for a grammar that cannot be."""
    names = {field.name for field in dataclasses.fields(request)} - _APART
    sent = Sent(_i32(request.tokens), others={name: getattr(request, name) for name in names})
    if isinstance(request, Request):
        sent.params, sent.grammar = request.params, _grammar_of(request.grammar)
        sent.prediction = _i32(request.prediction)
    return sent


def _i32(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


class Makers(NamedTuple):
    """Functions with which a process makes grammars."""

    compile_grammar: Callable[[str], Matcher]
    """Compile a grammar in llguidance's own form."""
    spelling_of: Callable[[int], bytes]
    """Bytes of a token."""
    vocab_size: int


def request_of(sent: Sent, makers: Makers) -> Request | ScoreRequest:
    """The request that was sent. Raises what `makers.compile_grammar` raises."""
    tokens: Any = np.frombuffer(sent.tokens, np.int32)
    if sent.params is None:
        return ScoreRequest(tokens, **sent.others)
    grammar = sent.grammar and _matcher_of(sent.grammar, makers)
    prediction = tuple(np.frombuffer(sent.prediction, np.int32).tolist())
    return Request(tokens, sent.params, grammar=grammar, prediction=prediction, **sent.others)


def _grammar_of(matcher: Matcher | None) -> Grammar | None:
    if matcher is None:
        return None
    found = Grammar()
    if isinstance(matcher, TokenFilter):
        found.is_filter = True
        found.allowed_token_ids = matcher.allowed_token_ids
        found.bad_words = matcher.bad_words
        matcher = matcher.grammar
    if isinstance(matcher, ReasoningGrammar):
        found.reasoning = matcher.end_tag, matcher.begin_token, matcher.end_token_ids
        matcher = matcher.grammar
    if isinstance(matcher, GrammarMatcher):
        found.grammar = matcher.grammar
    elif matcher is not None:
        raise TypeError(f"a grammar of the type {type(matcher).__name__} cannot be sent")
    return found


def _matcher_of(fields: Grammar, makers: Makers) -> Matcher | None:
    matcher = None if fields.grammar is None else makers.compile_grammar(fields.grammar)
    if fields.reasoning is not None:
        assert matcher is not None
        end_tag, begin_token, end_token_ids = fields.reasoning
        matcher = ReasoningGrammar(
            matcher,
            makers.vocab_size,
            end_tag=end_tag,
            spelling_of=makers.spelling_of,
            begin_token=begin_token,
            end_token_ids=end_token_ids,
        )
    if not fields.is_filter:
        return matcher
    return TokenFilter(
        makers.vocab_size,
        allowed_token_ids=fields.allowed_token_ids,
        bad_words=fields.bad_words,
        grammar=matcher,
    )


# From process 0 -----------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag="welcome"):
    """The answer to `Hello`."""

    refused: str = ""
    """Reason why the process cannot take part; "" if it can."""


class Frame(msgspec.Struct, tag="frame", omit_defaults=True):
    """Commands that every process applies to its engine before the same step: the aborts, then the
    requests."""

    step: int
    """Steps before this one."""
    pages_in_use: int
    """Pages that requests held before this frame, in every engine."""
    aborts: list[Abort] = []
    requests: list[Sent] = []
    goes_on: bool = False
    """More requests for the same step are in the next frame."""


class Last(msgspec.Struct, tag="last"):
    """Process 0 ends."""

    error: str = ""
    """Reason of the end; "" for one that was asked for."""


def frames(
    step: int,
    pages_in_use: int,
    aborts: list[Abort],
    requests: Sequence[Request | ScoreRequest],
) -> Iterator[Frame]:
    """The frames of one step: one, unless its requests are very long."""
    frame = Frame(step, pages_in_use, aborts, [])
    size = 0
    for sent in map(sent_of, requests):
        num_bytes = len(msgspec.msgpack.encode(sent))
        if size and size + num_bytes > SPLIT_BYTES:
            frame.goes_on = True
            yield frame
            frame = Frame(step, pages_in_use, [], [])
            size = 0
        frame.requests.append(sent)
        size += num_bytes
    yield frame


# From a follower ----------------------------------------------------------------------------


class Hello(msgspec.Struct):
    """The first message of a connection."""

    secret: bytes
    process: int
    facts: dict[str, str]
    """Facts that have to be equal in all processes, by name."""


class Ready(msgspec.Struct, tag="ready"):
    """All programs are compiled."""


class Done(msgspec.Struct, tag="done"):
    """A step has been taken."""

    step: int


class Failed(msgspec.Struct, tag="failed"):
    """The process ends."""

    error: str


FROM_PROCESS_0 = msgspec.msgpack.Decoder(Welcome | Frame | Last)
FROM_FOLLOWER = msgspec.msgpack.Decoder(Ready | Done | Failed)
HELLO = msgspec.msgpack.Decoder(Hello)

# In every process ----------------------------------------------------------------------------


def apply_commands(
    engine: Engine, aborts: Iterable[Abort], requests: Iterable[Request | ScoreRequest]
) -> list[int | UsageError]:
    """Abort and add requests, with the same calls in every process. Returns the engine's id of each
    request, or why it can never run."""
    for request_id, sample in aborts:
        engine.abort_request(request_id, sample)
    added: list[int | UsageError] = []
    for request in requests:
        try:
            added.append(engine.add_request(request))
        except UsageError as error:
            added.append(error)
    return added
