"""JSON objects of checkpoints and runs. Errors name the file, and say so of Git LFS pointers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_POINTER = b"version https://git-lfs"
"""How a Git LFS pointer begins: the text that stands for a large file which was not fetched."""


def check_no_pointer(file: Path, content: bytes) -> None:
    """Raise `CheckpointError` if a file, which begins with `content`, is a Git LFS pointer."""
    if content.startswith(_POINTER):
        raise CheckpointError(
            f"{file}: a Git LFS pointer in the place of the file: `git lfs pull` in its folder "
            f"fetches it"
        )


def read_json(file: Path, error_type: type[CheckpointError] = CheckpointError) -> dict[str, Any]:
    """The JSON object in a file. Raises `error_type` naming it if it is missing or has none."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise error_type(f"{file}: no such file") from None
    except OSError as error:
        raise error_type(f"{file}: cannot be read ({error.strerror})") from None
    return parse_json(file, content, error_type)


def parse_json(
    file: Path, content: bytes, error_type: type[CheckpointError] = CheckpointError
) -> dict[str, Any]:
    """The JSON object that is the `content` of a file. Raises `error_type` naming the file if it is
    not one."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        check_no_pointer(file, content)
        raise error_type(f"{file}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise error_type(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value
