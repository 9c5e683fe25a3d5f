"""Prompts that do not fit, in the words of OpenAI and Anthropic, by which clients know them."""

import json
import re
from typing import Any

import pytest

from swiftkv_jax.errors import ContextLengthError
from swiftkv_jax.infer.engine.checks import check_request
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.serve.errors import of_usage
from tests.infer.mock_model_runner import mock_engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LIMIT = 256
SHORT, LONG = "x" * 13, "x" * 300


def body_of(path: str, text: str, max_tokens: int) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"prompt": text, "max_tokens": max_tokens}
    if path == RESPONSES:
        return {"input": text, "max_output_tokens": max_tokens}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}


def prompt_tokens(running, path: str, text: str) -> int:
    chat = body_of(CHAT, text, 1)["messages"]
    body = {"prompt": text} if path == COMPLETIONS else {"messages": chat}
    return running.post("/tokenize", body)[1]["count"]


OPENAI = "This model's maximum context length is 256 tokens"
TOO_LONG = {
    CHAT: OPENAI + ". However, your messages resulted in {n} tokens. Please reduce the length of "
    "the messages.",
    COMPLETIONS: OPENAI + ". However, your prompt resulted in {n} tokens. Please reduce the length "
    "of the prompt.",
    MESSAGES: "prompt is too long: {n} tokens > 256 maximum",
}
NO_ROOM = {
    CHAT: OPENAI + ". However, you requested {sum} tokens ({n} in the messages, 5000 in the "
    "completion). Please reduce the length of the messages or completion.",
    COMPLETIONS: OPENAI + ", however you requested {sum} tokens ({n} in your prompt; 5000 for the "
    "completion). Please reduce your prompt; or completion length.",
    MESSAGES: "input length and `max_tokens` exceed context limit: {n} + 5000 > 256, decrease "
    "input length or `max_tokens` and try again",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("text", [SHORT, LONG])
def test_each_route_has_the_words_of_its_api(running, path, text):
    tokens = prompt_tokens(running, path, text)
    table, new = (TOO_LONG, 4) if text == LONG else (NO_ROOM, 5000)
    status, answer = running.post(path, body_of(path, text, new))
    error = answer["error"]
    expected = table[CHAT if path == RESPONSES else path].format(n=tokens, sum=tokens + 5000)
    if path != MESSAGES:  # for clients that look for the code in the message
        expected += " (context_length_exceeded)"
    assert (status, error["message"]) == (400, expected)
    assert error["type"] == "invalid_request_error"
    if path != MESSAGES:
        assert error["code"] == "context_length_exceeded"
        prompt = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}[path]
        maximum = "max_output_tokens" if path == RESPONSES else "max_tokens"
        assert error["param"] == (prompt if text == LONG else maximum)


def test_what_is_left_of_a_context_may_be_asked_for(running):
    body = body_of(MESSAGES, SHORT, LIMIT - prompt_tokens(running, CHAT, SHORT))
    assert running.post(MESSAGES, body)[0] == 200
    body["max_tokens"] += 1
    assert running.post(MESSAGES, body)[0] == 400


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_text_that_is_not_tokenized_has_a_lower_bound(running, path):
    status, answer = running.post(path, body_of(path, "x" * 100_000, 4))
    message = answer["error"]["message"]
    (tokens,) = re.findall(r"at least (\d+) tokens", message)
    assert status == 400 and LIMIT < int(tokens) <= 100_100
    assert (path == MESSAGES) == message.startswith("prompt is too long: at least ")


def test_counting_refuses_in_the_same_words(running):
    status, answer = running.post(
        "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 1100}]}
    )
    assert status == 400 and re.fullmatch(
        r"prompt is too long: (at least )?\d+ tokens > 256 maximum", answer["error"]["message"]
    )


@pytest.mark.parametrize(("text", "new"), [(SHORT, 5000), (LONG, 4)])
def test_a_stream_of_responses_fails_in_its_events(running, text, new):
    """As OpenAI's does: Codex looks for the code there alone."""
    with running.openai() as client:
        events: list[Any] = list(
            client.responses.create(model="tiny", input=text, max_output_tokens=new, stream=True)
        )
    kinds = ["response.created", "response.in_progress", "response.failed"]
    assert [event.type for event in events] == kinds
    assert [event.sequence_number for event in events] == [0, 1, 2]
    failed = events[-1].response
    assert failed.status == "failed" and failed.error.code == "context_length_exceeded"
    assert failed.error.message.startswith(OPENAI)
    body = body_of(RESPONSES, text, 4) | {"stream": True, "temperature": 9}
    status, _, content = running.request("POST", RESPONSES, body | {"input": "a"})
    assert status == 400 and json.loads(content)["error"]["param"] == "temperature"


def test_what_the_engine_refuses_is_told_by_its_numbers():
    """Whatever its message says."""
    engine, _ = mock_engine(max_model_len=64, num_pages=64, chunk=16, slots=2)
    requests = (
        (Request([1] * 60, SamplingParams(max_tokens=8)), (60, 8, 64)),
        (ScoreRequest([1] * 65, 1), (65, 0, 64)),
    )
    for request, numbers in requests:
        with pytest.raises(ContextLengthError) as caught:
            check_request(request, engine.config, engine.options)
        error = caught.value
        assert (error.prompt_tokens, error.new_tokens, error.limit) == numbers
        found = of_usage(error)
        assert (found.status, found.code) == (400, "context_length_exceeded")
        assert found.message.startswith("This model's maximum context length is 64 tokens")
