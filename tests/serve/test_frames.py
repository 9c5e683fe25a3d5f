"""Messages between the processes of a server, and requests within them."""

import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from swiftkv_jax.infer.engine.grammar import Matcher
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.structured.reasoning_grammar import ReasoningGrammar
from swiftkv_jax.infer.structured.structured_outputs import StructuredOutputs
from swiftkv_jax.infer.structured.token_filter import TokenFilter
from swiftkv_jax.serve.distributed import channel as channels
from swiftkv_jax.serve.distributed import frames
from swiftkv_jax.serve.distributed.channel import Channel, ProtocolError
from tests.infer.engine.test_grammar import Digits
from tests.infer.mock_model_runner import VOCAB


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Channel]]:
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = Channel(listener.accept()[0], timeout=0.2)
    yield one, other
    one.close()
    other.close()


def test_a_message_arrives_whole_however_it_is_cut(pair):
    one, other = pair
    content = msgspec.msgpack.encode(frames.Done(7))
    message = len(content).to_bytes(4, "big") + content
    for at in range(len(message)):
        one.sendall(message[:at])
        with pytest.raises(TimeoutError) if at % 4 == 0 else contextlib.nullcontext():
            if at % 4 == 0:
                other.receive(frames.FROM_FOLLOWER)
        one.sendall(message[at:] + message)
        assert [other.receive(frames.FROM_FOLLOWER) for _ in range(2)] == 2 * [frames.Done(7)]


@pytest.mark.parametrize(
    ("sent", "limit", "error", "message"),
    [
        (b"\0\0\0\5abc", 9, ConnectionError, "has ended"),
        (b"\0\0", 9, ConnectionError, "has ended"),
        (b"\xff\xff\xff\xff", 9, ProtocolError, "a message of 4294967295 bytes, above 9"),
        (b"\0\0\0\x0a", 9, ProtocolError, "10 bytes, above 9"),
        (b"\0\0\0\3abc", 9, ProtocolError, "no message"),
        (b"\0\0\0\0", 9, ProtocolError, "no message"),
        (b"\0\0\0\2\x81\xa4", 9, ProtocolError, "no message"),
    ],
)
def test_what_is_no_message(pair, sent, limit, error, message):
    one, other = pair
    one.sendall(sent)
    one.shutdown(socket.SHUT_WR)
    with pytest.raises(error, match=message):
        other.receive(frames.FROM_FOLLOWER, limit)


def test_a_message_that_is_too_long_is_not_sent(pair, monkeypatch):
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 64)
    with pytest.raises(ProtocolError, match="above 64"):
        pair[1].send(frames.Failed("x" * 64))


def test_a_reader_that_does_not_read_ends_the_sender(pair):
    with pytest.raises(TimeoutError):
        for _ in range(1000):
            pair[1].send(frames.Failed("x" * 100_000))


def reasoned(grammar: Matcher, begin_token: int | None) -> ReasoningGrammar:
    """Up to the bytes 4, 5."""
    return ReasoningGrammar(
        grammar,
        VOCAB,
        end_tag=b"\4\5",
        spelling_of=lambda token: bytes([token]),
        begin_token=begin_token,
        end_token_ids=(1, 2),
    )


def test_requests_are_what_they_were(compiler):
    params = SamplingParams(
        max_tokens=9,
        temperature=0.7,
        top_k=3,
        logit_bias={5: -1.5},
        seed=2**63 - 1,
        n=2,
        stop=("a",),
        stop_token_ids=(7, 8),
        logprobs=0,
    )
    grammar = compiler.compile(StructuredOutputs(regex="[a-c]{3}"))
    tokens: Any = np.array([1, 2, 96], np.int32)
    requests = [
        Request(tokens, params, rng_stream=4, cache_salt="s", page_keys=[b"k" * 32]),
        Request(tokens, SamplingParams(), grammar=grammar, speculative=False),
        Request(tokens, prediction=(4, 96)),
        Request(tokens, grammar=TokenFilter(VOCAB, bad_words=[[1, 2]], grammar=grammar)),
        Request(tokens, grammar=TokenFilter(VOCAB, allowed_token_ids=[3, 4])),
        Request(tokens, grammar=reasoned(grammar, None)),
        Request(tokens, grammar=TokenFilter(VOCAB, bad_words=[[9]], grammar=reasoned(grammar, 3))),
        ScoreRequest(tokens, start=2, top_logprobs=3, cache_salt="s", page_keys=[]),
    ]
    makers = frames.Makers(compiler.compile_grammar, lambda token: bytes([token]), VOCAB)
    (frame,) = frames.frames(3, 5, [(1, None), (2, 0)], requests)
    sent = frames.FROM_PROCESS_0.decode(msgspec.msgpack.encode(frame))
    assert isinstance(sent, frames.Frame)
    assert (sent.step, sent.pages_in_use, sent.aborts) == (3, 5, [(1, None), (2, 0)])
    for request, fields in zip(requests, sent.requests, strict=True):
        made = frames.request_of(fields, makers)
        for field in dataclasses.fields(request):
            before, after = getattr(request, field.name), getattr(made, field.name)
            if field.name in ("prompt", "tokens"):
                assert after.dtype == np.int32 and after.tolist() == before.tolist()
            elif field.name == "grammar" and before is not None:
                assert type(after) is type(before)
                for token in (3, 4, 5, None):
                    masks = np.zeros((2, 4), np.uint32)
                    for one, mask in zip((before, after), masks, strict=True):
                        one.fill_masks([one], mask[None])
                    assert (masks[0] == masks[1]).all()
                    if token is not None and masks[0][0] >> token & 1:
                        before.accept(token), after.accept(token)
            else:
                assert after == before


def test_a_grammar_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="Digits cannot be sent"):
        frames.sent_of(Request([1], grammar=Digits(3)))


def test_long_requests_are_sent_in_several_frames(monkeypatch):
    requests = [Request(list(range(10))) for _ in range(5)]
    size = len(msgspec.msgpack.encode(frames.sent_of(requests[0])))
    monkeypatch.setattr(frames, "SPLIT_BYTES", 2.5 * size)
    sent = list(frames.frames(0, 0, [(0, None)], requests))
    assert [len(frame.requests) for frame in sent] == [2, 2, 1]
    assert [frame.goes_on for frame in sent] == [True, True, False]
    assert [len(frame.aborts) for frame in sent] == [1, 0, 0]
