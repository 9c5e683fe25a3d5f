"""SIGINT ends a command with one line on standard error and exit code 130, whatever it is doing.

While the command starts (imports, arguments) it ends at once. Later SIGINT raises
`KeyboardInterrupt`, once: `cli.run` turns it into the line and the code, and what is open is
closed on the way. An exception that is raised inside an import, a destructor or a callback from
native code may be swallowed there, so it is raised again until it arrives, and after
`GRACE_SECONDS` the process ends without it. That leaves no file half-written: files appear complete
or not at all.

Only what is quick to import is imported here: this comes before everything else.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes longer than all of the above
    from threading import Thread
    from types import FrameType
    from typing import Any

GRACE_SECONDS = 5.0
"""Seconds from the interrupt until the process ends, whatever is still running."""
_WAIT_SECONDS = 0.2
"""The longest of the waits in `join`."""
_CODE = 130


class _State:
    """State of the interrupt, one for the whole process, as signal handlers are."""

    raised = False
    """The interrupt has come while the command ran."""
    swallowed = False
    """The exception did not arrive, or was not raised yet."""
    reported = False
    """The line has been written."""
    main_thread: int = 0
    """The thread that runs Python's signal handlers."""


def install() -> None:
    """Start handling SIGINT, in the main thread. Changes nothing if SIGINT is ignored, as under
    nohup, or has another handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _State.main_thread = _thread.get_ident()
        signal.signal(signal.SIGINT, _end_at_once)


class raising:
    """A context in which SIGINT raises `KeyboardInterrupt`: where the command runs. Changes nothing
    without `install`."""

    def __enter__(self) -> None:
        self._installed = signal.getsignal(signal.SIGINT) is _end_at_once
        self._hook = sys.unraisablehook
        if self._installed:
            sys.unraisablehook = self._note_swallowed
            signal.signal(signal.SIGINT, _raise)

    def __exit__(self, *exception: Any) -> None:
        if self._installed:
            # Ignored, not handled: Python's finalization gives handlers back to the system, and a
            # late SIGINT would then end the process by the signal.
            signal.signal(signal.SIGINT, signal.SIG_IGN if _State.raised else _end_at_once)
            sys.unraisablehook = self._hook

    def _note_swallowed(self, lost: Any) -> None:
        """Python's report of an exception that had nowhere to go, as in a destructor."""
        if _State.raised and isinstance(lost.exc_value, KeyboardInterrupt):
            _State.swallowed = True
        else:
            self._hook(lost)


class held_back:
    """A context that SIGINT does not divide. It yields a list, of one item for each SIGINT that has
    come; if there is any at the end, the handler from before is called then. Changes nothing in
    other threads than the main one, which runs the handlers, and where SIGINT has none in Python:
    the list stays empty."""

    def __enter__(self) -> list[int]:
        self._seen: list[int] = []
        self._handler = signal.getsignal(signal.SIGINT)
        if callable(self._handler):
            try:
                signal.signal(signal.SIGINT, lambda number, frame: self._seen.append(number))
            except ValueError:  # another thread
                self._handler = None
        return self._seen

    def __exit__(self, *exception: Any) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
            if self._seen:
                self._handler(signal.SIGINT, sys._getframe())


def pending() -> bool:
    """True if SIGINT has come while the command ran, and nothing else has handled it."""
    return _State.raised


def join(thread: Thread, timeout: float) -> None:
    """Wait until `thread` has ended, for at most `timeout` seconds. SIGINT is handled meanwhile,
    also one that another thread receives or that comes just before a wait: neither ends that wait,
    so each is short."""
    deadline = time.monotonic() + timeout
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, _WAIT_SECONDS))


def tell() -> bool:
    """True for the first caller only: the line is still to be written."""
    reported = _State.reported
    _State.reported = True
    return not reported


def _end_at_once(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    if tell():
        try:  # past sys.stderr, whose buffer the interrupted code may be using
            os.write(2, b"error: interrupted\n")
        except OSError:  # it is closed
            pass
    os._exit(_CODE)


def _raise(number: int, frame: FrameType | None) -> None:
    if _State.raised and not _State.swallowed:
        return
    if not _State.raised:
        _State.raised = True
        # Not by `threading`, whose locks the interrupted code may hold.
        _thread.start_new_thread(_watch, ())
    _State.swallowed = _is_importing(frame)
    if not _State.swallowed:
        raise KeyboardInterrupt


def _watch() -> None:
    """Raise the interrupt again while it is swallowed; after the grace period, end the process."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        if _State.swallowed:
            signal.pthread_kill(_State.main_thread, signal.SIGINT)
    _end_at_once()


def _is_importing(frame: FrameType | None) -> bool:
    """True if an import is under way, which may catch every exception and leave modules
    half loaded."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
