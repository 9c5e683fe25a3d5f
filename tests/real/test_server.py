"""The server before Qwen2.5-Coder-0.5B-Instruct: its own template, tools and long conversations,
through the libraries of OpenAI and Anthropic. So small a model decides little by itself, but it
writes calls, reads what tools answer, and remembers."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.real_models import FILES

NAME = FILES["qwen2.5-coder"].name
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
READ = {
    "name": "read_file",
    "description": "Read a text file and return its content",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}
LIST = {
    "name": "list_files",
    "description": "List the names of the files in the project",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: Any = [{"type": "function", "function": function} for function in (WEATHER, READ)]
SYSTEM = {
    "role": "system",
    "content": "You are a helpful assistant. Use a tool when one is needed. When you have a tool's "
    "response, answer the question in one sentence.",
}
QUESTION = {"role": "user", "content": "What is the weather in Paris, in celsius?"}
PARIS = {"city": "Paris", "unit": "celsius"}
PAGE = 16


def calls_of(message) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]


def ask(client, messages, **options):
    return client.chat.completions.create(model=NAME, messages=messages, **options).choices[0]


def streamed(client, messages, **options) -> tuple[str, list[tuple[str, str]], str]:
    """(content, calls, finish reason) put together from the parts of a stream."""
    content, calls, reason = "", [], ""
    for chunk in client.chat.completions.create(
        model=NAME, messages=messages, stream=True, **options
    ):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.function.name:
                    calls.append([part.function.name, ""])
                calls[part.index][1] += part.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, [(name, arguments) for name, arguments in calls], reason


def test_the_name_is_that_of_the_file(client):
    assert [model.id for model in client.models.list()] == [NAME]


@pytest.mark.parametrize(
    "choice",
    [{"type": "function", "function": {"name": "get_weather"}}, "required"],
    ids=["named", "required"],
)
def test_a_forced_call(client, choice):
    found = ask(
        client,
        [QUESTION],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=60,
    )
    assert found.finish_reason == "tool_calls" and not found.message.content
    assert calls_of(found.message) == [("get_weather", PARIS)]


def test_a_call_of_its_own_accord(client):
    found = ask(client, [SYSTEM, QUESTION], tools=TOOLS[:1], max_tokens=80)
    assert found.finish_reason == "tool_calls"
    assert calls_of(found.message) == [("get_weather", PARIS)]
    none = ask(client, [SYSTEM, QUESTION], tools=TOOLS[:1], tool_choice="none", max_tokens=20)
    assert none.message.tool_calls is None and none.message.content


def test_a_tool_that_is_called_answers(client):
    """As every agent does it: call, result, answer."""
    messages: list[Any] = [SYSTEM, QUESTION]
    call = ask(client, messages, tools=TOOLS[:1], max_tokens=80).message
    messages.append(call.model_dump(exclude_none=True))
    result = json.dumps({"temperature": 17, "condition": "light rain"})
    messages.append({"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": result})
    answer = ask(client, messages, max_tokens=60)
    assert answer.finish_reason == "stop"
    assert "17" in answer.message.content and "light rain" in answer.message.content


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 40},
        {"tools": TOOLS, "max_tokens": 80},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 40},
    ],
    ids=["text", "auto", "required"],
)
def test_streamed_is_what_is_not_streamed(client, options):
    whole = ask(client, [QUESTION], **options)
    calls = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()]
    assert bool(calls) == ("tools" in options)
    expected = (whole.message.content or "", calls, whole.finish_reason)
    assert streamed(client, [QUESTION], **options) == expected


def test_an_agent_of_several_turns(client):
    """It looks for a file, reads it, and answers from it when asked again. Which tool is called is
    forced: so small a model does not plan."""
    files = {"settings.json": json.dumps({"host": "0.0.0.0", "port": 8417, "debug": False})}
    tools: Any = [{"type": "function", "function": function} for function in (LIST, READ)]
    messages: list[Any] = [
        SYSTEM,
        {"role": "user", "content": "Which port is set in the file settings.json of this project?"},
    ]
    cached = []
    for name in ("list_files", "read_file", None):
        if name is None:
            messages.append({"role": "user", "content": "So which port is it?"})
        forced = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": name}}}
        answer = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=60, **(forced if name else {})
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            found = "\n".join(files) if name == "list_files" else files[arguments["path"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    assert "8417" in messages[-1]["content"]
    assert cached[1] >= 128, "the second turn begins with the first's prompt"


LONG = " ".join(
    f"Shelf {number} holds {10 * number + 7} boxes of part number {1000 + 37 * number}."
    for number in range(1, 40)
)


def test_a_long_chat_and_the_prefix_cache(client):
    """Each turn finds those before it in the cache, and is answered as without a cache."""
    messages: list[Any] = [
        {"role": "user", "content": f"{LONG}\n\nHow many boxes does shelf 12 hold? Answer briefly."}
    ]
    questions = ["And shelf 31?", "What part number do the boxes of shelf 12 have?", None]
    before = 0
    for turn, question in enumerate(questions):
        found = client.chat.completions.create(model=NAME, messages=messages, max_tokens=24)
        cached = found.usage.prompt_tokens_details.cached_tokens
        assert cached >= before // PAGE * PAGE, turn
        salted = {"cache_salt": f"turn {turn}"}
        again = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=24, extra_body=salted
        )
        assert again.usage.prompt_tokens_details.cached_tokens == 0
        text = found.choices[0].message.content
        assert again.choices[0].message.content == text
        assert streamed(client, messages, max_tokens=24)[0] == text
        if turn == 0:
            assert "127" in text
        before = found.usage.prompt_tokens
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    assert before > 800


def test_structured_output(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = ask(
        client,
        [{"role": "user", "content": "Extract name and age: Ada Lovelace was 36 years old."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema, "strict": True},
        },
        max_tokens=60,
    )
    assert json.loads(found.message.content) == {"name": "Ada Lovelace", "age": 36}


def test_code_is_completed(client):
    found = client.completions.create(
        model=NAME,
        prompt='def add(a, b):\n    """Return the sum of a and b."""\n',
        max_tokens=12,
        stop=["\n\n"],
    )
    assert found.choices[0].text.strip() == "return a + b"


def test_responses_api(client):
    """The same call, result and answer through /v1/responses."""
    tools = [{"type": "function", "strict": True} | WEATHER]
    first = client.responses.create(
        model=NAME,
        instructions=SYSTEM["content"],
        input=[QUESTION],
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=60,
    )
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", PARIS)
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "17 degrees, light rain",
    }
    answer = client.responses.create(
        model=NAME,
        instructions=SYSTEM["content"],
        input=[QUESTION, call.model_dump(exclude_none=True), result],
        max_output_tokens=60,
    )
    assert "17" in answer.output_text and "light rain" in answer.output_text


def test_messages_api(anthropic_client):
    """The same through /v1/messages."""
    tool: Any = {
        "name": WEATHER["name"],
        "description": WEATHER["description"],
        "input_schema": WEATHER["parameters"],
    }
    messages: list[Any] = [QUESTION]
    options: Any = {"model": NAME, "max_tokens": 60, "system": SYSTEM["content"]}
    first = anthropic_client.messages.create(
        messages=messages,
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        **options,
    )
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert first.stop_reason == "tool_use" and (call.name, call.input) == ("get_weather", PARIS)
    messages.append(
        {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "17 degrees, light rain"}
    messages.append({"role": "user", "content": [result]})
    answer = anthropic_client.messages.create(messages=messages, **options)
    (block,) = answer.content
    assert block.type == "text" and "17" in block.text and "light rain" in block.text


def test_a_file_of_code_is_explained_from_its_text(client):
    """A prompt of some thousand tokens, read in chunks: this package's own code."""
    source = Path(__file__).parents[2] / "swiftkv_jax" / "infer" / "structured" / "token_filter.py"
    text = source.read_text(encoding="utf-8")
    question = f"```python\n{text}\n```\n\nWhat is the name of the first class in this file?"
    found = ask(client, [{"role": "user", "content": question}], max_tokens=40)
    assert "TokenFilter" in found.message.content
