"""Stopping a run from outside: SIGINT and SIGTERM end it after the current step, on every process
after the same one."""

from __future__ import annotations

import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..cli.exit import log


class StopSignals:
    """Notes SIGINT and SIGTERM instead of dying from them; a second one acts as usual."""

    received: int = 0
    """The signal this process got, 0 for none."""

    def __enter__(self) -> StopSignals:
        self._previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        self._asked: jax.Array | None = None
        return self

    def agreed(self) -> int:
        """A signal that any process got, 0 for none: the same answer on all of them. Call it once a
        step.

        With several processes it is what they had got one step ago, so that nobody waits for the
        answer.
        """
        if jax.process_count() == 1:
            return self.received
        asked, self._asked = self._asked, _largest(self.received)
        return 0 if asked is None else int(asked)

    def _note(self, number: int, frame: Any) -> None:
        self.received = number
        log("finishing and saving the current step; once more to stop at once")
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(self, *exception: Any) -> None:
        self._restore()


def _largest(number: int) -> jax.Array:
    """The largest of the numbers that the processes bring, on all of them; computed while the
    devices go on."""
    first_devices = [
        next(d for d in jax.devices() if d.process_index == process)
        for process in range(jax.process_count())
    ]
    one_each = Mesh(np.array(first_devices), ("process",), axis_types=(AxisType.Auto,))
    brought = jax.make_array_from_process_local_data(
        NamedSharding(one_each, P("process")), np.array([number], np.int32)
    )
    return jax.jit(jnp.max, out_shardings=NamedSharding(one_each, P()))(brought)
