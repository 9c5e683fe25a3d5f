"""The adapters of an engine, by name: each has a number, the place of its matrices in the programs
of the model runner. A request is bound to the number when it is queued."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import UsageError
from ...process import interrupts
from .request_state import RequestState

if TYPE_CHECKING:
    from .model_runner_base import Adapter, ModelRunnerBase


class _Loaded(NamedTuple):
    number: int
    prompt_digest: bytes
    """See `Adapter`."""


class Adapters:
    """Adapters that requests may name (`Request.adapter`); with `EngineOptions.enable_lora`.

    All methods but `read` are for the thread of the engine.
    """

    def __init__(self, model_runner: ModelRunnerBase, requests: Mapping[int, RequestState]):
        """`requests` are those that have not ended."""
        self._model_runner, self._requests = model_runner, requests
        self._loaded: dict[str, _Loaded] = {}

    @property
    def names(self) -> list[str]:
        """Adapters that requests may name, in the order in which they were loaded."""
        return list(self._loaded)

    def load(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load an adapter that PEFT saved in the directory `path`, while requests run or not.
        Nothing is compiled.

        Raises `UsageError` if the name is in use or no place is free, `CheckpointError` and
        `ConfigError` for an adapter that does not fit, before anything changes.
        """
        self._free_number(name)
        self.insert(name, self.read(Path(path)))

    def read(self, path: Path) -> Adapter:
        """Read an adapter for `insert`, in any thread. Raises `CheckpointError` and `ConfigError`;
        `UsageError` without `enable_lora`."""
        self._check_enabled()
        return self._model_runner.read_adapter(path)

    def insert(self, name: str, adapter: Adapter) -> None:
        """Let requests name what `read` has returned. Raises `UsageError` as `load`."""
        number = self._free_number(name)
        with interrupts.held_back():
            self._model_runner.insert_adapter(number, adapter)
            self._loaded[name] = _Loaded(number, adapter.prompt_digest)

    def unload(self, name: str) -> None:
        """Let no further request name an adapter. Requests that have keep it; its place is free
        when the last of them has ended. Raises `UsageError` for a name that is not loaded."""
        self._of(name)
        del self._loaded[name]

    def prompt_digest(self, name: str) -> bytes:
        """`Adapter.prompt_digest`, for `page_keys`; that of the name "" is empty. Raises
        `UsageError` for a name that is not loaded."""
        return self._of(name).prompt_digest if name else b""

    def bind(self, state: RequestState) -> None:
        """Give a new request the adapter that it names. Raises `UsageError` for a name that is not
        loaded."""
        if name := state.request.adapter:
            state.adapter, state.prompt_digest = self._of(name)

    def _of(self, name: str) -> _Loaded:
        if name not in self._loaded:
            raise UsageError(f"the adapter {name!r} is not loaded", option="adapter")
        return self._loaded[name]

    def _check_enabled(self) -> None:
        if not self._model_runner.shapes.num_adapters:
            raise UsageError(
                "this engine takes no adapters: make it with the option `enable_lora`=True",
                option="enable_lora",
            )

    def _free_number(self, name: str) -> int:
        self._check_enabled()
        if not isinstance(name, str) or not name:
            raise UsageError(f"{name!r} is not the name of an adapter", option="adapter")
        if name in self._loaded:
            raise UsageError(f"the adapter {name!r} is loaded already", option="adapter")
        count = self._model_runner.shapes.num_adapters
        used = {one.number for one in self._loaded.values()}
        used.update(state.adapter for state in self._requests.values())
        free = set(range(1, count + 1)) - used
        if not free:
            raise UsageError(
                f"all {count} places for adapters are in use: unload one and let its requests end, "
                f"or raise `max_loras`",
                option="max_loras",
            )
        return min(free)
