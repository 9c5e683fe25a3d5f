"""The formats in which models call tools: which one a chat template asks for, and which of its
markers are tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

FORMATS: Mapping[str, tuple[str, ...]] = {
    "llama3_json": ("<|python_tag|>",),
    "hermes": ("<tool_call>", "</tool_call>"),
}
"""Formats, with vLLM's names -> their markers."""


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How one model calls tools."""

    name: str
    """One of `FORMATS`."""
    token_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Markers that are tokens of their own; the others are text."""

    @classmethod
    def of(cls, name: str, tokenizer: Any) -> ToolFormat:
        """A format as a tokenizer writes it."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        ids = {str(token): index for index, token in added.items()}
        return cls(name, {marker: ids[marker] for marker in FORMATS[name] if marker in ids})


def format_of(template: str) -> str | None:
    """The format that a chat template asks for; None if it takes no tools."""
    if "tools" not in template:
        return None
    return "hermes" if "<tool_call>" in template else "llama3_json"
