"""The Responses API, asked by OpenAI's own client, and its tools as Codex sends them: functions in
namespaces, and hosted tools."""

import copy
import json
import time
from typing import Any

import pytest

from swiftkv_jax.serve.api.response_bodies import InputItem, ResponsesBody
from swiftkv_jax.serve.api.response_events import ResponseWriter
from swiftkv_jax.serve.api.responses import chat_body
from swiftkv_jax.serve.api.tools import offered, shown_name
from swiftkv_jax.serve.bodies.decoding import decode
from swiftkv_jax.serve.errors import APIError
from swiftkv_jax.serve.protocol import MAX_MESSAGES, Message
from tests.serve.test_forms import SCHEMA, check_schema

PATH = "/v1/responses"
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA}
FILES = {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [READ]}
AGENTS = {"type": "namespace", "name": "agents", "tools": [READ | {"description": None}]}
SEARCH = {"type": "web_search", "external_web_access": True}
TOOLS: Any = [READ, SEARCH, FILES, AGENTS]
CODEX = {
    "instructions": "be kind",
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "extra_body": {"client_metadata": {"x-codex-installation-id": "b"}},
}
"""What Codex sends with an empty configuration, shortened."""


def test_items_become_messages():
    items = [
        InputItem(role="user", content="weather?"),
        InputItem(type="function_call", name="forecast", arguments="{}", call_id="a"),
        InputItem(type="reasoning"),
        InputItem(type="function_call", name="forecast", arguments="{}", call_id="b"),
        InputItem(type="function_call_output", call_id="a", output="sun"),
        InputItem(role="assistant", content="Sun."),
    ]
    found, places = chat_body(ResponsesBody(input=items, instructions="short"))
    roles = "system user assistant tool assistant".split()
    assert [message.role for message in found.messages] == roles
    assert places == ["instructions", "input[0]", "input[1]", "input[4]", "input[5]"]
    calls = found.messages[2].tool_calls
    assert calls is not None and [call.id for call in calls] == ["a", "b"]
    assert found.messages[3] == Message(role="tool", content="sun", tool_call_id="a")


def test_many_calls_are_one_message_at_once():
    call = InputItem(type="function_call", name="f", arguments="{}", call_id="a")
    start = time.process_time()
    found, _ = chat_body(ResponsesBody(input=[call] * MAX_MESSAGES))
    assert time.process_time() - start < 1
    (message,) = found.messages
    assert message.tool_calls is not None and len(message.tool_calls) == MAX_MESSAGES
    with pytest.raises(APIError, match="items"):
        chat_body(ResponsesBody(input=[call] * (MAX_MESSAGES + 1)))


