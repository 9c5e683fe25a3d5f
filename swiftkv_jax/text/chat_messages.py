"""Messages and tools in the one form that chat templates get, rendered by the server, by training
or by the commands. The forms that they come in are OpenAI's.

https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Type of a part of a content -> its field that holds the text."""
UNSUPPORTED = ("audio", "function_call")
"""Fields of a message that would be lost on the model."""
_OF_MESSAGE = (
    "role content name tool_call_id reasoning reasoning_content tool_calls refusal annotations "
    "audio function_call"
).split()
_OF_FUNCTION = ("name", "description", "parameters", "strict")


class MessageError(ValueError):
    """A message that cannot be rendered. The text of the error is the reason alone."""

    def __init__(self, number: int, field: str, reason: str, *, unsupported: bool = False):
        """`number` is that of the message, from 0; `field` the path in it, `content[0].type`;
        `unsupported` tells that the form is OpenAI's, and not one that this package renders."""
        super().__init__(reason)
        self.number = number
        self.field = field
        self.unsupported = unsupported


def normalize_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates get them: `normalize_message` of each. Raises `MessageError`."""
    return [normalize_message(message, number) for number, message in enumerate(messages)]


def normalize_message(message: Any, number: int) -> dict[str, Any]:
    """Message `number` of a conversation as chat templates get it.

    * `content` is a text: parts are joined, and null, which only an answer with calls, reasoning or
      a refusal may have, is the refusal or nothing;
    * arguments of calls are an object, also where they came as JSON text; a text that is no object
      stays as it is;
    * role `developer` is `system`; reasoning has both names that templates read, `reasoning` and
      `reasoning_content`;
    * a null is as if the field were not there. Fields that are not OpenAI's are passed on.

    The order of the fields is always the same, so that templates that write messages as JSON write
    the same text. Raises `MessageError`.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        reason = 'expected {"role": "...", "content": "..."}'
        raise MessageError(number, "role", reason)
    role = message["role"]
    for name in UNSUPPORTED:
        if message.get(name):
            raise MessageError(number, name, f"`{name}` is not supported", unsupported=True)
    reasoning = _reasoning(message, number)
    calls = message.get("tool_calls")
    content = _text(message.get("content"), number)
    if content is None:
        content = message.get("refusal") or ("" if calls or reasoning else None)
        if content is None or role != "assistant":
            raise MessageError(number, "content", f"a message of role {role!r} needs `content`")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            found[name] = message[name]
    if reasoning:
        found |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        found["tool_calls"] = _calls(calls, number)
    others = {name: value for name, value in message.items() if name not in _OF_MESSAGE}
    return found | {name: value for name, value in others.items() if value is not None}


def normalize_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Descriptions of tools as chat templates get them: OpenAI's objects, with their fields in one
    order and without those that are null; None where there are none. A function alone is wrapped.
    Raises `ValueError` of one line."""
    found = []
    for number, tool in enumerate(tools or ()):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'tool {number}: expected {{"type": "function", "function": {{"name": "..."}}}}'
            )
        order = [*_OF_FUNCTION, *(name for name in function if name not in _OF_FUNCTION)]
        fields = {name: function[name] for name in order if function.get(name) is not None}
        if function is tool:
            fields.pop("type", None)
        found.append({"type": "function", "function": fields})
    return found or None


def _text(content: Any, number: int) -> str | None:
    """The text of a content, or None for null. Raises `MessageError`."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        reason = f"`content` must be a text or a list of parts, not {type(content).__name__}"
        raise MessageError(number, "content", reason)
    return "".join(_text_of_part(part, number, at) for at, part in enumerate(content))


def _text_of_part(part: Any, number: int, at: int) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        reason = f'part {at} of `content`: expected {{"type": "text", "text": "..."}}'
        raise MessageError(number, f"content[{at}]", reason)
    name = TEXT_OF_PART.get(part["type"])
    if name is None:
        reason = f"a part of type {part['type']!r}: the model reads text alone"
        raise MessageError(number, f"content[{at}].type", reason, unsupported=True)
    if not isinstance(part.get(name), str):
        raise MessageError(number, f"content[{at}].{name}", f"`{name}` is missing")
    return part[name]


def _reasoning(message: Mapping[str, Any], number: int) -> str | None:
    """Return the reasoning that came before the content. Raises `MessageError`."""
    names = [name for name in ("reasoning", "reasoning_content") if message.get(name)]
    if not names:
        return None
    found = message[names[0]]
    if any(message[name] != found for name in names):
        raise MessageError(number, "reasoning", "`reasoning` and `reasoning_content` differ")
    if not isinstance(found, str):
        reason = f"`{names[0]}` must be a text, not {type(found).__name__}"
        raise MessageError(number, names[0], reason)
    if message["role"] != "assistant":
        reason = f"a message of role {message['role']!r} has no reasoning"
        raise MessageError(number, names[0], reason)
    return found


def _calls(calls: Any, number: int) -> list[dict[str, Any]]:
    """The calls of an answer as templates get them. Raises `MessageError`."""
    if not isinstance(calls, list | tuple):
        reason = f"`tool_calls` must be a list, not {type(calls).__name__}"
        raise MessageError(number, "tool_calls", reason)
    return [_call(call, number, at) for at, call in enumerate(calls)]


def _call(call: Any, number: int, at: int) -> dict[str, Any]:
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        reason = (
            f'call {at} of `tool_calls`: expected {{"type": "function", "function": '
            f'{{"name": "...", "arguments": ...}}}}'
        )
        raise MessageError(number, f"tool_calls[{at}].function", reason)
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _object(arguments)
    elif not isinstance(arguments, Mapping):
        reason = f"`arguments` of {function['name']!r} must be an object or JSON text"
        raise MessageError(number, f"tool_calls[{at}].function.arguments", reason)
    named = {"name": function["name"], "arguments": arguments}
    return {"type": "function", "function": named} | ({"id": call["id"]} if call.get("id") else {})


def _object(text: str) -> Any:
    """The object that JSON text spells; the text itself where it spells none, or one that cannot be
    written as JSON again (half a character, a number that is too large)."""
    try:
        found = json.loads(text or "{}")
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
