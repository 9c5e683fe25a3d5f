"""The Messages API, asked by Anthropic's own client."""

import json
import types
from typing import Any

import pytest

from swiftkv_jax.serve.api.message_bodies import (
    ContentBlock,
    InputMessage,
    MessagesBody,
    OutputConfig,
    Thinking,
)
from swiftkv_jax.serve.api.message_events import MessageWriter, error_body
from swiftkv_jax.serve.api.messages import chat_body
from swiftkv_jax.serve.api.response_events import ResponseWriter
from swiftkv_jax.serve.errors import APIError
from swiftkv_jax.serve.protocol import FunctionCall, Message, ToolCall
from swiftkv_jax.serve.service.generation import TextDelta
from tests.serve.conftest import lazily
from tests.serve.test_forms import CALL, ROOM, SCHEMA
from tests.serve.test_reasoning_answers import BEGUN, HYBRID, SAID, make_reasoning_tokenizer

anthropic = lazily("anthropic")
PATH, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
FORECAST: Any = {"name": "forecast", "description": "The weather.", "input_schema": SCHEMA}


def client_of(running) -> Any:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client
    server.check_empty()


GREEDY: Any = {"extra_body": {"temperature": 0}}  # the client no longer has it as a parameter


def ask(client: Any, **fields: Any) -> Any:
    return client.messages.create(**{"model": "tiny", "messages": HI, "max_tokens": 200} | fields)


def test_text(client, server):
    """The answer is that of the same chat, and what the prefix cache had is counted apart."""
    found = ask(client, system="be kind", max_tokens=30, **GREEDY)
    messages = [{"role": "system", "content": "be kind"}, *HI]
    _, chat = server.post(CHAT, {"messages": messages, "max_tokens": 30, "temperature": 0})
    (choice,) = chat["choices"]
    (block,) = found.content
    assert block.type == "text" and block.text == choice["message"]["content"]
    assert (found.type, found.role, found.model) == ("message", "assistant", "tiny")
    reason = "max_tokens" if choice["finish_reason"] == "length" else "end_turn"
    assert found.stop_reason == reason and found.stop_sequence is None
    assert found.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert found.usage.input_tokens == chat["usage"]["prompt_tokens"]
    again = ask(client, system="be kind", max_tokens=30, **GREEDY).usage
    assert again.cache_read_input_tokens > 0
    assert again.input_tokens + again.cache_read_input_tokens == found.usage.input_tokens
    counted = client.messages.count_tokens(model="tiny", messages=HI, system="be kind")
    assert counted.input_tokens == found.usage.input_tokens


def test_the_last_message_may_be_gone_on_with(server, client):
    """What the assistant is to begin with is part of the prompt, not of the answer."""
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    found = ask(client, messages=messages, max_tokens=9, **GREEDY)
    body = {"messages": messages, "max_tokens": 9, "temperature": 0, "continue_final_message": True}
    _, chat = server.post(CHAT, body)
    assert found.content[0].text == chat["choices"][0]["message"]["content"]
    assert (
        found.usage.cache_read_input_tokens + found.usage.input_tokens
        == (chat["usage"]["prompt_tokens"])
    )


def test_messages_become_those_of_a_chat():
    def block(type: str, **fields: Any) -> ContentBlock:
        return ContentBlock(type=type, **fields)

    content = [
        block("thinking", thinking="hm", signature="x"),
        block("text", text="a"),
        block("text", text="b"),
        block("tool_use", id="1", name="f", input={"x": 1}),
    ]
    results = [
        block("tool_result", tool_use_id="1", content="sun"),
        block("tool_result", tool_use_id="2", content=[ContentBlock(type="text", text="rain")]),
        block("text", text="so?"),
    ]
    body = MessagesBody(
        max_tokens=5,
        system="short",
        messages=[
            InputMessage(role="user", content="weather?"),
            InputMessage(role="assistant", content=content),
            InputMessage(role="user", content=results),
        ],
        thinking=Thinking(type="adaptive"),
    )
    chat, places = chat_body(body, {"enable_thinking"})
    call = ToolCall(function=FunctionCall(name="f", arguments={"x": 1}), id="1")
    assert chat.messages == [
        Message(role="system", content="short"),
        Message(role="user", content="weather?"),
        Message(role="assistant", content="ab", reasoning="hm", tool_calls=[call]),
        Message(role="tool", content="sun", tool_call_id="1"),
        Message(role="tool", content="rain", tool_call_id="2"),
        Message(role="user", content="so?"),
    ]
    assert places == ["system", *(f"messages[{number}]" for number in (0, 1, 2, 2, 2))]
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert chat_body(body, ())[0].chat_template_kwargs is None
    body.output_config = OutputConfig(effort="max")
    assert chat_body(body, {"reasoning_effort"})[0].reasoning_effort == "max"
    assert chat_body(body, ())[0].reasoning_effort is None


