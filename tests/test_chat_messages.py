"""The same messages are the same text, whether a server or training renders them."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.text import encode_chat
from swiftkv_jax.serve.app import App
from swiftkv_jax.serve.errors import APIError
from swiftkv_jax.serve.protocol import Message, TokenizeBody
from swiftkv_jax.serve.text.prompts import PromptEncoder
from swiftkv_jax.text.chat_messages import MessageError, normalize_message, normalize_tools
from swiftkv_jax.train.data.documents import Document, parse_json
from swiftkv_jax.train.data.rendering import Renderer
from swiftkv_jax.train.data.tokenize import Example, tokenize
from tests.chat_templates import TEMPLATES, byte_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Weather in Paris?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
PARTS = [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Paris?"}]
ID = "abcdefghi"
NESTED = {"city": "Paris", "days": [1, 2.5, None], "unit": {"of": "°C", "exact": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def call(arguments, name="weather", **fields):
    return {
        "id": ID,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
        **fields,
    }


def calling(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(content: Any = "22", **fields):
    return {"role": "tool", "tool_call_id": ID, "content": content, **fields}


def shape(*messages, **fields):
    return {"messages": list(messages), **fields}


TEXT_CALL, OBJECT_CALL = call('{"city": "Paris"}'), call({"city": "Paris"})
SHAPES = {
    "one turn": shape(USER, ANSWER),
    "system": shape(SYSTEM, USER, ANSWER),
    "developer": shape(SYSTEM | {"role": "developer"}, USER, ANSWER),
    "developer in the middle": shape(USER, ANSWER, SYSTEM | {"role": "developer"}, USER, ANSWER),
    "four turns": shape(USER, ANSWER, USER, ANSWER),
    "ends with a question": shape(SYSTEM, USER, ANSWER, USER),
    "empty answer": shape(USER, {"role": "assistant", "content": ""}),
    "parts": shape({"role": "user", "content": PARTS}, ANSWER),
    "parts of an answer": shape(USER, {"role": "assistant", "content": PARTS}),
    "parts of responses": shape(
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Ho"}]},
    ),
    "no parts": shape({"role": "user", "content": []}, ANSWER),
    "parts of the system": shape({"role": "system", "content": PARTS}, USER, ANSWER),
    "parts with nulls": shape({"role": "user", "content": [{**PARTS[0], "image_url": None}]}),
    "refusal": shape(USER, {"role": "assistant", "content": None, "refusal": "No."}),
    "refusal as a part": shape(
        USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    ),
    "refusal beside content": shape(USER, ANSWER | {"refusal": "No."}),
    "names": shape(USER | {"name": "ann"}, ANSWER | {"name": "bob"}),
    "nulls of an answer": shape(
        USER,
        ANSWER
        | {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "name": None},
    ),
    "annotations": shape(USER, ANSWER | {"annotations": []}),
    "arguments as text": shape(USER, calling(TEXT_CALL), result(), ANSWER, tools=[TOOL]),
    "arguments as an object": shape(USER, calling(OBJECT_CALL), result(), ANSWER, tools=[TOOL]),
    "nested arguments": shape(USER, calling(call(json.dumps(NESTED))), result(), ANSWER),
    "nested arguments as an object": shape(USER, calling(call(NESTED)), result(), ANSWER),
    "no arguments": shape(USER, calling(call("")), result(), ANSWER),
    "empty arguments": shape(USER, calling(call("{}")), result(), ANSWER),
    "arguments that are null": shape(USER, calling(call('{"city": null}')), result(), ANSWER),
    "arguments that are no object": shape(USER, calling(call("[1, 2]")), result(), ANSWER),
    "arguments that are no JSON": shape(USER, calling(call('{"city": ')), result(), ANSWER),
    "arguments that are too large": shape(USER, calling(call('{"a": 1e999}')), result(), ANSWER),
    "arguments of half a character": shape(USER, calling(call('{"a": "\\ud83d"}')), result()),
    "integers of 30 digits": shape(USER, calling(call('{"a": 12345678901234567890123456789}'))),
    "escapes": shape(USER, calling(call('{"a": "\\u00e9\\n<b>\\"\\ud83d\\ude00"}')), result("é\n")),
    "content beside calls": shape(USER, calling(TEXT_CALL, content="Let me look."), result()),
    "no content beside calls": shape(
        USER, {"role": "assistant", "tool_calls": [TEXT_CALL]}, result(), ANSWER
    ),
    "empty content beside calls": shape(USER, calling(TEXT_CALL, content=""), result(), ANSWER),
    "parts beside calls": shape(USER, calling(TEXT_CALL, content=PARTS), result(), ANSWER),
    "two calls": shape(
        USER,
        calling(call('{"city": "Paris"}', index=0), call('{"q": "Rome"}', "look_up", index=1)),
        result("22"),
        result("Italy"),
        ANSWER,
        tools=[TOOL, LOOK_UP],
    ),
    "calls in two turns": shape(
        USER, calling(TEXT_CALL), result(), calling(OBJECT_CALL), result("23"), ANSWER
    ),
    "no calls": shape(USER, ANSWER | {"tool_calls": []}),
    "a call without an id": shape(
        USER, calling({"function": {"name": "f", "arguments": "{}"}}), result()
    ),
    "parts of a result": shape(USER, calling(TEXT_CALL), result(PARTS), ANSWER),
    "a result with a name": shape(USER, calling(TEXT_CALL), result(name="weather"), ANSWER),
    "reasoning": shape(USER, ANSWER | {"reasoning": "Hm.\nParis."}),
    "reasoning_content": shape(USER, ANSWER | {"reasoning_content": "Hm.\nParis."}),
    "both reasonings": shape(USER, ANSWER | {"reasoning": "Hm.", "reasoning_content": "Hm."}),
    "reasoning before a call": shape(
        USER, calling(TEXT_CALL, reasoning_content="I look."), result(), ANSWER
    ),
    "reasoning in the content": shape(
        USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSunny."}, USER, ANSWER
    ),
    "no reasoning": shape(USER, ANSWER | {"reasoning_content": ""}),
    "tools and system": shape(SYSTEM, USER, ANSWER, tools=[TOOL, LOOK_UP]),
    "fields of tools in another order": shape(
        USER,
        ANSWER,
        tools=[{"function": {"parameters": {}, "strict": True, "name": "f"}, "type": "function"}],
    ),
    "no tools": shape(USER, ANSWER, tools=[]),
    "nulls of tools": shape(
        USER,
        ANSWER,
        tools=[{"type": "function", "function": {"name": "f", "description": None}}],
    ),
    "spaces": shape(
        {"role": "user", "content": " a \n"}, {"role": "assistant", "content": "\n b "}
    ),
    "other scripts": shape({"role": "user", "content": "日本語 🎉"}, ANSWER),
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(specials=("<|im_start|>", "<|im_end|>"))


def by_server(tokenizer, line: bytes, generation_prompt: bool):
    """(ids, text) of the messages of a body."""
    body = msgspec.json.decode(line, type=TokenizeBody)
    body.add_generation_prompt = generation_prompt
    encoder = PromptEncoder(
        tokenizer, max_model_len=8192, vocab_size=len(tokenizer), page_size=64, caching=False
    )
    app = SimpleNamespace(
        tokenizer=tokenizer,
        encoder=encoder,
        template_variables=frozenset(),
        options=SimpleNamespace(chat_template_kwargs=()),
        reasoning=None,
    )
    try:
        prompt = asyncio.run(App.encode_chat(app, body, "", len(line)))  # pyright: ignore[reportArgumentType]
        return prompt.token_ids.tolist(), prompt.text
    except APIError as error:
        return error.message
    finally:
        encoder.close()


def by_training(tokenizer, line: bytes, generation_prompt: bool):
    document = parse_json(line, "row")
    assert isinstance(document, Document), document
    turns = len(document.messages or [])
    try:
        text = Renderer(tokenizer).text(document, turns, add_generation_prompt=generation_prompt)
    except ValueError as error:
        return str(error).removesuffix(f" (the first {turns} of them)")
    return tokenizer(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [False, True], ids=["whole", "prompt"])
def test_training_and_the_server_render_the_same(tokenizer, template, generation_prompt):
    assert len(SHAPES) >= 40
    tokenizer.chat_template = TEMPLATES[template]
    refused = []
    for name, row in SHAPES.items():
        line = json.dumps(row).encode()
        trained = by_training(tokenizer, line, generation_prompt)
        assert trained == by_server(tokenizer, line, generation_prompt), name
        if isinstance(trained, str):
            refused.append(name)
    assert refused == REFUSED.get(template, [])


REFUSED = {
    "llama": ["two calls"],
    "mistral": ["developer in the middle", "a call without an id"],
}


def test_rows_of_training_are_what_the_server_renders(tokenizer):
    """To the token, where each answer is in the text of the whole."""
    tokenizer.chat_template = TEMPLATES["hermes"]
    lines = [json.dumps(row).encode() for row in SHAPES.values()]
    documents = [parse_json(line, "row") for line in lines]
    for line, row in zip(lines, tokenize(documents, tokenizer), strict=True):
        if isinstance(row, Example):
            assert row.tokens.tolist() == by_server(tokenizer, line, False)[0]
        else:
            assert row.reason == "no message with role 'assistant' to train on"


def test_the_commands_render_the_same(tokenizer):
    tokenizer.chat_template = TEMPLATES["json"]
    for row in SHAPES.values():
        if not row.get("tools"):
            line = json.dumps(row).encode()
            assert encode_chat(tokenizer, row["messages"]) == by_server(tokenizer, line, True)[0]
    with pytest.raises(UsageError, match=r"message 1: a part of type 'image_url'"):
        encode_chat(tokenizer, [USER, {"role": "user", "content": [{"type": "image_url"}]}])


CALLED = {"role": "assistant", "content": "", "tool_calls": [OBJECT_CALL]}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (USER, USER),
        (SYSTEM | {"role": "developer"}, SYSTEM),
        ({"role": "user", "content": PARTS}, USER),
        (calling(TEXT_CALL), CALLED),
        ({"role": "assistant", "tool_calls": [TEXT_CALL | {"index": 0}]}, CALLED),
        (calling(OBJECT_CALL, content=""), CALLED),
        (
            calling({"name": "f", "arguments": '{"a": [1, null], "b": null}'}),
            calling(
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": [1, None], "b": None}},
                },
                content="",
            ),
        ),
        (
            {"role": "assistant", "content": None, "refusal": "No.", "audio": None},
            {"role": "assistant", "content": "No."},
        ),
        (
            ANSWER | {"reasoning": "Hm."},
            ANSWER | {"reasoning": "Hm.", "reasoning_content": "Hm."},
        ),
        (ANSWER | {"reasoning_content": "", "tool_calls": [], "annotations": []}, ANSWER),
        (
            USER | {"name": "ann", "thinking": "x", "other": None},
            USER | {"name": "ann", "thinking": "x"},
        ),
        (result(PARTS), result("Weather in Paris?")),
    ],
)
def test_what_templates_get(message, expected):
    """The order of the fields counts too: templates may write them as JSON."""
    found = normalize_message(message, 0)
    assert found == expected
    order = ["role", "content", "name", "tool_call_id", "reasoning", "reasoning_content"]
    assert [name for name in found if name in order] == [name for name in order if name in found]
    assert normalize_message(found, 0) == found


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ('{"a": {"b": null}}', {"a": {"b": None}}),
        ('{"a": 123456789012345678901}', {"a": 123456789012345678901}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ("[1]", "[1]"),
        ("no", "no"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_as_text(text, arguments):
    (found,) = normalize_message(calling(call(text)), 0)["tool_calls"]
    assert found["function"] == {"name": "weather", "arguments": arguments}


@pytest.mark.parametrize(
    ("message", "field", "reason", "unsupported"),
    [
        ("hi", "role", "expected", False),
        ({"content": "a"}, "role", "expected", False),
        ({"role": "user"}, "content", "a message of role 'user' needs `content`", False),
        ({"role": "tool", "content": None}, "content", "role 'tool' needs", False),
        ({"role": "assistant"}, "content", "role 'assistant' needs", False),
        ({"role": "user", "content": 3}, "content", "a text or a list of parts, not int", False),
        ({"role": "user", "content": [PARTS[0], "a"]}, "content[1]", "part 1 of", False),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "is missing", False),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
            "content[0].type",
            "a part of type 'image_url': the model reads text alone",
            True,
        ),
        (ANSWER | {"audio": {"id": "a"}}, "audio", "`audio` is not supported", True),
        (ANSWER | {"function_call": {"name": "f"}}, "function_call", "not supported", True),
        (USER | {"reasoning": "a"}, "reasoning", "role 'user' has no reasoning", False),
        (ANSWER | {"reasoning": "a", "reasoning_content": "b"}, "reasoning", "differ", False),
        (ANSWER | {"reasoning_content": 3}, "reasoning_content", "must be a text, not int", False),
        (calling(3), "tool_calls[0].function", "call 0 of `tool_calls`: expected", False),
        (calling(call(3)), "tool_calls[0].function.arguments", "an object or JSON text", False),
        (ANSWER | {"tool_calls": "f"}, "tool_calls", "must be a list, not str", False),
    ],
)
def test_messages_that_cannot_be_rendered(message, field, reason, unsupported):
    with pytest.raises(MessageError) as caught:
        normalize_message(message, 7)
    error = caught.value
    assert (error.number, error.field, error.unsupported) == (7, field, unsupported)
    assert reason in str(error)


def test_a_server_names_the_field():
    message = Message(role="user", content=None)
    with pytest.raises(APIError) as caught:
        message.rendered(3)
    assert (caught.value.param, caught.value.code) == ("messages[3].content", "invalid_value")


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (None, None),
        ([], None),
        ([TOOL], [TOOL]),
        ([TOOL["function"]], [TOOL]),
        ([{"type": "function", "name": "f"}], [{"type": "function", "function": {"name": "f"}}]),
        (
            [{"function": {"x": 1, "parameters": {}, "description": None, "name": "f"}}],
            [{"type": "function", "function": {"name": "f", "parameters": {}, "x": 1}}],
        ),
    ],
)
def test_tools(tools, expected):
    assert json.dumps(normalize_tools(tools)) == json.dumps(expected)
    with pytest.raises(ValueError, match="tool 1: expected"):
        normalize_tools([TOOL, {"type": "web_search"}])
