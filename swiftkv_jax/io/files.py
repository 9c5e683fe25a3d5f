"""Files that appear complete or not at all, and never in the place of another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import UsageError


def check_absent(flag: str, path: Path | None) -> None:
    """Before an hour of work rather than after it: raise `UsageError` if `path`, given by `flag`,
    exists or cannot be made."""
    if path is None:
        return
    if path.exists():
        raise UsageError(
            f"{flag} {path}: exists already; nothing is overwritten, so remove it or choose "
            f"another path"
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: its folder does not exist")


def write_whole(path: Path, content: bytes) -> None:
    """Make or replace `path` in one step: whoever reads it, and whenever the machine stops, finds
    all of it or what was there."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        error.add_note(f"cannot write {path}")
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """`write_whole` of a document that people may read too."""
    write_whole(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
