"""Calls of the engine that are made whole or not at all: what it plans, what the device holds and
what the prefix cache names are changed one after another, and agree only at the end of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, Protocol

from ...errors import UsageError
from ...process import interrupts


class _Failing(Protocol):
    failed: bool


def check_whole(engine: _Failing) -> None:
    """Raise `RuntimeError` after an error within a call."""
    if engine.failed:
        raise RuntimeError("an error left this engine between two states: make a new one")


def undivided[E: _Failing, **P, T](
    method: Callable[Concatenate[E, P], T],
) -> Callable[Concatenate[E, P], T]:
    """A method that SIGINT does not divide: what its handler raises comes after the call. Any error
    but a `UsageError`, which comes before anything changes, sets `failed`, and then `check_whole`
    raises."""

    @functools.wraps(method)
    def call(self: E, *args: P.args, **kwargs: P.kwargs) -> T:
        with interrupts.held_back():
            check_whole(self)
            try:
                return method(self, *args, **kwargs)
            except UsageError:
                raise
            except BaseException:
                self.failed = True
                raise

    return call
