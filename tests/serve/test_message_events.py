"""Blocks of answers of the Messages API: text, calls and thinking, whole and as events."""

import types
from typing import Any

import anthropic
import pytest

from swiftkv_jax.serve.api.message_events import MessageWriter
from swiftkv_jax.serve.api.response_events import ResponseWriter
from swiftkv_jax.serve.service.generation import TextDelta
from tests.serve.test_forms import CALL, ROOM
from tests.serve.test_messages import COUNT, GREEDY, HI, PATH, ask, client_of
from tests.serve.test_reasoning_answers import BEGUN, HYBRID, SAID, make_reasoning_tokenizer


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
