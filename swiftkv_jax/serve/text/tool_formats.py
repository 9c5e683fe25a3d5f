"""The formats in which models call tools: which one a chat template asks for, and which of its
markers are tokens."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

FORMATS: Mapping[str, tuple[str, ...]] = {
    "llama3_json": ("<|python_tag|>",),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}
"""Formats, with vLLM's names -> their markers."""
UNPARSED = "unparsed"
"""Name in place of a format: calls of the model are in another one, and come as text."""
_OTHER_FORMATS = re.compile(
    r"<[^<>\s'\"]*(?i:tool\S{0,2}calls?|function\S?calls?)[^<>]*>|\[TOOL_CALLS?\]|\[ARGS\]"
    r"|<function=|functools\[|<arg_key>|<invoke|<\|START_ACTION\|>|<\|channel\|>"
    r"|```tool_code|<\|plugin\|>|<\|tools_prefix\|>|\[\w+\(\w+="
)
"""Marks of calls in the templates of Mistral, DeepSeek, Granite 3, Phi-4, GLM-4.5, MiniMax, Kimi,
Command R, gpt-oss, Functionary, Gemma, InternLM and Apertus, and of calls in Python. Their calls
are no objects of a name and its arguments, or stand in a list."""
_JSON_FORM = re.compile(
    r"['\"](?:name|parameters|arguments)\\?['\"]\s*:"
    r"|(?:messages|tool_?calls?)['\"]?\]?(?:\[\w+\])?(?:\.function|\['function'\])?\s*\|\s*tojson"
    r"|(?i:answer|call|output|reply|respond|return|write)[^.{}%]{0,80}\bJSON\b"
)
"""A call as JSON, or the words that ask for one."""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """The way in which one model calls tools."""

    name: str
    """One of `FORMATS`, or `UNPARSED`."""
    token_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Markers that are tokens of their own; the others are text."""


def tool_format_of(parser: str, tokenizer: Any, template: str) -> ToolFormat | None:
    """The format in which the model of a chat template calls tools; None if it takes none. `parser`
    is the option of `ServerOptions`."""
    name = format_of(template)
    if name is None or parser == "none":
        return None
    if parser != "auto":
        name = parser
    if name == UNPARSED:
        logger.warning(
            "calls of tools come as text: the chat template asks for them in a format that is not "
            "parsed; `tool_call_parser` chooses one of %s",
            ", ".join(FORMATS),
        )
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {str(token): index for index, token in added.items()}
    markers = FORMATS.get(name, ())
    return ToolFormat(name, {marker: ids[marker] for marker in markers if marker in ids})


def format_of(template: str) -> str | None:
    """The format that a chat template asks for, or `UNPARSED`; None if it takes no tools."""
    template = _COMMENT.sub("", template)
    if "tools" not in template:
        return None
    if all(mark in template for mark in ("<tool_call>", "<function=", "<parameter=")):
        return "qwen3_coder"
    if "<tool_call>" in template and "<arg_key>" not in template:
        return "hermes"
    is_json = _JSON_FORM.search(template) and not _OTHER_FORMATS.search(template)
    return "llama3_json" if is_json else UNPARSED
