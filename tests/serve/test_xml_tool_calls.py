"""Calls in Qwen3-Coder's form: one text gives one answer, however it is cut; forced calls are read
back as their schemas say."""

import json
import random
import re

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.serve.bodies.call_grammars import calls_grammar
from swiftkv_jax.serve.text.tool_formats import ToolFormat, tool_format_of
from swiftkv_jax.serve.text.xml_tool_calls import XMLToolCallParser
from tests.infer.test_grammar_tokenizer import byte_level, made, walk
from tests.serve.conftest import TEMPLATE, make_tokenizer
from tests.serve.parts import said
from tests.serve.test_forms import CHAT, ROOM, chat
from tests.serve.test_tool_calls import read

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"type": ["string", "null"]},
        "where": {"$ref": "#/$defs/place"},
        "list": {"anyOf": [{"type": "array", "items": {}}, {"type": "null"}]},
        "unit": {"enum": ["C", "1", 1, None, True]},
        "any": {},
    },
    "$defs": {"place": {"type": "object"}},
}
SCHEMAS = {"f": SCHEMA, "now": {"type": "object", "properties": {}}}


def call(name: str = "f", **arguments: str) -> str:
    written = "".join(
        f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def parse(text: str, size: int = 1, *, is_cut: bool = False, **options):
    """(content, [(name, arguments)]) of a text that comes in parts of `size`."""
    return read(XMLToolCallParser(SCHEMAS, **options), text, size, is_cut=is_cut)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", ' a "b"\n  \\c\n', ' a "b"\n  \\c\n'),
        ("text", "<function=f> </parameter </tool_call>", "<function=f> </parameter </tool_call>"),
        ("text", "é😀\t", "é😀\t"),
        ("count", "5", 5),
        ("count", " -12 ", -12),
        ("count", "9007199254740993", 9007199254740993),
        ("count", "5.5", "5.5"),
        ("count", "five", "five"),
        ("count", "05", "05"),
        ("ratio", "1e-3", 1e-3),
        ("ratio", "7", 7),
        ("ratio", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "yes", "yes"),
        ("maybe", "None", None),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("where", '{"x": [1, 2.50]}', {"x": [1, 2.5]}),
        ("where", "[1]", "[1]"),
        ("where", '{"<parameter=x>": "\\"</parameter></function></tool_call>"}')
        + ({"<parameter=x>": '"</parameter></function></tool_call>'},),
        ("where", '{"x": "5}', '{"x": "5}'),
        ("where", "{'x': 1}", "{'x': 1}"),
        ("where", '{"x": NaN}', '{"x": NaN}'),
        ("list", "[1,\n 2]", [1, 2]),
        ("list", "null", None),
        ("unit", "1", "1"),
        ("unit", "None", None),
        ("unit", "true", True),
        ("any", "[1]", "[1]"),
        ("undeclared", "5", "5"),
    ],
)
def test_arguments_have_their_declared_types(name, text, value):
    """What is not of its type stays the text that it is."""
    for size in (1, 3, 10**6):
        content, ((_, arguments),) = parse(call(**{name: text}), size)
        assert content == "" and json.loads(arguments) == {name: value}
        assert type(json.loads(arguments)[name]) is type(value)


