"""The adapters of a server: names that requests give as their model. They come and go while it
runs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import UsageError
from ..lora_modules import engine_name, public_name
from .service import Service


@dataclasses.dataclass(eq=False)
class ServedAdapter:
    """An adapter, from its load until its last request is over."""

    engine_name: str
    """`Request.adapter`. Never that of another adapter: one that was unloaded stays until its
    requests have ended, and another may be loaded under its name meanwhile."""
    root: str
    """The directory it is from."""
    prompt_digest: bytes
    """See `Adapter`."""
    num_requests: int = 0
    """Requests that have named it and are not over."""
    is_unloaded: bool = False


NO_ADAPTER = ServedAdapter("", "", b"")
"""Stand-in in requests for the model itself."""


class ServedAdapters:
    """Adapters by the names of requests. All of it runs on the thread of the connections."""

    def __init__(self, service: Service, loaded: Mapping[str, ServedAdapter], places: int):
        """`loaded` are the engine's at the start; `places` is the number of adapters that it can
        have."""
        self._service, self._places = service, places
        self._served = dict(loaded)
        self._count = itertools.count(2)
        self._loading = asyncio.Lock()

    def get(self, name: str | None) -> ServedAdapter | None:
        """The adapter of this name; None if there is none."""
        return self._served.get(name or "")

    def names(self) -> list[str]:
        return list(self._served)

    async def load(self, name: str, path: Path) -> None:
        """Load an adapter. Raises `UsageError` and `CheckpointError`, and `APIError` if the engine
        has ended."""
        engine = self._service.engine
        async with self._loading:
            if name in self._served:
                message = f"The lora adapter {name!r} has already been loaded."
                raise UsageError(message, option="adapter")
            adapter = await asyncio.to_thread(engine.read_adapter, path)
            made = ServedAdapter(
                engine_name(name, next(self._count)), str(path), adapter.prompt_digest
            )
            insert = engine.call(lambda engine: engine.adapters.insert(made.engine_name, adapter))
            try:
                await asyncio.wrap_future(insert)
            except concurrent.futures.BrokenExecutor:
                self._service.check_ready()
                raise
            self._served[name] = made

    def unload(self, name: str) -> None:
        """Take no further requests for an adapter. Those that have been taken keep it."""
        adapter = self._served.pop(name)
        adapter.is_unloaded = True
        self._retire(adapter)

    @contextlib.contextmanager
    def held(self, name: str | None) -> Iterator[None]:
        """Keep the adapter that a request names, if it does, until the request is over."""
        if (adapter := self.get(name)) is None:
            yield
            return
        adapter.num_requests += 1
        try:
            yield
        finally:
            adapter.num_requests -= 1
            self._retire(adapter)

    def _retire(self, adapter: ServedAdapter) -> None:
        """Let the engine forget an adapter that was unloaded and that no request needs."""
        if adapter.is_unloaded and not adapter.num_requests:
            self._service.engine.call(lambda engine: engine.adapters.unload(adapter.engine_name))

    def facts(self) -> dict[str, str]:
        """Labels of vLLM's metric of adapters; none if the engine takes none."""
        if not self._places:
            return {}
        found = {"max_lora": str(self._places)}
        for state in ("running", "waiting"):
            of_requests = self._service.adapters_of_requests(waiting=state == "waiting")
            found[f"{state}_lora_adapters"] = ",".join(sorted(set(map(public_name, of_requests))))
        return found
