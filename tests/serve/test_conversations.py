"""Recorded conversations: what the official clients get of each API, whole and as a stream.

`RECORD=1 pytest tests/serve/test_conversations.py` writes them anew.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import TEMPLATE, lazily, make_tokenizer

anthropic = lazily("anthropic")
FILE = Path(__file__).parent / "conversations.json"
TEMPLATE = TEMPLATE + "{# <tool_call> </think> #}{% if enable_thinking %}{% endif %}"
TEMPLATE = TEMPLATE.replace("{#", "{% if false %}<tool_call>{% endif %}{#")
TOKENIZER = make_tokenizer("<think>", "</think>", "<tool_call>", "</tool_call>", template=TEMPLATE)
NAME = "forecast"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
ARGUMENTS = '{"city": "Rome", "days": 3}'
CALL = f'<tool_call>{{"name": "{NAME}", "arguments": {ARGUMENTS}}}</tool_call>'
SAID = {
    "text": "one, two, three",
    "empty": "",
    "reasoning": "<think>\nTwo, or so.\n</think>\n\nIt is 4.",
    "only reasoning": "<think>\nTwo, or so",
    "call": CALL,
    "text and calls": f"<think>Hm.</think>Well. {CALL}{CALL}",
    "broken call": f"Well. {CALL.replace('"Rome"', 'Rome')} Then. {CALL}",
}
CASES = [
    *((name, "") for name in ("text", "empty", "reasoning", "only reasoning")),
    *(("text", how) for how in ("cut", "stopped", "counted", "form")),
    *(("call", how) for how in ("cut", "tools", "required", "by name")),
    *(("text and calls", how) for how in ("cut", "tools", "single")),
    ("broken call", "tools"),
    ("reasoning", "cut"),
]
"""What the model says, and what the request asks for."""
CONVERSATIONS = [
    (api, *case)
    for api in ("chat", "responses", "messages")
    for case in CASES
    if (api, case) != ("responses", ("text", "stopped"))  # the API has no stop strings
]
LENGTHS = {"text": 5, "call": 45, "text and calls": 110, "reasoning": 9}
"""Tokens of an answer that is cut."""


def body_of(api: str, said: str, how: str, *, stream: bool) -> dict[str, Any]:
    """The body of a request of `api`."""
    messages = [{"role": "user", "content": "hi"}]
    limit = LENGTHS[said] if how == "cut" else 200
    has_tools = how in ("tools", "required", "by name", "single") or (
        how == "cut" and said != "text"
    )
    function = {"name": NAME, "description": "The weather."}
    parameters = function | {"parameters": SCHEMA}
    if api == "chat":
        body: dict[str, Any] = {"messages": messages, "max_tokens": limit, "temperature": 0}
        tools: Any = [{"type": "function", "function": parameters}]
        by_name: Any = {"type": "function", "function": {"name": NAME}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        more = {"form": {"response_format": form}, "stopped": {"stop": ["four", ", t"]}}
        more["counted"] = {"stream_options": {"include_usage": True}} if stream else {"n": 1}
        single: dict[str, Any] = {"parallel_tool_calls": False}
    elif api == "responses":
        body = {"input": messages, "max_output_tokens": limit, "temperature": 0}
        tools = [{"type": "function", **parameters}]
        by_name = {"type": "function", "name": NAME}
        form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
        more = {"form": {"text": {"format": form}}, "counted": {"instructions": "be kind"}}
        single = {"parallel_tool_calls": False}
    else:
        body = {"messages": messages, "max_tokens": limit, "extra_body": {"temperature": 0}}
        tools = [function | {"input_schema": SCHEMA}]
        by_name = {"type": "tool", "name": NAME}
        form = {"type": "json_schema", "schema": SCHEMA}
        more = {"form": {"output_config": {"format": form}}, "counted": {"system": "be kind"}}
        more["stopped"] = {"stop_sequences": ["four", ", t"]}
        single = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    body |= more.get(how, {}) | ({"tools": tools} if has_tools else {})
    required = {"type": "any"} if api == "messages" else "required"
    body |= {"required": {"tool_choice": required}, "by name": {"tool_choice": by_name}}.get(
        how, {}
    )
    return body | (single if how == "single" else {})


@pytest.fixture(scope="module")
def server(start):
    engine = {"max_model_len": 1024, "num_pages": 2048, "enable_prefix_caching": False}
    return start(engine=engine, tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def clients(server) -> Iterator[dict[str, Any]]:
    """The function that sends a request of each API."""
    with (
        server.openai() as one,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other,
    ):
        chat, responses = one.chat.completions.create, one.responses.create
        yield {"chat": chat, "responses": responses, "messages": other.messages.create}


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, Any]]:
    """What was recorded, by conversation."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    yield found
    if os.environ.get("RECORD"):
        lines = (f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("api", "said", "how"), CONVERSATIONS, ids=map(" ".join, CONVERSATIONS))
