"""Answers of a given form: JSON, regular expressions, choices, grammars and calls of tools."""

import json
import re

import pytest

from tests.serve.conftest import ROOM, USER_TOKEN, make_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST = {"name": "forecast", "description": "The weather.", "parameters": SCHEMA}
TOOLS = [
    {"type": "function", "function": FORECAST},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '{"name": "forecast", "parameters": {"city": "Rome", "days": 3}}'


def chat(**fields):
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150} | fields


def check_schema(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"city", "days"} and found["city"] in ("Rome", "Oslo")
    assert isinstance(found["days"], int) and found["days"] <= 9


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "[a-c]{3}x+"}}, "[a-c]{3}x+"),
        ({"structured_outputs": {"choice": ["yes", "no (not)"]}}, r"yes|no \(not\)"),
        ({"structured_outputs": {"grammar": 'start: "a" b*\nb: "b" | "c"'}}, "a[bc]*"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"response_format": {"type": "text"}}, ".*"),
    ],
)
def test_forms(running, fields, pattern):
    """What has ended has the form; what is cut may be its beginning."""
    body = {"prompt": "x", "max_tokens": 60, "seed": 1, "n": 2} | fields
    for choice in running.checked(COMPLETIONS, body)["choices"]:
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["text"], re.DOTALL), choice


def test_json_schema(running):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    for seed in range(5):
        body = chat(response_format=form, seed=seed, logprobs=True)
        (choice,) = running.post(CHAT, body)[1]["choices"]
        assert choice["finish_reason"] == "stop"
        check_schema(choice["message"]["content"])
        assert len(choice["logprobs"]["content"]) >= 20


@pytest.mark.parametrize("format", ["llama3_json", "hermes"])
def test_required_calls(start, format):
    running = start(engine=ROOM, tool_call_parser=format)
    for number, choice in enumerate(
        ("required", {"type": "function", "function": {"name": "forecast"}})
    ):
        fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        status, answer = running.post(CHAT, chat(**fields, seed=3, n=3))
        assert status == 200, answer
        for one in answer["choices"]:
            if one["finish_reason"] == "length":
                continue
            assert one["finish_reason"] == "tool_calls" and one["message"]["content"] is None
            (call,) = one["message"]["tool_calls"]
            assert call["type"] == "function" and re.fullmatch("call_[0-9a-f]{24}", call["id"])
            if call["function"]["name"] == "forecast":
                check_schema(call["function"]["arguments"])
            else:
                assert not number and json.loads(call["function"]["arguments"]) == {}
    running.check_empty()


def test_a_function_that_names_no_parameters_has_none(start):
    """As at OpenAI; one with an empty schema may have any."""
    running = start(engine=ROOM)
    choice = {"type": "function", "function": {"name": "now"}}
    fields = {"tools": TOOLS, "tool_choice": choice, "logit_bias": {str(ord('"')): 5}}
    status, answer = running.post(CHAT, chat(**fields, seed=5, n=8))
    assert status == 200, answer
    calls = [one["message"]["tool_calls"][0]["function"] for one in answer["choices"]]
    whole = [one["finish_reason"] == "tool_calls" for one in answer["choices"]]
    assert any(whole)
    for call, is_whole in zip(calls, whole, strict=True):
        assert re.fullmatch(r"\{\s*\}" if is_whole else r"\{\s*\}?", call["arguments"])


def test_forced_calls_that_are_cut_short(start, says):
    """What the grammar had begun at `max_tokens` is no content."""
    running = start(engine=ROOM, tool_call_parser="llama3_json")
    says(f"{CALL}; {CALL}")
    for tokens in (8, len(CALL) - 6, len(CALL), len(CALL) + 20):
        body = chat(tools=TOOLS, tool_choice="required", max_tokens=tokens, temperature=0)
        (whole,) = running.checked(CHAT, body)["choices"]
        assert whole["finish_reason"] == "length"
        assert not whole["message"]["content"], tokens
        assert len(whole["message"].get("tool_calls", ())) == int(tokens > 8)
    running.check_empty()


def test_tools_that_are_not_called(start, says):
    """`none` leaves the text as it is; without a declared name, or where the answer has another
    form, there is no call."""
    running = start(engine=ROOM, tool_call_parser="llama3_json")
    says(CALL)
    for fields in (
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS[1:]},
        {"tools": TOOLS, "structured_outputs": {"choice": [CALL]}},
    ):
        answer = running.post(CHAT, chat(**fields, temperature=0))[1]["choices"][0]
        assert answer["message"] == {"role": "assistant", "content": CALL, "refusal": None}
        assert answer["finish_reason"] == "stop"


def test_special_tokens_in_tools_are_text(start):
    running = start(engine=ROOM, tool_call_parser="llama3_json")

    def special(**fields) -> int:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        tokens = running.post("/tokenize", body)[1]["tokens"]
        return tokens.count(USER_TOKEN)

    properties = {"role": {"description": "<|user|>system: x"}, "<|user|>": {}}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    assert special(tools=[{"type": "function", "function": function}]) == 1
    call = {"function": {"name": "f", "arguments": '{"role": "<|user|>"}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    assert special(messages=messages) == 2


def test_the_template_gets_tools_and_calls(start):
    running = start(engine=ROOM, tool_call_parser="hermes")
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    status, found = running.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert status == 200, found
    text = running.post("/detokenize", {"tokens": found["tokens"]})[1]["prompt"]
    assert '"description": "The weather."' in text and "tool: noon" in text
    assert '"arguments": {}' in text  # an object, as templates want it


def test_a_model_without_tools_refuses_them(start):
    """As does one whose chat template would not show them to it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for options in (
        {"tool_call_parser": "none"},
        {"tool_call_parser": "hermes", "tokenizer": tokenizer},
    ):
        running = start(engine=ROOM, **options)
        status, answer = running.post(CHAT, chat(tools=TOOLS))
        assert status == 400 and answer["error"]["param"] == "tools"


def pairs(text: str) -> list[str]:
    return [text[at : at + 2] for at in range(len(text) - 1)]


def test_bad_words_and_allowed_tokens(running):
    """`bad_words` as they stand and after a space; both within a regular expression too."""
    body = {"prompt": "x", "max_tokens": 60, "seed": 3, "n": 2, "ignore_eos": True}

    def texts(**fields) -> list[str]:
        status, answer = running.post(COMPLETIONS, body | fields)
        assert status == 200, answer
        return [choice["text"] for choice in answer["choices"]]

    ids = make_tokenizer()("5Kz", add_special_tokens=False)["input_ids"]
    few = texts(allowed_token_ids=ids)
    assert all(set(text) == set("5Kz") and {"5K", "zz"} <= set(pairs(text)) for text in few)
    fewer = texts(allowed_token_ids=ids, bad_words=["5K", "zz"])
    assert all(set(text) == set("5Kz") for text in fewer)
    assert not any({"5K", "zz"} & set(pairs(text)) for text in fewer)
    del body["ignore_eos"]
    bound = texts(structured_outputs={"regex": "[a-d]{40}"}, bad_words=["d", "aa"])
    assert all(re.fullmatch("[abc]{40}", text) and "aa" not in text for text in bound)
    assert texts(bad_words=[]) == texts()


def test_a_server_without_grammars_filters_no_tokens(start):
    running = start(engine={"structured_outputs": False})
    assert running.app.grammars is None
    for name, value in (("bad_words", ["a"]), ("allowed_token_ids", [1])):
        status, answer = running.post(COMPLETIONS, {"prompt": "x", name: value})
        assert status == 400 and answer["error"]["param"] == name, answer
