"""Answers of a given form: JSON, regular expressions, choices, grammars and calls of tools."""

import json
import re

import pytest

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
ROOM = {"max_model_len": 2048, "num_pages": 2048}
CALL = '{"name": "forecast", "parameters": {"city": "Rome", "days": 3}}'


def chat(**fields):
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150} | fields


def check_schema(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"city", "days"} and found["city"] in ("Rome", "Oslo")
    assert isinstance(found["days"], int) and found["days"] <= 9


@pytest.mark.parametrize("stream", [False, True])
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
def test_forms(running, fields, pattern, stream):
    """What has ended has the form; what is cut may be its beginning."""
    body = {"prompt": "x", "max_tokens": 60, "seed": 1, "n": 2} | fields
    if stream:
        found = {}
        for event in running.events(COMPLETIONS, body)[:-1]:
            for choice in event["choices"]:
                text, _ = found.get(choice["index"], ("", None))
                found[choice["index"]] = text + choice["text"], choice["finish_reason"]
        whole = running.post(COMPLETIONS, body)[1]["choices"]
        assert [found[one["index"]] for one in whole] == [
            (one["text"], one["finish_reason"]) for one in whole
        ]
        return
    status, answer = running.post(COMPLETIONS, body)
    assert status == 200, answer
    for choice in answer["choices"]:
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
                assert not number and isinstance(json.loads(call["function"]["arguments"]), dict)
    running.check_empty()


@pytest.mark.parametrize("single", [False, True])
def test_calls_in_a_stream_are_those_of_the_whole_answer(start, single):
    """The text is forced, so that the parser sees a call that nothing but the text announces."""
    running = start(engine=ROOM, tool_call_parser="llama3_json")
    text = f"Well. {CALL}; {CALL}"
    body = chat(
        tools=TOOLS,
        structured_outputs={"choice": [text]},
        parallel_tool_calls=not single,
        max_tokens=200,
    )
    (whole,) = running.post(CHAT, body)[1]["choices"]
    message = whole["message"]
    assert whole["finish_reason"] == "tool_calls" and message["content"] == "Well."
    calls = [call["function"] for call in message["tool_calls"]]
    expected = {"name": "forecast", "arguments": '{"city": "Rome", "days": 3}'}
    assert calls == [expected] * (1 if single else 2)
    content, streamed, reasons = "", {}, []
    for event in running.events(CHAT, body)[:-1]:
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            reasons.append(choice["finish_reason"])
            for call in choice["delta"].get("tool_calls", ()):
                one = streamed.setdefault(call["index"], {"name": "", "arguments": ""})
                for name, value in call["function"].items():
                    one[name] += value
                assert ("id" in call) == ("name" in call["function"])
    assert content == message["content"] and list(streamed.values()) == calls
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
    running.check_empty()


def test_tools_that_are_not_called(start):
    """`none` leaves the text as it is; without a declared name there is no call."""
    running = start(engine=ROOM, tool_call_parser="llama3_json")
    forced = {"structured_outputs": {"choice": [CALL]}, "tools": TOOLS}
    answer = running.post(CHAT, chat(**forced, tool_choice="none"))[1]["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert answer["finish_reason"] == "stop"
    forced["tools"] = TOOLS[1:]
    assert running.post(CHAT, chat(**forced))[1]["choices"][0]["message"]["content"] == CALL


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


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", None),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_grammar"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "invalid_grammar",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "invalid_grammar"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs", "invalid_grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "invalid_grammar"),
        ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs", "invalid_grammar"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unknown_field"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", None),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", None),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            None,
        ),
        ({"guided_regex": "a"}, "guided_regex", "unsupported_parameter"),
        ({"tools": []}, "tools", None),
        ({"tools": TOOLS * 65}, "tools", None),
        ({"tools": TOOLS + TOOLS}, "tools[2].function.name", None),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", None),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
            None,
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
            None,
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            None,
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "invalid_grammar",
        ),
    ],
)
def test_refused(running, fields, param, code):
    status, answer = running.post(CHAT, chat(**fields))
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert code is None or answer["error"]["code"] == code, answer
    assert len(json.dumps(answer)) < 2048


def test_deep_and_large_schemas_are_refused(running):
    deep: dict = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    large = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(4000)}}
    for schema in (deep, large):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        status, answer = running.post(CHAT, chat(response_format=form))
        assert status == 400 and answer["error"]["code"] == "invalid_grammar"


def test_a_model_without_tools_refuses_them(start):
    running = start(engine=ROOM, tool_call_parser="none")
    status, answer = running.post(CHAT, chat(tools=TOOLS))
    assert status == 400 and answer["error"]["param"] == "tools"
