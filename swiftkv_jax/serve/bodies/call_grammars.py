"""Grammars of forced calls of tools, in Lark as llguidance extends it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from ...infer.structured.structured_outputs import json_options
from ..text.tool_formats import ToolFormat
from ..text.xml_arguments import argument_schema, literals_of, resolved, types_of
from ..text.xml_tool_calls import CLOSE, FUNCTION, FUNCTION_END, OPEN, PARAMETER, PARAMETER_END

BREAK = r"/\n?/"
"""A line break or none."""
_NO_END = (
    r"~/(?s:.*)(<\/parameter>|<\/function>[ \t\r\n]*<\/tool_call>|\n<parameter=)(?s:.*)/"
    r" & ~/<parameter=(?s:.*)/"
)
"""No text with tags that end it."""
_ENDED = re.compile(r"</parameter>|</function>\s*</tool_call>|(?:^|\n)<parameter=")
_NO_JSON = r" & ~/\s*([\[{](?s:.*)|null\s*|None\s*)/"
"""No text that would be read as something else where an argument may be that too."""
_END = json.dumps(f"\n{PARAMETER_END}\n")
_ARGUMENTS = {"llama3_json": "parameters"}
"""Key of the arguments in formats where it is another than `arguments`."""


def calls_grammar(schemas: Mapping[str, Any], tool_format: ToolFormat, *, single: bool) -> str:
    """A grammar of one call, or of several. `schemas` has those of the arguments, by the names of
    the functions. Raises `UsageError` for schemas that the format cannot follow."""
    if tool_format.name == "qwen3_coder":
        return _xml_calls_grammar(schemas, tool_format, single=single)
    rules = [f"call: {' | '.join(f'call{number}' for number in range(len(schemas)))}"]
    for number, (name, schema) in enumerate(schemas.items()):
        key = _ARGUMENTS.get(tool_format.name, "arguments")
        begin = json.dumps(f'{{"name": "{name}", "{key}": ')
        call = f'{begin} arguments{number} "}}"'
        if tool_format.name == "hermes":
            opened, closed = (_marker(one, tool_format) for one in ("<tool_call>", "</tool_call>"))
            call = f"{opened} {BREAK} {call} {BREAK} {closed}"
        rules += [f"call{number}: {call}", f"arguments{number}: %json {json_options(schema)}"]
    if tool_format.name == "hermes":
        return "\n".join([_start(BREAK, single=single), *rules])
    start = _start('"; "', single=single)
    if (tag := tool_format.token_ids.get("<|python_tag|>")) is not None:
        start = start.replace("start:", f"start: <[{tag}]>?")
    return "\n".join([start, *rules])


def _start(between: str, *, single: bool) -> str:
    """The rule of all calls."""
    if single:
        return "start: call"
    return f"start: call ({between} call)*"


def _marker(marker: str, tool_format: ToolFormat) -> str:
    """A marker as its token, or as text: a token is no text to llguidance, nor the reverse."""
    token = tool_format.token_ids.get(marker)
    return json.dumps(marker) if token is None else f"<[{token}]>"


# In the form of Qwen3-Coder --------------------------------------------------------


def _xml_calls_grammar(schemas: Mapping[str, Any], tool_format: ToolFormat, *, single: bool) -> str:
    """A grammar of one call, or of several, whose arguments come in the order of the schema. Raises
    `UsageError` for schemas that are not of named parameters."""
    rules = [f"call: {' | '.join(f'call{number}' for number in range(len(schemas)))}"]
    opened = _marker(OPEN, tool_format)
    closed = _marker(CLOSE, tool_format)
    for number, (name, schema) in enumerate(schemas.items()):
        call = [opened, json.dumps(f"\n{FUNCTION}{name}>\n")]
        for argument, is_required in _arguments(name, schema):
            rule = f"argument{number}_{len(call)}"
            begin = json.dumps(f"{PARAMETER}{argument}>\n", ensure_ascii=False)
            rules += _value(rule, begin, argument_schema(schema, argument), schema)
            call.append(rule if is_required else f"{rule}?")
        call += [json.dumps(f"{FUNCTION_END}\n"), closed]
        rules.append(f"call{number}: {' '.join(call)}")
    return "\n".join([_start('"\\n"', single=single), *rules])


def _arguments(function: str, schema: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """(name, whether it is required) of the arguments of a function."""
    top = resolved(schema, schema)
    found = top.get("properties", {})
    required = top.get("required", [])
    if not isinstance(found, Mapping) or any(one in top for one in ("anyOf", "oneOf", "allOf")):
        raise UsageError(
            f"calls of {function!r} cannot be forced in this model's format: its `parameters` must "
            "be `properties`, not anyOf, oneOf or allOf"
        )
    names = [*found, *(name for name in required if name not in found)]
    if top.get("minProperties", 0) > len(required) or top.get("maxProperties", 64) < len(names):
        raise UsageError(
            f"calls of {function!r} cannot be forced in this model's format: the `minProperties` "
            "and `maxProperties` of its `parameters` cannot be followed; name them in `properties` "
            "and `required`"
        )
    for name in names:
        if not name or re.search(r"[<>\n]", name):
            raise UsageError(f"the parameter {name!r} cannot be written in this model's format")
    return [(name, name in required) for name in names]


def _value(rule: str, begin: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
    """Rules of an argument, its tags included."""
    terminal = rule.upper()
    if (values := literals_of(schema)) is not None:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        for found in filter(None, map(_ENDED.search, texts)):
            raise UsageError(
                f"a text with {found[0].strip()} cannot be written in this model's format"
            )
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return [f"{rule}: {begin} ({options}) {_END}"]
    types = types_of(schema, root)
    if types and "string" not in types:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        found = json_options({**definitions, **schema})
        return [f"{rule}: {begin} %json {found} {_END}"]
    text = _text(_text_schema(schema, root)) + (_NO_JSON if types - {"string"} else "")
    return [
        f"{rule}: {begin} {terminal}",
        f"{terminal}: ({terminal}_TEXT) {_END}",
        f"{terminal}_TEXT: {text}",
    ]


def _text_schema(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The constraints of a schema on a text."""
    for keyword in ("anyOf", "oneOf"):
        for option in schema.get(keyword) or ():
            found = resolved(option, root)
            if "string" in types_of(found, root):
                return found
    return schema


