"""Compilation of all programs of an engine, several at once, and a counter of compilations."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import jax
from tqdm import tqdm

from ...errors import UsageError
from .kept_programs import KeptPrograms

logger = logging.getLogger(__name__)

CompilerOption = str | int | float | bool
"""Value of a field of XLA's `DebugOptions`."""

LOG_INTERVAL = 10.0
"""Seconds between two lines of the log while programs are compiled."""
_REFUSALS = "No such compile option", "While setting option"
"""Parts of XLA's errors for an unknown option and for a value that does not fit."""


def compile_all[Program](
    lowered: dict[Program, Callable[[], jax.stages.Lowered]],
    on_progress: Callable[[int, int], object] | None = None,
    options: Mapping[str, CompilerOption] | None = None,
    defaults: Callable[[Program], Mapping[str, CompilerOption]] = lambda _: {},
    kept: KeptPrograms | None = None,
) -> dict[Program, jax.stages.Compiled]:
    """Lower the programs one after the other and compile as many at once as there are cores, but
    for those that are `kept`.

    `on_progress` is called with the number of compiled programs and of all, first with 0; a
    terminal shows a progress bar, and without one the log has a line every `LOG_INTERVAL`. XLA gets
    the `defaults` of each program, and `options` for all of them, which prevail. The result has the
    order of `lowered`. Raises `UsageError` for `options` that XLA refuses.
    """

    def options_of(key: Program) -> dict[str, CompilerOption] | None:
        return {**defaults(key), **(options or {})} or None

    def compile_one(key: Program, program: jax.stages.Lowered) -> jax.stages.Compiled:
        if kept is None:
            return program.compile(compiler_options=options_of(key))
        return kept.compile(lowered[key], options_of(key), program)

    def load(key: Program) -> jax.stages.Compiled | None:
        return None if kept is None else kept.load(lowered[key], options_of(key))

    bar = tqdm(total=len(lowered), desc="compiling", unit="program", disable=None, leave=False)
    workers = min(len(lowered), os.cpu_count() or 1)
    compiled: dict[Program, jax.stages.Compiled] = {}
    logged = _logged(compiled, len(lowered)) if bar.disable else contextlib.nullcontext()
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    with bar, logged, _uncollected(), pool:
        if on_progress is not None:
            on_progress(0, len(lowered))
        found = zip(lowered, pool.map(load, lowered), strict=True)
        compiled |= {key: program for key, program in found if program is not None}
        bar.update(len(compiled))
        if compiled and on_progress is not None:
            on_progress(len(compiled), len(lowered))
        running = {
            pool.submit(compile_one, key, lower()): key
            for key, lower in lowered.items()
            if key not in compiled
        }
        for done in concurrent.futures.as_completed(running):
            try:
                compiled[running[done]] = done.result()
            except jax.errors.JaxRuntimeError as error:
                pool.shutdown(cancel_futures=True)
                refusal = re.search(rf"(?:{'|'.join(_REFUSALS)}).*", str(error))
                if refusal is None or not any(name in refusal[0] for name in options or ()):
                    raise  # a default of ours
                raise UsageError(f"`compiler_options`: {refusal[0]}") from error
            bar.update()
            if on_progress is not None:
                on_progress(len(compiled), len(lowered))
    # Not in the order in which they finished: every process must run them in the same order.
    return {key: compiled[key] for key in lowered}


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Do without garbage collections while this lasts: tracing makes objects that stay, and looking
    at all of them again and again takes a quarter of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _logged(compiled: Sized, total: int) -> Iterator[None]:
    """Log how many programs are compiled, from time to time while this lasts."""
    ended = threading.Event()
    start = time.perf_counter()

    def log() -> None:
        while not ended.wait(LOG_INTERVAL):
            seconds = time.perf_counter() - start
            logger.info(f"compiling: {len(compiled)} of {total} programs after {seconds:.0f} s")

    thread = threading.Thread(target=log, name="compile-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class CompileCounter:
    """Number of programs that this process has compiled. All engines share one listener, since JAX
    cannot remove one safely."""

    _lock = threading.Lock()
    _count: int | None = None

    @classmethod
    def start(cls) -> None:
        """Start counting; later calls do nothing."""
        with cls._lock:
            if cls._count is None:
                cls._count = 0
                jax.monitoring.register_event_duration_secs_listener(cls._on_event)

    @classmethod
    def read(cls) -> int:
        """Programs compiled since `start` was first called; 0 if it never was."""
        with cls._lock:
            return cls._count or 0

    @classmethod
    def _on_event(cls, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and cls._count is not None:
            with cls._lock:
                cls._count += 1
