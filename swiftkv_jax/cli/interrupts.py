"""SIGINT ends a command with one line on standard error and exit code 130, whatever it is doing.

While the command starts (imports, arguments) it ends at once. Later SIGINT raises
`KeyboardInterrupt`, once: `exit.run` turns it into the line and the code, and what is open is
closed on the way. An exception that is raised inside an import, a destructor or a callback from
native code may be swallowed there, so it is raised again until it arrives, and after
`GRACE_SECONDS` the process ends without it. That leaves no file half-written: files appear complete
or not at all.

Only what is quick to import is imported here: this comes before everything else.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

GRACE_SECONDS = 5.0
"""From the interrupt until the process ends, whatever is still running."""
_CODE = 130


class _State:
    """What became of the interrupt; of the process, as signal handlers are."""

    raised = False
    """It has come while the command ran."""
    swallowed = False
    """The exception did not arrive, or was not raised yet."""
    told = False
    """The line has been written."""


def install() -> None:
    """Handle SIGINT from now on, in the main thread. Where it is ignored, as under nohup, or
    handled by others, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Where the command runs: SIGINT raises `KeyboardInterrupt`. Does nothing without `install`."""
    if signal.getsignal(signal.SIGINT) is not _end_at_once:
        yield
        return
    hook = sys.unraisablehook

    def unraisable(lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt) and _State.raised:
            _State.swallowed = True
        else:
            hook(lost)

    sys.unraisablehook = unraisable
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end_at_once)
        sys.unraisablehook = hook


def pending() -> bool:
    """Whether SIGINT has come while the command ran, and nothing else has handled it."""
    return _State.raised


def tell() -> bool:
    """Whether the line is still to be written: True for the first caller only."""
    told, _State.told = _State.told, True
    return not told


def _end_at_once(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    if tell():
        with contextlib.suppress(OSError):  # the buffer of sys.stderr may be in use
            os.write(2, b"error: interrupted\n")
    os._exit(_CODE)


def _raise(number: int, frame: FrameType | None) -> None:
    if _State.raised and not _State.swallowed:
        return
    if not _State.raised:
        _State.raised = True
        # Not `threading`, whose locks the interrupted code may hold.
        _thread.start_new_thread(_watch, ())
    _State.swallowed = _is_importing(frame)
    if not _State.swallowed:
        raise KeyboardInterrupt


def _watch() -> None:
    """Raise the interrupt again where it was swallowed; in the end, end the process."""
    main, deadline = threading.main_thread().ident, time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        if _State.swallowed and main is not None:
            signal.pthread_kill(main, signal.SIGINT)
    _end_at_once()


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is under way, which may catch every exception and leave modules in
    pieces."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
