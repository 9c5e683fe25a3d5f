"""Makes standard input, output and error of a command usable if the environment has left them
unusable."""

from __future__ import annotations

import codecs
import io
import os
import sys


class _ClosedInput(io.TextIOBase):
    """Standard input that is closed: an `OSError` where it is read."""

    def read(self, size: int | None = -1, /) -> str:
        raise OSError("standard input is closed")

    readline = read

    def readable(self) -> bool:
        return True


def prepare() -> None:
    """Make the standard streams usable.

    Streams that would be ASCII become UTF-8. Without a standard error nothing is written there;
    standard input that is closed raises `OSError` when it is read. Raises `OSError` if standard
    output is closed: the next file to be opened would take its place, and results be written there.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        raise OSError("standard output is closed; redirect it to /dev/null to do without it")
    if sys.stdin is None:
        sys.stdin = _ClosedInput()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding="utf-8")


def discard_stdout() -> None:
    """Discard everything that is still to be written to standard output, because its reader has
    ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
