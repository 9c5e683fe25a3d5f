"""The answer of the Messages API, as it grows, the events that tell how, and its errors.

https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ..errors import APIError, PromptTooLong
from ..http.exchange import HTTPExchange, named_event
from ..service.generation import Choice, Generation
from ..text.call_parser import ToolCallDelta
from .part_writer import PartWriter, TextKind

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status of an error -> its type; `invalid_request_error` for others."""
NO_THREADS = "thread_unsupported_request"
"""Code of an error, after which clients that can do without `thread` ask again."""
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type of what is added to it, and the field that has it."""


def error_body(error: APIError, request_id: str) -> dict[str, Any]:
    """An error in Anthropic's shape. The field that it is about comes first in its message."""
    message = error.message
    if isinstance(error, PromptTooLong):
        message = _too_long(error)
    elif error.param is not None and f"`{error.param}`" not in message:
        message = f"{error.param}: {message}"
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    found: dict[str, Any] = {"type": kind, "message": message}
    if error.code == NO_THREADS:
        found["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": found, "request_id": request_id}


def _too_long(error: PromptTooLong) -> str:
    """Anthropic's words for it. Claude Code reads the numbers: after the second text it asks for
    fewer tokens, after the first it shortens the conversation."""
    prompt = error.prompt_tokens
    new = error.new_tokens
    limit = error.limit
    if not new or prompt > limit:
        return f"prompt is too long: {error.bound}{prompt} tokens > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {new} > {limit}, decrease "
        f"input length or `max_tokens` and try again"
    )


def use_message_errors(exchange: HTTPExchange) -> None:
    """Errors of this request have Anthropic's shape, and its answer the header `request-id`."""
    exchange.error_body = lambda error: error_body(error, exchange.request_id)
    exchange.extra["request-id"] = exchange.request_id


class MessageWriter(PartWriter):
    """An answer in blocks."""

    kinds: ClassVar[dict[TextKind, str]] = {"text": "text", "reasoning": "thinking"}

    def __init__(self, request_id: str, model: str, *, manages_context: bool = False):
        """`manages_context` is whether the body asks for `context_management`."""
        blocks: list[dict[str, Any]] = []
        answer = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }
        super().__init__(answer, blocks)
        self._request_id = request_id
        self._context: dict[str, Any] = {}
        if manages_context:
            self._context["context_management"] = {"applied_edits": []}
        self._has_begun = False
        self._index = -1
        """Number of the last block in events. `answer` leaves some out."""

    def _begin(self, generation: Generation) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        self.answer["usage"] = usage(generation)
        return _event("message_start", message=self.answer)

    def _text_part(self, kind: TextKind) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def _call(self, call: ToolCallDelta, name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": call.id, "name": name, "input": {}}

    def _opened(self, part: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=part)

    def _grown(self, part: dict[str, Any], text: str) -> bytes:
        kind, field = _DELTAS[part["type"]]
        return _event("content_block_delta", index=self._index, delta={"type": kind, field: text})

    def _closed(self, part: dict[str, Any], written: str, status: str) -> bytes:
        """A call whose arguments are no JSON, most often since it was cut, is no part of the
        answer."""
        if part["type"] != "tool_use":
            part[part["type"]] = written
        else:
            try:
                part["input"] = msgspec.json.decode(written)
            except (msgspec.DecodeError, RecursionError):
                self._parts.pop()
        return _event("content_block_stop", index=self._index)

    def end(self, generation: Generation, choice: Choice) -> bytes:
        events = self._close()
        reason = _STOP_REASONS[choice.finish_reason or "stop"]
        if reason == "tool_use" and all(block["type"] != reason for block in self._parts):
            reason = "end_turn"
        sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if sequence is not None and reason == "end_turn":
            reason = "stop_sequence"
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        counts = {"usage": usage(generation), **self._context}
        self.answer |= delta | counts
        return events + _event("message_delta", delta=delta, **counts) + _event("message_stop")

    def fail(self, error: APIError) -> bytes:
        return named_event("error", error_body(error, self._request_id))


def _event(name: str, /, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})


def usage(generation: Generation) -> dict[str, Any]:
    """Tokens so far. Those that the prefix cache had are counted apart."""
    cached = generation.num_cached_tokens
    return {
        "input_tokens": generation.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generation.num_tokens,
        "output_tokens_details": {"thinking_tokens": generation.num_reasoning_tokens},
    }
