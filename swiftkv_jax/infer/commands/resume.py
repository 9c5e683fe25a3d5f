"""Output that survives its process: `OUT.partial` grows by whole lines, and becomes `OUT` when all
are there.

Beside it, `OUT.settings.json` says what the lines come from: the input's digest, the model's, and
what else decides what a row becomes. `--resume` goes on only if all of that is the same. A kill at
any moment leaves whole lines and at most one torn one, which is dropped: no row is lost, none comes
twice. An `OUT` that is complete is left as it is.
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
from ...io.files import check_absent, write_atomic
from ...io.jsonl import parse

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
"""Of each file of a checkpoint: reading all of it again would take as long as loading it."""


def checkpoint_digest(path: Path) -> str:
    """Of the names, sizes and parts of a checkpoint's files. Other weights of the same shape differ
    all over, so parts are enough."""
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as content:
            for start in sorted(
                {max(0, size - _SAMPLE_BYTES) * part // (_SAMPLES - 1) for part in range(_SAMPLES)}
            ):
                content.seek(start)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


class Output:
    """The file that `--output` names."""

    def __init__(self, path: Path, *, resume: bool):
        """Raises `UsageError` if something is in the way: nothing is overwritten."""
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self._settings_file = path.with_name(path.name + ".settings.json")
        self.complete = resume and path.exists()
        """An earlier run has written all of it."""
        if not self.complete:
            check_absent("--output", path)
        if self.partial.exists() and not resume:
            raise UsageError(
                f"--output {path}: {self.partial} is of an interrupted run; go on with --resume, "
                f"or remove it"
            )

    def count(self, settings: dict[str, Any]) -> tuple[int, int]:
        """(rows, how many of them failed) of an output that is complete. Raises `UsageError` if it
        was made with other settings."""
        self._check(self.path, settings)
        with self.path.open("rb") as file:
            failed = ["error" in parse(line) for line in file]
        return len(failed), sum(failed)

    @contextlib.contextmanager
    def open(
        self, settings: dict[str, Any], old: Callable[[dict[str, Any]], None]
    ) -> Iterator[BinaryIO]:
        """The file to append lines to; it takes its name at the end of the block, unless an
        exception ends that.

        `old` hears of each row that is there already. Raises `UsageError` if these were made with
        other settings, or are being written at this moment, and `DataError` if they are damaged.
        """
        with self.partial.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"--output {self.path}: another process is writing {self.partial}"
                ) from None
            # Another process may have ended since this one began, and have taken the file from
            # under its name.
            if self.path.exists() or not (
                self.partial.exists()
                and os.path.samestat(os.fstat(file.fileno()), self.partial.stat())
            ):
                if not os.fstat(file.fileno()).st_size:
                    self.partial.unlink(missing_ok=True)
                raise UsageError(
                    f"--output {self.path}: another process has just written it; nothing is "
                    f"overwritten"
                )
            if os.fstat(file.fileno()).st_size:
                self._check(self.partial, settings)
            else:
                write_atomic(self._settings_file, json.dumps(settings, indent=2).encode())
            self._read(file, old)
            yield file
            file.flush()
            os.fsync(file.fileno())
            self.partial.rename(self.path)

    def _check(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises `UsageError` unless `path` was written with these settings."""
        try:
            written = parse(self._settings_file.read_bytes())
        except (DataError, OSError):
            raise DataError(
                f"{self._settings_file}: missing or damaged, so nobody knows what {path} holds; "
                f"remove both"
            ) from None
        now = parse(json.dumps(settings).encode())  # with the types that JSON has
        for name in [*written, *now]:
            if written.get(name) != now.get(name):
                values = (
                    ""
                    if name in ("input", "model")
                    else f": {written.get(name)!r} then, {now.get(name)!r} now"
                )
                raise UsageError(
                    f"--resume: {path} was written with another {name}{values}; use the same, or "
                    f"remove it"
                )

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
                raise DataError(
                    f"{self.partial}:{number}: {error}; remove the file to start again"
                ) from None
            end += len(line)
        file.truncate(end)
        file.seek(end)
