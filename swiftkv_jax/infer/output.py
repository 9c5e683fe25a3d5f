"""Writing what was generated, in the order of the prompts: text for people, JSON lines for programs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TextIO

from .prompts import Request
from .text import TextStream


@dataclasses.dataclass
class Row:
    """A request on its way through."""

    request: Request
    stream: TextStream | None
    """None without a tokenizer."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def push(self, tokens: list[int], finish_reason: str | None) -> None:
        """Take new tokens. A stop string finishes the row, and drops the tokens that came after it."""
        if self.stream is None:
            self.token_ids += tokens
        else:
            self.text += self.stream.push(tokens)
            self.token_ids = self.stream.token_ids
            if finish_reason and not self.stream.stopped:
                self.text += self.stream.finish()
            if self.stream.stopped:
                finish_reason = "stop"
        self.finish_reason = finish_reason

    def to_json(self) -> dict[str, Any]:
        if self.error is not None:
            return {"id": self.request.id, "error": self.error}
        usage = {"prompt_tokens": len(self.request.token_ids), "completion_tokens": len(self.token_ids)}
        text = None if self.stream is None else self.text
        return {"id": self.request.id, "text": text, "token_ids": self.token_ids, "finish_reason": self.finish_reason, "usage": usage}


class TextWriter:
    """Completions one after the other, each ended by a newline. With `live`, the first unfinished row as it grows."""

    def __init__(self, rows: list[Row], file: TextIO, *, live: bool, prefix: str = ""):
        self._rows, self._file, self._live, self._prefix = rows, file, live, prefix
        self._at, self._written = 0, 0

    def update(self) -> None:
        """Write what has become certain since the last call."""
        while self._at < len(self._rows):
            row = self._rows[self._at]
            if not (self._live or row.done):
                return
            if row.error is None:
                text = (self._prefix + row.text)[self._written :]
                self._file.write(text + ("\n" if row.done else ""))
                self._written += len(text)
            self._file.flush()
            if not row.done:
                return
            self._at, self._written = self._at + 1, 0


class JsonlWriter:
    """One line per row, each whole and flushed when all rows before it have been written."""

    def __init__(self, rows: list[Row], file: TextIO):
        self._rows, self._file, self._at = rows, file, 0

    def update(self) -> None:
        while self._at < len(self._rows) and self._rows[self._at].done:
            self._file.write(json.dumps(self._rows[self._at].to_json(), ensure_ascii=False) + "\n")
            self._file.flush()
            self._at += 1
