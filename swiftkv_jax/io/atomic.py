"""Directories that appear complete or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..distributed import barrier, from_process_0, is_main_process
from ..errors import UsageError


@contextlib.contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary sibling to write into; on success it is flushed to disk and renamed to `path`, on
    any error removed.

    With several processes all of them enter; process 0 creates, renames and removes. Raises
    `UsageError` if `path` is a file or a directory with something in it.
    """
    path = Path(os.path.abspath(path))
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{from_process_0(os.getpid())}")
    first = is_main_process()
    try:
        if first:
            _remove_abandoned(path)
            partial.mkdir()
        barrier("directory created")
        yield partial
        barrier("directory written")
        if first:
            _flush(partial)
            os.rename(partial, path)
            _flush_one(path.parent)
        barrier("directory renamed")
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove_abandoned(path: Path) -> None:
    """What processes that were killed left of this directory."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        number = left.name.rpartition("-")[2]
        if number.isdigit() and (
            int(number) == os.getpid() or not _is_running(int(number))
        ):  # in a container both may be 1
            shutil.rmtree(left, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_free(path: str | os.PathLike[str]) -> None:
    """Raise `UsageError` unless `path` is absent or an empty directory."""
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(
            f"{path}: exists already; nothing is overwritten, so remove it or choose another path"
        )


def _flush(directory: Path) -> None:
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            _flush_one(Path(folder, name))
        _flush_one(Path(folder))


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
