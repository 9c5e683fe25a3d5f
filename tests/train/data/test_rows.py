"""Forms of a row, what each becomes, and rows that are refused."""

import json

import pytest

from swiftkv_jax.train.data.documents import Document, Unreadable, parse_row
from tests.train.data.test_sources import calling

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "t", "messages": None}, Document("o", text="t")),
        (
            {"messages": [USER, ANSWER], "prompt": "ignored", "completion": "too"},
            Document("o", messages=[USER, ANSWER]),
        ),
        (
            {"messages": [USER | {"name": "n", "x": None}], "tools": [TOOL]},
            Document("o", messages=[USER | {"name": "n"}], tools=[TOOL]),
        ),
        ({"prompt": "q ", "completion": "a"}, Document("o", text="q a", given=2)),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
            Document("o", messages=[USER, ANSWER, USER, ANSWER], given=3),
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            Document("o", messages=[USER, ANSWER]),
        ),
        (
            {"conversations": [USER | {"from": None, "value": None}, ANSWER]},
            Document("o", messages=[USER, ANSWER]),
        ),
        (
            {
                "system": "s",
                "tools": json.dumps([TOOL]),
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"a": null}}'},
                    {"from": "observation", "value": "1"},
                    {"from": "function_call", "value": '[{"name": "f"}, {"name": "g"}]'},
                    {"from": "tool", "value": "2"},
                    {"from": "function_response", "value": "3"},
                    {"from": "gpt", "value": "a"},
                ],
            },
            Document(
                "o",
                messages=[
                    SYSTEM,
                    USER,
                    calling(a=None),
                    {"role": "tool", "content": "1"},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [CALL, {**CALL, "function": {"name": "g", "arguments": {}}}],
                    },
                    {"role": "tool", "content": "2"},
                    {"role": "tool", "content": "3"},
                    ANSWER,
                ],
                tools=[TOOL],
            ),
        ),
        ({"prompt": "q ", "response": "a"}, Document("o", text="q a", given=2)),
        (
            {"prompt": [USER], "response": [ANSWER]},
            Document("o", messages=[USER, ANSWER], given=1),
        ),
        (
            {"prompt": [USER], "response": [ANSWER], "system": "s"},
            Document("o", messages=[SYSTEM, USER, ANSWER], given=2),
        ),
        (
            {"instruction": "q", "input": "", "output": "a"},
            Document("o", messages=[USER, ANSWER]),
        ),
        ({"instruction": "q", "output": "a"}, Document("o", messages=[USER, ANSWER])),
        (
            {"instruction": "q", "input": "i", "output": "a", "system": "s"},
            Document("o", messages=[SYSTEM, USER | {"content": "q\n\ni"}, ANSWER]),
        ),
        (
            {"instruction": "q", "output": "a", "history": [["b", "c"], ["d", "e"]], "system": "s"},
            Document(
                "o",
                messages=[
                    SYSTEM,
                    *(
                        {"role": role, "content": text}
                        for role, text in zip(["user", "assistant"] * 3, "bcdeqa", strict=True)
                    ),
                ],
            ),
        ),
        (
            {"instruction": "q", "output": "a", "history": [], "system": ""},
            Document("o", messages=[USER, ANSWER]),
        ),
        (
            {"prompt": "q ", "response": "a", "history": [], "system": "", "tools": "[]"},
            Document("o", text="q a", given=2),
        ),
        (
            {"instruction": "q", "output": "a", "text": "q: a"},
            Document("o", text="q: a"),
        ),
        (
            {"messages": [SYSTEM, USER, ANSWER], "system": "other", "tools": [json.dumps(TOOL)]},
            Document("o", messages=[SYSTEM, USER, ANSWER], tools=[TOOL]),
        ),
        ({"messages": [USER, ANSWER], "tools": ""}, Document("o", messages=[USER, ANSWER])),
        ({"messages": [USER, ANSWER], "tools": "[]"}, Document("o", messages=[USER, ANSWER])),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
            Document("o", messages=[{"role": "assistant", "content": "", "tool_calls": [CALL]}]),
        ),
    ],
)
def test_row_forms(row, expected):
    assert parse_row(row, "o") == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"txt": "?"}, "unknown form, found the fields txt; accepted"),
        ({"text": 1}, "unknown form"),
        ([1, 2], "unknown form, found list"),
        ({"prompt": "a"}, "unknown form"),
        ({"prompt": "a", "completion": [ANSWER]}, "must both be text"),
        ({"messages": "hello"}, '"messages" must be a list'),
        ({"messages": [USER, {"content": "no role"}]}, "message 1: expected"),
        ({"messages": [{"role": "user"}]}, "message 0: a message of role 'user' needs `content`"),
        ({"conversations": {}}, '"conversations" must be a list'),
        (
            {"conversations": [{"from": "robot", "value": "x"}]},
            'turn 0 of "conversations": expected .*human',
        ),
        (
            {"conversations": [{"from": "function_call", "value": "f(1)"}]},
            'turn 0 of "conversations": a function_call must be JSON',
        ),
        ({"conversations": [{"from": "function_call", "value": "3"}]}, "message 0, .*: call 0 of"),
        ({"messages": [USER], "tools": "f(x)"}, '"tools" is text, and not valid JSON'),
        ({"messages": [USER], "tools": {"f": 1}}, '"tools" must be a list, not dict'),
        ({"messages": [USER], "tools": [3]}, '"tools": tool 0: expected'),
        ({"messages": [USER], "system": 3}, '"system" must be text, not int'),
        ({"instruction": 3, "output": "a"}, '"instruction", "input" and "output" must be text'),
        ({"instruction": "q", "response": "a"}, "unknown form, found the fields instruction, resp"),
        *(
            (
                {"prompt": "q", answer: "a", name: value},
                f'"{name}" has no place in a row of text, "prompt" and "{answer}": use "messages"',
            )
            for answer in ("completion", "response")
            for name, value in [("system", "s"), ("tools", [TOOL]), ("tools", json.dumps([TOOL]))]
        ),
        ({"prompt": "q", "response": "a", "system": 3}, '"system" must be text, not int'),
        (
            {"prompt": "q", "response": "a", "history": [["b", "c"]]},
            '"history" has no place beside "prompt" and "response": use "messages"',
        ),
        (
            {"prompt": [USER], "completion": [ANSWER], "history": [["b", "c"]]},
            '"history" has no place beside "prompt" and "completion": use "messages"',
        ),
        *(
            (
                {"instruction": "q", "output": "a", "history": history},
                '"history" must be a list of pairs',
            )
            for history in ("b", [["b"]], [["b", 1]], [["b", "c", "d"]], ["bc"])
        ),
        ({"prompt": "q", "response": [ANSWER]}, '"prompt" and "response" must both be text'),
        (
            {"messages": [USER | {"content": [{"type": "image"}]}]},
            r"message 0, content\[0\].type: a part of type 'image': the model reads text alone",
        ),
    ],
)
def test_malformed_rows(row, reason):
    found = parse_row(row, "o")
    assert isinstance(found, Unreadable)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found.reason)
