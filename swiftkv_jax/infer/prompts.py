"""Reading what to generate from: a row that cannot be read carries its error, so that the others still run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..errors import DataError, UsageError
from .text import encode, encode_chat

SOURCES = ("prompt", "prompt_token_ids", "messages")


@dataclasses.dataclass(frozen=True)
class Request:
    """One row: token ids, or why there are none."""

    id: Any
    token_ids: list[int] = dataclasses.field(default_factory=list)
    error: str | None = None


def read_text(path: Path) -> str:
    """A file as one prompt. Raises `DataError` if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_jsonl(path: Path, tokenizer: Any) -> list[Request]:
    """One request per line that is not blank: `{"id"?, "prompt" | "prompt_token_ids" | "messages"}`. `id` defaults to the row number.

    Raises `DataError` if the file is not UTF-8 or has no row at all.
    """
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]
    if not lines:
        raise DataError(f"{path}: no rows")
    return [_read_row(f"{path}:{number}", row, line, tokenizer) for row, (number, line) in enumerate(lines)]


def _read_row(where: str, number: int, line: str, tokenizer: Any) -> Request:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return Request(number, error=f"{where}: not valid JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return Request(number, error=f"{where}: not valid JSON: nested too deeply")
    if not isinstance(row, dict):
        return Request(number, error=f"{where}: expected an object, got {type(row).__name__}")
    id = row.pop("id", number)
    try:
        return Request(id, _token_ids(row, tokenizer))
    except UsageError as error:
        return Request(id, error=f"{where}: {error}")


def _token_ids(row: dict[str, Any], tokenizer: Any) -> list[int]:
    if len(row) != 1 or next(iter(row)) not in SOURCES:
        raise UsageError(f"expected id and one of {', '.join(SOURCES)}; got {', '.join(row) or 'neither'}")
    source, value = next(iter(row.items()))
    if source == "prompt_token_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise UsageError("prompt_token_ids must be a list of whole numbers")
        return value
    if tokenizer is None:
        raise UsageError(f"{source} needs a tokenizer, and this checkpoint has none: give prompt_token_ids")
    if source == "prompt":
        if not isinstance(value, str):
            raise UsageError("prompt must be a string")
        return encode(tokenizer, value)
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UsageError("messages must be a list of objects with role and content")
    return encode_chat(tokenizer, value)
