"""The adapters of a server: names that requests give as their model. They come and go while it
runs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...errors import UsageError
from .service import Service

RETIRE_SECONDS = 0.1
"""Time between two looks whether requests still wait that name an adapter."""


class ServedAdapter(NamedTuple):
    engine_name: str
    """`Request.adapter`. Never that of another adapter: one that was unloaded stays until its
    requests have ended, and another may be loaded under its name meanwhile."""
    root: str
    """The directory it is from."""


class ServedAdapters:
    """Adapters by the names of requests. All of it runs on the thread of the connections."""

    def __init__(self, service: Service, loaded: Mapping[str, str], places: int):
        """`loaded` are the engine's at the start, and the directory of each; `places` is the number
        of adapters that it can have."""
        self._service, self._places = service, places
        self._served = {name: ServedAdapter(name, root) for name, root in loaded.items()}
        self._names = {name: name for name in loaded}
        """Name of each that the engine has."""
        self._count = itertools.count(2)
        self._loading = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()

    def get(self, name: str | None) -> ServedAdapter | None:
        """The adapter of this name; None if there is none."""
        return self._served.get(name or "")

    def names(self) -> list[str]:
        return list(self._served)

    async def load(self, name: str, path: Path) -> None:
        """Load an adapter. Raises `UsageError` and `CheckpointError`."""
        engine = self._service.engine
        async with self._loading:
            if name in self._served:
                message = f"The lora adapter {name!r} has already been loaded."
                raise UsageError(message, option="adapter")
            adapter = await asyncio.to_thread(engine.read_adapter, path)
            engine_name = f"{name} ({next(self._count)})"
            insert = engine.call(lambda engine: engine.adapters.insert(engine_name, adapter))
            await asyncio.wrap_future(insert)
            self._names[engine_name] = name
            self._served[name] = ServedAdapter(engine_name, str(path))

    def unload(self, name: str) -> None:
        """Take no further requests for an adapter. Those that have been taken keep it."""
        task = asyncio.ensure_future(self._retire(self._served.pop(name).engine_name))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retire(self, engine_name: str) -> None:
        while engine_name in self._service.adapters_of_requests(waiting=True):
            await asyncio.sleep(RETIRE_SECONDS)
        unload = self._service.engine.call(lambda engine: engine.adapters.unload(engine_name))
        await asyncio.wrap_future(unload)
        del self._names[engine_name]

    def facts(self) -> dict[str, str]:
        """Labels of vLLM's metric of adapters; none if the engine takes none."""
        if not self._places:
            return {}
        found = {"max_lora": str(self._places)}
        for state in ("running", "waiting"):
            of_requests = self._service.adapters_of_requests(waiting=state == "waiting")
            names = {self._names.get(one, one) for one in of_requests}
            found[f"{state}_lora_adapters"] = ",".join(sorted(names))
        return found