def test_conversation(server, clients, recorded, says, api, said, how, stream):
    says('{"city":"a"}' if how == "form" else SAID[said], TOKENIZER)
    got = clients[api](model="tiny", stream=stream, **body_of(api, said, how, stream=stream))
    events = [one.model_dump(exclude_unset=True) for one in (got if stream else [got])]
    server.check_empty()
    numbers = [one["sequence_number"] for one in events if "sequence_number" in one]
    assert numbers == list(range(len(numbers)))
    found = masked(joined(events))
    name = f"{api}, {said}, {how}, {'stream' if stream else 'whole'}"
    if os.environ.get("RECORD"):
        recorded[name] = found
    assert found == recorded[name]


def masked(events: list[dict[str, Any]]) -> list[Any]:
    """Events without times and version; ids by the order in which they come."""
    ids: dict[str, str] = {}
    text = json.dumps(events)
    text = re.sub(r'"(created|created_at)": [\d.]+', r'"\1": 0', text)
    text = re.sub(r"swiftkv-[^\"]+", "VERSION", text)
    pattern = r"\b(chatcmpl|resp|msg|fc|rs|call)[-_][0-9a-f]{24,32}\b"
    return json.loads(
        re.sub(pattern, lambda id: ids.setdefault(id[0], f"{id[1]} {len(ids)}"), text)
    )


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events with neighbouring deltas as one: steps of the engine may come together."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event.get("type") == "message_start":
            del event["message"]["usage"]["output_tokens"]
            del event["message"]["usage"]["output_tokens_details"]
        event.pop("sequence_number", None)
        for part in _parts(event):
            # A chat's chunk has the fields of a delta in one object, without an order.
            before = found if "choices" in part else found[-1:]
            if not any(_add(one, part) for one in before):
                found.append(part)
    return found


def _parts(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a chat's chunk, an event for each field of its delta and for its end."""
    if event.get("object") != "chat.completion.chunk" or not event["choices"]:
        yield event
        return
    (choice,) = event["choices"]
    for name, value in sorted(choice["delta"].items()):
        for one in value if name == "tool_calls" else [value]:
            if name == "tool_calls" and "name" in one["function"]:
                yield event | {"choices": [{name: one | {"function": one["function"]["name"]}}]}
                one = {
                    "index": one["index"],
                    "function": {"arguments": one["function"]["arguments"]},
                }
            yield event | {"choices": [{name: one}]}
    if choice["finish_reason"] is not None:
        yield event | {"choices": [choice | {"delta": {}}]}


def _add(event: dict[str, Any], other: dict[str, Any]) -> bool:
    """Add the text of `other` to `event`, and return whether they differ in nothing else."""
    texts = [_text(one) for one in (event, other)]
    if None in texts:
        return False
    (place, key), (other_place, other_key) = texts
    kept, added = place[key], other_place[other_key]
    place[key] = added
    if event != other:
        place[key] = kept
        return False
    place[key] = kept + added
    return True


def _text(event: dict[str, Any]) -> Any:
    """(object, key) of the text of a delta; None for another event."""
    place: Any = event
    if event.get("choices"):
        (place,) = event["choices"]
    if "tool_calls" in place:
        place = place["tool_calls"]["function"]
        return None if isinstance(place, str) else (place, "arguments")
    if isinstance(place.get("delta"), dict):
        place = place["delta"]
    for key in ("delta", "content", "reasoning", "text", "thinking", "partial_json"):
        if isinstance(place.get(key), str):
            return place, key
    return None
