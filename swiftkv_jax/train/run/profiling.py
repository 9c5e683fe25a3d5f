"""A trace of a few steps, for XProf or Perfetto."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax

from ...errors import UsageError


class ProfileWindow:
    """Traces steps FIRST to LAST, both included, of `"FIRST:LAST"` into `folder`, or those of them
    that the run makes.

        with ProfileWindow("10:15", folder) as profile:
            for n in ...:
                profile.step(n, state)      # before step n is started
                state = train_step(state)

    `None` traces nothing. Raises `UsageError` for text that is not two numbers in order.
    """

    def __init__(self, steps: str | None, folder: Path):
        self._folder = str(folder)
        self._running = False
        self._steps = range(0) if steps is None else parse_steps(steps)

    def __enter__(self) -> ProfileWindow:
        return self

    def step(self, number: int, pending: Any) -> None:
        """Call this before step `number`. `pending` are arrays of the step before: they are waited
        for at the two edges of the window only, so that the trace holds whole steps and no
        others."""
        if not self._running and number in self._steps:
            jax.block_until_ready(pending)
            jax.profiler.start_trace(self._folder)
            self._running = True
        elif self._running and number not in self._steps:
            jax.block_until_ready(pending)
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._running = False

    def __exit__(self, *exception: Any) -> None:
        if self._running:
            self._stop()


def parse_steps(text: str) -> range:
    """`"10:15"` -> steps 10 to 15, both included. Raises `UsageError`."""
    match = re.fullmatch(r"([1-9]\d{0,8}):([1-9]\d{0,8})", text.strip())
    if not match or int(match[1]) > int(match[2]):
        raise UsageError(
            f"`profile_steps`={text!r}: expected FIRST:LAST, both counted from 1, for example 10:15"
        )
    return range(int(match[1]), int(match[2]) + 1)
