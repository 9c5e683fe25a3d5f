"""Compilation of all programs of an engine, several at once, and a counter of compilations."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import Any

import jax

from .lowering import Key


def compile_all(
    lowered: dict[Key, Callable[[], jax.stages.Lowered]],
    progress: Callable[[], object] = lambda: None,
) -> dict[Key, jax.stages.Compiled]:
    """Lower the programs one after the other and compile as many at once as there are cores;
    `progress` is called after each."""
    with concurrent.futures.ThreadPoolExecutor(min(len(lowered), os.cpu_count() or 1)) as pool:
        running = {
            pool.submit(lambda program: program.compile(), lower()): key
            for key, lower in lowered.items()
        }
        compiled = {}
        for done in concurrent.futures.as_completed(running):
            compiled[running[done]] = done.result()
            progress()
    return compiled


class CompileCounter:
    """Number of programs that this process has compiled. All engines share one listener, since JAX
    cannot remove one safely."""

    _lock = threading.Lock()
    _count: int | None = None

    @classmethod
    def read(cls) -> int:
        """Programs compiled since the first call."""
        with cls._lock:
            if cls._count is None:
                cls._count = 0
                jax.monitoring.register_event_duration_secs_listener(cls._on_event)
            return cls._count

    @classmethod
    def _on_event(cls, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and cls._count is not None:
            with cls._lock:
                cls._count += 1
