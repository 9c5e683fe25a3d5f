"""Conversations of ShareGPT's form: turns with `from` and `value`, as messages of OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
"""Role of a message, by the `from` of its turn. A `function_call` is JSON text of a call, or of a
list of calls; what it returned has several names."""


def messages_of(turns: list[Any]) -> list[Any]:
    """The messages that stand for `turns`; those that have a `role` already stay as they are.
    Raises `ValueError` of one line."""
    return [_message(number, turn) for number, turn in enumerate(turns)]


def _message(number: int, turn: Any) -> Any:
    if isinstance(turn, dict) and turn.get("from") is None and turn.get("role") is not None:
        return turn
    if (
        not isinstance(turn, dict)
        or turn.get("from") not in ROLES
        or not isinstance(turn.get("value"), str)
    ):
        roles = "|".join(ROLES)
        raise ValueError(
            f'turn {number} of "conversations": expected {{"from": "{roles}", "value": "..."}}'
        )
    source = turn["from"]
    value = turn["value"]
    message = {"role": ROLES[source], "weight": turn.get("weight")}
    if source != "function_call":
        return message | {"content": value}
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(
            f'turn {number} of "conversations": a function_call must be JSON, '
            f'{{"name": "...", "arguments": ...}}'
        ) from None
    return message | {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