def test_the_number_of_a_request_is_no_part_of_its_prompt(server):
    """Claude Code writes one before its system prompt."""
    numbered = "x-anthropic-billing-header: cc_version=2.1; cch="
    found = set()
    for texts in (["be kind"], [numbered + "a1", "be kind"], [numbered + "b22", "be kind"]):
        system = [{"type": "text", "text": text} for text in texts]
        _, answer = server.post(COUNT, {"messages": HI, "system": system})
        found.add(answer["input_tokens"])
    assert len(found) == 1


CLEAR_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
CLEAR_TOOL_USES = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "input_tokens", "value": 30000},
    "keep": {"type": "tool_uses", "value": 3},
    "exclude_tools": ["forecast"],
}


@pytest.mark.parametrize("edits", [None, [], [CLEAR_THINKING], [CLEAR_THINKING, CLEAR_TOOL_USES]])
def test_a_context_that_is_only_cleared_stays_whole(server, edits):
    """The answer says that nothing was applied, in streams in their last event but one."""
    body = {"messages": HI, "max_tokens": 2, "temperature": 0}
    _, plain = server.post(PATH, body)
    managed = body | {"context_management": {"edits": edits}}
    status, answer = server.post(PATH, managed)
    assert status == 200, answer
    assert answer["content"] == plain["content"] and "context_management" not in plain
    assert answer["context_management"] == {"applied_edits": []}
    _, _, content = server.request("POST", PATH, managed | {"stream": True})
    (line,) = [one for one in content.split(b"\n") if b'"type":"message_delta"' in one]
    last = json.loads(line.removeprefix(b"data: "))
    assert last["context_management"] == {"applied_edits": []}
    del managed["max_tokens"], managed["temperature"]
    status, counted = server.post(COUNT, managed)
    tokens = counted["input_tokens"]
    assert status == 200 and counted["context_management"] == {"original_input_tokens": tokens}


def test_redacted_thinking_is_left_out(server):
    """It came from another server, and has no text."""
    block = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    found = []
    for blocks in ([block, {"type": "text", "text": "a"}], "a"):
        messages = [*HI, {"role": "assistant", "content": blocks}, *HI]
        found.append(server.post(COUNT, {"messages": messages}))
    assert found[0][0] == 200 and found[0] == found[1]


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
PAGE = {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "c"}
FAILED = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
SEARCHED = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "a"}},
    *(
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": content}
        for content in ([PAGE | {"page_age": None}], FAILED)
    ),
]


def test_tools_of_other_servers_are_left_out(server):
    """Their blocks in a conversation, and those of a request, which a header names."""
    found = []
    for blocks in ([*SEARCHED, {"type": "text", "text": "a"}], "a"):
        messages = [*HI, {"role": "assistant", "content": blocks}, *HI]
        found.append(server.post(COUNT, {"messages": messages}))
    assert found[0][0] == 200 and found[0] == found[1]
    body = {"messages": HI, "tools": [FORECAST]}
    _, plain = server.post(COUNT, body)
    body["tools"] = [SEARCH, FORECAST]
    status, headers, content = server.request("POST", COUNT, body)
    assert (status, json.loads(content)) == (200, plain)
    assert headers["x-ignored-fields"] == "tools[0]"


