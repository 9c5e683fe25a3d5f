"""Bodies that are refused: each error names the field that is wrong, or what to write instead."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from swiftkv_jax.serve.bodies.decoding import INSTEAD
from tests.serve.process import ROOT
from tests.serve.test_forms import TOOLS
from tests.serve.test_messages import CLEAR_THINKING, FORECAST
from tests.serve.test_messages import SEARCH as SEARCH_BLOCKS
from tests.serve.test_responses import AGENTS, FILES, READ, SEARCH

HI: Any = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, SCORE = "/v1/messages", "/v1/score"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETION: {"prompt": "a"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 2},
    SCORE: {},
}
INVALID, TOO_LONG = "invalid_value", "context_length_exceeded"
UNKNOWN, UNSUPPORTED = "unknown_field", "unsupported_parameter"

# Code -> path of a field -> values of it.
OF_BOTH = {
    "model_not_found": {"model": ["another"]},
    INVALID: {
        "model": [3],
        "stream": ["yes"],
        "stream_options": [{"include_usage": True}],
        "n": [0, 17, 9, True, 1.5],
        "temperature": [-0.1, 2.1, "1"],
        "top_p": [-0.1, 1.1],
        "top_k": [-2, "16"],
        "min_p": [2],
        "presence_penalty": [3],
        "frequency_penalty": [-3],
        "repetition_penalty": [0],
        "seed": [-(2**63) - 1, 2**63, 2.0**53],  # the client may have written another number
        "stop": [[""], ["a"] * 17, ["a" * 200] * 3],
        "stop_token_ids": [[97], [-1]],
        "max_tokens": [-1, 16.5],
        "min_tokens": [1000],
        "logit_bias": [{"017": 1}, {"1.0": 1}, {"97": 1}, {"7": 101}]
        + [{str(i): 1 for i in range(301)}],
        "cache_salt": ["a@b", ""],
        "request_id": ["a b", "日本"],
        "metadata": [{str(i): "" for i in range(17)}],
        "priority": ["high"],
        "truncate_prompt_tokens": [0, -2, 257],
        "truncation_side": ["left", "middle"],
        "skip_special_tokens": ["no"],
        "allowed_token_ids": [[], [97], [-1], [1] * 1025],
        "prompt_logprobs": [21, -1],
        "bad_words": [[" "], ["a"] * 129, ["a" * 5000]],
    },
    TOO_LONG: {"max_tokens": [10**6]},
    UNKNOWN: {"no_such_field": [1]},
    UNSUPPORTED: {
        "best_of": [2],
        "use_beam_search": [True],
        "length_penalty": [0.5],
        "guided_json": [{}],
        "priority": [1],
        "logits_processors": [["a"]],
        "service_tier": ["flex"],
        "store": [True],
        "modalities": [["audio"]],
    },
}
OF_COMPLETIONS = {
    INVALID: {
        "prompt": ["", [], [""], [[]], ["a", 1], [1, True], [1, [2]], [97], [2**70], [-1]]
        + [["a"] * 70, ["a"] * 129, [[1]] * 129],
        "max_tokens": [0],
        "logprobs": [21, -1],
    },
    TOO_LONG: {"prompt": ["a" * 257, [1] * 257, "a" * 100_000]},
    UNSUPPORTED: {"suffix": ["a"], "stream_interval": [1]},
    UNKNOWN: {"messages": [HI]},
}
MANY = {"prompt": [[1] * 100] * 100, "n": 4, "max_tokens": 1, "prompt_logprobs": 20}
ECHOED = {"prompt": [[1] * 100] * 40, "n": 4, "max_tokens": 1, "echo": True, "logprobs": 20}
TOGETHER = [
    ({"prompt_logprobs": 20, "stream": True}, "stream", UNSUPPORTED),
    (MANY, "prompt_logprobs", "above the limit"),
    (ECHOED, "logprobs", "16160 tokens"),  # each choice repeats those of its prompt
]
IMAGE = {"type": "image_url", "image_url": {"url": "a"}}
OF_CHATS = {
    INVALID: {
        "messages": [[], "hi"],
        "messages[0].role": [[{"role": "god", "content": "a"}], [{"content": "a"}]],
        "messages[0].content": [[{"role": "user"}], [{"role": "user", "content": 3}]],
        "max_completion_tokens": [0],
        "top_logprobs": [3],
        "logprobs": [3],
    },
    TOO_LONG: {"max_completion_tokens": [10**6]},
    UNKNOWN: {
        "prompt": ["a"],
        "messages[0].colour": [[{"role": "user", "content": "a", "colour": 1}]],
        "messages[0].content[0].colour": [
            [{"role": "user", "content": [{"type": "text", "text": "a", "colour": 1}]}]
        ],
    },
    UNSUPPORTED: {
        "messages[0].content[0].type": [[{"role": "user", "content": [IMAGE]}]],
        "functions": [[{"name": "f"}]],
        "reasoning_effort": ["high"],
        "chat_template": ["a"],
        "chat_template_kwargs": [{"a": 1}],
        "documents": [[{}]],
        "audio": [{}],
        "web_search_options": [{}],
    },
}


def function(name: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name} | fields}]


JSON = {"type": "json_object"}
OF_FORMS = [
    ({"response_format": {"type": "xml"}}, "response_format.type", ""),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ""),
    ({"response_format": JSON | {"json_schema": {"name": "a"}}}, "response_format.json_schema", ""),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", UNKNOWN),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", ""),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", ""),
    ({"structured_outputs": {"regex": "a"}, "response_format": JSON}, "structured_outputs", ""),
    ({"guided_regex": "a"}, "guided_regex", UNSUPPORTED),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", INVALID),
    ({"tools": []}, "tools", ""),
    ({"tools": TOOLS * 65}, "tools", ""),
    ({"tools": TOOLS + TOOLS}, "tools[2].function.name", ""),
    ({"tools": function("a b")}, "tools[0].function.name", ""),
    ({"tools": function("a\n")}, "tools[0].function.name", ""),
    ({"tool_choice": "required"}, "tool_choice", ""),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", ""),
    ({"tools": TOOLS, "tool_choice": function("no")[0]}, "tool_choice", ""),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": JSON}, "response_format", ""),
    (
        {"tools": function("a", parameters={"type": "x"}), "tool_choice": "required"},
        "tools[0].function.parameters",
        "",
    ),
]
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
OF_GRAMMARS = [
    {},
    {"regex": "a", "choice": ["b"]},
    {"regex": "(a"},
    {"regex": "a" * 5000},
    {"regex": "[^\\s\\S]"},
    {"choice": []},
    {"choice": ["a" * 70_000]},
    {"grammar": "start: start"},
    {"json": {"type": "x"}},
    {"json": {"pattern": "a" * 5000}},
    {"json": {"x-guidance": {}}},
    {"json": {}, "json_object": True},
    {"json": DEEP},
    {"json": {"type": "object", "properties": {f"p{n}": {} for n in range(4000)}}},
]
CALL = {"type": "function_call", "name": "f"}
CUSTOM = {"type": "custom", "name": "x"}
BAD_FORMAT = {"type": "json_schema", "name": "a", "schema": {"type": "messages[9]"}}
ODD = READ | {"z": 1}
OF_RESPONSES = [
    ({"store": True}, "store", ""),
    ({"background": True}, "background", ""),
    ({"previous_response_id": "resp_1"}, "previous_response_id", ""),
    ({"conversation": "c"}, "conversation", ""),
    ({"truncation": "auto"}, "truncation", ""),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", ""),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", ""),
    ({"include": ["reasoning.encrypted_content", "message.x"]}, "include[1]", ""),
    ({"context_management": [{"type": "compaction"}]}, "context_management", ""),
    ({"max_output_tokens": 0}, "max_output_tokens", ""),
    ({"max_output_tokens": 10**6}, "max_output_tokens", ""),
    ({"temperature": 3}, "temperature", ""),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", ""),
    ({"text": {"format": JSON | {"name": "x", "schema": {}}}}, "text.format", ""),
    ({"text": {"format": BAD_FORMAT}}, "text.format", ""),  # the client's own words
    ({"n": 2}, "n", ""),
    ({"zzz": 1}, "zzz", ""),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", ""),
    ({"input": []}, "input", ""),
    ({"input": [CALL]}, "input[0].arguments", ""),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", ""),
    ({"input": [{"role": "user", "content": "a", "output": "b"}]}, "input[0].output", ""),
    ({"input": [{"role": "user", "content": "a", "action": {}}]}, "input[0].action", ""),
    ({"input": [{"role": "user", "content": "a", "namespace": "b"}]}, "input[0].namespace", "no"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "`store` to false"),
    (
        {"instructions": "x", "input": [{"role": "user", "content": [{"type": "image"}]}]},
        "input[0].content[0].type",
        "",
    ),
    ({"tools": [CUSTOM]}, "tools[0].type", ""),
    ({"tools": [{"type": "local_shell"}]}, "tools[0].type", ""),
    ({"tools": [{"name": "f"}]}, "tools[0].type", ""),
    ({"tools": [{"type": "function"}]}, "tools[0].name", ""),
    ({"tools": [READ | {"colour": 1}]}, "tools[0].colour", ""),
    ({"tools": [READ | {"parameters": []}]}, "tools[0].parameters", ""),
    ({"tools": [READ | {"strict": 1}]}, "tools[0].strict", ""),
    ({"tools": [READ | {"z": None}, AGENTS | {"tools": [ODD]}]}, "tools[1].tools[0].z", UNKNOWN),
    ({"tools": [READ, READ]}, "tools[1].name", "'read'"),
    ({"tools": [READ | {"name": "agents__read"}, AGENTS]}, "tools[1].tools[0].name", "agents__"),
    ({"tools": [SEARCH, FILES, FILES]}, "tools[2].tools[0].name", "'mcp__files__read'"),
    (
        {"tools": [SEARCH, AGENTS | {"tools": [READ, CUSTOM]}]},
        "tools[1].tools[1].type",
        "'custom' is not supported: declare it as a function",
    ),
    (
        {"tools": [AGENTS | {"tools": [READ | {"parameters": {"type": 3}}]}]},
        "tools[0].tools[0].parameters",
        "",
    ),
    ({"tools": [AGENTS | {"name": "a b"}]}, "tools[0].name", ""),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools", "missing"),
    ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice", "needs `tools`"),
    ({"tools": [READ], "tool_choice": {"type": "function", "name": "w"}}, "tool_choice", "'w'"),
    (
        {"tools": [READ], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice",
        "no function",
    ),
    ({"tools": [READ], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
    *(
        ({"input": [item]}, "input[0].type", f"an item of type {item['type']!r} is not supported")
        for item in (
            {"type": "compaction_trigger"},
            {"type": "web_search_call", "id": "a", "status": "completed", "action": {}},
            {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "a"},
            {"type": "local_shell_call", "call_id": "a", "action": {"command": ["ls"]}},
            {"type": "code_interpreter_call", "code": "1", "container_id": "c", "outputs": []},
            {"type": "file_search_call", "queries": ["a"], "results": []},
        )
    ),
]
PICTURE = {"type": "image", "source": {"type": "url", "url": "a"}}
CALLED = {"type": "tool_use", "id": "a", "name": "forecast", "input": {}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": list(content)}


def called(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": [*blocks, CALLED]}]}


def edits(*changes: Any) -> dict[str, Any]:
    return {"context_management": {"edits": list(changes)}}


# The API's errors have no `param`: the field is in the message.
OF_MESSAGES = [
    ({"max_tokens": 0}, "`max_tokens`"),
    ({"messages": []}, "`messages` must have"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "`messages[0].role`"),
    (user(PICTURE), "messages[0].content[0].type: a blo"),
    (user({"type": "text"}), "[0].text: `text` is"),
    (
        user({"type": "thinking", "thinking": "a"}),
        "messages[0].content[0].type: a message of role 'user' has no",
    ),
    (user({"type": "redacted_thinking", "data": "a"}), "no block of type 'redacted_thinking'"),
    (
        user(result({"type": "web_page"})),
        "messages[0].content[0].content[0].type: a block of type 'web_page'",
    ),
    (called(), "messages[1]: the results of the calls"),
    (called({"type": "text", "text": "a"}), "messages[1]: the results of the calls"),
    ({"system": [PICTURE]}, "system[0].type: a block of type 'image'"),
    ({"tools": [FORECAST, FORECAST]}, "tools[1].name: two tools are"),
    ({"tools": [SEARCH_BLOCKS, FORECAST, FORECAST]}, "tools[2].name: two tools are"),
    ({"tools": [FORECAST | {"input_schema": {"type": 3}}]}, "tools[0].input_schema: "),
    (
        {"tools": [SEARCH_BLOCKS, {"type": "bash_20250124", "name": "bash"}]},
        "tools[1].type: a tool of type 'bash_20250124' is not supported: define it as a tool",
    ),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "`tool_choice` needs `tools`"),
    ({"tools": [FORECAST], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
    ({"mcp_servers": [{"name": "a"}]}, "`mcp_servers` is not supported"),
    ({"thread": {"type": "create"}}, "thread: conversations are not kept"),
    ({"speed": "fast"}, "`speed` is not supported"),
    ({"temperature": 3}, "`temperature`"),
    ({"stop_sequences": [""]}, "`stop_sequences`"),
    (
        edits(CLEAR_THINKING, {"type": "compact_20260112"}),
        "context_management.edits[1].type: 'compact_20260112': a context is only cleared",
    ),
    (edits({}), "context_management.edits[0].type"),
    ({"context_management": {"prune": 1}}, "context_management.prune: there is no field"),
    ({"compaction": {"type": "summarize"}}, "`compaction` is not supported"),
]
PAIR = {"context": "a", "continuation": "b"}
OF_SCORES = [
    ([], "pairs"),
    ([PAIR | {"continuation": ""}], "pairs[0]"),
    ([{"context": "a"}], "pairs[0].continuation"),
    ([PAIR | {"c": 1}], "pairs[0].c"),
    ([PAIR | {"context": "a" * 300}], "pairs[0]"),
    ([PAIR] * 129, "pairs"),
]


def cases() -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """(route, fields, the field that is named, code or words of the error)"""
    for path, *tables in ((CHAT, OF_BOTH, OF_CHATS), (COMPLETION, OF_BOTH, OF_COMPLETIONS)):
        for table in tables:
            for code, fields in table.items():
                for param, values in fields.items():
                    for value in values:
                        yield path, {param.partition("[")[0]: value}, param, code
    for grammar in OF_GRAMMARS:
        yield CHAT, {"structured_outputs": grammar}, "structured_outputs", "invalid_grammar"
    for path, table in ((CHAT, OF_FORMS), (COMPLETION, TOGETHER), (RESPONSES, OF_RESPONSES)):
        yield from ((path, fields, param, said) for fields, param, said in table)
    yield from ((MESSAGES, fields, "", said) for fields, said in OF_MESSAGES)
    for path, advice in INSTEAD.items():
        head, _, last = path.rpartition(".")
        value = {"type": "json_object", last: {}} if head else 1
        yield CHAT, {head or last: value}, path, f"there is no field {last!r}: {advice}"
    yield from ((SCORE, {"pairs": pairs}, param, "") for pairs, param in OF_SCORES)


@pytest.mark.parametrize(("path", "fields", "param", "said"), list(cases()))
def test_an_error_names_the_field(running, path, fields, param, said):
    status, answer = running.post(path, BODIES[path] | fields)
    error = answer["error"]
    assert status == (404 if said == "model_not_found" else 400), error
    assert said == error.get("code") or said in error["message"], error
    assert len(json.dumps(answer)) < 2048
    if path == MESSAGES:
        assert error["type"] == "invalid_request_error" and answer["type"] == "error"
        assert "`stop`" not in error["message"]
    else:
        assert error["param"] == param, error
        assert error.keys() == {"message", "type", "param", "code"}
        assert path != RESPONSES or "`messages`" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": [HI[0] | {"options": 1}]}), (RESPONSES, {"input": "hi", "options": 1})],
)
def test_fields_of_other_servers_are_known_in_chats_alone(running, path, body):
    _, answer = running.post(path, body)
    assert answer["error"]["message"] == "there is no field 'options'"


def test_the_docs_list_the_fields_of_other_servers():
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    section = text.partition("### Fields of other servers")[2].partition("\n### ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert {path.rpartition(".")[2] for path in INSTEAD} <= named
