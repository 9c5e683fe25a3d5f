"""The parser of calls: one text gives one answer, however it is cut."""

import json
import random

import pytest

from swiftkv_jax.serve.text.call_parser import CallParser
from swiftkv_jax.serve.text.tool_calls import ToolCallParser

NAMES = {"get_weather", "f", "send-mail_2"}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'


def parse(text: str, size: int = 1, format: str = "llama3_json", **options):
    """(content, [(name, arguments)]) of a text that comes in parts of `size`."""
    return read(ToolCallParser(NAMES, format, **options), text, size)


def read(parser: CallParser, text: str, size: int, *, is_cut: bool = False):
    """(content, [(name, arguments)]) that a parser finds in a text in parts of `size`."""
    parts = [one for at in range(0, len(text), size) for one in parser.push(text[at : at + size])]
    content, calls = "", []
    for part in parts + parser.finish(is_cut=is_cut):
        if isinstance(part, str):
            content += part
        elif part.name is not None:
            assert part.index == len(calls) and part.id and not part.arguments
            calls.append([part.name, ""])
        else:
            assert part.index == len(calls) - 1 and part.id is None
            calls[-1][1] += part.arguments
    assert parser.num_calls == len(calls)
    return content, [tuple(call) for call in calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": "x}\\"{"}}', "", [("f", '{"a": "x}\\"{"}')]),
        ('<|python_tag|>{"name":"f","arguments":{}}', "", [("f", "{}")]),
        (
            '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"b": [{}]}}\n',
            "",
            [("f", "{}"), ("get_weather", '{"b": [{}]}')],
        ),
        ('Let me look.\n\n{"name": "f", "parameters": {}}', "Let me look.", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}\nDone.', "\nDone.", [("f", "{}")]),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('{"parameters": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        ('{"name": "f", "parameters": {}, "id": "}"} x', " x", [("f", "{}")]),
        ('{"name": "f", "type": "function", "id": "1"}', "", [("f", "{}")]),
        ('{"name": "f", "arguments": null}', "", [("f", "{}")]),
        ('{"name": "f", "parameters": ""}', "", [("f", "{}")]),
        *(
            (f'{{"name": "f", "arguments": {none}}}', "", [("f", "{}")])
            for none in ('"null"', '" "', "[]", '"[]"', '"{}"')
        ),
        ('[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
        ('See: [{"name": "f"},\n{"name": "f", "arguments": {}} ]\n', "See:", [("f", "{}")] * 2),
        ('[{"name": "f", "arguments": {}}] and [1]', " and [1]", [("f", "{}")]),
        ('{"name": "f", "arguments": {}}]', "]", [("f", "{}")]),
        ("[1, [{}], [",) * 2 + ([],),
        ('[{"name": "other", "arguments": {}}]',) * 2 + ([],),
        ('{"name": "f", "arguments": 0}',) * 2 + ([],),
        (
            '{"type": "f", "name": "f", "parameters": {"x": "\\ud800"}}',
            "",
            [("f", '{"x": "\\ud800"}')],
        ),
        ('{"name": "f", "parameters": "{\\"a\\": 2}"}', "", [("f", '{"a": 2}')]),
        ('{"name": "f", "parameters": {"a": 1}', "", [("f", '{"a": 1}')]),  # cut, or forgotten
        ('{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')]),
        (
            '{"name": "f", "parameters": {}} First: hello, {"name": "f", "parameters": {}}',
            " First: hello,",
            [("f", "{}"), ("f", "{}")],
        ),
        ('{\n}\n{"name": "f", "parameters": {}}', "{\n}", [("f", "{}")]),
        ('a { b\n{"name": "f", "parameters": {}}', "a { b", [("f", "{}")]),
        ("{" + '"name":' + " " * 520 + '"f", "parameters": {}}',) * 2 + ([],),
        (" " * 2000 + '{"name": "f", "parameters": {}}', " " * 2000, [("f", "{}")]),
        # Not calls.
        ('{"people": [{"name": "f"}]}', '{"people": [{"name": "f"}]}', []),
        ('{"a": {"name": "f", "parameters": {}}}',) * 2 + ([],),
        ('{"name": "f", "description": "x", "type": "object"}',) * 2 + ([],),
        ('{"type": "f", "name": "f", "parameters": {"x": NaN}}',) * 2 + ([],),
        ('{"type": "f", "name": "f", "parameters": {"x": 1e999}}',) * 2 + ([],),
        ('{"name": "f", "param', '{"name": "f", "param', []),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        ('A set {1, 2} and {"a": {"b": 2}} ; ok', 'A set {1, 2} and {"a": {"b": 2}} ; ok', []),
        ('{"parameters": {"a" 1}, "name": "f"}', '{"parameters": {"a" 1}, "name": "f"}', []),
        ('{"name": "f", "parameters": [1]}', '{"name": "f", "parameters": [1]}', []),
        ("  \n<|python", "  \n<|python", []),
        ("a; b, c <", "a; b, c <", []),
        ("", "", []),
    ],
)
def test_llama3_json(text, content, calls):
    for size in (1, 2, 3, 5, 8, 64, 1000):
        assert parse(text, size) == (content, calls), size


