"""Calls of functions as Qwen3-Coder writes them, one parser for streams and for whole answers:

    <tool_call>
    <function=NAME>
    <parameter=X>
    text of any number of lines
    </parameter>
    </function>
    </tool_call>

NAME is a declared function, and `<tool_call>` may be missing: tokenizers may leave it out of texts.
One line break after `<parameter=X>` and one before `</parameter>` belong to the tags. Where the
model leaves `</parameter>` out, an argument ends at a line that begins the next declared one, or at
the end of the call. Arguments become JSON of their declared types; those that are texts come as
they are written. In the texts of an object or a list no tag counts. Of arguments with one name the
first counts. What looks like a call and is none is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .call_parser import MAX_GAP, MAX_HEAD, MAX_NAME, SPACE, AnswerPart, CallParser, begun
from .xml_arguments import argument_json, argument_schema, resolved, types_of

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
MAX_SPACE = 64
"""Spaces between `</function>` and `</tool_call>` where these end an argument."""
_FUNCTION_SPACE = rf"{FUNCTION_END}[{SPACE}]{{0,{MAX_SPACE}}}"
_NEXT = rf"\n{PARAMETER}([^<>\n\"]{{1,{MAX_HEAD}}})>"
_END = re.compile(rf"{PARAMETER_END}|{_FUNCTION_SPACE}{CLOSE}|{_NEXT}")
"""Texts that may end an argument; the group is the name of the next one."""


def _beginnings(mark: str) -> str:
    """An expression of all beginnings of `mark`, "" and itself included."""
    found = ""
    for sign in reversed(mark):
        found = f"(?:{re.escape(sign)}{found})?"
    return found


_LAST_END = re.compile(rf"{_FUNCTION_SPACE}{_beginnings(CLOSE)}\Z")
"""The end of a call, as the end of a text."""
_BEGUN_END = re.compile(
    rf"\n?(?:{_FUNCTION_SPACE}{_beginnings(CLOSE)}|{_beginnings(FUNCTION_END)}"
    rf"|{_beginnings(PARAMETER_END)})\Z"
    rf"|\n(?:{PARAMETER}[^<>\n\"]{{0,{MAX_HEAD}}}|{_beginnings(PARAMETER)})\Z"
)
"""The end of a text with which an `_END` may begin."""
_IN_STRING = re.compile(r'(?:[^"\\\n]|\\[^\n])*')


class XMLToolCallParser(CallParser):
    """Reads one answer."""

    def __init__(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        single: bool = False,
        forced: bool = False,
    ):
        """`schemas` has the declared functions with the schemas of their arguments."""
        super().__init__(single=single, forced=forced)
        self._schemas = schemas
        self._schema: Mapping[str, Any] = {}
        """Names of the call's arguments."""
        self._argument: Mapping[str, Any] = {}
        """Schema of the argument that is read."""
        self._is_first = self._is_blank = self._is_streamed = False
        """No argument has come; nothing of this one; it is a text, which goes out as it comes."""
        self._value: list[str] = []
        """Text of an argument that does not."""
        self._given: set[str] = set()
        """Names of the call's arguments so far."""
        self._is_repeated = self._is_json = False
        """The argument that is read has come before, and is left out; it is an object or a list."""

    def finish(self, *, is_cut: bool) -> list[AnswerPart]:
        """The end of the text. A call that the model did not end ends here, unless the answer
        `is_cut`."""
        if self.is_within_call and not is_cut:
            if self._state != self._read_parameters:
                last = _LAST_END.search(self._text) if self._state == self._read_value else None
                self._end_value(last.start() if last else len(self._text))
            self._end_call()
        elif self._state == self._read_text and not self._forced:
            blank = self._follows_call and not self._text.strip(SPACE)
            self._emit("" if blank else self._text)
        self._text = ""
        return self._take_parts()

    @property
    def is_within_call(self) -> bool:
        """A call has begun, and its arguments are not whole."""
        return self._state in (self._read_parameters, self._read_value, self._read_string)

    # States: each reads some of the text, and returns whether another may go on -----------------

    def _read_text(self) -> bool:
        text = self._text
        found = [at for mark in (OPEN, FUNCTION) if (at := text.find(mark)) >= 0]
        if not found:
            certain = self._certain(text.removesuffix(begun(text, OPEN, FUNCTION)))
            self._emit(text[:certain])
            self._text = text[certain:]
            return False
        before = text[: min(found)]
        self._text = text[min(found) :]
        head = _head(self._text)
        if head is None and len(self._text) <= MAX_HEAD:  # more is needed
            self._text = before + self._text
            return False
        name, end = head or ("", 0)
        if name not in self._schemas:
            self._emit(before + self._text[0])
            self._text = self._text[1:]
            return True
        self._emit(before[: self._certain(before)])
        self._text = self._text[end:]
        self._gap_is_content = False
        self._schema, self._is_first, self._given = self._schemas[name], True, set()
        self._begin_call(name)
        self._add_arguments("{")
        self._state = self._read_parameters
        return True

    def _certain(self, text: str) -> int:
        """Characters of content in front of a call: without the spaces at the end, unless these are
        very many."""
        certain = len(text.rstrip(SPACE))
        self._gap_is_content &= not certain
        if self._gap_is_content or len(text) - certain > MAX_GAP:
            self._gap_is_content = True
            self._follows_call = False
            return len(text)
        return certain

    def _read_parameters(self) -> bool:
        """Skip what stands between the arguments: nothing that matters."""
        text = self._text
        ends = [at for mark in (FUNCTION_END, CLOSE) if (at := text.find(mark)) >= 0]
        begin = text.find(PARAMETER)
        if ends and not 0 <= begin < min(ends):
            self._text = text[min(ends) :].removeprefix(FUNCTION_END)
            self._end_call()
            return True
        if begin < 0:
            self._text = text[-max(map(len, (FUNCTION_END, CLOSE))) :]
            return False
        begin += len(PARAMETER)
        if (end := text.find(">", begin)) < 0:
            if len(text) - begin <= MAX_HEAD:
                return False
            self._text = text[begin:]
            return True
        name = text[begin:end]
        self._text = text[end + 1 :]
        self._argument = argument_schema(self._schema, name)
        types = types_of(self._argument, self._schema)
        self._is_streamed = types <= {"string"}
        self._is_json = "string" not in types and not types.isdisjoint(("object", "array"))
        self._is_blank = True
        self._is_repeated = name in self._given
        self._state = self._read_value
        if self._is_repeated:
            return True
        self._given.add(name)
        separator = "" if self._is_first else ", "
        quote = '"' if self._is_streamed else ""
        self._add_arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: {quote}")
        self._is_first = False
        return True

    def _read_value(self) -> bool:
        text = self._text
        quote = text.find('"') if self._is_json else -1
        found = self._find_end(text if quote < 0 else text[:quote])
        if found is not None:
            self._end_value(found.start())
            self._text = text[found.start() :].removeprefix("\n").removeprefix(PARAMETER_END)
            self._state = self._read_parameters
            return True
        if quote >= 0:
            self._add(text[: quote + 1])
            self._text = text[quote + 1 :]
            self._state = self._read_string
            return True
        end = _BEGUN_END.search(text)
        certain = end.start() if end else len(text)
        self._add(text[:certain])
        self._text = text[certain:]
        return False

    def _find_end(self, text: str) -> re.Match[str] | None:
        """Find the end of the argument that is read."""
        for found in _END.finditer(text):
            name = found[1]
            if name is None or (name not in self._given and self._is_declared(name)):
                return found
        return None

    def _is_declared(self, name: str) -> bool:
        declared = resolved(self._schema, self._schema).get("properties")
        return isinstance(declared, Mapping) and name in declared

    def _read_string(self) -> bool:
        """A text within an object or a list; one that goes over the line is none of JSON."""
        found = _IN_STRING.match(self._text)
        end = found.end() if found else 0
        rest = self._text[end : end + 2]
        if rest in ("", "\\"):
            self._add(self._text[:end])
            self._text = rest
            return False
        self._is_json = rest[0] == '"'
        end += self._is_json
        self._add(self._text[:end])
        self._text = self._text[end:]
        self._state = self._read_value
        return True

    def _read_close(self) -> bool:
        """The tag after a call, or none."""
        text = self._text.lstrip(SPACE)
        if CLOSE.startswith(text) and len(text) < len(CLOSE):
            return False
        if text.startswith(CLOSE):
            self._text = text[len(CLOSE) :]
        self._state = self._read_text
        return True

    # Parts ------------------------------------------------------------------------

    def _emit(self, content: str) -> None:
        if content and not (self._follows_call and not content.strip(SPACE)):
            self._parts.append(content)
            self._follows_call = False

    def _add(self, text: str) -> None:
        """More of an argument."""
        if not text or self._is_repeated:
            return
        if self._is_blank:
            text = text.removeprefix("\n")
            self._is_blank = False
        if self._is_streamed:
            self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self, end: int) -> None:
        self._add(self._text[:end].removesuffix("\n"))
        if self._is_repeated:
            return
        if self._is_streamed:
            self._add_arguments('"')
            return
        value = "".join(self._value)
        self._value = []
        self._add_arguments(argument_json(value, self._argument, self._schema))

    def _end_call(self) -> None:
        self._add_arguments("}")
        self._follows_call = True
        self._state = self._read_close
        self.is_complete = self._single


def _head(text: str) -> tuple[str, int] | None:
    """(name of a function, where its arguments begin) of a text that begins with `OPEN` or
    `FUNCTION`; "" for no call, None if more is needed to tell."""
    at = len(text) - len(text.removeprefix(OPEN).lstrip(SPACE))
    if not text.startswith(FUNCTION, at):
        return None if FUNCTION.startswith(text[at:]) else ("", 0)
    begin = at + len(FUNCTION)
    end = text.find(">", begin, begin + MAX_NAME + 1)
    if end < 0:
        return None if len(text) - begin <= MAX_NAME else ("", 0)
    at = len(text) - len(text[end + 1 :].lstrip(SPACE))
    for mark in (PARAMETER, FUNCTION_END):
        if text.startswith(mark, at):
            return text[begin:end], at
        if mark.startswith(text[at:]):
            return None
    return "", 0
