"""Output that survives its process: `OUT.partial` grows by whole lines, and becomes `OUT` when all are there.

Beside it, `OUT.partial.json` says what the lines come from: the input's digest, the model's, and what else decides what a
row becomes. `--resume` goes on only if all of that is the same. A kill at any moment leaves whole lines and at most one
torn one, which is dropped: no row is lost, none comes twice. Of an `OUT` that is complete, `--resume` leaves everything as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import DataError, UsageError
from ...files import check_absent, write_whole
from .jsonl import parse

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
"""Of each file of a checkpoint: reading all of it again would take as long as loading it."""


def checkpoint_digest(path: Path) -> str:
    """Of the names, sizes and parts of a checkpoint's files. Other weights of the same shape differ all over, so parts are enough."""
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as content:
            for start in sorted({max(0, size - _SAMPLE_BYTES) * part // (_SAMPLES - 1) for part in range(_SAMPLES)}):
                content.seek(start)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def finished(path: Path) -> tuple[int, int] | None:
    """(rows, how many of them failed) of an output that is complete; None if it is not there. Raises `DataError` if it is no such file.

    Removes what a kill at the very end may have left beside it.
    """
    if not path.exists():
        return None
    rows = failed = 0
    with path.open("rb") as file:
        for rows, line in enumerate(file, start=1):
            try:
                failed += "error" in parse(line)
            except DataError as error:
                raise DataError(f"{path}:{rows}: {error}: not an output of this command") from None
    if not _partial(path).exists():
        _settings_file(path).unlink(missing_ok=True)
    return rows, failed


class Output:
    """The file that `--output` names."""

    def __init__(self, path: Path, *, resume: bool):
        """Raises `UsageError` if something is in the way: nothing is overwritten."""
        self.path, self.partial, self._settings_file = path, _partial(path), _settings_file(path)
        check_absent("--output", path)
        if self.partial.exists() and not resume:
            raise UsageError(f"--output {path}: {self.partial} is of an interrupted run; go on with --resume, or remove it")

    @contextlib.contextmanager
    def open(self, settings: dict[str, Any], old: Callable[[dict[str, Any]], None]) -> Iterator[BinaryIO]:
        """The file to append lines to; it takes its name at the end of the block, unless an exception ends that.

        `old` hears of each row that is there already. Raises `UsageError` if these were made with other settings, or are
        being written at this moment, and `DataError` if they are damaged.
        """
        if self.partial.exists():
            self._check(settings)
        else:
            write_whole(self._settings_file, json.dumps(settings, indent=2).encode())
        with self.partial.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"--output {self.path}: another process is writing {self.partial}") from None
            self._read(file, old)
            yield file
            file.flush()
            os.fsync(file.fileno())
            self.partial.rename(self.path)
        self._settings_file.unlink(missing_ok=True)

    def _check(self, settings: dict[str, Any]) -> None:
        try:
            written = parse(self._settings_file.read_bytes())
        except (DataError, OSError):
            raise DataError(f"{self._settings_file}: missing or damaged, so nobody knows what {self.partial} holds; remove both") from None
        now = parse(json.dumps(settings).encode())  # with the types that JSON has
        for name in [*written, *now]:
            if written.get(name) != now.get(name):
                values = "" if name in ("input", "model") else f": {written.get(name)!r} then, {now.get(name)!r} now"
                raise UsageError(f"--resume: {self.partial} was written with another {name}{values}; use the same, or remove it")

    def _read(self, file: BinaryIO, old: Callable[[dict[str, Any]], None]) -> None:
        """Every whole line to `old`; a torn last one is cut off."""
        file.seek(0)
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                old(parse(line))
            except DataError as error:
                raise DataError(f"{self.partial}:{number}: {error}; remove the file to start again") from None
            end += len(line)
        file.truncate(end)
        file.seek(end)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _settings_file(path: Path) -> Path:
    return path.with_name(path.name + ".partial.json")
