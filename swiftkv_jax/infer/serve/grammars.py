"""Grammars compiled in threads of their own: few at once, so that they hold up no prompt, each once
for all who ask for it, and within a time. One that no client waits for any more is not begun."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses

from ...errors import UsageError
from ..engine.grammar import Matcher
from ..structured_outputs import GrammarCompiler
from .errors import APIError, invalid
from .workers import Workers

WORKERS = 2
"""Grammars compiled at once."""
COMPILE_SECONDS = 2.0
"""Time that one may take."""
MAX_CACHED = 64
MAX_CACHED_CHARACTERS = 2**20
"""Of all grammars that are kept."""


@dataclasses.dataclass
class _Compilation:
    """One that has not ended."""

    task: asyncio.Task[Matcher]
    waiting: int = 0
    """Requests that wait for it."""


class GrammarQueue:
    """Compiles one after the other, and keeps the last ones. On the thread of the connections."""

    def __init__(self, compiler: GrammarCompiler, *, queue_timeout: float):
        """`queue_timeout` in seconds is how long one may wait for its turn."""
        self._compiler, self._queue_timeout = compiler, queue_timeout
        self._pool = concurrent.futures.ThreadPoolExecutor(WORKERS, "grammar")
        self._workers = Workers(self._pool, WORKERS)
        self._cached: collections.OrderedDict[str, Matcher] = collections.OrderedDict()
        self._compiling: dict[str, _Compilation] = {}
        self._late: set[str] = set()
        """Those that have had their time, and still run."""

    async def compile(self, grammar: str, param: str) -> Matcher:
        """A matcher at the beginning of a grammar in llguidance's form, shared by those who ask for
        the same. Raises `APIError` that names `param`."""
        if (found := self._cached.get(grammar)) is not None:
            self._cached.move_to_end(grammar)
            return found
        if grammar in self._late:
            raise invalid(param, _too_long(), "invalid_grammar")
        if (one := self._compiling.get(grammar)) is None:
            one = _Compilation(asyncio.create_task(self._compile(grammar)))
            self._compiling[grammar] = one
        one.waiting += 1
        try:
            return await asyncio.shield(one.task)
        except UsageError as error:
            raise invalid(param, str(error), "invalid_grammar") from None
        finally:
            one.waiting -= 1
            if not one.waiting:
                one.task.cancel()  # nothing, if it has ended
                if self._compiling.get(grammar) is one:
                    del self._compiling[grammar]

    async def _compile(self, grammar: str) -> Matcher:
        """Raises `APIError` if there is no turn for it, `UsageError` if it cannot be compiled."""
        try:
            async with asyncio.timeout(self._queue_timeout):
                work = await self._workers.start(lambda: self._compiler.compile_grammar(grammar))
        except TimeoutError:
            message = f"waited {self._queue_timeout:g} s for the compiler of grammars"
            raise APIError(408, "queue_timeout", message, headers={"retry-after": "5"}) from None
        try:
            await asyncio.wait([work], timeout=COMPILE_SECONDS)
        except asyncio.CancelledError:
            work.cancel()
            raise
        if not work.done():
            self._late.add(grammar)
            work.add_done_callback(lambda ended: self._end_late(grammar, ended))
            raise UsageError(_too_long())
        self._keep(grammar, work.result())
        return work.result()

    def _end_late(self, grammar: str, ended: asyncio.Future[Matcher]) -> None:
        self._late.discard(grammar)
        if not ended.cancelled() and ended.exception() is None:
            self._keep(grammar, ended.result())

    def _keep(self, grammar: str, made: Matcher) -> None:
        self._cached[grammar] = made
        while len(self._cached) > MAX_CACHED or sum(map(len, self._cached)) > MAX_CACHED_CHARACTERS:
            self._cached.popitem(last=False)

    def close(self) -> bool:
        """False if a thread still runs, which would hold up the end of the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not self._workers.num_running


def _too_long() -> str:
    return f"the grammar takes more than {COMPILE_SECONDS:g} s to compile"
