"""The answer of the Responses API, as it grows, and the typed events that tell how."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from .generation import Choice, Generation, TextDelta


class ResponseWriter:
    """One answer. The text is one message, which stays open until the end; each call of a function
    is an item of its own."""

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
        self._message: dict[str, Any] | None = None
        self._calls: list[dict[str, Any]] = []

    def begin(self) -> bytes:
        """The events before all others."""
        return b"".join(
            self._event(f"response.{name}", response=self.response)
            for name in ("created", "in_progress")
        )

    def add(self, delta: TextDelta) -> bytes:
        """Add what has become certain."""
        events = b""
        if delta.text:
            if self._message is None:
                events += self._open_message()
            assert self._message is not None
            self._message["content"][0]["text"] += delta.text
            where = self._at(self._message) | {"content_index": 0}
            events += self._event(
                "response.output_text.delta", **where, delta=delta.text, logprobs=[]
            )
        for call in delta.calls:
            if call.name is not None:
                events += self._open(
                    {
                        "id": f"fc_{secrets.token_hex(12)}",
                        "type": "function_call",
                        "status": "in_progress",
                        "call_id": call.id,
                        "name": call.name,
                        "arguments": "",
                    }
                )
                self._calls.append(self._output[-1])
            if call.arguments:
                item = self._calls[call.index]
                item["arguments"] += call.arguments
                events += self._event(
                    "response.function_call_arguments.delta",
                    **self._at(item),
                    delta=call.arguments,
                )
        return events

    def end(self, generation: Generation, choice: Choice) -> bytes:
        """The last events, when all has been added; `response` is whole then."""
        cut = choice.finish_reason == "length"
        events = b"" if self._output else self._open_message()
        for item in self._output:
            events += self._close(item, "incomplete" if cut else "completed")
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

    def _open_message(self) -> bytes:
        self._message = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        events = self._open(self._message)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        where = self._at(self._message) | {"content_index": 0}
        events += self._event("response.content_part.added", **where, part=part)
        self._message["content"].append(part)
        return events

    def _open(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        index = len(self._output) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, item: dict[str, Any], status: str) -> bytes:
        events, where = b"", self._at(item)
        item["status"] = status
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

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        index = next(index for index, one in enumerate(self._output) if one is item)
        return {"item_id": item["id"], "output_index": index}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
