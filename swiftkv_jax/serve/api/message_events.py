"""The answer of the Messages API, as it grows, the events that tell how, and its errors.

https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import APIError, PromptTooLong
from ..http.exchange import HTTPExchange, named_event
from ..service.generation import Choice, Generation, TextDelta
from ..text.call_parser import ToolCallDelta
from ..text.reasoning import ReasoningDelta

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
_TEXT_DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}


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
    prompt, new, limit = error.prompt_tokens, error.new_tokens, error.limit
    if not new or prompt > limit:
        bound = "at least " if error.at_least else ""
        return f"prompt is too long: {bound}{prompt} tokens > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {new} > {limit}, decrease "
        f"input length or `max_tokens` and try again"
    )


def use_message_errors(exchange: HTTPExchange) -> None:
    """Errors of this request have Anthropic's shape, and its answer the header `request-id`."""
    exchange.error_body = lambda error: error_body(error, exchange.request_id)
    exchange.extra["request-id"] = exchange.request_id


class MessageWriter:
    """One answer. Reasoning, each stretch of text and each call are blocks of their own; one is
    closed before the next is opened."""

    def __init__(self, request_id: str, model: str, *, manages_context: bool = False):
        """`manages_context` is whether the body asks for `context_management`."""
        self._request_id = request_id
        self._context: dict[str, Any] = {}
        if manages_context:
            self._context["context_management"] = {"applied_edits": []}
        self.answer: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._has_begun = self._is_open = False
        self._index = -1
        """Of the last block in events. `answer` leaves some out."""
        self._texts: list[str] = []
        """Text of the block that is open, or arguments of its call."""

    def add(self, generation: Generation, delta: TextDelta) -> bytes:
        """Add what has become certain. Returns its events, the first time after the one that begins
        every answer."""
        events = self._begun(generation)
        for part in delta.joined_parts():
            if isinstance(part, ToolCallDelta):
                events += self._add_call(part)
            elif isinstance(part, ReasoningDelta):
                events += self._add_text("thinking", part.text)
            else:
                events += self._add_text("text", part)
        return events

    def _begun(self, generation: Generation) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        self.answer["usage"] = usage(generation)
        return self._event("message_start", message=self.answer)

    def _add_text(self, kind: str, text: str) -> bytes:
        events = b""
        if not self._is_open or self._content[-1]["type"] != kind:
            block = {"type": kind, kind: ""}
            events += self._begin(block | ({"signature": ""} if kind == "thinking" else {}))
        self._texts.append(text)
        return events + self._delta({"type": _TEXT_DELTAS[kind], kind: text})

    def _add_call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.name is not None:
            events += self._begin(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            )
        if call.arguments:
            self._texts.append(call.arguments)
            events += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return events

    def end(self, generation: Generation, choice: Choice) -> bytes:
        """The last events, when all has been added; `answer` is whole then. A call whose arguments
        are no JSON, most often since it was cut, is no part of it."""
        events = self._close()
        reason = _STOP_REASONS[choice.finish_reason or "stop"]
        if reason == "tool_use" and all(block["type"] != reason for block in self._content):
            reason = "end_turn"
        sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if sequence is not None and reason == "end_turn":
            reason = "stop_sequence"
        self.answer |= {
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage(generation),
            **self._context,
        }
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        events += self._event(
            "message_delta", delta=delta, usage=self.answer["usage"], **self._context
        )
        return events + self._event("message_stop")

    def fail(self, error: APIError) -> bytes:
        """The last event of an answer that cannot go on."""
        return named_event("error", error_body(error, self._request_id))

    # Blocks -----------------------------------------------------------------------

    @property
    def _content(self) -> list[dict[str, Any]]:
        return self.answer["content"]

    def _begin(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        self._content.append(block)
        self._index += 1
        self._is_open, self._texts = True, []
        return events + self._event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        """Close the block that grows."""
        if not self._is_open:
            return b""
        self._is_open = False
        events = self._event("content_block_stop", index=self._index)
        block, written = self._content[-1], "".join(self._texts)
        if block["type"] != "tool_use":
            block[block["type"]] = written
            return events
        try:
            block["input"] = msgspec.json.decode(written)
        except (msgspec.DecodeError, RecursionError):
            del self._content[-1]
        return events

    def _event(self, name: str, /, **fields: Any) -> bytes:
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
