"""Forced calls where the tags are tokens of the tokenizer, as Qwen's are."""

import itertools
import json
import re

import pytest

from tests.serve.conftest import END, TEMPLATE, make_tokenizer
from tests.serve.parts import said
from tests.serve.test_forms import CHAT, ROOM, chat

TAGS = "<tool_call>", "</tool_call>"
HERMES = TEMPLATE + "{% if false %}<tool_call>{% endif %}"
THINKING = HERMES.replace("assistant: ", "assistant: <think>\n") + "{# </think> #}"
PARTS = {
    "days": ({"type": "integer", "minimum": 0, "maximum": 40}, lambda v: 0 <= v <= 40),
    "unit": ({"enum": ["C", "<tool_call>", 3]}, lambda v: v in ("C", "<tool_call>", 3)),
    "code": ({"type": "string", "pattern": "^[a-c]{2}$"}, lambda v: re.fullmatch("[a-c]{2}", v)),
    "flag": ({"type": "boolean"}, lambda v: isinstance(v, bool)),
    "list": (
        {"type": "array", "items": {"const": "x"}, "minItems": 1, "maxItems": 2},
        lambda v: v in (["x"], ["x", "x"]),
    ),
    "spot": (
        {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -5, "maximum": 5}},
            "required": ["x"],
            "additionalProperties": False,
        },
        lambda v: set(v) == {"x"} and -5 <= v["x"] <= 5,
    ),
}
SCHEMAS = list(itertools.combinations(PARTS, 3))


def tool_of(parts: tuple[str, ...]) -> dict:
    schema = {
        "type": "object",
        "properties": {name: PARTS[name][0] for name in parts},
        "required": parts[:2],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.fixture(scope="module", params=[False, True], ids=["added", "special"])
def qwen(start, request):
    tokenizer = make_tokenizer(*TAGS, special=request.param, template=HERMES)
    return start(engine=ROOM, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "seeds", [range(0, 20, 7), pytest.param(range(20), marks=pytest.mark.long)], ids=["few", "all"]
)
def test_forced_calls_fit_their_schemas_and_their_streams(qwen, seeds):
    """5 calls for each schema, by name and `required`."""
    by_name = {"type": "function", "function": {"name": "f"}}
    for seed in seeds:
        parts = SCHEMAS[seed]
        choice = {"tool_choice": by_name if seed % 2 else "required", "max_tokens": 300}
        body = chat(tools=[tool_of(parts)], parallel_tool_calls=False, seed=seed, n=5, **choice)
        for one in qwen.checked(CHAT, body)["choices"]:
            content, _, ((name, arguments),) = said([one["message"]])
            found = json.loads(arguments)
            assert (content, name, one["finish_reason"]) == ("", "f", "tool_calls")
            assert set(parts[:2]) <= set(found) <= set(parts)
            assert all(PARTS[key][1](value) for key, value in found.items()), found
    qwen.check_empty()


CALL = '<tool_call>{"name": "f", "arguments": {"days":4,"unit":"C","flag":true}}</tool_call>'
TOOL = tool_of(("days", "unit", "flag"))


def test_several_calls_in_one_answer(qwen, says):
    """The tags are tokens between the calls too."""
    tokenizer = qwen.app.tokenizer
    says(f"{CALL}\n{CALL}", tokenizer)
    body = chat(tools=[TOOL], tool_choice="required", return_token_ids=True)
    (choice,) = qwen.post(CHAT, body)[1]["choices"]
    assert len(choice["message"]["tool_calls"]) == 2 and not choice["message"]["content"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["token_ids"] == [*tokenizer(f"{CALL}\n{CALL}")["input_ids"], END]
    for tag in TAGS:
        assert choice["token_ids"].count(tokenizer.convert_tokens_to_ids(tag)) == 2


@pytest.mark.parametrize("special", [False, True])
def test_forced_calls_after_reasoning(start, says, special):
    """The prompt ends with the tag that begins it; the call follows the one that ends it."""
    tokenizer = make_tokenizer("<think>", "</think>", *TAGS, special=special, template=THINKING)
    running = start(engine=ROOM, tokenizer=tokenizer)
    says(f"Rome, so 4.</think>{CALL}", tokenizer, "assistant: <think>\n")
    body = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=400)
    (choice,) = running.checked(CHAT, body)["choices"]
    assert choice["message"]["reasoning"] == "Rome, so 4." and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"days":4,"unit":"C","flag":true}'
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_the_python_tag_may_begin_a_call(start, says, tag):
    """Llama 3's, as a token, which texts leave out."""
    tokenizer = make_tokenizer("<|python_tag|>", special=True)
    running = start(engine=ROOM, tokenizer=tokenizer)
    call = '{"name": "f", "parameters": {"days":4,"unit":"C"}}'
    says(f"{tag}{call}; {call}", tokenizer)
    body = chat(tools=[TOOL], tool_choice="required", max_tokens=400, return_token_ids=True)
    (choice,) = running.post(CHAT, body)[1]["choices"]
    assert len(choice["message"]["tool_calls"]) == 2 and choice["message"]["content"] is None
    assert choice["token_ids"][:-1] == tokenizer(f"{tag}{call}; {call}")["input_ids"]


def test_errors_of_forced_calls_name_the_tools(qwen, monkeypatch):
    """When the answer has begun, too."""
    tools = [tool_of(("days", "unit", "flag"))]
    tools[0]["function"]["parameters"] |= {"not": {"type": "null"}}
    body = chat(tools=tools, tool_choice="required")
    status, answer = qwen.post(CHAT, body)
    assert status == 400 and answer["error"]["code"] == "invalid_grammar"
    assert answer["error"]["param"] == "tools", answer
    tools = [tool_of(("days", "unit", "list"))]
    monkeypatch.setattr(
        "swiftkv_jax.infer.structured.structured_outputs.GrammarMatcher.error",
        property(lambda self: "the answer cannot go on: no"),
    )
    for form, param in (
        ({"tools": tools, "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a+b{3}"}}, "structured_outputs"),
    ):
        status, answer = qwen.post(CHAT, chat(**form))
        assert status == 400 and answer["error"]["param"] == param, answer


def test_schemas_that_cannot_be_followed_are_refused_for_forced_calls_alone(qwen, says):
    """With `auto` the arguments are what the model writes."""
    tool = tool_of(("days",))
    tool["function"]["parameters"]["properties"]["days"] = {"type": "integer", "maximum": 2**64 - 1}
    status, answer = qwen.post(CHAT, chat(tools=[tool], tool_choice="required"))
    assert status == 400 and answer["error"]["param"] == "tools[0].function.parameters"
    assert "`maximum` in a schema" in answer["error"]["message"]
    says("It is late.", qwen.app.tokenizer)
    (choice,) = qwen.post(CHAT, chat(tools=[tool]))[1]["choices"]
    assert choice["message"]["content"] == "It is late." and choice["finish_reason"] == "stop"
