"""Calls of functions in the text of a model, as they come: one parser for streams and for whole
answers.

A call is a JSON object with a "name" that was declared and its "parameters" (or "arguments"), which
may be missing, null, "" or [], anywhere in the text but inside another object. The text before and
after is content, but not the brackets of a list of calls or the fences of a block of code that
holds nothing else, in which small models write them. Calls may be separated by whitespace, `;` and
the markers of the format: Llama 3's `<|python_tag|>`, or `<tool_call>` and `</tool_call>` around
each call (Hermes, Qwen). What looks like a call and is none is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from .call_parser import MAX_GAP, MAX_HEAD, MAX_NAME, SPACE, AnswerPart, CallParser, begun
from .tool_formats import FORMATS

_FENCE = "```"
_OPENING = (f"{_FENCE}json", f"{_FENCE}tool_call", _FENCE)
"""Lines that open a block of code with a call in it."""
_AT_END = re.compile(rf"(?:{'|'.join(_OPENING)})\Z")
_ARGUMENTS = "parameters", "arguments"
_BUFFERED = "type", "id", *_ARGUMENTS
"""Keys with which a call may begin that is read to its end first."""


class ToolCallParser(CallParser):
    """Reads one answer."""

    def __init__(
        self, names: Collection[str], format: str, *, single: bool = False, forced: bool = False
    ):
        """`names` are the declared ones, `format` one of `FORMATS`."""
        super().__init__(single=single, forced=forced)
        self._names = names
        self._markers = FORMATS[format]
        self._value = _JSONValue()
        self._brace = self._value_start = 0
        """Offsets in `_text` at which the object of `_read_object` begins, and up to which it was
        read."""
        self._depth = 0
        """Braces of the content that are open."""
        self._in_list = False
        """A bracket stood before the calls."""
        self._in_block = False
        """A fence did."""
        self._fences = 0
        """Last characters of the content."""

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """The end of the text: what was held back is content, or a call that was cut short where
        calls are forced. Whether the answer `is_cut` makes no difference."""
        rest = self._text
        self._text = ""
        if self._forced or self._state not in (self._read_text, self._read_object):
            return []
        separators = self._state == self._read_text and not self._without_gap(rest)
        return [] if not rest or (self._follows_call and separators) else [rest]

    @property
    def is_within_call(self) -> bool:
        """A call has begun, and its arguments are not whole."""
        return self._state == self._read_arguments

    # States: each reads some of the text, and returns whether another may go on -----------------

    def _read_text(self) -> bool:
        text = self._text
        brace = text.find("{")
        before = text if brace < 0 else text[:brace]
        certain = len(self._without_gap(before, may_go_on=brace < 0))
        if certain:
            self._gap_is_content = False
        if self._gap_is_content or len(before) - certain > MAX_GAP:
            certain = len(before)
            self._gap_is_content = True
        nested = self._depth_after(text[:certain]) > 0 and not before.endswith("\n")
        self._emit(text[:certain])
        self._text = text[certain:]
        if brace < 0:
            return False
        self._brace = brace - certain
        try:
            found = None if nested else _head(self._text, self._brace, self._names)
        except _Incomplete:
            if len(self._text) - self._brace <= MAX_HEAD:
                return False
            found = None
        if found is None:
            self._emit(self._text[: self._brace + 1])
            self._text = self._text[self._brace + 1 :]
            return True
        self._value = _JSONValue()
        if isinstance(found, _Buffered):
            self._value_start = self._brace
            self._state = self._read_object
        else:
            self._begin(found.name, self._text[: self._brace])
            self._text = self._text[found.end :]
            self._state = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        """The arguments of a call, as they come."""
        end = self._value.end(self._text)
        arguments = self._text[:end]
        self._text = self._text[end:]
        self._add_arguments(arguments)
        if not self._value.is_whole:
            return False
        self._state = self._read_close
        return True

    def _read_close(self) -> bool:
        """The rest of an object after the arguments; other keys are left out."""
        self._text = self._text.lstrip(SPACE)
        if not self._text:
            return False
        if self._text[0] == ",":
            self._value = _JSONValue(depth=1)
            self._state = self._skip_rest
            return True
        self._text = self._text.removeprefix("}")
        self._end_call()
        return True

    def _skip_rest(self) -> bool:
        self._text = self._text[self._value.end(self._text) :]
        if self._value.is_whole:
            self._end_call()
        return self._value.is_whole

    def _read_object(self) -> bool:
        """An object that may be a call, up to its end."""
        end = self._value_start = self._value_start + self._value.end(
            self._text[self._value_start :]
        )
        if not self._value.is_whole:
            return False
        written = self._text[:end]
        self._text = self._text[end:]
        call = _whole_call(written[self._brace :], self._names)
        self._state = self._read_text
        if call is None:
            self._emit(written)
            return True
        name, arguments = call
        self._begin(name, written[: self._brace])
        self._add_arguments(arguments)
        self._end_call()
        return True

    # Parts ------------------------------------------------------------------------

    def _emit(self, content: str) -> None:
        if self._follows_call:  # what closes a call is no content
            marks = [*self._markers, *("]" * self._in_list), *([_FENCE] * self._in_block)]
            while closed := [m for m in marks if content.lstrip(SPACE).startswith(m)]:
                content = content.lstrip(SPACE).removeprefix(closed[0])
                if closed[0] == _FENCE:  # another one opens a block
                    marks.remove(_FENCE)
        if content:
            self._in_list = self._in_block = False
            self._fences += content.count(_FENCE)
            self._depth = self._depth_after(content)
            self._parts.append(content)
            self._follows_call = False

    def _depth_after(self, content: str) -> int:
        return max(self._depth + content.count("{") - content.count("}"), 0)

    def _begin(self, name: str, gap: str) -> None:
        """A call, after a gap that is no content."""
        self._in_list |= "[" in gap
        self._in_block |= _FENCE in gap
        self._begin_call(name)

    def _end_call(self) -> None:
        self._follows_call = True
        self._state = self._read_text
        self._gap_is_content = False
        self._depth = 0
        self.is_complete = self._single

    def _without_gap(self, text: str, *, may_go_on: bool = False) -> str:
        """`text` without the separators at its end; with `may_go_on` also without what may become
        one."""
        if may_go_on:
            text = text.removesuffix(begun(text, *self._markers, *_OPENING))
        closing = "]" if self._in_list else ""
        if self._follows_call and not self._stripped(text, f"{SPACE};,[{closing}"):
            return ""
        return self._stripped(text, SPACE + "[")

    def _stripped(self, text: str, space: str) -> str:
        """`text` without these characters and markers at its end."""
        while True:
            shorter = text.rstrip(space)
            for marker in self._markers:
                shorter = shorter.removesuffix(marker)
            fence = _AT_END.search(shorter)
            if fence is not None and (
                self._follows_call
                or (self._fences + shorter.count(_FENCE, 0, fence.start())) % 2 == 0
            ):  # not one that closes a block of content
                shorter = shorter[: fence.start()]
            if shorter == text:
                return text
            text = shorter


class _Incomplete(Exception):
    """More text is needed."""


class _Head(NamedTuple):
    """The beginning of a call up to its arguments."""

    name: str
    end: int
    """Offset at which the arguments begin."""


class _Buffered(NamedTuple):
    """The beginning of an object that may be a call."""


def _head(text: str, at: int, names: Collection[str]) -> _Head | _Buffered | None:
    """Return the head of the object at `at`; None for no call. Raises `_Incomplete`."""
    reader = _Reader(text, at + 1)
    key = reader.string()
    if key != "name" or reader.next() != ":":
        return _Buffered() if key in _BUFFERED else None
    if reader.string() not in names:
        return None
    name = reader.last
    if reader.next() != "," or reader.string() not in _ARGUMENTS:
        return _Buffered()
    if reader.next() != ":" or reader.next() != "{":
        return _Buffered()
    return _Head(name, reader.at - 1) if reader.at - at <= MAX_HEAD else None


class _Reader:
    """Reads the short texts and the signs at the beginning of an object."""

    def __init__(self, text: str, at: int):
        self._text = text
        self.at = at
        self.last = ""

    def next(self) -> str:
        """The next sign, after spaces. Raises `_Incomplete`."""
        text = self._text
        while self.at < len(text) and text[self.at] in SPACE:
            self.at += 1
        if self.at == len(text):
            raise _Incomplete
        self.at += 1
        return text[self.at - 1]

    def string(self) -> str | None:
        """A text of up to 64 characters without escapes; None for anything else. Raises
        `_Incomplete`."""
        if self.next() != '"':
            return None
        end = self._text.find('"', self.at, self.at + MAX_NAME + 1)
        if end < 0:
            if len(self._text) - self.at <= MAX_NAME:
                raise _Incomplete
            return None
        self.last = self._text[self.at : end]
        self.at = end + 1
        return self.last


class _JSONValue:
    """Finds the end of an object or list as its text comes."""

    def __init__(self, depth: int = 0):
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.is_whole = False

    def end(self, text: str) -> int:
        """Characters of `text`, which follows the text before, that belong to the value."""
        for at, sign in enumerate(text, 1):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif sign == "\\":
                    self._escaped = True
                elif sign == '"':
                    self._in_string = False
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_whole = True
                    return at
        return len(text)


def _whole_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """(name, arguments as JSON) of an object; None if it is no call."""
    try:
        found: Any = json.loads(text)
        name = found.get("name")
        given = [found[key] for key in _ARGUMENTS if key in found]
        if not given and not found.keys() <= {"name", "type", "id"}:
            return None
        arguments = given[0] if given else {}
        if isinstance(arguments, str):  # JSON in JSON, as in OpenAI's own messages
            arguments = json.loads(arguments) if arguments.strip() else None
        if arguments is None or arguments == []:  # as some models write that there are none
            arguments = {}
        written = json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, written
