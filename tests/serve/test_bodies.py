"""What bodies may say: each field is honoured, or refused by name."""

import json
import random

import msgspec
import pytest
from starlette.routing import Route

from swiftkv_jax.serve import errors
from swiftkv_jax.serve.api.routes import asgi
from swiftkv_jax.serve.bodies import decoding, params
from swiftkv_jax.serve.protocol import ChatBody, CompletionBody, refused_fields

USER = [{"role": "user", "content": "hi"}]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"best_of": 1, "n": None, "response_format": {"type": "text"}, "store": False},
        {"service_tier": "auto", "modalities": ["text"], "use_beam_search": False, "priority": 0},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.5, "logit_bias": {"7": -100}},
        {"stream_options": None, "cache_salt": "tenant", "request_id": "a-1", "length_penalty": 1},
        {"min_tokens": 2, "ignore_eos": True, "presence_penalty": 1, "skip_special_tokens": True},
    ],
)
def test_fields_that_are_honoured_or_ask_for_nothing(running, field):
    for path, body in ((CHAT, {"messages": USER}), (COMPLETION, {"prompt": "a"})):
        status, answer = running.post(path, body | {"max_tokens": 3} | field)
        assert status == 200, answer
        if name := field.get("request_id"):
            assert answer["id"].endswith(name)


def test_an_empty_suffix_asks_for_nothing(running):
    status, _ = running.post(COMPLETION, {"prompt": "a", "max_tokens": 1, "suffix": ""})
    assert status == 200


def test_every_field_is_accepted_somewhere_or_refused_by_name():
    """A field that nothing reads would be dropped in silence."""
    read = (
        set(params._AS_GIVEN) | set(refused_fields(ChatBody)) | set(refused_fields(CompletionBody))
    )
    read |= set(
        "model stream stream_options seed stop include_stop_str_in_output min_tokens max_tokens "
        "logit_bias allowed_token_ids bad_words add_special_tokens return_token_ids cache_salt "
        "return_tokens_as_token_ids request_id best_of prompt messages logprobs top_logprobs "
        "echo max_completion_tokens add_generation_prompt continue_final_message response_format "
        "structured_outputs tools tool_choice parallel_tool_calls include_reasoning "
        "chat_template_kwargs reasoning_effort skip_special_tokens truncate_prompt_tokens "
        "truncation_side priority prompt_logprobs prediction speculative".split()
    )
    without_effect = {"user", "safety_identifier", "metadata"}
    without_effect |= {f"prompt_cache_{name}" for name in ("key", "options", "retention")}
    for kind in (ChatBody, CompletionBody):
        assert not set(kind.__struct_fields__) - read - without_effect


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"null", 400, "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, "invalid_value"),
        (b'{"prompt": "\xff"}', 400, "invalid_json"),
        (b'{"prompt": "a"} x', 400, "invalid_json"),
        (b'{"prompt": "\\ud800"}', 400, "invalid_json"),
        (b'{"prompt": "a", "store": ' + b"[" * 100_000, 400, "invalid_json"),
        (b'{"prompt": "a", "store": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "invalid_json"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, None),
        (b'{"prompt": "a", "' + b"k" * 9000 + b'": 1}', 400, "unknown_field"),
        (('{"prompt": "a", "' + "🤖" * 900 + '": 1}').encode(), 400, "unknown_field"),
        (b'{"prompt": "a", "' + rb"\u0000\"" * 900 + b'": 1}', 400, "unknown_field"),
        (('{"prompt": "a", "model": "' + "🤖" * 900 + '"}').encode(), 404, "model_not_found"),
    ],
)
def test_bodies_that_are_no_requests(running, content, status, code):
    found, _, answer = running.request("POST", COMPLETION, content)
    assert found == status
    if code is not None:
        assert json.loads(answer)["error"]["code"] == code, answer
    assert len(answer) <= 2048


def test_half_of_a_surrogate_pair_is_named(running):
    for end, half in (b"", True), (b"more text", True), (b"\\", False):
        body = b'{"prompt": "' + end + b'\\ud800"}'
        _, _, answer = running.request("POST", COMPLETION, body)
        assert (b"surrogate pair" in answer) == half, answer


def test_what_a_client_sends_is_not_taken_for_a_message(running):
    """Of the JSON library, which shows values in its messages."""
    for value in ("unknown field `x`", "missing required field `x`", "x - at `$.y`"):
        body = {"messages": [{"role": value, "content": "a"}]}
        status, answer = running.post("/v1/chat/completions", body)
        assert status == 400 and answer["error"]["code"] == "invalid_value"
        assert answer["error"]["param"] == "messages[0].role", value


def test_other_kinds_of_bodies(running):
    for headers, code in (
        ({"content-type": "text/plain"}, 415),
        ({"content-encoding": "gzip"}, 415),
    ):
        status, _, content = running.request("POST", COMPLETION, {"prompt": "a"}, headers)
        assert status == code
        assert "encoding" in next(iter(headers)) or b"the header content-type" in content
    assert running.post("/detokenize", {"tokens": [2**70]})[0] == 400
    status, answer = running.post("/detokenize", {"tokens": [1] * 257})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert running.post(COMPLETION + "/", {})[0] == 404, "no redirection to what a client names"
    status, headers, _ = running.request("GET", COMPLETION)
    assert status == 405 and headers["allow"] == "POST"
    for path, text in (("/v1/embeddings", "only generates text"), ("/nothing", "there is no")):
        status, answer = running.post(path, {})
        assert status == 404 and answer["error"]["code"] == "unknown_route"
        assert text in answer["error"]["message"]


