"""Compiled programs of one device in a folder, found without tracing them: by the code, the options
and the shapes that make them. JAX's own cache, which a traced program is looked up in, is behind.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxlib.version import __version__ as jaxlib_version

from ...process.files import PROGRAMS, write_atomic

logger = logging.getLogger(__name__)

Lower = Callable[[], jax.stages.Lowered]
"""Lowers a program: a `functools.partial` of a jitted function and all that it is lowered for."""
Options = dict[str, Any] | None
"""XLA's options for a program."""

UNUSED_DAYS = 30
"""Days without a start that uses it after which a program is removed."""
_PACKAGE = Path(__file__).parents[2]
_FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS"


class KeptPrograms:
    """The programs of a folder for one device."""

    def __init__(self, folder: Path, device: Any):
        """`device` is a `jax.Device`."""
        self._folder, self._device = folder, device
        client = device.client
        machine = client.platform_version, device.device_kind, _processor(device)
        flags = [os.environ.get(name) for name in _FLAGS]
        settings = sorted(jax.config.values.items())
        self._ground = repr((_code(), jax.__version__, jaxlib_version, machine, flags, settings))
        _listen()

    @classmethod
    def of(cls, device: Any) -> KeptPrograms | None:
        """The programs in the folder of JAX's cache; None where it has no `files.PROGRAMS`."""
        cache = jax.config.jax_compilation_cache_dir
        folder = Path(cache or "") / PROGRAMS
        return cls(folder, device) if cache and folder.is_dir() else None

    def load(self, lower: Lower, options: Options) -> jax.stages.Compiled | None:
        """The program of `lower`, compiled with these options; None if it is not here."""
        path = self._path(lower, options)
        if path is None or not path.exists():
            return None
        try:
            payload, given, returned = pickle.loads(zlib.decompress(path.read_bytes()))
            trees = jax.tree.structure(given), jax.tree.structure(returned)
            devices = [self._device]
            loaded = serialize_executable.deserialize_and_load(
                payload, *trees, self._device.client, devices
            )
            with contextlib.suppress(OSError):  # in a folder that cannot be written
                os.utime(path)
            return loaded
        except Exception as error:  # whatever a damaged file leads to
            logger.warning(f"{path}: is compiled anew, since it cannot be read: {error}")
            return None

    def compile(
        self,
        lower: Lower,
        options: Options,
        program: jax.stages.Lowered,
    ) -> jax.stages.Compiled:
        """Compile the `program` that `lower` has made, and keep it if JAX's cache did not have it:
        one from there is not whole, since XLA drops the machine code of a CPU once it is loaded."""
        thread = threading.get_ident()
        _missed.discard(thread)
        compiled = program.compile(compiler_options=options)
        path = self._path(lower, options)
        if path is None or thread not in _missed:
            return compiled
        try:
            payload, *trees = serialize_executable.serialize(compiled)
            # A structure is written as a tree of it.
            given, returned = (tree.unflatten(range(tree.num_leaves)) for tree in trees)
            write_atomic(path, zlib.compress(pickle.dumps((payload, given, returned)), 1))
            self._remove_unused()
        except (NotImplementedError, OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            logger.debug(f"{path} is not kept: {error}")
        return compiled

    def _remove_unused(self) -> None:
        """Remove what no start has used for `UNUSED_DAYS`: programs of earlier versions, mostly."""
        oldest = time.time() - UNUSED_DAYS * 24 * 60 * 60
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process removes it too
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def _path(self, lower: Lower, options: Options) -> Path | None:
        """The file of a program; None if what it is made from has no exact text."""
        if not isinstance(lower, functools.partial):
            return None
        function, *operands = lower.args
        name = f"{function.__module__}.{function.__qualname__}"
        leaves, tree = jax.tree.flatten((operands, lower.keywords))
        text = repr((leaves, tree, options))
        if " at 0x" in text or "<locals>" in name:
            return None
        if any(hasattr(leaf, "__array__") for leaf in leaves):  # long ones are shown in part
            return None
        key = hashlib.sha256(f"{self._ground} {name} {text}".encode()).hexdigest()
        return self._folder / f"{function.__name__}-{key}"


@functools.cache
def _code() -> str:
    """Digest of the package's code and tables."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        if path.suffix == ".py" or path.name == "tuning.json":
            digest.update(f"{path.relative_to(_PACKAGE)} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor(device: Any) -> str:
    """Features of a CPU that machine code may use, where the system says them."""
    path = Path("/proc/cpuinfo")
    if device.platform != "cpu" or not path.exists():
        return ""
    return path.read_text().partition("\n\n")[0].partition("flags")[2].partition("\n")[0]


_missed: set[int] = set()
"""Threads whose last compiled program was not in JAX's cache."""


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_on_event)


def _on_event(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_misses":
        _missed.add(threading.get_ident())
