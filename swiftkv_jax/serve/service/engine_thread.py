"""The thread that runs the engine. Nothing else changes the engine, and the thread never formats
text, logs a token or waits for a connection: between two steps it takes what was submitted and
aborted, and after each it hands over what came out, all of it in one call. With several processes
over one mesh it sends all of that to the others first, and then applies it itself."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import UsageError
from ...infer.engine.cache_events import CacheEvent
from ...infer.engine.checks import most_new_tokens
from ...infer.engine.engine import Engine
from ...infer.engine.model_runner_base import Adapter
from ...infer.engine.page_pool import PrefixStats
from ...infer.engine.requests import Request, RequestOutput, ScoreRequest
from ...infer.engine.sampling_params import SamplingParams
from ...infer.engine.stats import Load, Stats
from ..distributed.followers import Followers
from ..distributed.frames import apply_commands
from .histogram import ITERATION_BUCKETS, Histogram


class Ended(NamedTuple):
    """The last event of every request, however it ended: its pages and slots are free again."""


Event = tuple[int, "RequestOutput | UsageError | Ended"]
"""Id of a request, and what became of it."""


class Snapshot(NamedTuple):
    """The engine after a step, written by its thread and read by others without a lock."""

    load: Load
    stats: Stats
    prefix: PrefixStats
    waiting: frozenset[int]
    """Ids of requests of which nothing has been planned."""
    num_taken: int
    """Requests that the thread has taken since it began."""
    num_steps: int
    time: float
    """`time.monotonic()` of the step."""
    idle_seconds: float
    """Seconds in which the engine had nothing to do."""


class EngineThread:
    """Runs an engine until `stop`, or until a step fails."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
        followers: Followers | None = None,
        on_cache_events: Callable[[list[CacheEvent]], None] | None = None,
    ):
        """Make the thread. The callbacks run in it, and must return at once. `followers` are
        the other processes of the mesh; None in a single process. `on_cache_events` gets what has
        entered and left the prefix cache."""
        self._cache_events = on_cache_events and engine.record_cache_events()
        self._on_cache_events = on_cache_events
        self._engine = engine
        self._deliver = deliver
        self._on_failure = on_failure
        self._followers = followers
        self._submitted: collections.deque[tuple[int, Request | ScoreRequest]] = collections.deque()
        self._aborted: collections.deque[tuple[int, int | None]] = collections.deque()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Event()
        self.persists = False
        """True if the prefix cache has a disk tier."""
        for pool in engine.pools:
            if pool.host is not None and pool.host.store is not None:
                self.persists = True
                pool.host.store.on_written = self._wake.set
        self._stopping = False
        self._has_ended = False
        self._ids: dict[int, int] = {}
        """Id of a request -> the engine's."""
        self._names: dict[int, int] = {}
        """The engine's -> id."""
        self._unfinished: dict[int, set[int]] = {}
        """Id -> samples that have not ended."""
        self._num_taken = self._num_steps = 0
        self._idle_seconds = 0.0
        self._last_step: float | None = None
        """`time.monotonic()` of the last step; None while the thread waits for something to do."""
        self.iteration_tokens = Histogram(
            "vllm:iteration_tokens_total", "Of an engine step, cached and new.", ITERATION_BUCKETS
        )
        """Tokens that a step sent through prefill, and that it received; steps without any are left
        out. Written by the engine's thread."""
        self.snapshot = self._take_snapshot()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """End after the step that runs, whatever is unfinished. False if that does not end in
        `timeout` seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def persist(self, seconds: float) -> None:
        """Write the prefix cache to disk, after `stop` (`Engine.persist_prefix_cache`)."""
        self._engine.persist_prefix_cache(seconds)

    # From any thread ------------------------------------------------------------

    def submit(self, request_id: int, request: Request | ScoreRequest) -> None:
        """Queue a request under an id of the caller's. One that can never run gives a
        `UsageError`. `Ended` follows in any case."""
        self._submitted.append((request_id, request))
        self._wake.set()

    def abort(self, request_id: int, sample: int | None = None) -> None:
        """End a request, or one of its samples. Does nothing for one that has ended."""
        self._aborted.append((request_id, sample))
        self._wake.set()

    def most_new_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        """`checks.most_new_tokens` of a prompt of so many tokens."""
        request = Request(range(prompt_tokens), params)
        return most_new_tokens(request, self._engine.config, self._engine.model_runner.shapes)

    def num_cached_tokens(self, page_keys: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt that are cached now."""
        pools = self._engine.pools
        return pools[0].page_size * max(len(pool.match(page_keys)) for pool in pools)

    def read_adapter(self, path: Path) -> Adapter:
        """`Adapters.read` of the engine."""
        return self._engine.adapters.read(path)

    def call[T](self, work: Callable[[Engine], T]) -> concurrent.futures.Future[T]:
        """The result of `work` in the engine's thread, between two steps and after the requests
        that were submitted before; a `BrokenExecutor` once the thread has ended. Not with
        `followers`."""
        assert self._followers is None
        found = concurrent.futures.Future[T]()

        def run() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                if self._has_ended:
                    raise concurrent.futures.BrokenExecutor("the engine has ended")
                found.set_result(work(self._engine))
            except Exception as error:  # the caller's
                found.set_exception(error)

        self._calls.append(run)
        self._wake.set()
        if self._has_ended:
            self._end_calls()
        return found

    def _end_calls(self) -> None:
        """Give what was asked of the thread its error, once the thread has ended."""
        with contextlib.suppress(IndexError):
            while True:
                self._calls.popleft()()

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the last step, 0 while the thread waits for something to do."""
        last = self._last_step
        return 0.0 if last is None else max(time.monotonic() - last, 0.0)

    # In the engine's thread -------------------------------------------------------

    def _run(self) -> None:
        engine = self._engine
        try:
            while not self._stopping:
                self._last_step = time.monotonic()
                self._wake.clear()
                events = self._take_commands()
                if engine.has_work:
                    events += self._step()
                    self._take_cache_events()
                else:
                    for pool in engine.pools:  # more pages may wait to be written to disk
                        pool.move_pages()
                self.snapshot = self._take_snapshot()
                if events:
                    self._deliver(events)
                if not engine.has_work and not self._submitted and not self._aborted:
                    self._last_step, start = None, time.monotonic()
                    self._wake.wait(self._followers and self._followers.idle_seconds)
                    self._idle_seconds += time.monotonic() - start
        except BaseException as error:  # whatever it is, no request may wait for ever
            self._on_failure(error if self._followers is None else self._followers.cause(error))
        finally:
            self._has_ended = True
            self._end_calls()

    def _take_cache_events(self) -> None:
        if self._on_cache_events is not None and self._cache_events is not None:
            if found := self._cache_events.take():
                self._on_cache_events(found)

    def _take_snapshot(self) -> Snapshot:
        engine = self._engine
        return Snapshot(
            engine.load,
            engine.stats.copy(),
            engine.prefix_stats,
            frozenset(self._names[name] for name in engine.waiting_request_ids),
            self._num_taken,
            self._num_steps,
            time.monotonic(),
            self._idle_seconds,
        )

    def _take_commands(self) -> list[Event]:
        """Aborts come first: what leaves makes room. They are taken out of their queue before the
        submissions, so the request that one names is known, or among those, or has ended."""
        num_calls = len(self._calls)  # what was submitted before these is taken here too
        aborted = [self._aborted.popleft() for _ in range(len(self._aborted))]
        submitted = dict(self._submitted.popleft() for _ in range(len(self._submitted)))
        self._num_taken += len(submitted)
        events: list[Event] = [
            (request_id, Ended())
            for request_id, sample in aborted
            if sample is None and submitted.pop(request_id, None) is not None
        ]
        aborted = [
            (request_id, sample) for request_id, sample in aborted if request_id in self._ids
        ]
        aborts = [(self._ids[request_id], sample) for request_id, sample in aborted]
        requests = list(submitted.values())
        if self._followers is not None:
            self._followers.send(self._num_steps, self._engine.pages_in_use, aborts, requests)
        added = apply_commands(self._engine, aborts, requests)
        for request_id, sample in aborted:
            if request_id in self._ids:
                self._end(request_id, sample, events)
        for (request_id, request), name in zip(submitted.items(), added, strict=True):
            if isinstance(name, UsageError):
                events += [(request_id, name), (request_id, Ended())]
                continue
            self._ids[request_id], self._names[name] = name, request_id
            samples = request.params.n if isinstance(request, Request) else 1
            self._unfinished[request_id] = set(range(samples))
        for _ in range(num_calls):
            self._calls.popleft()()
        return events

    def _step(self) -> list[Event]:
        events: list[Event] = []
        stats = self._engine.stats
        before = stats.prefilled_tokens + stats.new_tokens
        for output in self._engine.step():
            if (request_id := self._names.get(output.request_id)) is None:
                continue
            events.append((request_id, output))
            if output.finish_reason is not None:
                self._end(request_id, output.sample, events)
        self._num_steps += 1
        if tokens := stats.prefilled_tokens + stats.new_tokens - before:
            self.iteration_tokens.observe(tokens)
        return events

    def _end(self, request_id: int, sample: int | None, events: list[Event]) -> None:
        """A sample has ended, or all have."""
        unfinished = self._unfinished[request_id]
        unfinished.discard(-1 if sample is None else sample)
        if sample is None or not unfinished:
            del self._names[self._ids.pop(request_id)], self._unfinished[request_id]
            events.append((request_id, Ended()))
