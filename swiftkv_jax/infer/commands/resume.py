"""Output files that survive a kill: `OUT.partial` grows by whole lines, and is renamed to `OUT`
when all are there.

Beside it, `OUT.settings.json` holds what the lines were made from: the digests of input and model,
and all settings that change a row. `--resume` continues only if all of that is the same. A kill at
any moment leaves whole lines and at most one torn line, which is dropped: no row is lost or written
twice. A complete `OUT` is never changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ...checkpoints.gguf.file import shards
from ...cli.model_options import ModelOptions
from ...errors import DataError, UsageError
from ...model.model import Model
from ...process.files import check_absent, lock, write_atomic
from ...process.jsonl import parse_object

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
"""Parts read of each file of a checkpoint, and bytes of a part: reading all of it would take as
long as loading it."""


_ENGINE_FIELDS = (
    *("kv_cache_dtype", "max_model_len", "generated_kv", "exact_tail"),
    "quantize_activations",
)
"""Fields of `EngineOptions` that change a row."""
_UNPRINTED = ("input", "model", "chat_template")
"""Settings that are digests."""


def checkpoint_digest(path: Path) -> str:
    """SHA-256 of the names, sizes and parts of the files of a checkpoint, a folder or a GGUF file
    with the others of its model. Other weights of the same shape differ everywhere, so parts are
    enough."""
    digest = hashlib.sha256()
    if path.is_file():
        folder, files = path.parent, shards(path)
    else:
        folder, files = path, sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size}\n".encode())
        with file.open("rb") as content:
            for start in sorted(
                {max(0, size - _SAMPLE_BYTES) * part // (_SAMPLES - 1) for part in range(_SAMPLES)}
            ):
                content.seek(start)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def output_settings(
    command: str,
    input_digest: str,
    model: Model,
    model_options: ModelOptions,
    engine_fields: Mapping[str, Any],
    template: str | None = None,
) -> dict[str, Any]:
    """Everything but the sampling that changes what a row becomes, as JSON. `engine_fields` are
    those of `EngineOptions` for which there was a flag, and `template` is the chat template in the
    place of the checkpoint's."""
    paths = [model_options.path, *filter(None, [model_options.adapter_path])]
    return {
        "command": command,
        "input": input_digest,
        "model": "+".join(map(checkpoint_digest, paths)),
        "swiftkv": model.uses_swiftkv(model_options.uses_swiftkv),
        "dtype": str(model.dtype),
        "quantization": model_options.quantization,
        "chat_template": template and hashlib.sha256(template.encode()).hexdigest(),
    } | {name: engine_fields.get(name) for name in _ENGINE_FIELDS}


class OutputFile:
    """The file that `--output` names."""

    def __init__(self, path: Path, *, resume: bool):
        """Raises `UsageError` if `path` exists, or `OUT.partial` does without `resume`."""
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self._settings_file = path.with_name(path.name + ".settings.json")
        self.complete = resume and path.exists()
        """True if an earlier run has written all of the file."""
        if not self.complete:
            check_absent("`output`", path)
        if self.partial.exists() and not resume:
            raise UsageError(
                f"`output`={path}: {self.partial} is of an interrupted run; go on with `resume`, "
                f"or remove it"
            )

    def count(self, settings: dict[str, Any]) -> tuple[int, int]:
        """Rows of a complete file, and how many of them failed. Raises `UsageError` if it was
        written with other settings."""
        self._check(self.path, settings)
        with self.path.open("rb") as file:
            failed = ["error" in parse_object(line) for line in file]
        return len(failed), sum(failed)

    @contextlib.contextmanager
    def open(
        self, settings: dict[str, Any], on_existing: Callable[[dict[str, Any]], None]
    ) -> Iterator[BinaryIO]:
        """Open the file to append lines; it is renamed to `path` at the end of the block, unless an
        exception ends that.

        `on_existing` is called with each row that is there already. Raises `UsageError` if these
        were written with other settings or another process is writing now, and `DataError` if they
        are damaged.
        """
        with self.partial.open("a+b") as file:
            if not lock(file):
                raise UsageError(f"`output`={self.path}: another process is writing {self.partial}")
            # Another process may have ended since this one began, and have renamed the file.
            if self.path.exists() or not (
                self.partial.exists()
                and os.path.samestat(os.fstat(file.fileno()), self.partial.stat())
            ):
                if not os.fstat(file.fileno()).st_size:
                    self.partial.unlink(missing_ok=True)
                raise UsageError(
                    f"`output`={self.path}: another process has just written it; nothing is "
                    f"overwritten"
                )
            if os.fstat(file.fileno()).st_size:
                self._check(self.partial, settings)
            else:
                write_atomic(self._settings_file, json.dumps(settings, indent=2).encode())
            self._read(file, on_existing)
            yield file
            file.flush()
            os.fsync(file.fileno())
            self.partial.rename(self.path)

    def _check(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises `UsageError` unless `path` was written with these settings."""
        try:
            written = parse_object(self._settings_file.read_bytes())
        except (DataError, OSError):
            raise DataError(
                f"{self._settings_file}: missing or damaged, so it is not known how {path} was "
                f"made; remove both"
            ) from None
        now = parse_object(json.dumps(settings).encode())  # with the types that JSON has
        for name in [*written, *now]:
            if written.get(name) != now.get(name):
                values = ""
                if name not in _UNPRINTED:
                    values = f": {written.get(name)!r} then, {now.get(name)!r} now"
                raise UsageError(
                    f"`resume`: {path} was written with another {name}{values}; use the same, or "
                    f"remove it"
                )

    def _read(self, file: BinaryIO, on_existing: Callable[[dict[str, Any]], None]) -> None:
        """Call `on_existing` with every whole line; a torn last one is cut off."""
        file.seek(0)
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                on_existing(parse_object(line))
            except DataError as error:
                raise DataError(
                    f"{self.partial}:{number}: {error}; remove the file to start again"
                ) from None
            end += len(line)
        file.truncate(end)
        file.seek(end)