@pytest.fixture(scope="module")
def lenient(start):
    return start(unknown_fields="ignore")


ONE_TOKEN = {"prompt": "a", "max_tokens": 1}
PART = {"type": "text", "text": "b", "cache_control": {}}
NESTED = {
    "messages": [USER[0] | {"colour": 1}, {"role": "user", "content": [PART]}],
    "stream_options": {"include_usage": False, "x": {"y": 2}},
    "metadata": {"any": "name"},
    **{"stream": True, "max_tokens": 1, "zz": None},
}
NAMED = "messages[0].colour,messages[1].content[0].cache_control,stream_options.x,zz"
READ = {"type": "function", "name": "read", "zz": 1}
GROUP = {"type": "namespace", "name": "agents", "tools": [READ]}


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        (COMPLETION, ONE_TOKEN | {"zz": 1, "mirostat": 2}, "mirostat,zz"),
        (COMPLETION, ONE_TOKEN | {"字\n": 1}, r"\u5b57\n"),
        ("/tokenize", {"prompt": "a", "zz": 1}, "zz"),
        ("/detokenize", {"tokens": [5], "zz": 1}, "zz"),
        ("/v1/score", {"pairs": [{"context": "a", "continuation": "b"}], "zz": 1}, "zz"),
        (CHAT, NESTED, NAMED),
        ("/v1/responses", {"input": [USER[0] | {"zz": {}}], "max_output_tokens": 1}, "input[0].zz"),
        (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 1, "yy": 1, "tools": [GROUP, {"type": "mcp"}]},
            "yy,tools[0].tools[0].zz,tools[1]",
        ),
    ],
)
def test_unknown_fields_may_be_ignored(lenient, running, path, body, ignored):
    """A header names them, each by its path."""
    status, headers, _ = lenient.request("POST", path, body)
    assert (status, headers["x-ignored-fields"]) == (200, ignored)
    status, answer = running.post(path, body)
    assert status == 400 and answer["error"]["code"] == "unknown_field"


def test_what_is_wrong_beside_unknown_fields_is_refused(lenient):
    for body, param in (
        ({"messages": [{"role": "user", "x": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "god", "content": "a", "x": 1}]}, "messages[0].role"),
        ({"messages": [3], "zz": 1}, "messages[0]"),
        ({"messages": {"x": 1}}, "messages"),
        ({"messages": USER, "n": "x", "zz": 1}, "n"),
    ):
        status, answer = lenient.post(CHAT, body)
        assert status == 400 and answer["error"]["param"] == param, answer
    body = ONE_TOKEN | {"x" * number: 1 for number in range(1, 100)}
    status, headers, _ = lenient.request("POST", COMPLETION, body)
    assert status == 200 and len(headers["x-ignored-fields"]) == 1024


def test_the_document_describes_the_bodies(running):
    status, _, content = running.request("GET", "/openapi.json")
    document = json.loads(content)
    assert status == 200 and document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    assert set(schemas["ChatBody"]["properties"]) == set(ChatBody.__struct_fields__)
    assert schemas["ChatBody"]["additionalProperties"] is False
    paths = [route.path for route in asgi(running.app).routes if isinstance(route, Route)]
    served = {path.replace(":path", "") for path in paths}
    assert served - document["paths"].keys() == {"/", "/openapi.json"}


def test_nothing_that_clients_send_is_an_error_of_the_server(running):
    """Bodies with a random change; all answers are JSON, none is 500 or above."""
    rng = random.Random(0)
    values = [None, True, -1, 0, 1, 2**70, 1.5, "", "a", [], [1], {}, {"a": 1}, ["a", None], [[]]]
    names = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__})
    statuses: dict[int, int] = {}
    for number in range(400):
        path = (CHAT, COMPLETION)[number % 2]
        body = {"messages": USER} if path == CHAT else {"prompt": "a"}
        body |= {"max_tokens": 2, rng.choice(names): rng.choice(values)}
        content = bytearray(msgspec.json.encode(body))
        if rng.random() < 0.3:
            content[rng.randrange(len(content))] = rng.randrange(256)
        status, headers, answer = running.request("POST", path, bytes(content))
        statuses[status] = statuses.get(status, 0) + 1
        assert status < 500, (content, answer)
        if headers["content-type"] == "application/json" and status != 200:
            assert json.loads(answer)["error"].keys() == {"message", "type", "param", "code"}
    assert statuses[200] > 20 and statuses[400] > 150


def test_few_nulls_of_unknown_fields_are_looked_for():
    """So that no body takes the time of a walk through all of it."""
    messages = [{"a": None} for _ in range(10 * decoding.MAX_NULLS)]
    with pytest.raises(errors.APIError) as caught:
        decoding.decode(ChatBody, json.dumps({"messages": messages}).encode(), ignore_unknown=False)
    assert caught.value.code == "unknown_field"
    body = {"messages": messages}
    found = decoding._drop_unknown(
        body, decoding._type_info(ChatBody), most_nulls=decoding.MAX_NULLS
    )
    assert len(found) == decoding.MAX_NULLS + 1 and "a" in messages[len(found)]


def test_nulls_are_looked_for_in_small_bodies():
    """Not where a client sends as many lists as a body holds."""
    few, many = (
        b'{"prompt": "' + b"[" * brackets + b'", "of_another_api": null}'
        for brackets in (10, decoding.MAX_BRACKETS)
    )
    body, _ = decoding.decode(CompletionBody, few, ignore_unknown=False)
    assert body.prompt == "[" * 10
    with pytest.raises(errors.APIError) as caught:
        decoding.decode(CompletionBody, many, ignore_unknown=False)
    assert caught.value.code == "unknown_field"