CALL, CODE = '{"name": "f", "arguments": {}}', "```python\nx = 1\n```"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"```json\n{CALL}\n```", "", 1),
        (f"```\n{CALL}\n```\n", "", 1),
        (f"```tool_call\n{CALL}", "", 1),  # as Qwen2.5-Coder-0.5B ends it
        (f"I look.\n```json\n{CALL}\n```\nAnd so on", "I look.\nAnd so on", 1),
        (f"```json\n{CALL}\n```\n```json\n{CALL}\n```", "", 2),
        (f"```json\n[{CALL},\n{CALL}]\n```", "", 2),
        (f"```json\n{CALL}\n```\n\n{CODE}", "\n\n" + CODE, 1),
        (f"{CALL}\n{CODE}", "\n" + CODE, 1),
        (f"{CODE}\n{CALL}", CODE, 1),  # the fence closes a block of content
        (f"{CODE}\n```json\n{CALL}\n```", CODE, 1),
        (CODE, CODE, 0),
        ('```json\n{"a": 1}\n```',) * 2 + (0,),
        ('```json\n{"name": "other", "arguments": {}}\n```',) * 2 + (0,),
        ("What is ```js",) * 2 + (0,),
        ("`f` and ``g``",) * 2 + (0,),
    ],
)
@pytest.mark.parametrize("format", ["llama3_json", "hermes"])
def test_calls_in_blocks_of_code(text, content, calls, format):
    for size in (1, 2, 3, 5, 8, 64, 1000):
        assert parse(text, size, format) == (content, [("f", "{}")] * calls), size


def test_hermes():
    calls = [("f", '{"a": [1, "}"]}')]
    for size in (1, 2, 5, 8, 64, 1000):
        assert parse(HERMES, size, "hermes") == ("", calls)
        assert parse(f"Yes.\n{HERMES}\n{HERMES}", size, "hermes") == ("Yes.", calls * 2)
        assert parse(f"{HERMES} and so on", size, "hermes") == (" and so on", calls)
        listed = '<tool_call>\n[{"name": "f", "arguments": {}}]\n</tool_call>'
        assert parse(listed, size, "hermes") == ("", [("f", "{}")])
        assert parse(listed + " so", size, "hermes") == (" so", [("f", "{}")])
        assert parse("<tool_call> is a tag", size, "hermes") == ("<tool_call> is a tag", [])


def test_only_one():
    text = '{"name": "f", "parameters": {"a": 1}} and {"name": "f", "parameters": {}}'
    for size in (1, 8, 100):
        assert parse(text, size, single=True) == ("", [("f", '{"a": 1}')])


def test_random_texts_do_not_depend_on_how_they_come():
    """400 texts of calls, prose and broken calls."""
    rng = random.Random(0)
    parts = [
        '{"name": "f", "parameters": {"text": "a \\\\ \\" } {", "n": [1, {"x": null}]}}',
        '{"name": "get_weather", "arguments": {}}',
        '{"name": "send-mail_2", "parameters": {"é": "ü😀"}, "type": "function"}',
        '{"name": "unknown", "parameters": {}}',
        '{"name": "f", "parameters": ',
        '{"arguments": {"q": 1}, "name": "f"}',
        '{"type": "f"}',
        "<|python_tag|>",
        "Some words; and more, {of them}. ",
        "\n\n",
        "; ",
        "[",
        "]",
        "}",
        '"',
    ]
    calls = 0
    for _ in range(400):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 7)))
        whole = parse(text, 10**6)
        calls += len(whole[1])
        for size in (1, 2, 5, 8, 64):
            assert parse(text, size) == whole, text
        complete = parse(text + "}" * 9, 3)[1] if whole[1] else []
        for name, arguments in complete[:-1]:
            assert name in NAMES and isinstance(json.loads(arguments), dict), text
    assert calls > 100


@pytest.mark.parametrize(
    ("format", "key", "between"),
    [("llama3_json", "parameters", "; "), ("hermes", "arguments", "\n")],
)
def test_a_forced_call_that_is_cut_short_is_no_content(format, key, between):
    """Wherever the answer ends, and however it comes."""
    call = f'{{"name": "get_weather", "{key}": {{"city": "Rome"}}}}'
    if format == "hermes":
        call = f"<tool_call>\n{call}\n</tool_call>"
    text = call + between + call
    for end in range(1, len(text) + 1):
        for size in (1, 8, 10**6):
            content, calls = parse(text[:end], size, format, forced=True)
            assert content == "" and len(calls) <= 2, text[:end]
    assert len(parse(text, 8, format, forced=True)[1]) == 2


def test_held_text_is_bounded():
    """Spaces, quotes and braces for ever cost a bounded time and come out in the end."""
    for text in (" " * 5000, '{"name' + " " * 5000, '{"' * 3000, '{"name": "' + "f" * 5000):
        assert parse(text, 1) == (text, [])
        parser = ToolCallParser(NAMES, "llama3_json")
        held = 0
        for sign in text:
            parser.push(sign)
            held = max(held, len(parser._text))
        assert held <= 1100