def test_an_answer_may_be_sent_back(client):
    """As the client's own objects, and as what they are dumped to, with fields of its own."""
    first = client.responses.create(
        model="tiny", input="hi", max_output_tokens=300, tools=[READ], tool_choice="required"
    )
    (call,) = [item for item in first.output if item.type == "function_call"][:1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    for items in (first.output, [item.model_dump() for item in first.output]):
        found = client.responses.create(
            model="tiny", input=[*items, output], max_output_tokens=4, tools=[READ]
        )
        assert found.status in ("completed", "incomplete")


def test_what_asks_for_nothing(server):
    fields = {"store": False, "truncation": "disabled", "include": [], "top_logprobs": 0}
    fields |= {"metadata": {"a": "b"}, "user": "x", "parallel_tool_calls": True}
    fields |= dict.fromkeys(("zzz", "reasoning")) | {"background": False}
    status, answer = server.post(PATH, {"input": "hi", "max_output_tokens": 2} | fields)
    assert status == 200 and answer["metadata"] == {"a": "b"}


def test_a_stream_that_cannot_go_on_ends_with_a_failed_response(start):
    """The item that is open is closed before."""
    running = start(request_timeout=0.6, step_seconds=0.15, sse_keep_alive=0.05)
    with running.openai() as client:
        events: list[Any] = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first, last = events[0], events[-1]
    assert first.type == "response.created" and last.type == "response.failed"
    assert last.response.status == "failed" and last.response.error.code == "server_error"
    assert "has run for" in last.response.error.message
    opened, closed = (
        [event.item.id for event in events if event.type == f"response.output_item.{name}"]
        for name in ("added", "done")
    )
    assert opened == closed == [item.id for item in last.response.output]
    assert all(item.status == "incomplete" for item in last.response.output)
    running.check_empty()
    _, _, content = running.request("POST", PATH, {"input": "hi", "stream": True})
    assert b"[DONE]" not in content and content.count(b"event: response.failed\n") == 1
    running.check_empty()


def test_the_error_of_a_response_has_a_code_of_the_api():
    for status, code in ((400, "invalid_prompt"), (429, "rate_limit_exceeded"), (504, None)):
        writer = ResponseWriter({"id": "resp_a"})
        lines = writer.fail(APIError(status, "other", "why")).decode().split("\n\n")
        kinds = [line.partition("\n")[0] for line in lines if line]
        assert kinds == [f"event: response.{name}" for name in ("created", "in_progress", "failed")]
        error = {"code": code or "server_error", "message": "why"}
        assert writer.answer["error"] == error and writer.answer["status"] == "failed"


# Tools ----------------------------------------------------------------------------------------


def call_of(name: str) -> str:
    return json.dumps({"name": name, "parameters": {"city": "Rome", "days": 3}})


@pytest.mark.parametrize(
    ("said", "namespace"),
    [("read", None), ("mcp__files__read", "mcp__files__"), ("agents__read", "agents")],
)
def test_a_call_comes_back_as_its_function_was_declared(client, says, said, namespace):
    """Whole and in a stream, in its namespace; and it is read again under the model's name."""
    says(call_of(said))
    body: Any = CODEX | {"model": "tiny", "temperature": 0}
    whole = client.responses.create(**body, input="hi")
    events: list[Any] = list(client.responses.create(**body, input="hi", stream=True))
    added, done = (
        [event.item for event in events if event.type == f"response.output_item.{name}"]
        for name in ("added", "done")
    )
    streamed = events[-1].response
    for item in (*whole.output, *added, *done, *streamed.output):
        assert (item.type, item.name) == ("function_call", "read")
        assert item.to_dict().get("namespace") == namespace
    (call,) = whole.output
    check_schema(call.arguments)
    assert done[0].arguments == streamed.output[0].arguments == call.arguments
    (named,) = (e.name for e in events if e.type == "response.function_call_arguments.done")
    assert named == "read"
    assert [tool.to_dict() for tool in whole.tools] == TOOLS

    says("Sun.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    history: Any = [{"role": "user", "content": "hi"}, call.to_dict(), output]
    found = client.responses.create(**body, input=history)
    assert found.output_text == "Sun."
    parsed, _ = decode(
        ResponsesBody, json.dumps({"input": history, "tools": TOOLS}).encode(), ignore_unknown=False
    )
    chat, _ = chat_body(parsed, offered(parsed.tools, ignore_unknown=False))
    assert [one.function.name for one in chat.messages[1].tool_calls or ()] == [said]
    assert said in [tool.function.name for tool in chat.tools or ()]


@pytest.mark.parametrize(
    ("choice", "namespace"),
    [
        ({"name": "read"}, None),
        ({"name": "read", "namespace": "agents"}, "agents"),
        ({"name": "close"}, "desk"),
    ],
)
def test_a_function_of_a_namespace_may_be_forced(client, choice, namespace):
    """By its name alone, where no other has it."""
    desk = {"type": "namespace", "name": "desk", "tools": [READ | {"name": "close"}]}
    found = client.responses.create(
        model="tiny",
        input="hi",
        tools=[*TOOLS, desk],
        tool_choice={"type": "function"} | choice,
        max_output_tokens=300,
    )
    (call,) = found.output
    assert (call.name, call.to_dict().get("namespace")) == (choice["name"], namespace)
    check_schema(call.arguments)


def test_allowed_tools(server, says):
    """The model is offered all; a call of another one is text, and a forced one is of these."""
    named = {"type": "function", "name": "read", "namespace": "agents"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named, SEARCH]}
    body = {"input": "hi", "tools": TOOLS, "max_output_tokens": 300, "temperature": 0}
    _, plain = server.post(PATH, body)
    status, answer = server.post(PATH, body | {"tool_choice": choice})
    assert status == 200, answer
    assert [one["namespace"] for one in answer["output"]] == ["agents"] * len(answer["output"])
    assert answer["tool_choice"] == choice
    assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    choice["mode"] = "auto"
    for said, kind in (("agents__read", "function_call"), ("read", "message")):
        says(call_of(said))
        _, answer = server.post(PATH, body | {"tool_choice": choice})
        assert [one["type"] for one in answer["output"]] == [kind]


def test_allowed_tools_of_chats(server, says):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "ab"
    ]
    allowed: Any = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "a"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body: Any = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "temperature": 0}
    body |= {"tool_choice": choice, "max_tokens": 300}
    chat = "/v1/chat/completions"
    for name, reason in (("a", "tool_calls"), ("b", "stop")):
        says(call_of(name))
        _, answer = server.post(chat, body)
        assert answer["choices"][0]["finish_reason"] == reason
    allowed["mode"] = "required"
    _, answer = server.post(chat, body)
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"a"}
    for bad in ([], [{"type": "function", "function": {"name": "c"}}]):
        allowed["tools"] = bad
        status, answer = server.post(chat, body)
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
    allowed |= {"tools": tools[:1], "of_another_api": None}
    allowed["tools"][0]["function"].pop("parameters")
    assert server.post(chat, body)[0] == 200


