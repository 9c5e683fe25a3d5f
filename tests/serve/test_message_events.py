"""Blocks of answers of the Messages API: text, calls and thinking, whole and as events."""

import types
from typing import Any

import anthropic
import pytest

from swiftkv_jax.serve.api.message_events import MessageWriter
from swiftkv_jax.serve.api.response_events import ResponseWriter
from swiftkv_jax.serve.service.generation import TextDelta
from tests.serve.test_forms import CALL, ROOM
from tests.serve.test_messages import COUNT, FORECAST, GREEDY, HI, PATH, ask, client_of
from tests.serve.test_reasoning_answers import (
    BEGUN,
    HYBRID,
    SAID,
    make_reasoning_tokenizer,
    num_tokens,
)


def test_blocks_of_an_answer(start, says):
    """Text and calls keep their order, and an answer may be sent back with a result."""
    running = start(engine=ROOM, tool_call_parser="llama3_json")
    says(f"Well. {CALL} Done.")
    with client_of(running) as client:
        found = ask(client, tools=[FORECAST], **GREEDY)
        assert [block.type for block in found.content] == ["text", "tool_use", "text"]
        call = found.content[1]
        assert call.input == {"city": "Rome", "days": 3} and found.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
        messages = [*HI, {"role": "assistant", "content": found.content}]
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "thanks"}]})
        assert ask(client, messages=messages, tools=[FORECAST], max_tokens=4).content
        single = {"type": "auto", "disable_parallel_tool_use": True}
        says(CALL + CALL)
        assert len(ask(client, tools=[FORECAST], **GREEDY).content) == 2
        one = ask(client, tools=[FORECAST], tool_choice=single, **GREEDY)
        assert [block.type for block in one.content] == ["tool_use"]
        cut = ask(client, tools=[FORECAST], **GREEDY, max_tokens=num_tokens(CALL) - 3)
        assert cut.stop_reason == "max_tokens" and not cut.content
    running.check_empty()


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


def test_calls_that_are_no_json(start, says):
    """A whole answer leaves them out. A stream has begun them, and goes on with the next block."""
    running = start(engine=ROOM, tool_call_parser="llama3_json")
    bad = CALL.replace('"Rome"', "Rome")
    with client_of(running) as client:

        def both(said: str, **fields: Any) -> tuple[Any, list[Any], list[Any]]:
            """(whole answer, block of each index of the stream, its last reason)."""
            says(said)
            whole = ask(client, tools=[FORECAST], **GREEDY, **fields)
            events = list(ask(client, tools=[FORECAST], stream=True, **GREEDY, **fields))
            begun = [one for one in events if one.type == "content_block_start"]
            assert [one.index for one in begun] == list(range(len(begun)))
            texts = ["" for _ in begun]
            for one in events:
                if one.type == "content_block_delta" and one.delta.type == "text_delta":
                    texts[one.index] += one.delta.text
            (end,) = (one.delta for one in events if one.type == "message_delta")
            assert (end.stop_reason, end.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
            kinds = [one.content_block.type for one in begun]
            return whole, kinds, texts

        whole, kinds, texts = both(f"Well. {bad} Then. {CALL} Done.")
        assert [block.type for block in whole.content] == ["text", "text", "tool_use", "text"]
        assert kinds == ["text", "tool_use", "text", "tool_use", "text"]
        assert texts == ["Well.", "", " Then.", "", " Done."] and whole.stop_reason == "tool_use"
        whole, kinds, _ = both(f"Well. {bad}")
        assert kinds == ["text", "tool_use"] and len(whole.content) == 1
        assert whole.stop_reason == "end_turn", "there is nothing to run"
        whole, kinds, _ = both(CALL, stop_sequences=["days"])
        assert kinds == ["tool_use"] and not whole.content
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "days")
    running.check_empty()


def test_thinking_is_a_block(start, says):
    tokenizer = make_reasoning_tokenizer(HYBRID)
    running = start(engine=ROOM, tokenizer=tokenizer, reasoning_parser="auto")
    says(SAID, tokenizer)
    with client_of(running) as client:
        fields: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}} | GREEDY
        whole = ask(client, **fields)
        with client.messages.stream(model="tiny", messages=HI, max_tokens=200, **fields) as stream:
            streamed: Any = stream.get_final_message()
        for found in (whole, streamed):
            thought, text = found.content
            assert (thought.type, thought.thinking) == ("thinking", "Two, or so.")
            assert (text.type, text.text) == ("text", "It is 4.")
            details = found.usage.output_tokens_details
            assert details.thinking_tokens == num_tokens("<think>\nTwo, or so.\n</think>")
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
