"""The Responses API, asked by OpenAI's own client."""

import time
from typing import Any

import pytest

from swiftkv_jax.serve.api.response_bodies import InputItem, ResponsesBody
from swiftkv_jax.serve.api.response_events import ResponseWriter
from swiftkv_jax.serve.api.responses import chat_body
from swiftkv_jax.serve.errors import APIError
from swiftkv_jax.serve.protocol import MAX_MESSAGES, Message
from tests.serve.test_forms import SCHEMA

PATH = "/v1/responses"
FORECAST = {"type": "function", "name": "forecast", "parameters": SCHEMA}


def test_items_become_messages():
    items = [
        InputItem(role="user", content="weather?"),
        InputItem(type="function_call", name="forecast", arguments="{}", call_id="a"),
        InputItem(type="function_call", name="forecast", arguments="{}", call_id="b"),
        InputItem(type="function_call_output", call_id="a", output="sun"),
        InputItem(role="assistant", content="Sun."),
    ]
    found, places = chat_body(ResponsesBody(input=items, instructions="short"))
    roles = "system user assistant tool assistant".split()
    assert [message.role for message in found.messages] == roles
    assert places == ["instructions", "input[0]", "input[1]", "input[3]", "input[4]"]
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
        model="tiny", input="hi", max_output_tokens=300, tools=[FORECAST], tool_choice="required"
    )
    (call,) = [item for item in first.output if item.type == "function_call"][:1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    for items in (first.output, [item.model_dump() for item in first.output]):
        found = client.responses.create(
            model="tiny", input=[*items, output], max_output_tokens=4, tools=[FORECAST]
        )
        assert found.status in ("completed", "incomplete")


def test_what_asks_for_nothing(server):
    fields = {
        "store": False,
        "truncation": "disabled",
        "include": [],
        "top_logprobs": 0,
        "metadata": {"a": "b"},
    }
    fields |= {
        "zzz": None,
        "parallel_tool_calls": True,
        "reasoning": None,
        "background": False,
        "user": "x",
    }
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
