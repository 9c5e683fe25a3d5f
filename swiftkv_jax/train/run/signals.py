"""Stopping a run from outside: SIGINT and SIGTERM end it after the current step, in every process
after the same one."""

from __future__ import annotations

import logging
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

logger = logging.getLogger(__name__)


class StopSignals:
    """Records SIGINT and SIGTERM while it is entered; a second signal acts as it did before."""

    received: int = 0
    """Number of the signal that this process has received, 0 for none."""

    def __enter__(self) -> StopSignals:
        self._previous = {
            number: signal.signal(number, self._record)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        self._pending: jax.Array | None = None
        return self

    def agreed(self) -> int:
        """Number of a signal that any process has received, 0 for none: the same in all of them.
        All of them call this once a step.

        With several processes this is the answer of the step before, which has arrived by now.
        """
        if jax.process_count() == 1:
            return self.received
        before = self._pending
        self._pending = _largest(self.received)
        return int(before or 0)

    def _record(self, number: int, frame: Any) -> None:
        self.received = number
        self._restore()
        logger.info("finishing and saving the current step; once more to stop at once")

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(self, *exception: Any) -> None:
        self._restore()


def _largest(number: int) -> jax.Array:
    """The largest of the processes' numbers, in all of them. Does not wait for the devices."""
    first_devices = [
        next(d for d in jax.devices() if d.process_index == process)
        for process in range(jax.process_count())
    ]
    one_each = Mesh(np.array(first_devices), ("process",), axis_types=(AxisType.Auto,))
    numbers = jax.make_array_from_process_local_data(
        NamedSharding(one_each, P("process")), np.array([number], np.int32)
    )
    return jax.jit(jnp.max, out_shardings=NamedSharding(one_each, P()))(numbers)
