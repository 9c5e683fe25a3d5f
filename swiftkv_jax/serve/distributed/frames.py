"""Messages between the processes of a server: requests and aborts from process 0, a frame
before each step, and back from each follower when it has taken the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

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


class _Common(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Fields of `Request` and `ScoreRequest`."""

    tokens: bytes
    """i32."""
    cache_salt: str = ""
    page_keys: list[bytes] | None = None


class GenerateFields(_Common, tag="generate", omit_defaults=True, kw_only=True):
    """A `Request`."""

    params: SamplingParams
    rng_stream: int = 0
    grammar: Grammar | None = None
    speculative: bool = True
    prediction: bytes = b""
    """i32."""


class ScoreFields(_Common, tag="score", omit_defaults=True, kw_only=True):
    """A `ScoreRequest`."""

    start: int
    top_logprobs: int = 0


Fields = GenerateFields | ScoreFields


def fields_of(request: Request | ScoreRequest) -> Fields:
    """A request as it is sent. Raises `TypeError` for a grammar that cannot be."""
    is_score = isinstance(request, ScoreRequest)
    tokens = request.tokens if is_score else request.prompt
    common = {
        "tokens": np.asarray(tokens, np.int32).tobytes(),
        "cache_salt": request.cache_salt,
        "page_keys": request.page_keys and list(request.page_keys),
    }
    if is_score:
        return ScoreFields(**common, start=request.start, top_logprobs=request.top_logprobs)
    return GenerateFields(
        **common,
        params=request.params,
        rng_stream=request.rng_stream,
        grammar=_grammar_of(request.grammar),
        speculative=request.speculative,
        prediction=np.asarray(request.prediction, np.int32).tobytes(),
    )


class Makers(NamedTuple):
    """Functions with which a process makes grammars."""

    compile_grammar: Callable[[str], Matcher]
    """Compile a grammar in llguidance's own form."""
    spelling_of: Callable[[int], bytes]
    """Bytes of a token."""
    vocab_size: int


def request_of(fields: Fields, makers: Makers) -> Request | ScoreRequest:
    """The request that was sent. Raises what `makers.compile_grammar` raises."""
    common = {"cache_salt": fields.cache_salt, "page_keys": fields.page_keys}
    tokens = np.frombuffer(fields.tokens, np.int32)
    if isinstance(fields, ScoreFields):
        return ScoreRequest(
            tokens,  # type: ignore[arg-type]
            start=fields.start,
            top_logprobs=fields.top_logprobs,
            **common,
        )
    return Request(
        tokens,  # type: ignore[arg-type]
        fields.params,
        rng_stream=fields.rng_stream,
        grammar=fields.grammar and _matcher_of(fields.grammar, makers),
        speculative=fields.speculative,
        prediction=tuple(np.frombuffer(fields.prediction, np.int32).tolist()),
        **common,
    )


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
    requests: list[Fields] = []
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
    for fields in map(fields_of, requests):
        num_bytes = len(msgspec.msgpack.encode(fields))
        if size and size + num_bytes > SPLIT_BYTES:
            frame.goes_on = True
            yield frame
            frame = Frame(step, pages_in_use, [], [])
            size = 0
        frame.requests.append(fields)
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
