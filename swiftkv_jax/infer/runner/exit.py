"""The end of a process with calls in flight."""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from typing import Any, Protocol

import jax


class Waits(Protocol):
    """An object with calls in flight."""

    def wait(self) -> None:
        """Wait for them."""
        ...


def wait_for(state: Any, result: Any) -> None:
    """Wait until all calls on `state` have ended and `result` has been copied to the host; their
    errors are dropped."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if not leaf.is_deleted()]
    with contextlib.suppress(RuntimeError):
        jax.block_until_ready(leaves)
        jax.device_get(result)


_waiting: weakref.WeakSet[Waits] = weakref.WeakSet()


def wait_at_exit(runner: Waits) -> None:
    """Let the interpreter wait for calls in flight before it exits. Exit handlers run in reverse
    order, so this one runs before that of JAX, which destroys the client."""
    _register()
    _waiting.add(runner)


@functools.cache
def _register() -> None:
    atexit.register(lambda: [runner.wait() for runner in list(_waiting)])
