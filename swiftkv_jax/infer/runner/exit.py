"""The end of a process with calls in flight."""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import Protocol


class Waits(Protocol):
    """An object with calls in flight."""

    def wait(self) -> None:
        """Wait for them."""
        ...


_waiting: weakref.WeakSet[Waits] = weakref.WeakSet()


def wait_at_exit(runner: Waits) -> None:
    """Let the interpreter wait for calls in flight before it exits. Exit handlers run in reverse
    order, so this one runs before that of JAX, which destroys the client."""
    _register()
    _waiting.add(runner)


@functools.cache
def _register() -> None:
    atexit.register(lambda: [runner.wait() for runner in list(_waiting)])