def _text(schema: Mapping[str, Any]) -> str:
    """The expression of a text that a schema allows."""
    from llguidance import regex_to_lark  # type: ignore[attr-defined]

    least = schema.get("minLength", 0)
    most = schema.get("maxLength", "")
    if type(least) is not int or (most != "" and type(most) is not int):
        raise UsageError("`minLength` and `maxLength` in a schema must be whole numbers")
    length = f".{{{least},{most}}}" if least or most != "" else ".*"
    found = f"/(?s:{length})/ & {_NO_END}"
    if (pattern := schema.get("pattern")) is None:
        return found
    body = str(pattern).removeprefix("^")
    before = after = "(?s:.*)"
    if str(pattern).startswith("^"):
        before = ""
    if body.endswith("$") and not body.endswith(r"\$"):
        body = body[:-1]
        after = ""
    if re.search(r"(?<!\\)(?:\\\\)*[\^$](?![^\[]*\])", body) or (
        body != pattern and _has_alternatives(body)
    ):
        raise UsageError(
            f"the pattern {pattern!r} cannot be followed in this model's format: ^ and $ may only "
            "stand at its ends, with alternatives in a group, as in ^(a|b)$"
        )
    return f"{found} & /{before}(?:{regex_to_lark(body, 'dw')}){after}/"


def _has_alternatives(pattern: str) -> bool:
    """Return whether a `|` stands outside of all groups."""
    rest = ""
    inner = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)
    while rest != inner:
        rest = inner
        inner = re.sub(r"\([^()]*\)", "", inner)
    return "|" in rest
