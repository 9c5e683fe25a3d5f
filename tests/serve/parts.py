"""What a choice of a chat says, whole or in the deltas of a stream."""

from typing import Any


def said(parts: list[dict[str, Any]]) -> tuple[str, str, list[list[str]]]:
    """(content, reasoning, calls of [name, arguments]) of the messages or deltas of a choice."""
    calls: list[list[str]] = []
    for call in (call for part in parts for call in part.get("tool_calls", ())):
        if "id" in call:
            calls.append([call["function"]["name"], ""])
        calls[call.get("index", -1)][1] += call["function"].get("arguments", "")
    content, reasoning = (
        "".join(part.get(name) or "" for part in parts) for name in ("content", "reasoning")
    )
    return content, reasoning, calls


def entries_of(choices: list[dict[str, Any]]) -> list[Any]:
    """Log-probabilities of the parts of a choice of a chat."""
    return sum(((one["logprobs"] or {}).get("content", []) for one in choices), [])
