"""Files of JSON lines, read one row at a time: a row that cannot be read fails alone, and files may
be larger than memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError


class Line(NamedTuple):
    """A line that is not blank."""

    where: str
    """`FILE:LINE`, for errors."""
    number: int
    """Of the row in its file, from 0; blank lines do not count."""
    content: bytes


def survey(path: Path) -> tuple[int, str]:
    """How many rows a file has, and its SHA-256. Raises `DataError` if it has none, or can be read
    only once."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file: it is read twice, so save it as one")
    digest, rows = hashlib.sha256(), 0
    with path.open("rb") as file:
        for content in file:
            digest.update(content)
            rows += not content.isspace()
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows, digest.hexdigest()


def lines_of(path: Path, *, skip: int = 0) -> Iterator[Line]:
    """The rows of a file after the first `skip`."""
    with path.open("rb") as file:
        number = 0
        for at, content in enumerate(file, start=1):
            if content.isspace():
                continue
            if number >= skip:
                yield Line(f"{path}:{at}", number, content)
            number += 1


def parse(content: bytes) -> dict[str, Any]:
    """A JSON object. Raises `DataError` that says what is wrong, and not where."""
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError("not valid JSON: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"expected an object, got {type(value).__name__}")
    return value


def _refuse(constant: str) -> None:
    """Python would read NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{constant} is not a number")
