"""Work in threads for clients that may leave before it is done."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable


class Workers:
    """Threads that run at most `limit` calls at once, those included for which no client waits any
    more: a thread cannot be stopped. Methods are called on the thread of the connections."""

    def __init__(self, pool: concurrent.futures.Executor, limit: int):
        self._pool, self._turns = pool, asyncio.Semaphore(limit)
        self.num_running = 0
        """Calls that have not ended."""

    async def start[T](self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Wait for a turn, and begin. If the result is cancelled before a thread has begun, none
        will."""
        await self._turns.acquire()
        loop = asyncio.get_running_loop()
        begun = self._pool.submit(work)
        self.num_running += 1

        def end() -> None:
            self.num_running -= 1
            self._turns.release()

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(end)

        begun.add_done_callback(release)
        return asyncio.wrap_future(begun)
