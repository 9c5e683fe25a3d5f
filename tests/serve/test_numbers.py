"""Numbers in bodies: integers in any form of JSON, seeds of 64 bits, and a `top_p` of 0."""

import json

import msgspec
import pytest

from swiftkv_jax.serve.api.message_bodies import MessagesBody
from swiftkv_jax.serve.api.response_bodies import ResponsesBody
from swiftkv_jax.serve.bodies.decoding import decode
from swiftkv_jax.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, ScoreBody
from tests.serve.test_bodies import CHAT, COMPLETION, USER

OF_SAMPLING = {"seed": 7.0, "n": 2.0, "top_k": -1.0, "stop_token_ids": [9.0], "min_tokens": 1e0}
WHOLE = [
    (ChatBody, {"messages": USER, "max_completion_tokens": 3.0, "top_logprobs": 2e0}),
    (ChatBody, {"messages": USER} | OF_SAMPLING),
    (CompletionBody, {"prompt": "a", "max_tokens": 1.6e1, "logprobs": 2.0} | OF_SAMPLING),
    (CompletionBody, {"prompt": "a", "allowed_token_ids": [1, 2.0], "of_another_api": None}),
    (ResponsesBody, {"input": "a", "max_output_tokens": 3.0, "max_tool_calls": 2.0}),
    (MessagesBody, {"messages": USER, "max_tokens": 3.0, "top_k": 7.0}),
    (DetokenizeBody, {"tokens": [5.0, 6]}),
    (ScoreBody, {"pairs": [], "top_logprobs": -0.0}),
]


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize(("kind", "fields"), WHOLE)
def test_whole_numbers_are_integers_however_they_are_written(kind, fields, ignore):
    """As in JSON Schema: some languages write 16.0 for 16."""
    written = json.dumps(fields)
    integers = json.loads(written, parse_float=lambda one: int(float(one)))
    found, expected = (
        json.dumps(msgspec.to_builtins(decode(kind, one.encode(), ignore_unknown=ignore)[0]))
        for one in (written, json.dumps(integers))
    )
    assert found == expected


@pytest.mark.parametrize("schema", [{"minimum": 1.0}, {"enum": [2.0]}])
def test_numbers_of_schemas_stay_as_they_are(schema):
    """They are the client's, beside a field that becomes an integer too."""
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    fields = {"messages": USER, "n": 1.0, "response_format": form}
    body, _ = decode(ChatBody, json.dumps(fields).encode(), ignore_unknown=False)
    found = body.response_format and body.response_format.json_schema
    assert found is not None and json.dumps(found.schema) == json.dumps(schema)


def test_a_whole_number_is_accepted_in_a_request(running):
    body = {"prompt": "a", "max_tokens": 3.0, "ignore_eos": True}
    status, answer = running.post(COMPLETION, body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


def test_prompts_of_whole_numbers(running):
    body = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    found, expected = (
        running.post(COMPLETION, body | {"prompt": prompt})[1]["choices"]
        for prompt in ([[5.0, 6], [7.0]], [[5, 6], [7]])
    )
    assert found == expected
    for prompt in ([5.5], [[5, 0.5]], [True, 1.0], [2.0**60]):
        status, answer = running.post(COMPLETION, body | {"prompt": prompt})
        assert status == 400 and answer["error"]["param"] == "prompt"


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_seeds_of_64_bits(running, seed):
    """Each is a seed like any other."""
    body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True, "seed": seed}
    answers = [running.post(COMPLETION, body) for _ in range(2)]
    assert answers[0][0] == 200
    assert answers[0][1]["choices"] == answers[1][1]["choices"]


def test_a_top_p_of_0_is_accepted(running):
    body = {"messages": USER, "max_tokens": 2, "top_p": 0}
    assert running.post(CHAT, body)[0] == 200
    assert running.post("/v1/messages", body)[0] == 200