CALL = call(text="a\nb", count="2")
WRITTEN = ("f", '{"text": "a\\nb", "count": 2}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [WRITTEN]),
        (call("now"), "", [("now", "{}")]),
        (f"Let me look.\n\n{CALL}\n{CALL}\n", "Let me look.", [WRITTEN] * 2),
        (f"{CALL} and so on", " and so on", [WRITTEN]),
        (f"{CALL} then {call('now')}", " then", [WRITTEN, ("now", "{}")]),
        (CALL.replace("<tool_call>\n", "").replace("\n</tool_call>", ""), "", [WRITTEN]),
        (CALL.replace("\n</function>", "").replace("</tool_call>", ""), "", [WRITTEN]),
        (CALL.removesuffix("</parameter>\n</function>\n</tool_call>"), "", [WRITTEN]),
        ("<function=now></function>", "", [("now", "{}")]),
        (" " * 2000 + CALL, " " * 2000, [WRITTEN]),
        # Without `</parameter>`; one that comes again.
        (CALL.replace("\n</parameter>", ""), "", [WRITTEN]),
        (CALL.replace("\n</parameter>", "") + CALL, "", [WRITTEN] * 2),
        (CALL.replace("\n</parameter>\n</function>\n</tool_call>", "</function> "), "", [WRITTEN]),
        (
            "<function=f>\n<parameter=text>\n<parameter=count>\n2\n</function>\n</tool_call>",
            "",
            [("f", '{"text": "", "count": 2}')],
        ),
        *(
            (call(text=text), "", [("f", json.dumps({"text": text}))])
            for text in (
                "a\n<parameter=text>\nb",
                "a\n<parameter=other>\nb",
                "a <parameter=count>\n\nb",
                "a\n</function>\nb",
                "a</function>" + "\n" * 100 + "</tool_call>b",
            )
        ),
        (
            CALL.replace("</function>", "<parameter=text>\nb\n</parameter>\n</function>"),
            "",
            [WRITTEN],
        ),
        # Not calls.
        (call("other"),) * 2 + ([],),
        ("<tool_call> is a tag, <function=f> too, <function",) * 2 + ([],),
        ("<tool_call>\n{}",) * 2 + ([],),
        ("a < b\n<tool_",) * 2 + ([],),
        ("<function=" + "f" * 100 + "></function>",) * 2 + ([],),
        ("", "", []),
    ],
)
def test_texts(text, content, calls):
    for size in (1, 2, 3, 5, 8, 64, 10**6):
        assert parse(text, size) == (content, calls), size


def test_an_answer_that_is_cut_is_not_made_whole():
    for end in range(len(CALL)):
        results = {str(parse(CALL[:end], size, is_cut=True)) for size in (1, 7, 10**6)}
        assert len(results) == 1
        _, calls = parse(CALL[:end], is_cut=True)
        if calls and end <= CALL.index("</function>"):
            with pytest.raises(ValueError):
                json.loads(calls[0][1])
        forced = parse(CALL[:end], is_cut=True, forced=True)
        assert forced[0] == ""
    assert parse(f"{CALL} and {CALL}", single=True) == ("", [WRITTEN])


def test_random_texts_do_not_depend_on_how_they_come():
    rng = random.Random(0)
    parts = [CALL, call("now"), call("other"), "<tool_call>", "</tool_call>", "<function=f>", "\n"]
    parts += ["<parameter=text>", "</parameter>", "</function>", " a < b", "\n\n", "<", ">", "5"]
    parts += ["\n<parameter=count>\n", "\n<parameter=where>\n", '{"a": "', "\\", '"}']
    calls = 0
    for _ in range(600):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 8)))
        expected = parse(text, 10**6)
        calls += len(expected[1])
        for size in (1, 2, 5, 8, 64):
            assert parse(text, size) == expected, text
        for _, arguments in expected[1]:
            pairs = json.loads(arguments, object_pairs_hook=list)
            assert len(pairs) == len(dict(pairs))
    assert calls > 100


def test_little_text_is_held():
    """However long an argument is, a part costs what is new."""
    text = call(list="[" + "1, " * 3000 + "1]", text="<" * 3000 + "\n" * 3000)
    parser = XMLToolCallParser(SCHEMAS)
    for sign in text:
        parser.push(sign)
        assert len(parser._text) < 64
    assert parser.num_calls == 1 and not parser.is_within_call


# Forced calls -------------------------------------------------------------------------

