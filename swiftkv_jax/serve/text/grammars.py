"""Grammars compiled in threads of their own: few at once, so that they hold up no prompt, and each
once for all who ask for it. One that no client waits for any more is not begun."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses

from ...errors import UsageError
from ...infer.engine.grammar import Matcher
from ..errors import APIError, internal, invalid
from .grammar_process import CheckedCompiler, GrammarProcessError

WORKERS = 2
"""Grammars compiled at once."""
MAX_CACHED = 64
MAX_CACHED_CHARACTERS = 2**20
"""Characters of all grammars that are kept."""


@dataclasses.dataclass
class _Compilation:
    """One that has not ended."""

    made: asyncio.Future[Matcher]
    begun: asyncio.Event
    """Set when its turn has come."""
    waiting: int = 0
    """Requests that wait for it."""


class GrammarQueue:
    """Compiles one after the other, and keeps the last ones. On the thread of the connections."""

    def __init__(self, compiler: CheckedCompiler, *, queue_timeout: float):
        """`queue_timeout` in seconds is how long a request may wait for the turn of its grammar."""
        self._compiler = compiler
        self._queue_timeout = queue_timeout
        self._pool = concurrent.futures.ThreadPoolExecutor(WORKERS, "grammar")
        self._cached: collections.OrderedDict[str, Matcher] = collections.OrderedDict()
        self._compiling: dict[str, _Compilation] = {}
        self._submitted = set[concurrent.futures.Future[Matcher]]()

    async def matcher_of(self, grammar: str, param: str) -> Matcher:
        """A matcher at the beginning of a grammar in llguidance's form, shared by those who ask for
        the same. Raises `APIError` that names `param`."""
        if (found := self._cached.get(grammar)) is not None:
            self._cached.move_to_end(grammar)
            return found
        if (one := self._compiling.get(grammar)) is None:
            one = self._compiling[grammar] = self._submit(grammar)
        one.waiting += 1
        try:
            async with asyncio.timeout(self._queue_timeout):
                await one.begun.wait()
            made = await asyncio.shield(one.made)
            self._keep(grammar, made)
            return made
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
                one.made.cancel()  # nothing, if it has ended
                if self._compiling.get(grammar) is one:
                    del self._compiling[grammar]

    def _submit(self, grammar: str) -> _Compilation:
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def work() -> Matcher:
            loop.call_soon_threadsafe(begun.set)
            return self._compiler.compile_grammar(grammar)

        submitted = self._pool.submit(work)
        self._submitted.add(submitted)
        submitted.add_done_callback(self._submitted.discard)
        return _Compilation(asyncio.wrap_future(submitted), begun)

    def _keep(self, grammar: str, made: Matcher) -> None:
        self._cached[grammar] = made
        while len(self._cached) > MAX_CACHED or sum(map(len, self._cached)) > MAX_CACHED_CHARACTERS:
            self._cached.popitem(last=False)

    @property
    def is_busy(self) -> bool:
        """True while a thread compiles, also for a client that has left."""
        return any(one.running() for one in tuple(self._submitted))

    def close(self) -> bool:
        """False if a thread still runs, which would hold up the end of the process."""
        self._compiler.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not self.is_busy
