"""Files and directories that appear complete or not at all, and never replace others."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import UsageError
from .distributed import barrier, from_process_0, is_main_process


def check_absent(option: str, path: Path | None) -> None:
    """Raise `UsageError` if `path`, the value of `option`, exists or cannot be made. Call this
    before a long computation."""
    if path is None:
        return
    if path.exists():
        raise UsageError(
            f"{option} {path}: exists already; nothing is overwritten, so remove it or choose "
            f"another path"
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: its folder does not exist")


def check_free(path: str | os.PathLike[str]) -> None:
    """Raise `UsageError` unless `path` is absent or an empty directory."""
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(
            f"{path}: exists already; nothing is overwritten, so remove it or choose another path"
        )


PROGRAMS = "programs"
"""Folder of programs that a start finds without tracing them, in that of JAX's compilation cache.
To read one is to run code, so it is made only where the cache is a `private_directory`."""


def private_directory(option: str, folder: str | os.PathLike[str]) -> Path:
    """`folder`, the value of `option`, made for its owner alone if it is absent; `~` is the home
    directory.

    For what this process later trusts. Raises `UsageError` if it is a file, or others own it or can
    write it, and `OSError` if it cannot be made.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"`{option}`={path}: is not a folder", option=option) from None
    status = path.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise UsageError(
            f"`{option}`={path}: belongs to another user, and what is there is trusted; choose "
            f"another folder",
            option=option,
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"`{option}`={path}: others can write there, and what is there is trusted; chmod 700 "
            f"it, or choose another folder",
            option=option,
        )
    return path


@contextlib.contextmanager
def noting(action: str) -> Iterator[None]:
    """Add a note to an `OSError` that says what could not be done, as in `cannot write out.json`.
    Commands print it first."""
    try:
        yield
    except OSError as error:
        error.add_note(action)
        raise


def write_atomic(path: Path, content: bytes) -> None:
    """Make or replace `path` in one step: readers find all of `content` or what was there before,
    also after a crash of the machine. Raises `OSError`."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with noting(f"cannot write {path}"):
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write_json(
    path: Path, document: dict[str, Any] | list[Any], *, canonical: bool = False
) -> None:
    """`write_atomic` of a document that people may read too. `canonical` sorts its keys and escapes
    what is not ASCII, as in the config.json of a checkpoint."""
    if canonical:
        text = json.dumps(document, indent=2, sort_keys=True)
    else:
        text = json.dumps(document, indent=1, ensure_ascii=False)
    write_atomic(path, (text + "\n").encode())


def lock(file: int | IO[bytes]) -> bool:
    """Take the lock of an open file, which is held until that is closed. False if another process
    has it; True where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock file `path`, which is removed at the end, during the block. Yields False if
    another process has it. Raises `OSError` if it cannot be made."""
    with path.open("ab") as file:
        # A process that ends now may have removed the file since it was opened.
        owns = (
            lock(file) and path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        )
        try:
            yield owns
        finally:
            if owns:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary sibling to write into; on success it is flushed to disk and renamed to `path`, on
    any error removed.

    With several processes all of them enter; process 0 creates, renames and removes. Raises
    `UsageError` if `path` is a file or a directory with something in it, and `OSError` with a note
    if it cannot be written.
    """
    path = Path(os.path.abspath(path))
    check_free(path)
    first = is_main_process()
    with noting(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial-{from_process_0(os.getpid())}")
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
    """Remove temporary siblings of this directory that killed processes left behind."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        number = left.name.rpartition("-")[2]
        # In a container this process and the one that was killed may both have the number 1.
        if number.isdigit() and (int(number) == os.getpid() or not is_running(int(number))):
            shutil.rmtree(left, ignore_errors=True)


def is_running(process: int) -> bool:
    """True if there is a process of this number on this host."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