FORCED = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "days": {"type": "integer", "minimum": 0, "maximum": 40},
        "flag": {"type": "boolean"},
        "unit": {"enum": ["C", "a\nb", 3, None]},
        "where": {"$ref": "#/$defs/place"},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "list": {"type": "array", "items": {"const": "x"}, "maxItems": 2},
    },
    "required": ["code", "days", "where"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "maximum": 5, "minimum": -5}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def check(found: dict) -> None:
    assert {"code", "days", "where"} <= set(found) <= set(FORCED["properties"])
    assert len(found["code"]) == 2 and set(found["code"]) <= set("abc")
    assert type(found["days"]) is int and 0 <= found["days"] <= 40
    assert set(found["where"]) == {"x"} and -5 <= found["where"]["x"] <= 5
    assert 1 <= len(found.get("name", "a")) <= 4 and isinstance(found.get("name", ""), str)
    assert type(found.get("flag", True)) is bool
    assert found.get("unit") in ("C", "a\nb", 3, None)
    assert found.get("maybe") is None or len(found["maybe"]) <= 3
    assert found.get("list", []) in ([], ["x"], ["x", "x"])


def test_forced_calls_are_read_back_as_their_schemas_say():
    model = made(byte_level())
    for tokenizer in (model[0], None):
        form = tool_format_of("qwen3_coder", tokenizer, "tools")
        assert form is not None
        lark = calls_grammar({"f": FORCED}, form, single=True)
        for seed in range(15):
            text, _ = walk(model, lark, seed)
            parser = XMLToolCallParser({"f": FORCED}, forced=True)
            parts = parser.push(text) + parser.finish(is_cut=False)
            written = "".join(str(getattr(part, "arguments", part)) for part in parts)
            check(json.loads(written))


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^(a|b)c$", {"ac", "bc"}),
        ("^(?:a|(b|c))$", {"a", "b", "c"}),
        ("^[a|]$", {"a", "|"}),
        (r"^(a\)|b)$", {"a)", "b"}),
        (r"^a\|b$", {"a|b"}),
    ],
)
def test_patterns_with_alternatives(pattern, texts):
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    lark = calls_grammar({"f": schema}, ToolFormat("qwen3_coder"), single=True)
    model = made(byte_level())
    found = {walk(model, lark, seed)[0] for seed in range(12)}
    assert found <= {call(a=text) for text in texts} and found


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"anyOf": [{"properties": {}}]}, "`properties`"),
        ({"properties": {"a>b": {}}}, "'a>b'"),
        ({"properties": {"a": {"const": "</parameter>"}}}, "</parameter>"),
        ({"properties": {"a": {"enum": [{"b": "</parameter>"}]}}}, "</parameter>"),
        ({"properties": {"a": {"const": "b\n<parameter=c>"}}}, "<parameter="),
        ({"properties": {"a": {"const": "</function>\n</tool_call>"}}}, "</function>"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "^(a|b)$"),
        ({"properties": {"a": {"type": "string", "pattern": "^(a)|((b))$"}}}, "^(a|b)$"),
        ({"additionalProperties": {"type": "integer"}, "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "maxProperties"),
    ],
)
def test_what_has_no_such_form_is_refused(schema, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        calls_grammar({"f": schema}, ToolFormat("qwen3_coder"), single=True)


def test_a_server(start, says):
    form = "<tool_call>\n<function=x>\n<parameter=y>"
    template = TEMPLATE + "{% if false %}" + form + "{% endif %}"
    tokenizer = make_tokenizer("<tool_call>", "</tool_call>", template=template)
    running = start(engine=ROOM, tokenizer=tokenizer)
    tool = {"type": "function", "function": {"name": "f", "parameters": FORCED}}
    says("Yes.\n" + call(code="ab", days="7", where='{"x":1}'), tokenizer)
    body = chat(tools=[tool], max_tokens=400)
    (one,) = running.checked(CHAT, body)["choices"]
    content, _, ((name, arguments),) = said([one["message"]])
    assert (content, name, one["finish_reason"]) == ("Yes.", "f", "tool_calls")
    assert json.loads(arguments) == {"code": "ab", "days": 7, "where": {"x": 1}}
    says(call(code="ab", days="7", where='{"x":1}'), tokenizer)
    (one,) = running.checked(CHAT, body | {"tool_choice": "required"})["choices"]
    assert said([one["message"]]) == ("", "", [["f", arguments]])
    assert one["finish_reason"] == "tool_calls"
