"""The adapters of an engine, by name: each has a number, the place of its matrices in the programs
of the model runner. A request is bound to the number when it is queued."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...process import interrupts
from .request_state import RequestState

if TYPE_CHECKING:
    from .model_runner_base import ModelRunnerBase


class Adapters:
    """Adapters that requests may name (`Request.adapter`); with `EngineOptions.enable_lora`.

    All methods but `read` are for the thread of the engine.
    """

    def __init__(self, model_runner: ModelRunnerBase, requests: Mapping[int, RequestState]):
        """`requests` are those that have not ended."""
        self._model_runner, self._requests = model_runner, requests
        self._numbers: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """Adapters that requests may name, in the order in which they were loaded."""
        return list(self._numbers)

    def load(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load an adapter that PEFT saved in the directory `path`, while requests run or not.
        Nothing is compiled.

        Raises `UsageError` if the name is in use or no place is free, `CheckpointError` and
        `ConfigError` for an adapter that does not fit, before anything changes.
        """
        self._free_number(name)
        self.insert(name, self.read(Path(path)))

    def read(self, path: Path) -> Any:
        """Read an adapter for `insert`, in any thread. Raises `CheckpointError` and `ConfigError`;
        `UsageError` without `enable_lora`."""
        self._check_enabled()
        return self._model_runner.read_adapter(path)

    def insert(self, name: str, adapter: Any) -> None:
        """Let requests name what `read` has returned. Raises `UsageError` as `load`."""
        number = self._free_number(name)
        with interrupts.held_back():
            self._model_runner.insert_adapter(number, adapter)
            self._numbers[name] = number

    def unload(self, name: str) -> None:
        """Let no further request name an adapter. Requests that have keep it; its place is free
        when the last of them has ended. Raises `UsageError` for a name that is not loaded."""
        self.number_of(name)
        del self._numbers[name]

    def number_of(self, name: str) -> int:
        """Return the adapter's number; 0 of the name "". Raises `UsageError` for one that is not
        loaded."""
        if name and name not in self._numbers:
            raise UsageError(f"the adapter {name!r} is not loaded", option="adapter")
        return self._numbers.get(name, 0)

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
        if name in self._numbers:
            raise UsageError(f"the adapter {name!r} is loaded already", option="adapter")
        count = self._model_runner.shapes.num_adapters
        used = {*self._numbers.values(), *(state.adapter for state in self._requests.values())}
        free = set(range(1, count + 1)) - used
        if not free:
            raise UsageError(
                f"all {count} places for adapters are in use: unload one and let its requests end, "
                f"or raise `max_loras`",
                option="max_loras",
            )
        return min(free)
