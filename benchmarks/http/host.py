"""How fast the machine is, and what else it does, while HTTP is measured."""

from __future__ import annotations

import os
import time
import timeit
from pathlib import Path

from swiftkv_jax.errors import UsageError

STAT = Path("/proc/stat")
IDLE = (3, 4)
"""Columns of /proc/stat in which a processor does nothing: idle, and waiting for a disk."""


def check_load(limit: float, load: float | None = None) -> None:
    """Raise `UsageError` on a machine that is busier than `limit`; `load` is by default the load
    average of the last minute."""
    load = os.getloadavg()[0] if load is None else load
    if load > limit:
        raise UsageError(
            f"the load of this machine is {load:.2f}, above `max_load`={limit:g}: times of such a "
            "run tell little; wait, or go on with --max-load inf"
        )


def interpreter_seconds() -> float:
    """Time of a million additions in a loop of the interpreter, the least of five."""
    return min(timeit.repeat("total += 1", "total = 0", number=1_000_000, repeat=5))


class OtherProcesses:
    """Counts the processor cores that other processes keep busy, from now on."""

    def __init__(self):
        self._begin, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores(self) -> float | None:
        """Cores on average since the beginning; None where the system does not count them. Of the
        processes that this one has started, those that have ended count as its own."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        seconds = time.perf_counter() - self._begin
        return max(busy - self._busy - (_own_seconds() - self._own), 0.0) / seconds


def _busy_seconds() -> float | None:
    """Seconds that all processors have worked since the machine started."""
    try:
        first = STAT.read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    ticks = [int(text) for text in first.split()[1:9]]  # guests count as user time already
    busy = sum(count for column, count in enumerate(ticks) if column not in IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])