def test_the_model_is_offered_functions_under_names_of_its_own():
    found = offered(copy.deepcopy(TOOLS), ignore_unknown=False)
    functions = [tool.function for tool in found.tools]
    assert [one.name for one in functions] == ["read", "mcp__files__read", "agents__read"]
    assert [one.description for one in functions] == ["Reads.", "Files.\n\nReads.", None]
    assert found.places == ["tools[0]", "tools[2].tools[0]", "tools[3].tools[0]"]
    assert found.ignored == ["tools[1]"]


def test_long_names_stay_apart():
    """They are as long as a name may be, and those of functions that begin alike differ."""
    names = {shown_name("n" * 40, "f" * 40 + end) for end in "ab"}
    assert len(names) == 2 and {len(name) for name in names} == {64}
    assert shown_name("n" * 40, "f" * 22) == "n" * 40 + "__" + "f" * 22
    assert shown_name(None, "f" * 64) == "f" * 64


HOSTED = """
web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11 file_search
code_interpreter image_generation mcp tool_search
""".split()


@pytest.mark.parametrize("tools", [[], *([{"type": kind, "x": 1}] for kind in HOSTED)])
def test_tools_that_the_server_would_run_are_not_offered(server, tools):
    """The prompt and its answer are those without them, and a header names them."""
    body = {"input": "hi", "max_output_tokens": 9, "temperature": 0}
    _, plain = server.post(PATH, body)
    status, headers, content = server.request("POST", PATH, body | {"tools": tools})
    answer = json.loads(content)
    assert status == 200 and answer["tools"] == tools
    assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert answer["output"][0]["content"] == plain["output"][0]["content"]
    assert headers.get("x-ignored-fields") == ("tools[0]" if tools else None)


def test_advice_and_what_asks_for_nothing(server):
    """Reasoning that another server has encrypted is left out."""
    fields: Any = {
        "reasoning": {"summary": "detailed", "context": "auto", "generate_summary": None},
        "max_tool_calls": 3,
        "include": ["web_search_call.action.sources", "reasoning.encrypted_content"],
        "client_metadata": {"a": {"b": 1}},
    }
    asked = {"role": "user", "content": "hi"}
    secret = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "c2VjcmV0"}
    body = {"max_output_tokens": 9, "temperature": 0}
    _, plain = server.post(PATH, body | {"input": [asked]})
    status, answer = server.post(PATH, body | fields | {"input": [secret, asked]})
    assert status == 200, answer
    assert answer["output"][0]["content"] == plain["output"][0]["content"]
    assert answer["reasoning"] == {"effort": None, "summary": "detailed"}
    assert answer["max_tool_calls"] == 3 and plain["max_tool_calls"] is None
