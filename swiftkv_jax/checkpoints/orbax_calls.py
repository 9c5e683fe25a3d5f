"""Calls of Orbax, with errors in one line and without its log."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Callable, Iterator

import jax


def try_orbax[T](read: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of `read` and "", or None and what is wrong with the file, in one line.
    Errors of the device are raised: out of memory says nothing about the file."""
    with quiet_orbax():
        try:
            return read(), ""
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:  # as many types as there are kinds of damage
            problem = _reason(error)
        # Orbax leaves the other tasks of a failed read unfinished. Collected later, wherever that
        # happens to be, each would print "coroutine ... was never awaited".
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
    return None, problem


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silence Orbax's log: it prints the tracebacks of its threads, also of errors that are raised
    to the caller."""

    def is_foreign(record: logging.LogRecord) -> bool:  # one a context: contexts may nest
        return "orbax" not in record.pathname and "orbax" not in record.getMessage()

    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(is_foreign)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_foreign)


def _reason(error: BaseException) -> str:
    """The first cause says more than Orbax's wrappers."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text.partition("\n")[0][:300]
