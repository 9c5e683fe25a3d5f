"""The answer of the Responses API, as it grows, and the typed events that tell how."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ..errors import APIError, PromptTooLong
from ..http.exchange import named_event
from ..service.generation import Choice, Generation, TextDelta
from ..text.call_parser import ToolCallDelta
from ..text.reasoning import ReasoningDelta

_TEXT_EVENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("response.output_text", {"logprobs": []}),
    "reasoning": ("response.reasoning_text", {}),
}
"""Type of an item -> (name of the events of its text, fields that they have besides)."""


_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Status of an error -> the code of OpenAI's that comes nearest; `server_error` for others."""


class ResponseWriter:
    """One answer. Reasoning, each stretch of text and each call of a function are items of their
    own; one is closed before the next is opened."""

    def __init__(
        self, facts: dict[str, Any], namespaced: Mapping[str, tuple[str, str]] | None = None
    ):
        """`facts` are fields of the response object. `namespaced` maps names that the model has for
        functions to (namespace, name)."""
        self._namespaced = namespaced or {}
        self.answer: dict[str, Any] = {
            "object": "response",
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **facts,
        }
        self._sequence_number = 0
        self._open: dict[str, Any] | None = None
        """The item that grows."""
        self._texts: list[str] = []
        """Its text, or the arguments of its call."""

    def add(self, generation: Generation, delta: TextDelta) -> bytes:
        """Add what has become certain. Returns its events, the first time after those that begin
        every answer."""
        events = self.begin()
        for part in delta.joined_parts():
            if isinstance(part, ToolCallDelta):
                events += self._add_call(part)
            elif isinstance(part, ReasoningDelta):
                events += self._add_text("reasoning", part.text)
            else:
                events += self._add_text("message", part)
        return events

    def begin(self) -> bytes:
        """The events that begin every answer, once."""
        if self._sequence_number:
            return b""
        names = "response.created", "response.in_progress"
        return b"".join(self._event(name, response=self.answer) for name in names)

    def _add_text(self, kind: str, text: str) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != kind:
            events += self._begin_message() if kind == "message" else self._begin_reasoning()
        self._texts.append(text)
        name, fields = _TEXT_EVENTS[kind]
        where = self._where() | {"content_index": 0}
        return events + self._event(f"{name}.delta", **where, delta=text, **fields)

    def _add_call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.name is not None:
            namespace, name = self._namespaced.get(call.name, (None, call.name))
            item = {
                "id": f"fc_{secrets.token_hex(12)}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": call.id,
                "name": name,
                "arguments": "",
            }
            events += self._begin(item | ({"namespace": namespace} if namespace else {}))
        if call.arguments:
            self._texts.append(call.arguments)
            events += self._event(
                "response.function_call_arguments.delta", **self._where(), delta=call.arguments
            )
        return events

    def end(self, generation: Generation, choice: Choice) -> bytes:
        """The last events, when all has been added; `answer` is whole then."""
        cut = choice.finish_reason == "length"
        events = b"" if self._output else self._begin_message()
        events += self._close("incomplete" if cut else "completed")
        prompt, new = generation.num_prompt_tokens, generation.num_tokens
        self.answer |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
                "output_tokens": new,
                "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
                "total_tokens": prompt + new,
            },
        }
        return events + self._event(f"response.{self.answer['status']}", response=self.answer)

    def fail(self, error: APIError) -> bytes:
        """The last events of an answer that cannot go on."""
        events = self.begin() + self._close("incomplete")
        code = _ERROR_CODES.get(error.status, "server_error")
        code = error.code if isinstance(error, PromptTooLong) else code
        self.answer |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return events + self._event("response.failed", response=self.answer)

    # Items ------------------------------------------------------------------------

    @property
    def _output(self) -> list[dict[str, Any]]:
        return self.answer["output"]

    def _begin_message(self) -> bytes:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._begin_text({"id": f"msg_{secrets.token_hex(12)}", "type": "message"}, part)

    def _begin_reasoning(self) -> bytes:
        item = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": []}
        return self._begin_text(item, {"type": "reasoning_text", "text": ""})

    def _begin_text(self, item: dict[str, Any], part: dict[str, Any]) -> bytes:
        content: list[dict[str, Any]] = []
        item |= {"status": "in_progress", "content": content}
        if item["type"] == "message":
            item["role"] = "assistant"
        events = self._begin(item)
        where = self._where() | {"content_index": 0}
        events += self._event("response.content_part.added", **where, part=part)
        content.append(part)
        return events

    def _begin(self, item: dict[str, Any]) -> bytes:
        events = self._close("completed")
        self._output.append(item)
        self._open, self._texts, index = item, [], len(self._output) - 1
        return events + self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, status: str) -> bytes:
        """Close the item that grows."""
        if (item := self._open) is None:
            return b""
        events, where = b"", self._where()
        item["status"], self._open = status, None
        written = "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = written
            events += self._event(
                "response.function_call_arguments.done",
                **where,
                name=item["name"],
                arguments=written,
            )
        else:
            (part,) = item["content"]
            part["text"] = written
            inside = where | {"content_index": 0}
            name, fields = _TEXT_EVENTS[item["type"]]
            events += self._event(f"{name}.done", **inside, text=written, **fields)
            events += self._event("response.content_part.done", **inside, part=part)
        return events + self._event(
            "response.output_item.done", output_index=where["output_index"], item=item
        )

    def _where(self) -> dict[str, Any]:
        """The item that grows, in an event."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_event(name, event)
