"""JSON lines: one JSON value on each line, read one at a time, so that a bad line is an error of
its own row and a file may be larger than memory."""

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
    """Index among the lines that are not blank, from 0."""
    content: bytes


def scan(path: Path) -> tuple[int, str]:
    """Count the rows of a file and take its SHA-256, as a hexadecimal string.

    Raises `DataError` if there are no rows, or if the file is not a regular one: it is read twice.
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file: it is read twice, so save it as one")
    digest = hashlib.sha256()
    rows = 0
    with path.open("rb") as file:
        for content in file:
            digest.update(content)
            rows += not content.isspace()
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows, digest.hexdigest()


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a file that are not blank."""
    with path.open("rb") as file:
        number = 0
        for at, content in enumerate(file, start=1):
            if not content.isspace():
                yield Line(f"{path}:{at}", number, content)
                number += 1


def parse_value(content: bytes) -> Any:
    """Parse one line, a JSON value of any type.

    Stricter than `json.loads`: NaN and Infinity, which JSON does not have, and an object with the
    same key twice are refused. Raises `DataError` that says what is wrong, and not where.
    """
    try:
        return json.loads(
            content.decode("utf-8"),
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_keys,
        )
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError("not valid JSON: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits, or one of the two below
        raise DataError(f"not valid JSON: {error}") from None


def parse_object(content: bytes) -> dict[str, Any]:
    """`parse_value` of a line that must be an object. Raises `DataError`."""
    value = parse_value(content)
    if not isinstance(value, dict):
        raise DataError(f"expected an object, got {type(value).__name__}")
    return value


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} appears twice in an object")
        found[key] = value
    return found
