"""How a command ends: exit codes and one-line errors.

Exit codes: 0 ok, 1 error, 2 usage, 3 some rows failed, 4 bad or mismatched checkpoint, 5 out of
memory, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from ..errors import (
    CheckpointError,
    DataError,
    DivergenceError,
    OutOfMemoryError,
    UsageError,
)
from ..pallas_kernels import ImplementationError
from ..process import interrupts
from . import json_log, messages, streams
from .messages import log as log

OK = 0
ERROR = 1
USAGE = 2
SOME_ROWS_FAILED = 3
BAD_CHECKPOINT = 4
OUT_OF_MEMORY = 5
INTERRUPTED = 130

TRACEBACK = "SWIFTKV_TRACEBACK"
"""Environment variable that prints the traceback of an unforeseen error."""


def run(main: Callable[[], int], parser: argparse.ArgumentParser | None = None) -> int:
    """Run a command's `main`; returns its exit code.

    Every foreseeable failure becomes one line on standard error and the right exit code. Names of
    `parser`'s arguments in backticks become its flags, in errors and in the log.
    """
    try:
        try:
            with interrupts.raising(), messages.own_log(parser):
                code = _run(main, parser)
            if not interrupts.pending():
                return code
        except KeyboardInterrupt:
            pass
        if not interrupts.pending() or interrupts.tell():
            messages.write("interrupted", "error")
        return INTERRUPTED
    finally:
        json_log.end()


def end(code: int) -> NoReturn:
    """End the program with exit code `code`, as `sys.exit` would: other threads are awaited, exit
    functions run, streams are flushed. Only the interpreter is not torn down, object by object,
    which takes most of a second once JAX has run."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()
    os._exit(code)


def _run(main: Callable[[], int], parser: argparse.ArgumentParser | None) -> int:
    try:
        streams.prepare()
        code = main()
        sys.stdout.flush()
        return code
    except Exception as error:
        return INTERRUPTED if interrupts.pending() else report(error, parser)


def fail(error: object, code: int, parser: argparse.ArgumentParser | None = None) -> int:
    """Write `error: ...` to standard error, in every process; returns `code`."""
    messages.write(messages.with_flags(str(error), parser), "error")
    return code


def report(error: Exception, parser: argparse.ArgumentParser | None = None) -> int:
    """Print `error`; returns the exit code."""
    text = str(error)
    match error:
        case UsageError():
            return fail(error, USAGE, parser)
        case ImplementationError():
            return fail(error.of_option("attention"), USAGE, parser)
        case NotImplementedError():
            return fail(error, USAGE, parser)
        case CheckpointError():
            return fail(error, BAD_CHECKPOINT, parser)
        case DataError() | DivergenceError():
            return fail(error, ERROR, parser)
        case OutOfMemoryError():
            return fail(error, OUT_OF_MEMORY, parser)
        case BrokenPipeError():  # whatever read the output has ended
            streams.discard_stdout()
            return ERROR
        case FileNotFoundError():
            return fail(_os_error(error), USAGE, parser)
        case OSError():
            return fail(_os_error(error), ERROR, parser)
        case MemoryError():
            detail = f": {text.splitlines()[0]}" if text.strip() else ""
            return fail(f"out of host memory{detail}", OUT_OF_MEMORY)
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        return fail(f"out of device memory: {text.splitlines()[0]}", OUT_OF_MEMORY)
    if platforms := _wrong_platforms(error):
        return fail(platforms, USAGE)
    return _fail_unforeseen(error)


def _os_error(error: OSError) -> str:
    """Return what could not be used or done, then the reason.

    A note on the error (`BaseException.add_note`) that begins with "cannot" says what was being
    done: "cannot write out.json".
    """
    if error.strerror is None:  # one of ours, in words
        return str(error)
    reason = error.strerror[0].lower() + error.strerror[1:]
    for note in getattr(error, "__notes__", ()):
        if note.startswith("cannot "):
            return f"{note}: {reason}"
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if _is_path(name)]
    if not names:
        return reason
    return f"cannot use {' or '.join(names)}: {reason}"


def _is_path(name: object) -> bool:
    return isinstance(name, str | bytes | os.PathLike)


def _wrong_platforms(error: Exception) -> str | None:
    """Return what is wrong with the environment's choice of devices; None if JAX failed for another
    reason."""
    chosen = os.environ.get("JAX_PLATFORMS")
    if chosen is None or "jax" not in sys.modules:
        return None
    if "Unable to initialize backend" not in str(error):
        try:  # where a plugin is missing, JAX fails an assertion instead
            sys.modules["jax"].devices()
            return None
        except Exception as again:
            error = again
    reason = str(error).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0]
    return (
        f"JAX_PLATFORMS={chosen!r} in the environment names a kind of device that is not here"
        + (f": {reason}" if reason else "")
    )


def _fail_unforeseen(error: Exception) -> int:
    """Print an unexpected error, most likely a defect of this program: one line, and the traceback
    if it was asked for."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    reason = str(error).strip().splitlines() or [""]
    return fail(
        f"unexpected {type(error).__name__}: {reason[0]} (set {TRACEBACK}=1 for the traceback)",
        ERROR,
    )
