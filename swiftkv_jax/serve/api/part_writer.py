"""Answers that announce each of their parts: OpenAI's Responses and Anthropic's Messages."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..service.generation import Choice, Generation, TextDelta
from ..text.call_parser import ToolCallDelta
from ..text.reasoning import ReasoningDelta
from .run import Writer

TextKind = Literal["text", "reasoning"]


class PartWriter(Writer):
    """One answer as it grows, and its events. Reasoning, each stretch of text and each call are
    parts; one is closed before the next is opened. A subclass spells parts and events."""

    kinds: ClassVar[dict[TextKind, str]]
    """The API's types of the parts of text."""

    def __init__(self, answer: dict[str, Any], parts: list[dict[str, Any]]):
        """`parts` is the list of parts in `answer`."""
        self.answer = answer
        """The whole answer, after `end`."""
        self._parts = parts
        self._open: dict[str, Any] | None = None
        """The part that grows."""
        self._texts: list[str] = []
        """Its text, or the arguments of its call."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        self.events(generation)
        return self.answer

    def events(self, generation: Generation) -> bytes:
        (choice,) = generation.choices
        if not choice.is_ready:
            return b""
        events = self.add(generation, choice.take())
        return events + self.end(generation, choice) if generation.is_done else events

    def add(self, generation: Generation, delta: TextDelta) -> bytes:
        """Add what has become certain. Returns its events, the first time after those that begin
        every answer."""
        events = self._begin(generation)
        for part in delta.joined_parts():
            if isinstance(part, ToolCallDelta):
                if part.name is not None:
                    events += self._open_part(self._call(part, part.name))
                if part.arguments:
                    events += self._grow(part.arguments)
            elif isinstance(part, ReasoningDelta):
                events += self._add_text("reasoning", part.text)
            else:
                events += self._add_text("text", part)
        return events

    def _add_text(self, kind: TextKind, text: str) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != self.kinds[kind]:
            events = self._open_part(self._text_part(kind))
        return events + self._grow(text)

    def _open_part(self, part: dict[str, Any]) -> bytes:
        events = self._close()
        self._parts.append(part)
        self._open = part
        self._texts = []
        return events + self._opened(part)

    def _grow(self, text: str) -> bytes:
        assert self._open is not None
        self._texts.append(text)
        return self._grown(self._open, text)

    def _close(self, status: str = "completed") -> bytes:
        """Close the part that grows. `status` is what it has become."""
        part = self._open
        if part is None:
            return b""
        self._open = None
        return self._closed(part, "".join(self._texts), status)

    # The spelling of an API -------------------------------------------------------

    def end(self, generation: Generation, choice: Choice) -> bytes:
        """The last events, when all has been added; `answer` is whole then."""
        raise NotImplementedError

    def _begin(self, generation: Generation) -> bytes:
        """The events that begin every answer, once."""
        raise NotImplementedError

    def _text_part(self, kind: TextKind) -> dict[str, Any]:
        """An empty part of text."""
        raise NotImplementedError

    def _call(self, call: ToolCallDelta, name: str) -> dict[str, Any]:
        """The part of a call that begins."""
        raise NotImplementedError

    def _opened(self, part: dict[str, Any]) -> bytes:
        """Events of a part that was opened, the last of the answer."""
        raise NotImplementedError

    def _grown(self, part: dict[str, Any], text: str) -> bytes:
        """Events of more text, or more arguments, of the last part."""
        raise NotImplementedError

    def _closed(self, part: dict[str, Any], written: str, status: str) -> bytes:
        """Finish the last part, of which `written` is all of the text. Returns its events."""
        raise NotImplementedError
