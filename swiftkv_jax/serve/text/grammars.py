"""Grammars compiled in threads of their own: few at once, so that they hold up no prompt, and each
once for all who ask for it. One that no client waits for any more is not begun."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
from typing import Protocol

from ...errors import UsageError
from ...infer.engine.grammar import Matcher
from ..errors import APIError, internal, invalid
from .grammar_process import GrammarProcessError
from .workers import Workers

WORKERS = 2
"""Grammars compiled at once."""
MAX_CACHED = 64
MAX_CACHED_CHARACTERS = 2**20
"""Characters of all grammars that are kept."""


class Compiler(Protocol):
    """A `CheckedCompiler`."""

    def compile_grammar(self, grammar: str) -> Matcher: ...

    def close(self) -> None: ...


@dataclasses.dataclass
class _Compilation:
    """One that has not ended."""

    task: asyncio.Task[Matcher]
    begun: asyncio.Event
    """Set when its turn has come."""
    waiting: int = 0
    """Requests that wait for it."""


class GrammarQueue:
    """Compiles one after the other, and keeps the last ones. On the thread of the connections."""

    def __init__(self, compiler: Compiler, *, queue_timeout: float):
        """`queue_timeout` in seconds is how long a request may wait for the turn of its grammar."""
        self._compiler = compiler
        self._queue_timeout = queue_timeout
        self._pool = concurrent.futures.ThreadPoolExecutor(WORKERS, "grammar")
        self._workers = Workers(self._pool, WORKERS)
        self._cached: collections.OrderedDict[str, Matcher] = collections.OrderedDict()
        self._compiling: dict[str, _Compilation] = {}

    async def compile(self, grammar: str, param: str) -> Matcher:
        """A matcher at the beginning of a grammar in llguidance's form, shared by those who ask for
        the same. Raises `APIError` that names `param`."""
        if (found := self._cached.get(grammar)) is not None:
            self._cached.move_to_end(grammar)
            return found
        if (one := self._compiling.get(grammar)) is None:
            begun = asyncio.Event()
            one = _Compilation(asyncio.create_task(self._compile(grammar, begun)), begun)
            self._compiling[grammar] = one
        one.waiting += 1
        try:
            async with asyncio.timeout(self._queue_timeout):
                await one.begun.wait()
            return await asyncio.shield(one.task)
        except TimeoutError:
            message = f"the request has waited {self._queue_timeout:g} s for a grammar's compiler"
            raise APIError(408, "queue_timeout", message, headers={"retry-after": "5"}) from None
        except UsageError as error:
            raise invalid(param, str(error), "invalid_grammar") from None
        except GrammarProcessError as error:
            raise internal(str(error)) from None
        finally:
            one.waiting -= 1
            if not one.waiting:
                one.task.cancel()  # nothing, if it has ended
                if self._compiling.get(grammar) is one:
                    del self._compiling[grammar]

    async def _compile(self, grammar: str, begun: asyncio.Event) -> Matcher:
        """Raises what the compiler raises."""
        try:
            work = await self._workers.start(lambda: self._compiler.compile_grammar(grammar))
        finally:
            begun.set()
        made = await work
        self._keep(grammar, made)
        return made

    def _keep(self, grammar: str, made: Matcher) -> None:
        self._cached[grammar] = made
        while len(self._cached) > MAX_CACHED or sum(map(len, self._cached)) > MAX_CACHED_CHARACTERS:
            self._cached.popitem(last=False)

    def close(self) -> bool:
        """False if a thread still runs, which would hold up the end of the process."""
        self._compiler.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not self._workers.num_running
