"""Admitted requests, between the connections and the engine's thread: they wait, run, end in time
or are aborted. All of it runs on the thread of the connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Literal

from ...errors import OutOfMemoryError
from ...infer.engine.engine import Engine
from ...infer.engine.requests import RequestOutput
from ...infer.engine.scheduler import MAX_SKIPS
from ..distributed.followers import Followers
from ..distributed.kv_events import KVEventPublisher
from ..errors import APIError, internal, request_timeout
from ..options import ServerOptions
from .admission import Admission, FairQueue
from .backlog import Backlog
from .engine_thread import EngineThread, Event
from .generation import EngineRequest, Generation, WaitingPart
from .histogram import RecentRate
from .metrics import Metrics, state_of

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "stalled", "failed"]
MAX_WAITING_IN_ENGINE = MAX_SKIPS
"""Requests that the engine has not begun, at most: it looks no farther down its queue."""
SPARE = 0.5
"""The engine gets more requests than it has slots by this share of them, two at least, for slots
that become free in one call. It serves in the order of arrival: what else waits there would delay
other keys."""
MOST_PAGES = 0.9
"""Share of the pages in use above which prompts may wait for pages."""
HEARTBEAT_SECONDS = 0.1
TICK_SECONDS = 1.0
RATE_SECONDS = 30
"""Seconds over which the rate of prefill is measured."""


class Service:
    """Requests of all connections, on one engine."""

    def __init__(self, options: ServerOptions, model_name: str):
        self.options, self.model_name = options, model_name
        self.state: State = "starting"
        self.is_shutting_down = False
        """True while the `--shutdown-delay` of a shutdown runs: requests are still taken."""
        self.start: dict[str, Any] = {"phase": "weights"}
        """The step of the start that runs, and how far it is, as `/ready` reports them."""
        self.failure: BaseException | None = None
        """The error of the engine in the state `failed`."""
        self.failed = asyncio.Event()
        self.metrics = Metrics()
        self.idle = asyncio.Event()
        """Event that no request is admitted, and all answers are sent."""
        self.idle.set()
        self._admitted: set[Generation] = set()
        self._queue: FairQueue[WaitingPart] = FairQueue()
        self._parts: dict[int, tuple[Generation, EngineRequest]] = {}
        self._num_submitted = self._num_answering = 0
        self._reading: set[asyncio.Task[Any]] = set()
        """Tasks that read the body of a request."""
        self._stopped: set[asyncio.Task[Any]] = set()
        self._prefilled = RecentRate(RATE_SECONDS)
        self.prefill_rate = 0.0
        """Tokens/s of prefill in the last while; 0 if it is not known."""
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._backlog = Backlog(self._loop, self._process)
        """Events of requests that have their first token."""
        self.kv_events: KVEventPublisher | None = None
        """Publishes events of the prefix cache; None without `kv_events_config`."""
        if (config := options.kv_events_config) is not None and config.is_enabled:
            self.kv_events = KVEventPublisher(config)
        self.engine: EngineThread
        self.is_open = False
        """True once there is an engine."""
        self._followers: Followers | None = None
        self.admission: Admission

    def open(self, engine: Engine, prefill_rate: float, followers: Followers | None = None) -> None:
        """Take requests for an engine that is ready. `prefill_rate` in tokens/s counts until
        one was measured under load; `followers` are the other processes of its mesh, ready too."""
        self.prefill_rate = prefill_rate
        self.max_num_seqs, self.max_model_len = engine.options.max_num_seqs, engine.max_model_len
        shapes = engine.model_runner.shapes
        self.num_speculative_tokens = shapes.most_drafts
        self.cache_facts = {
            "block_size": str(shapes.page_size),
            "num_gpu_blocks": str(shapes.num_pages * shapes.dp_size),
            "cache_dtype": engine.options.kv_cache_dtype,
            "enable_prefix_caching": str(engine.options.enable_prefix_caching),
        }
        """Facts of the KV cache, under vLLM's names."""
        self.admission = Admission(
            self.options,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            prefill_rate=lambda: self.prefill_rate,
        )
        self.metrics.set_longest(self.max_model_len)

        def deliver(events: list[Event]) -> None:
            self._loop.call_soon_threadsafe(self._on_events, events)

        def on_failure(error: BaseException) -> None:
            self._loop.call_soon_threadsafe(self.fail, error)

        self._followers = followers
        if followers is not None:
            followers.watch(on_failure)
        batches = self.kv_events and self.kv_events.start(shapes.page_size)
        self.engine = EngineThread(engine, deliver, on_failure, followers, batches and batches.put)
        self.engine.start()
        self.is_open = True
        if self.state == "starting":
            self.state = "ready"

    def check_ready(self) -> None:
        """Raise `APIError` unless requests are taken."""
        if self.state == "draining":
            headers = {"retry-after": "1", "x-should-retry": "true", "connection": "close"}
            raise APIError(503, "draining", "the server is shutting down", headers=headers)
        if self.state != "ready":
            code = "engine_failed" if self.state == "failed" else self.state
            raise APIError(503, code, f"the server is {self.state}", headers={"retry-after": "5"})

    # Requests ------------------------------------------------------------------------

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request, from its arrival until its answer is sent."""
        self._num_answering += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            self._check_idle()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Register the task while it reads a body. Raises `APIError` after `stop_reading`."""
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._stopped:
                raise
            task.uncancel()
            self.check_ready()
            raise
        finally:
            self._reading.discard(task)
            self._stopped.discard(task)

    def stop_reading(self) -> None:
        """Stop accepting requests: those whose body is not whole are refused."""
        self._stopped |= self._reading
        for task in self._reading:
            task.cancel()

    def submit(self, generation: Generation) -> None:
        """Let a request wait for its turn."""
        self._admitted.add(generation)
        self.idle.clear()
        for part in generation.parts:
            self._queue.push(generation.queue_key, WaitingPart(generation, part))
        self._pump()

    def abort(self, generation: Generation, reason: str) -> None:
        """End a request whose client has gone, or that takes too long, in whatever state it is.
        Does nothing for one that has ended."""
        if generation.abort_reason is not None or generation not in self._admitted:
            return
        self._backlog.process_of({part.engine_id for part in generation.parts})
        if generation not in self._admitted:
            return
        generation.abort_reason = reason
        if reason == "client":
            self.metrics.disconnects[state_of(generation)] += 1
        for part in generation.parts:
            if part.engine_id < 0:
                self._queue.remove(generation.queue_key, WaitingPart(generation, part))
                part.is_ended = True
            elif not part.is_ended:
                self.engine.abort(part.engine_id)
        if generation.is_ended:
            self._end(generation)

    @property
    def num_waiting(self) -> int:
        """Prompts whose prefill has not begun."""
        return len(self._queue) + self._num_waiting_in_engine

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    def adapters_of_requests(self, *, waiting: bool) -> set[str]:
        """Adapters of requests that are not over: `waiting` of those that the engine has not."""
        parts = (part for one in self._admitted for part in one.parts if not part.is_ended)
        return {part.request.adapter for part in parts if (part.engine_id < 0) == waiting} - {""}

    @property
    def _has_room_in_engine(self) -> bool:
        """True if the engine needs one more request."""
        load, waiting = self.engine.snapshot.load, self._num_waiting_in_engine
        free = self.max_num_seqs - load.num_running - load.num_prefilling
        spare = max(int(SPARE * self.max_num_seqs), 2)
        return waiting < min(max(free, 0) + spare, MAX_WAITING_IN_ENGINE)

    @property
    def _num_waiting_in_engine(self) -> int:
        snapshot = self.engine.snapshot
        return snapshot.load.num_waiting + self._num_submitted - snapshot.num_taken

    def _pump(self) -> None:
        """Submit what waits, as far as the engine needs it."""
        while self._has_room_in_engine:
            if (found := self._queue.pop()) is None:
                return
            generation, part = found
            times = generation.times
            times.submitted = times.submitted or time.monotonic()
            part.engine_id = self._num_submitted
            self._num_submitted += 1
            self._parts[part.engine_id] = generation, part
            self.engine.submit(part.engine_id, part.request)

    def _on_events(self, events: list[Event]) -> None:
        """Take the outputs of a step. Requests get their first token before those of the others are
        made text: a few at a time, so that connections are served in between. All events of a
        request that has its first token go through the backlog, so they stay in order."""
        first: list[Event] = []
        others: list[Event] = []
        for event in events:
            found = self._parts.get(event[0])
            if found is not None and found[0].times.first_token:
                others.append(event)
            else:
                first.append(event)
        if first:
            self._process(first)
        self._backlog.add(others)

    def _process(self, events: list[Event]) -> None:
        changed: dict[Generation, None] = {}
        for engine_id, event in events:
            if (found := self._parts.get(engine_id)) is None:
                continue
            generation, part = found
            try:
                self.metrics.observe_event(generation, part, event)
                ended_by_text = generation.push(part, event)
                self.metrics.count_tokens(generation, part, event)
            except Exception:  # a tokenizer's or a parser's: no other request may suffer
                logger.exception("the text of an answer has failed")
                generation.fail(internal())
                ended_by_text = False
            if ended_by_text:
                assert isinstance(event, RequestOutput)
                self.engine.abort(engine_id, event.sample)
            if part.is_ended:
                del self._parts[engine_id]
            changed[generation] = None
        for generation in changed:
            if generation.error is not None:
                self.abort(generation, "error")  # its other parts
            if generation.is_ended:
                self._end(generation)
        self._pump()

    def _end(self, generation: Generation) -> None:
        """Release everything that is held for a request."""
        if generation not in self._admitted:
            return
        self._admitted.discard(generation)
        generation.reservation.release()
        self.metrics.observe_end(generation)
        generation.changed.set()
        self._check_idle()

    def _check_idle(self) -> None:
        if not self._admitted and not self._num_answering:
            self.idle.set()

    # Time -----------------------------------------------------------------------------

    async def watch(self) -> None:
        """Every second: deadlines, the rate of prefill, whether the engine still runs. Ten times a
        second: how late this thread is."""
        last_tick = time.monotonic()
        while True:
            before = time.monotonic()
            is_open = self.is_open
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            if is_open:
                self.metrics.loop_lag.add(now, max(now - before - HEARTBEAT_SECONDS, 0.0))
            if now - last_tick >= TICK_SECONDS:
                last_tick = now
                self.tick(now)

    def tick(self, now: float) -> None:
        """Check deadlines and the engine: one iteration of `watch`."""
        if not self.is_open or self.state == "failed":
            return
        options = self.options
        for generation in list(self._admitted):
            age = now - generation.times.arrival
            if age > options.queue_timeout and self._is_waiting(generation):
                message = (
                    f"the request has waited {age:.0f} s, longer than {options.queue_timeout:g} s"
                )
                headers = {"retry-after": str(self.admission.retry_after())}
                self._time_out(generation, APIError(408, "queue_timeout", message, headers=headers))
            elif age > generation.timeout:
                self._time_out(generation, request_timeout(age, generation.timeout))
        self._measure_rate(now)
        if self._followers is not None:
            silent, process = self._followers.silence()
            if silent > options.stall_timeout:
                message = f"process {process} has taken no step for {silent:.0f} s"
                self.fail(ConnectionError(message))
        stalled = self.engine.stalled_seconds
        if stalled > 2 * options.stall_timeout:
            self.fail(TimeoutError(f"the engine has taken no step for {stalled:.0f} s"))
        elif stalled > options.stall_timeout and self.state == "ready":
            logger.error("the engine has taken no step for %.0f s", stalled)
            self.state = "stalled"
        elif self.state == "stalled" and stalled <= options.stall_timeout:
            self.state = "ready"

    def _is_waiting(self, generation: Generation) -> bool:
        """Return whether no part of a request has run."""
        waiting = self.engine.snapshot.waiting
        return all(part.engine_id < 0 or part.engine_id in waiting for part in generation.parts)

    def _time_out(self, generation: Generation, error: APIError) -> None:
        generation.fail(error)
        self.abort(generation, "timeout")

    def _measure_rate(self, now: float) -> None:
        """Measure `prefill_rate` over the seconds in which prompts were waiting from beginning to
        end, for nothing but prefill: not for slots, of which a request needs one for each sample,
        and not for pages."""
        snapshot = self.engine.snapshot
        load = snapshot.load
        slots = max((len(part.choices) for one in self._admitted for part in one.parts), default=1)
        waits = (
            self.admission.tokens > 0
            and load.num_running + slots <= self.max_num_seqs
            and load.pages_in_use <= MOST_PAGES * load.num_pages
        )
        self._prefilled.add(now, snapshot.stats.prefilled_tokens, counts=waits)
        self.prefill_rate = self._prefilled.value or self.prefill_rate

    # Ends -----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """The engine has failed: so does all that is admitted, and the process ends."""
        if self.state == "failed":
            return
        self._backlog.process_all()
        self.state, self.failure = "failed", error
        self.failed.set()
        logger.error(
            "the engine has failed: %s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
            exc_info=error if error.__traceback__ is not None else None,
        )
        self.stop_reading()
        message = "the engine has failed"
        if isinstance(error, OutOfMemoryError | MemoryError):
            message = "out of memory"
        self._fail_all(APIError(500, "engine_failed", message))

    def abort_all(self) -> None:
        """The time for a shutdown is over."""
        headers = {"retry-after": "1", "x-should-retry": "true"}
        self._fail_all(APIError(503, "draining", "the server is shutting down", headers=headers))

    def _fail_all(self, error: APIError) -> None:
        for generation in list(self._admitted):
            generation.fail(error)
            if self.state == "failed":  # no event will come
                generation.abort_reason = "error"
                self._end(generation)
            else:
                self.abort(generation, "shutdown")
