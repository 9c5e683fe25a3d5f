"""Functions called in another process: one that dies or hangs does not end a benchmark, and the
device is free for the next. On a TPU only one process can hold it, so that a benchmark that calls
these must not start JAX's backend itself."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

import jax
import jax.numpy as jnp

from . import report


class WorkerError(RuntimeError):
    """What was called failed, or its process died or took too long."""


class Worker:
    """A process for one call after the other, which keep its JAX and what it has compiled. It is
    started by the first call, and anew by the next after one that died or took too long."""

    def __init__(self) -> None:
        self._process: Any = None
        self._calls: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call[Result](
        self, function: Callable[..., Result], *args: Any, seconds: float | None = None
    ) -> Result:
        """The result of a function of a module. Raises `WorkerError`, also after `seconds`."""
        if self._process is None:
            self._start()
        process: Any = self._process
        done = False
        try:
            self._calls.send((function, args))
            if not self._calls.poll(seconds):
                raise WorkerError(f"no result after {seconds:g} s")
            error, result = self._calls.recv()
            done = True
        except (EOFError, ConnectionError) as lost:
            process.join(10)
            raise WorkerError(f"the process ended with exit code {process.exitcode}") from lost
        finally:
            if not done:
                self.end()
        if error is not None:
            raise WorkerError(error)
        return result

    def works(self) -> bool:
        """True if the device still computes in this process, which it does not after an illegal
        access. If not, the process is ended."""
        try:
            self.call(_compute, seconds=60)
        except WorkerError:
            self.end()
            return False
        return True

    def end(self) -> None:
        """End the process and free what it holds on the device; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join(10)  # what hangs in a driver may not end at once
            self._calls.close()
        self._process = self._calls = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def alone[Result](
    function: Callable[..., Result], *args: Any, seconds: float | None = None
) -> Result:
    """`Worker.call` in a process for this call alone."""
    with Worker() as worker:
        return worker.call(function, *args, seconds=seconds)


def _compute() -> None:
    jax.block_until_ready(jnp.ones(8) + 1)


def _serve(calls: Connection) -> None:
    while True:
        try:
            function, args = calls.recv()
        except EOFError:  # the caller has ended
            return
        try:
            answer = None, function(*args)
        except Exception as error:  # in one line: not every error can be sent to another process
            answer = report.reason(error), None
        calls.send(answer)
