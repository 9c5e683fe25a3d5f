"""Standard error as JSON, one object on each line: the logs of the package and of libraries,
warnings, and everything else that is written to `sys.stderr`. Output that compiled code writes
directly is not converted."""

from __future__ import annotations

import datetime
import io
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any, TextIO


class JSONStderr(io.TextIOBase):
    """Takes the place of `sys.stderr`."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self._line = ""

    def write(self, text: str, /) -> int:
        """Text that ends with a line break is a message of one or more lines."""
        self._line += text
        if self._line.endswith("\n"):
            line = self._line.strip("\n")
            self._line = ""
            if line.strip():
                self.write_object("info", {"message": line})
        return len(text)

    def write_object(self, level: str, fields: Mapping[str, Any]) -> None:
        """A line with the time, a level and some fields."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self.stream.write(json.dumps({"time": now, "level": level, **fields}) + "\n")
        self.stream.flush()

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True


class _Handler(logging.Handler):
    """Handler of the root logger, for records of libraries."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if isinstance(sys.stderr, JSONStderr):
                sys.stderr.write_object(record.levelname.lower(), fields_of(record))
        except Exception:
            self.handleError(record)


_HANDLER = _Handler(logging.WARNING)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Logger, message and traceback; `fields` in the record's `extra` are added."""
    found: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
    if record.exc_info:
        found["exception"] = logging.Formatter().formatException(record.exc_info)
    return found | getattr(record, "fields", {})


def begin() -> None:
    """Replace standard error until `end`."""
    if sys.stderr is not None and not isinstance(sys.stderr, JSONStderr):
        sys.stderr = JSONStderr(sys.stderr)
        logging.getLogger().addHandler(_HANDLER)
        logging.captureWarnings(True)


def end() -> None:
    """Restore standard error. Does nothing without a `begin`."""
    if isinstance(sys.stderr, JSONStderr):
        sys.stderr = sys.stderr.stream
        logging.getLogger().removeHandler(_HANDLER)
        logging.captureWarnings(False)
