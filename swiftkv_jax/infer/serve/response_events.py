"""The answer of the Responses API, as it grows, and the typed events that tell how."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from .generation import Choice, Generation, TextDelta
from .tool_calls import ToolCallDelta


class ResponseWriter:
    """One answer. Each stretch of text is a message, each call of a function an item of its own;
    one is closed before the next is opened."""

    def __init__(self, facts: dict[str, Any]):
        """`facts` are fields of the response object."""
        self.response: dict[str, Any] = {
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

    def add(self, delta: TextDelta) -> bytes:
        """Add what has become certain. Returns its events, the first time after those that begin
        every answer."""
        events = b""
        if not self._sequence_number:
            for name in ("response.created", "response.in_progress"):
                events += self._event(name, response=self.response)
        for part in delta.parts:
            events += self._add_text(part) if isinstance(part, str) else self._add_call(part)
        return events

    def _add_text(self, text: str) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != "message":
            events += self._begin_message()
        assert self._open is not None
        self._open["content"][0]["text"] += text
        where = self._where() | {"content_index": 0}
        return events + self._event("response.output_text.delta", **where, delta=text, logprobs=[])

    def _add_call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.name is not None:
            events += self._begin(
                {
                    "id": f"fc_{secrets.token_hex(12)}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": "",
                }
            )
        if call.arguments:
            assert self._open is not None
            self._open["arguments"] += call.arguments
            events += self._event(
                "response.function_call_arguments.delta", **self._where(), delta=call.arguments
            )
        return events

    def end(self, generation: Generation, choice: Choice) -> bytes:
        """The last events, when all has been added; `response` is whole then."""
        cut = choice.finish_reason == "length"
        events = b"" if self._output else self._begin_message()
        events += self._close("incomplete" if cut else "completed")
        prompt, new = generation.num_prompt_tokens, generation.num_tokens
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
                "output_tokens": new,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + new,
            },
        }
        return events + self._event(f"response.{self.response['status']}", response=self.response)

    # Items ------------------------------------------------------------------------

    @property
    def _output(self) -> list[dict[str, Any]]:
        return self.response["output"]

    def _begin_message(self) -> bytes:
        content: list[dict[str, Any]] = []
        events = self._begin(
            {
                "id": f"msg_{secrets.token_hex(12)}",
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": content,
            }
        )
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        where = self._where() | {"content_index": 0}
        events += self._event("response.content_part.added", **where, part=part)
        content.append(part)
        return events

    def _begin(self, item: dict[str, Any]) -> bytes:
        events = self._close("completed")
        self._output.append(item)
        self._open, index = item, len(self._output) - 1
        return events + self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, status: str) -> bytes:
        """Close the item that grows."""
        if (item := self._open) is None:
            return b""
        events, where = b"", self._where()
        item["status"], self._open = status, None
        if item["type"] == "function_call":
            events += self._event(
                "response.function_call_arguments.done",
                **where,
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            (part,) = item["content"]
            inside = where | {"content_index": 0}
            events += self._event(
                "response.output_text.done", **inside, text=part["text"], logprobs=[]
            )
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
        return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
