"""Documents of training data, and the forms of a row that becomes one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

FORMS = (
    '"text"; "messages"; "prompt" and "completion" (text, or lists of messages); '
    '"conversations" with "from" and "value"'
)
COLUMNS = ("messages", "conversations", "prompt", "completion", "text", "tools")
"""Fields that are read. If a row has several forms, the first in this order counts."""

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


@dataclasses.dataclass(frozen=True)
class Document:
    """One unit of text, or one conversation, before tokenisation."""

    origin: str
    """Place in the data: `file`, `file:line`, or `file:row N`, where N counts from 0 as in pyarrow
    and datasets."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    """Descriptions of tools, for the chat template."""
    given: int = 0
    """Number of leading characters of `text`, or of leading messages, that are context and no
    targets."""


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A row that cannot be trained on. Such rows are counted, and reported by their origin."""

    origin: str
    reason: str


def parse_json(line: bytes, origin: str) -> Document | Unreadable:
    """The document in one line of JSONL."""
    try:
        row = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        return Unreadable(origin, f"not valid JSON ({error.msg} at column {error.colno})")
    except RecursionError:
        return Unreadable(origin, "not valid JSON (nested too deeply)")
    except UnicodeDecodeError as error:
        return Unreadable(origin, f"not UTF-8 text ({error.reason} at byte {error.start})")
    return parse_row(row, origin)


def parse_row(row: Any, origin: str) -> Document | Unreadable:
    """The document in one row. Null fields count as absent, for Arrow cannot tell the two apart."""
    fields = (
        {name: value for name, value in row.items() if value is not None}
        if isinstance(row, dict)
        else {}
    )
    try:
        if "messages" in fields:
            return Document(
                origin, messages=_messages(fields["messages"]), tools=fields.get("tools")
            )
        if "conversations" in fields:
            return Document(
                origin, messages=_sharegpt(fields["conversations"]), tools=fields.get("tools")
            )
        if "prompt" in fields and "completion" in fields:
            return _prompt_and_completion(fields, origin)
        if isinstance(fields.get("text"), str):
            return Document(origin, text=fields["text"])
    except _Malformed as error:
        return Unreadable(origin, str(error))
    return Unreadable(origin, f"unknown form, found {_describe(row)}; accepted: {FORMS}")


class _Malformed(ValueError):
    pass


def _prompt_and_completion(fields: dict[str, Any], origin: str) -> Document:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Document(origin, text=prompt + completion, given=len(prompt))
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = _messages(prompt) + _messages(completion)
        return Document(origin, messages=messages, tools=fields.get("tools"), given=len(prompt))
    raise _Malformed('"prompt" and "completion" must both be text, or both lists of messages')


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages for a chat template: role, content, and whatever else they carry."""
    if not isinstance(value, list):
        raise _Malformed('"messages" must be a list')
    return [_message(number, message) for number, message in enumerate(value)]


def _message(number: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _Malformed(f'message {number}: expected {{"role": "...", "content": "..."}}')
    message = {name: part for name, part in value.items() if part is not None}
    content = message.setdefault("content", None)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise _Malformed(f'message {number}: "content" must be text, or null beside "tool_calls"')
    return message


def _sharegpt(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _Malformed('"conversations" must be a list')
    messages = []
    for number, turn in enumerate(value):
        if (
            not isinstance(turn, dict)
            or turn.get("from") not in _SHAREGPT_ROLES
            or not isinstance(turn.get("value"), str)
        ):
            roles = "|".join(_SHAREGPT_ROLES)
            raise _Malformed(
                f'turn {number} of "conversations": expected {{"from": "{roles}", "value": "..."}}'
            )
        messages.append({"role": _SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return messages


def _describe(row: Any) -> str:
    return (
        f"the fields {', '.join(row) or '(none)'}" if isinstance(row, dict) else type(row).__name__
    )
