"""The base of the parsers of calls: text goes in as it comes, parts of an answer come out."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

MAX_NAME = 64
MAX_GAP = 1024
"""Characters between calls that are held back until it is known what follows."""
MAX_HEAD = 512
"""Characters of a call before its arguments."""
SPACE = " \t\r\n"


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call: first its name and id, then more of its arguments."""

    index: int
    name: str | None = None
    id: str | None = None
    arguments: str = ""
    """Part of a JSON object, as the model wrote it."""


AnswerPart = str | ToolCallDelta
"""Content, or a part of a call."""


def begun(text: str, *marks: str) -> str:
    """Return the longest end of `text` with which one of `marks` begins, without being whole."""
    longest = max(map(len, marks)) - 1
    for start in range(max(len(text) - longest, 0), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return text[start:]
    return ""


class CallParser:
    """Reads one answer. A subclass has the states: each reads some of the text, and returns whether
    another may go on."""

    def __init__(self, *, single: bool, forced: bool):
        """Make a parser. With `single` the answer ends with its first call; with `forced` a grammar
        lets the model write nothing but calls."""
        self._single = single
        self._forced = forced
        self._text = ""
        """Text that is not certain yet."""
        self._state: Callable[[], bool] = self._read_text
        self._follows_call = False
        """True while nothing but separators has come since a call."""
        self._gap_is_content = False
        self._parts: list[AnswerPart] = []
        self.num_calls = 0
        self.is_complete = False
        """The answer ends here, whatever follows."""

    def push(self, text: str) -> list[AnswerPart]:
        """Add text. Returns what has become certain, in its order."""
        self._text += text
        while not self.is_complete and self._state():
            pass
        if self.is_complete:
            self._text = ""
        return self._take_parts()

    def finish(self, *, is_cut: bool) -> list[AnswerPart]:
        """End the text. Returns the rest. `is_cut` is whether something else than the model ended
        it."""
        raise NotImplementedError

    @property
    def is_within_call(self) -> bool:
        """A call has begun, and its arguments are not whole."""
        raise NotImplementedError

    def _read_text(self) -> bool:
        """Read content, up to a call: the first state."""
        raise NotImplementedError

    def _take_parts(self) -> list[AnswerPart]:
        parts = self._parts
        self._parts = []
        return parts

    def _begin_call(self, name: str) -> None:
        call_id = f"call_{secrets.token_hex(12)}"
        self._parts.append(ToolCallDelta(self.num_calls, name, call_id))
        self.num_calls += 1

    def _add_arguments(self, arguments: str) -> None:
        """Add to the arguments of the call that was begun last."""
        if arguments:
            self._parts.append(ToolCallDelta(self.num_calls - 1, arguments=arguments))
