"""Grammars of forced calls of tools, in Lark as llguidance extends it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...infer.structured.structured_outputs import json_options
from ..text.tool_formats import ToolFormat

BREAK = r"/\n?/"
"""A line break or none."""


def calls_grammar(schemas: Mapping[str, Any], tool_format: ToolFormat, *, single: bool) -> str:
    """A grammar of one call, or of several. `schemas` has those of the arguments, by the names of
    the functions."""
    rules = [f"call: {' | '.join(f'call{number}' for number in range(len(schemas)))}"]
    for number, (name, schema) in enumerate(schemas.items()):
        key = "parameters" if tool_format.name == "llama3_json" else "arguments"
        begin = json.dumps(f'{{"name": "{name}", "{key}": ')
        call = f'{begin} arguments{number} "}}"'
        if tool_format.name == "hermes":
            opened, closed = (
                marker_of(one, tool_format) for one in ("<tool_call>", "</tool_call>")
            )
            call = f"{opened} {BREAK} {call} {BREAK} {closed}"
        rules += [f"call{number}: {call}", f"arguments{number}: %json {json_options(schema)}"]
    if tool_format.name == "hermes":
        begin, between = "", BREAK
    else:
        tag = tool_format.token_ids.get("<|python_tag|>")
        begin, between = "" if tag is None else f"<[{tag}]>?", '"; "'
    start = f"start: {begin} call" if single else f"start: {begin} call ({between} call)*"
    return "\n".join([start, *rules])


def marker_of(marker: str, tool_format: ToolFormat) -> str:
    """A marker as its token, or as text: a token is no text to llguidance, nor the reverse."""
    token = tool_format.token_ids.get(marker)
    return json.dumps(marker) if token is None else f"<[{token}]>"
