"""Training states on disk: `checkpoints/<step>/` in a run's output folder, read leaf by leaf, each
with its digest.

`train.checkpointing` writes them with Orbax, which gives a folder its name only when all of it is
on disk. Orbax keeps no checksum of array payloads, so each state carries a digest per leaf in its
metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from ..errors import CheckpointError
from ..process.distributed import any_process
from .digest import digest

FOLDER = "checkpoints"
"""Folder of the states, in the run's output folder."""
STATE = "state"
"""Orbax's name of the one tree in each of its checkpoints; the leaves of the tree are stored flat,
by path: `delta.q`."""


class DamagedError(CheckpointError):
    """A state that was once complete but cannot be used any more."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Metadata that is stored beside the arrays of a state."""

    fingerprint: dict[str, Any]
    """Identifies the run."""
    digests: dict[str, int]
    """Leaf -> `digest.digest`."""
    score: float | None
    """Score on the held-out data, lower is better; None where it was not measured."""


def list_steps(folder: Path) -> list[int]:
    """Steps whose state was written to the end, ascending. `folder` need not exist."""
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()
    )


def read_metadata(path: Path) -> Metadata:
    """The metadata of the state in `path`. Raises `DamagedError` if it is missing or garbled."""
    from orbax.checkpoint import v1 as ocp

    def read() -> Metadata:
        found: Any = ocp.checkpointables_metadata(str(path)).custom_metadata
        return Metadata(found["fingerprint"], found["digests"], found["score"])

    metadata, problem = try_orbax(read)
    if metadata is None:
        raise DamagedError(f"{path}: its metadata cannot be read ({problem})")
    return metadata


def read_leaf(path: Path, name: str, abstract: jax.ShapeDtypeStruct, expected: int) -> jax.Array:
    """One leaf of the state in `path`, where `abstract.sharding` says. Raises `DamagedError` if its
    digest is not `expected`.

    With several processes, all of them call this.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # One leaf at a time: an error then has a name, and memory a bound.
    context.pytree.loading.partial_load = True
    # Each process reads its shards by itself: Orbax's barriers would let the others wait for one
    # that cannot.
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    with context:
        array, problem = try_orbax(
            lambda: ocp.load_checkpointables(str(path), {STATE: {name: abstract}})[STATE][name]
        )
    if any_process(array is None):
        raise DamagedError(f"{path}: {name} cannot be read ({problem or 'by another process'})")
    assert array is not None
    if digest(array) != expected:
        raise DamagedError(
            f"{path}: {name} is damaged: its digest is not the one it was saved with"
        )
    return array


# Orbax, with errors in one line and without its log ---------------------------


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
