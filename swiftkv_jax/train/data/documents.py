"""Documents of training data, and the forms of a row that becomes one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ...text.chat_messages import MessageError, normalize_messages, normalize_tools
from . import sharegpt

FORMS = (
    '"text"; "messages"; "prompt" and "completion" or "response" (text, or lists of messages); '
    '"conversations" with "from" and "value", or "role" and "content"; "instruction", "input" and '
    '"output"'
)
COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "text",
    "response",
    "instruction",
    "output",
)
"""Fields that make a form. If a row has several forms, the first in this order counts."""
FURTHER_COLUMNS = ("tools", "system", "input", "history")
"""Fields that are read with them."""


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
    fields = {}
    if isinstance(row, dict):
        fields = {name: value for name, value in row.items() if value is not None}
    try:
        found = _document(fields, origin)
    except _Malformed as error:
        return Unreadable(origin, str(error))
    except MessageError as error:
        part = f", {error.field}" if "[" in error.field else ""
        return Unreadable(origin, f"message {error.number}{part}: {error}")
    if found is None:
        return Unreadable(origin, f"unknown form, found {_describe(row)}; accepted: {FORMS}")
    return found


def _document(fields: dict[str, Any], origin: str) -> Document | None:
    """The document in the fields of a row that are not null; None if they are of no form. Raises
    `_Malformed`, `MessageError`."""
    if "messages" in fields:
        return _chat(origin, _list(fields, "messages"), fields)
    if "conversations" in fields:
        return _chat(origin, _sharegpt(_list(fields, "conversations")), fields)
    if "prompt" in fields and "completion" in fields:
        return _prompt_and(fields, "completion", origin)
    if isinstance(fields.get("text"), str):
        return Document(origin, text=fields["text"])
    if "prompt" in fields and "response" in fields:
        return _prompt_and(fields, "response", origin)
    if "instruction" in fields and "output" in fields:
        return _instruction(fields, origin)
    return None


class _Malformed(ValueError):
    pass


def _prompt_and(fields: dict[str, Any], answer: str, origin: str) -> Document:
    prompt = fields["prompt"]
    completion = fields[answer]
    if _history(fields):
        raise _Malformed(f'"history" has no place beside "prompt" and "{answer}": use "messages"')
    if isinstance(prompt, str) and isinstance(completion, str):
        for name, value in (
            ("system", _system(fields, [])),
            ("tools", _tools(fields.get("tools"))),
        ):
            if value:
                raise _Malformed(
                    f'"{name}" has no place in a row of text, "prompt" and "{answer}": use '
                    f'"messages", or lists of messages'
                )
        return Document(origin, text=prompt + completion, given=len(prompt))
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat(origin, prompt + completion, fields, given=len(prompt))
    raise _Malformed(f'"prompt" and "{answer}" must both be text, or both lists of messages')


def _instruction(fields: dict[str, Any], origin: str) -> Document:
    """A question and its answer, as in Alpaca's data; `history` has those before them."""
    parts = [fields["instruction"], fields.get("input", "")]
    if not all(isinstance(part, str) for part in [*parts, fields["output"]]):
        raise _Malformed('"instruction", "input" and "output" must be text')
    question = {"role": "user", "content": "\n\n".join(filter(None, parts))}
    answer = {"role": "assistant", "content": fields["output"]}
    return _chat(origin, [*_history(fields), question, answer], fields)


def _history(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row's `history`, pairs of a question and its answer. Raises
    `_Malformed`."""
    pairs = fields.get("history") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and [type(one) for one in pair] == [str, str] for pair in pairs
    ):
        raise _Malformed('"history" must be a list of pairs [question, answer] of text')
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(roles, pair, strict=True)
    ]


def _chat(origin: str, messages: list[Any], fields: dict[str, Any], *, given: int = 0) -> Document:
    """A conversation as chat templates get it. Raises `_Malformed`, `MessageError`."""
    if system := _system(fields, messages):
        messages = [system, *messages]
        given = given and given + 1
    without_weight = {at for at, message in enumerate(messages) if _weight(at, message) == 0}
    return Document(
        origin,
        messages=normalize_messages(list(map(_without_weight, messages))),
        tools=_tools(fields.get("tools")),
        given=given,
        without_weight=frozenset(without_weight),
    )


def _without_weight(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if name != "weight"}


def _system(fields: dict[str, Any], messages: list[Any]) -> dict[str, Any] | None:
    """The message of a row's `system`, if the conversation has no such message of its own. Raises
    `_Malformed`."""
    text = fields.get("system")
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        raise _Malformed(f'"system" must be text, not {type(text).__name__}')
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") in ("system", "developer"):
        return None
    return {"role": "system", "content": text}


def _weight(number: int, message: Any) -> float | None:
    """The `weight` of a message, as in OpenAI's format for fine-tuning. Raises `_Malformed`."""
    if not isinstance(message, dict) or message.get("weight") is None:
        return None
    weight = message["weight"]
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


def _sharegpt(turns: list[Any]) -> list[Any]:
    try:
        return sharegpt.messages_of(turns)
    except ValueError as error:
        raise _Malformed(str(error)) from None


def _describe(row: Any) -> str:
    if isinstance(row, dict):
        return f"the fields {', '.join(row) or '(none)'}"
    return type(row).__name__