def test_what_asks_for_nothing(server):
    cached = {"cache_control": {"type": "ephemeral"}}
    fields = {
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "speed": "standard",
        "mcp_servers": [],
        "container": None,
        "output_config": {"effort": "max", "task_budget": {"type": "tokens", "total": 9000}},
        "fallbacks": [{"model": "other"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"} | cached]}],
        "system": [{"type": "text", "text": "be kind"} | cached],
        "tools": [FORECAST | cached | {"type": "custom"}],
        "tool_choice": {"type": "auto"},
        "diagnostics": {"previous_message_id": None},
        "zzz": None,
    }
    status, answer = server.post(PATH, {"max_tokens": 2} | fields | cached)
    assert status == 200 and answer["type"] == "message", answer
    status, answer = server.post(PATH, {"max_tokens": 2, "messages": HI, "tools": []})
    assert status == 200, answer


def test_errors_have_the_shape_of_the_api(start):
    running = start(api_keys={"one": "a-key-of-some-length"})
    for path in (PATH, COUNT):
        status, answer = running.post(path, {})
        assert status == 401 and answer["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(client_of(running))
    assert caught.value.type == "authentication_error"
    with anthropic.Anthropic(
        base_url=running.url, auth_token="a-key-of-some-length", api_key=None, max_retries=0
    ) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            ask(client, model="other")
        assert missing.value.type == "not_found_error" and "'other'" in str(missing.value)
        assert ask(client, max_tokens=2).content
    assert running.post(PATH, {}, x_api_key="a-key-of-some-length")[0] == 400
    for method, path, expected in (
        ("GET", PATH, (405, "invalid_request_error")),
        ("POST", f"{PATH}/batches", (404, "not_found_error")),
    ):
        status, headers, content = running.request(method, path)
        answer = json.loads(content)
        assert (status, answer["error"]["type"]) == expected and answer["type"] == "error"
        assert headers["request-id"] == answer["request_id"]
    statuses = 408, 429, 503
    kinds = [error_body(APIError(status, "a", "b"), "c")["error"]["type"] for status in statuses]
    assert kinds == ["timeout_error", "rate_limit_error", "overloaded_error"]


# Blocks and events ---------------------------------------------------------------------------


@pytest.mark.parametrize("writer", [MessageWriter("1", "tiny"), ResponseWriter({})])
def test_a_text_is_put_together_once(writer):
    """If it grew with each piece, a long answer would take seconds for copies of its beginning."""
    facts: Any = types.SimpleNamespace(
        num_prompt_tokens=1, num_cached_tokens=0, num_tokens=1, num_reasoning_tokens=0
    )
    end: Any = types.SimpleNamespace(finish_reason="stop", stop_reason=None)

    def text() -> str:
        (block,) = writer.answer.get("content") or writer.answer["output"][0]["content"]
        return block["text"]

    for _ in range(3):
        writer.add(facts, TextDelta(parts=["ab"]))
    assert text() == ""
    writer.end(facts, end)
    assert text() == "ababab"


def test_the_tool_runner_of_the_client(start, says, monkeypatch):
    """It begins with a `thread`, and does without: each request has the whole conversation."""

    @anthropic.beta_tool
    def forecast(city: str, days: int) -> str:
        """The weather."""
        return f"sun in {city} for {days} days"

    running = start(engine=ROOM, tool_call_parser="llama3_json", unknown_fields="ignore")
    prompts, submit = [], running.app.service.submit

    def keep(generation: Any) -> None:
        prompts.append(generation.prompts[0].text)
        submit(generation)

    monkeypatch.setattr(running.app.service, "submit", keep)
    says(CALL)
    with client_of(running) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny", messages=HI, max_tokens=200, tools=[forecast], max_iterations=2
        )
        for _ in runner:
            says("Sunny.")
    first, second = prompts
    assert first.count("hi") == second.count("hi") == 1 and "sun in Rome for 3 days" in second
    running.check_empty()


def test_thinking_is_a_block(start, says):
    tokenizer = make_reasoning_tokenizer(HYBRID)
    running = start(engine=ROOM, tokenizer=tokenizer, reasoning_parser="auto")
    says(SAID, tokenizer)
    with client_of(running) as client:
        fields: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}} | GREEDY
        whole = ask(client, **fields)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        again = [*HI, {"role": "assistant", "content": whole.content}, *HI]
        assert ask(client, messages=again, max_tokens=3)
        omitted = {"type": "adaptive", "display": "omitted"}
        assert [one.type for one in ask(client, thinking=omitted, **GREEDY).content] == ["text"]
        says("4", tokenizer, "assistant: <think>\n\n</think>\n\n")
        off = ask(client, thinking={"type": "disabled"}, **GREEDY)
        assert [block.type for block in off.content] == ["text"]
        counted = client.messages.count_tokens(
            model="tiny", messages=HI, thinking={"type": "disabled"}
        )
        usage = off.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    running.check_empty()


def test_thinking_that_cannot_be_switched_off(start):
    running = start(engine=ROOM, tokenizer=make_reasoning_tokenizer(BEGUN), reasoning_parser="auto")
    for path, more in ((PATH, {"max_tokens": 5}), (COUNT, {})):
        body = {"messages": HI, "thinking": {"type": "disabled"}} | more
        status, answer = running.post(path, body)
        message = "thinking: this model's chat template cannot switch reasoning off"
        assert status == 400 and answer["error"]["message"] == message


def test_a_stream_that_cannot_go_on_ends_with_an_error(start):
    running = start(request_timeout=0.6, step_seconds=0.15, sse_keep_alive=0.05)
    with client_of(running) as client:
        with pytest.raises(anthropic.APIStatusError, match="has run for"):
            list(ask(client, stream=True))
    body = {"messages": HI, "max_tokens": 200, "stream": True}
    _, _, content = running.request("POST", PATH, body)
    assert b"[DONE]" not in content and content.count(b"event: error\n") == 1
    assert b"message_stop" not in content
    running.check_empty()
