"""The answer of the Responses API, as it grows, and the typed events that tell how."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import APIError, PromptTooLong
from ..http.exchange import named_event
from ..service.generation import Choice, Generation
from ..text.call_parser import ToolCallDelta
from .part_writer import PartWriter, TextKind

_TEXT_EVENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("response.output_text", {"logprobs": []}),
    "reasoning": ("response.reasoning_text", {}),
}
"""Type of an item -> (name of the events of its text, fields that they have besides)."""


_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Status of an error -> the code of OpenAI's that comes nearest; `server_error` for others."""


class ResponseWriter(PartWriter):
    """An answer in items. Each has one part of text, or is a call of a function."""

    kinds: ClassVar[dict[TextKind, str]] = {"text": "message", "reasoning": "reasoning"}

    def __init__(
        self, facts: dict[str, Any], namespaced: Mapping[str, tuple[str, str]] | None = None
    ):
        """`facts` are fields of the response object. `namespaced` maps names that the model has for
        functions to (namespace, name)."""
        items: list[dict[str, Any]] = []
        answer = {
            "object": "response",
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": items,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **facts,
        }
        super().__init__(answer, items)
        self._namespaced = namespaced or {}
        self._sequence_number = 0

    def begin(self) -> bytes:
        """The events that begin every answer, once."""
        if self._sequence_number:
            return b""
        names = "response.created", "response.in_progress"
        return b"".join(self._event(name, response=self.answer) for name in names)

    def _begin(self, generation: Generation) -> bytes:
        return self.begin()

    def _text_part(self, kind: TextKind) -> dict[str, Any]:
        number = secrets.token_hex(12)
        common = {"status": "in_progress", "content": []}
        if kind == "reasoning":
            return {"id": f"rs_{number}", "type": "reasoning", "summary": [], **common}
        return {"id": f"msg_{number}", "type": "message", **common, "role": "assistant"}

    def _call(self, call: ToolCallDelta, name: str) -> dict[str, Any]:
        namespace, name = self._namespaced.get(name, (None, name))
        item = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": name,
            "arguments": "",
        }
        return item | ({"namespace": namespace} if namespace else {})

    def _opened(self, part: dict[str, Any]) -> bytes:
        index = len(self._parts) - 1
        events = self._event("response.output_item.added", output_index=index, item=part)
        if part["type"] == "function_call":
            return events
        text: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if part["type"] == "message":
            text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events += self._event("response.content_part.added", **self._inside(), part=text)
        part["content"].append(text)
        return events

    def _grown(self, part: dict[str, Any], text: str) -> bytes:
        if part["type"] == "function_call":
            name = "response.function_call_arguments.delta"
            return self._event(name, **self._where(), delta=text)
        name, fields = _TEXT_EVENTS[part["type"]]
        return self._event(f"{name}.delta", **self._inside(), delta=text, **fields)

    def _closed(self, part: dict[str, Any], written: str, status: str) -> bytes:
        part["status"] = status
        if part["type"] == "function_call":
            part["arguments"] = written
            said = {"name": part["name"], "arguments": written}
            name = "response.function_call_arguments.done"
            events = self._event(name, **self._where(), **said)
        else:
            (text,) = part["content"]
            text["text"] = written
            name, fields = _TEXT_EVENTS[part["type"]]
            events = self._event(f"{name}.done", **self._inside(), text=written, **fields)
            events += self._event("response.content_part.done", **self._inside(), part=text)
        index = len(self._parts) - 1
        return events + self._event("response.output_item.done", output_index=index, item=part)

    def end(self, generation: Generation, choice: Choice) -> bytes:
        status = "completed"
        details = None
        if choice.finish_reason == "length":
            status = "incomplete"
            details = {"reason": "max_output_tokens"}
        events = b""
        if not self._parts:
            events = self._open_part(self._text_part("text"))
        events += self._close(status)
        prompt = generation.num_prompt_tokens
        new = generation.num_tokens
        self.answer |= {
            "status": status,
            "incomplete_details": details,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
                "output_tokens": new,
                "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
                "total_tokens": prompt + new,
            },
        }
        return events + self._event(f"response.{status}", response=self.answer)

    def fail(self, error: APIError) -> bytes:
        events = self.begin() + self._close("incomplete")
        code = _ERROR_CODES.get(error.status, "server_error")
        if isinstance(error, PromptTooLong):
            code = error.code
        self.answer |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return events + self._event("response.failed", response=self.answer)

    def _where(self) -> dict[str, Any]:
        """The last item, in an event."""
        return {"item_id": self._parts[-1]["id"], "output_index": len(self._parts) - 1}

    def _inside(self) -> dict[str, Any]:
        """The text of the last item, in an event."""
        return self._where() | {"content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_event(name, event)
