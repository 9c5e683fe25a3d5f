"""Documents of training data, and the forms of a row that becomes one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ...chat_messages import MessageError, normalize_messages, normalize_tools

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
    without_weight: frozenset[int] = frozenset()
    """Numbers of the messages whose `weight` is 0, which are no targets either."""


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
            return _chat(origin, _list(fields, "messages"), fields)
        if "conversations" in fields:
            return _chat(origin, _sharegpt(fields["conversations"]), fields)
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
        return _chat(origin, prompt + completion, fields, given=len(prompt))
    raise _Malformed('"prompt" and "completion" must both be text, or both lists of messages')


def _chat(origin: str, messages: list[Any], fields: dict[str, Any], *, given: int = 0) -> Document:
    """A conversation as chat templates get it. Raises `_Malformed`."""
    without_weight = {at for at, message in enumerate(messages) if _weight(at, message) == 0}
    messages = [
        {name: value for name, value in message.items() if name != "weight"}
        if isinstance(message, dict)
        else message
        for message in messages
    ]
    try:
        return Document(
            origin,
            messages=normalize_messages(messages),
            tools=_tools(fields.get("tools")),
            given=given,
            without_weight=frozenset(without_weight),
        )
    except MessageError as error:
        raise _Malformed(f"message {error.number}: {error}") from None


def _weight(number: int, message: Any) -> float | None:
    """The `weight` of a message, as in OpenAI's format for fine-tuning. Raises `_Malformed`."""
    weight = message.get("weight") if isinstance(message, dict) else None
    if weight is None:
        return None
    if weight not in (0, 1):
        raise _Malformed(f"message {number}: `weight` must be 0 or 1, not {weight!r}")
    if weight and message.get("role") != "assistant":
        role = message.get("role")
        raise _Malformed(f"message {number}: `weight` 1 on role {role!r}: only answers are targets")
    return weight


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Descriptions of tools, which may be JSON text. Raises `_Malformed`."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value else value
        if isinstance(tools, list):  # columns of Arrow hold one text per tool where schemas differ
            tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
    except (ValueError, RecursionError):
        raise _Malformed('"tools" is text, and not valid JSON') from None
    if tools and not isinstance(tools, list):
        raise _Malformed(f'"tools" must be a list, not {type(tools).__name__}')
    try:
        return normalize_tools(tools or None)
    except ValueError as error:
        raise _Malformed(f'"tools": {error}') from None


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(fields[name], list):
        raise _Malformed(f'"{name}" must be a list')
    return fields[name]


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
        messages.append(
            {
                "role": _SHAREGPT_ROLES[turn["from"]],
                "content": turn["value"],
                "weight": turn.get("weight"),
            }
        )
    return messages


def _describe(row: Any) -> str:
    return (
        f"the fields {', '.join(row) or '(none)'}" if isinstance(row, dict) else type(row).__name__
    )
