"""Compiling all programs ahead of time: several at once, kept on disk for the next start, and
counted ever after."""

from __future__ import annotations

import concurrent.futures
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ...errors import UsageError
from .lowering import Key

DEFAULT_CACHE = Path("~/.cache/swiftkv-jax/compiled")


def enable_compilation_cache(folder: Path) -> None:
    """Keep what is compiled from now on in `folder`, and look there first.

    A compiled program is code: whoever can write the folder can run code in this process. So it is
    made for its owner alone, and one that others own or can write is refused with `UsageError`.
    """
    folder = folder.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise UsageError(
            f"`compile_cache`={folder}: belongs to another user, who could put code there; choose "
            f"another folder"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"`compile_cache`={folder}: others can write there, and so run code here; chmod 700 "
            f"it, or choose another folder"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_all(
    lowered: dict[Key, Callable[[], jax.stages.Lowered]],
    progress: Callable[[], object] = lambda: None,
) -> dict[Key, jax.stages.Compiled]:
    """Lower one after the other, compile as many at once as there are cores; `progress` is called
    after each."""
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
    """How many programs this process has compiled. One listener for all engines: JAX has no way to
    count twice safely."""

    _lock = threading.Lock()
    _count: int | None = None

    @classmethod
    def read(cls) -> int:
        """Programs compiled since the first call."""
        with cls._lock:
            if cls._count is None:
                cls._count = 0
                jax.monitoring.register_event_duration_secs_listener(cls._hear)
            return cls._count

    @classmethod
    def _hear(cls, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and cls._count is not None:
            with cls._lock:
                cls._count += 1
