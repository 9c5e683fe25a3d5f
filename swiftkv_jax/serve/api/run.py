"""A request from its body to the end of its answer: what all routes share that use the engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ..app import App
from ..bodies.decoding import decode
from ..errors import APIError, printable, request_timeout
from ..http.exchange import KEEP_ALIVE, ClientGone, HTTPExchange, error_events
from ..protocol import Body
from ..service.admission import Reservation
from ..service.generation import EngineRequest, Generation


class Writer:
    """One answer: a JSON object, or the events of a stream."""

    takes_long = False
    """True if `whole` may take milliseconds: it runs in a thread then."""

    def whole(self, generation: Generation) -> Any:
        """The answer, when all of it is there."""
        raise NotImplementedError

    def events(self, generation: Generation) -> bytes:
        """Events of what has become certain since the last call, the last ones too at the end."""
        raise NotImplementedError

    def fail(self, error: APIError) -> bytes:
        """The last events of a stream that cannot go on."""
        return error_events(error)


type Prepare[B] = Callable[
    [App, HTTPExchange, B, Reservation], Awaitable[tuple[Generation, Writer]]
]


async def run[B: Body](
    app: App,
    exchange: HTTPExchange,
    kind: type[B],
    prepare: Prepare[B],
) -> None:
    """Answer one request. `prepare` makes what the engine runs of a body, and the writer of the
    answer. Raises `APIError` and `ClientGone`; nothing is held then."""
    service = app.service
    service.check_ready()
    with service.answering(), contextlib.ExitStack() as held:
        reservation = service.admission.reserve(exchange.client.name)
        try:
            with service.reading():
                content = await exchange.body(app.max_body_size, reservation.add_bytes)
            reservation.count(min(len(content) // 4, service.max_model_len), 1)
            body = body_of(app, exchange, kind, content)
            held.enter_context(app.adapters.held(body.model))
            timeout = min(app.options.request_timeout, exchange.timeout() or math.inf)
            exchange.watch()
            generation, writer = await _unless_gone(
                exchange, _in_time(exchange, timeout, prepare(app, exchange, body, reservation))
            )
            service.check_ready()
        except BaseException:
            reservation.release()
            raise
        generation.timeout = timeout
        generation.queue_key = exchange.client.name

        def leave() -> None:
            service.abort(generation, "client")
            generation.changed.set()

        exchange.on_gone = leave
        if generation.parts:
            service.submit(generation)
        else:
            reservation.release()
        try:
            streams = bool(getattr(body, "stream", False))
            await _answer(app, exchange, generation, writer, streams)
        except ClientGone as gone:
            service.abort(generation, "slow_client" if gone.args else "client")
            raise
        finally:
            if not generation.is_done:
                service.abort(generation, "client")
            _log(exchange, generation)
            if app.options.log_requests:
                exchange.log["prompt"] = _beginning(generation, app.options.max_log_len)


def reserve(
    app: App, reservation: Reservation, parts: list[EngineRequest], sequences: int, param: str
) -> None:
    """Reserve what the parts cost: of their prompts the tokens that are not cached now. Raises
    `APIError` that names `param`."""
    for part in parts:
        cached = app.service.engine.num_cached_tokens(part.prompt.page_keys)
        part.num_uncached_tokens = len(part.prompt.token_ids) - cached
    reservation.count(sum(part.num_uncached_tokens for part in parts), sequences, param)


@contextlib.asynccontextmanager
async def counted_body[B: Body](
    app: App, exchange: HTTPExchange, kind: type[B]
) -> AsyncIterator[B]:
    """The body of a request that needs no engine; its bytes count until the end. Raises
    `APIError` and `ClientGone`."""
    service = app.service
    service.check_ready()
    reservation = Reservation(exchange.client.name, service.admission)
    try:
        with service.reading():
            content = await exchange.body(app.max_body_size, reservation.add_bytes)
        yield body_of(app, exchange, kind, content)
    finally:
        reservation.release()


async def _in_time[T](exchange: HTTPExchange, limit: float, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises `APIError` after `limit` seconds from the arrival."""
    scope = asyncio.timeout(None)
    if limit < math.inf:
        scope = asyncio.timeout(exchange.arrival + limit - time.monotonic())
    try:
        async with scope:
            return await work
    except TimeoutError:
        if not scope.expired():
            raise
        raise request_timeout(time.monotonic() - exchange.arrival, limit) from None


async def _unless_gone[T](exchange: HTTPExchange, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises `ClientGone` as soon as the client has left: work that
    waits for its turn is not begun then."""
    task = asyncio.current_task()
    assert task is not None

    def leave() -> None:
        task.cancel()

    exchange.on_gone = leave
    try:
        found = await work
    except asyncio.CancelledError:
        if not exchange.is_gone or task.uncancel():
            raise
        raise ClientGone from None
    finally:
        exchange.on_gone = lambda: None
    if exchange.is_gone:
        raise ClientGone
    return found


def body_of[B: Body](app: App, exchange: HTTPExchange, kind: type[B], content: bytes) -> B:
    """The body of a request for the model that is served. A header of the answer names the fields
    that were ignored. Raises `APIError`."""
    ignore = app.options.unknown_fields == "ignore"
    body, ignored = decode(kind, content, ignore_unknown=ignore)
    note_ignored(exchange, ignored)
    app.check_model(body.model)
    return body


def note_ignored(exchange: HTTPExchange, paths: Sequence[str]) -> None:
    """Name what has no effect in a header of the answer, besides what it names already."""
    if paths:
        found = filter(None, (exchange.extra.get("x-ignored-fields"), *paths))
        exchange.extra["x-ignored-fields"] = _header(",".join(found))


def _header(text: str) -> str:
    """`text` as the value of a header: ASCII without control characters, at most 1,024 of them."""
    found = ascii(text)[1:-1]
    return found if len(found) <= 1024 else found[:1021] + "..."


async def _changes(
    exchange: HTTPExchange, generation: Generation, silence: float | None
) -> AsyncIterator[None]:
    """Yields when there may be something new to send, the last time when all is there. After so
    many seconds of silence it sends a comment of a stream, and yields too. Raises `APIError` and
    `ClientGone`."""
    done = generation.is_done and generation.error is None  # nothing is to be run
    timer = None if silence is None else _SilenceTimer(generation.changed, silence)
    try:
        while not done:
            await generation.changed.wait()
            generation.changed.clear()
            if exchange.is_gone:
                raise ClientGone
            if generation.error is not None:
                raise generation.error
            if timer is not None and timer.take():
                await exchange.send_events(KEEP_ALIVE)
            done = generation.is_done
            sent = exchange.num_bytes_out
            yield
            if timer is not None and exchange.num_bytes_out > sent:
                timer.restart()
    finally:
        if timer is not None:
            timer.cancel()


class _SilenceTimer:
    """Sets an event after so many seconds without a `restart`, and every so many again. A restart
    costs nothing: the one timer that runs looks at the time of the last."""

    def __init__(self, event: asyncio.Event, seconds: float):
        self._event = event
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._has_ended = False
        self._start = self._loop.time()
        self._handle = self._loop.call_later(seconds, self._check)

    def restart(self) -> None:
        self._start = self._loop.time()

    def take(self) -> bool:
        """Return whether the time has ended since the last call."""
        found = self._has_ended
        self._has_ended = False
        return found

    def cancel(self) -> None:
        self._handle.cancel()

    def _check(self) -> None:
        left = self._start + self._seconds - self._loop.time()
        if left <= 0:
            self._has_ended, self._start, left = True, self._loop.time(), self._seconds
            self._event.set()
        self._handle = self._loop.call_later(left, self._check)


async def _answer(
    app: App, exchange: HTTPExchange, generation: Generation, writer: Writer, streams: bool
) -> None:
    """Send an answer, whole or as a stream, with its times so far in a header, and return when
    the system has it. Raises `APIError` and `ClientGone`."""
    exchange.error_events = writer.fail
    silence = app.options.sse_keep_alive if streams else None
    timing = generation.times.server_timing
    async for _ in _changes(exchange, generation, silence):
        if streams and (events := writer.events(generation)):
            if not exchange.status:
                exchange.extra["server-timing"] = timing(whole=False)
            await exchange.send_events(events, more=not generation.is_done)
    if not streams:
        work = functools.partial(writer.whole, generation)
        length = generation.num_prompt_tokens + generation.num_tokens
        whole = await app.encoder.in_thread(work, length) if writer.takes_long else work()
        exchange.extra["server-timing"] = timing(whole=True)
        await exchange.send_json(200, whole)
    await exchange.flush()


def _beginning(generation: Generation, limit: int) -> str:
    """Return the beginning of the first prompt in one line: its text, or its token ids."""
    if not generation.prompts:
        return ""
    token_ids, _, text = generation.prompts[0]
    if text is None:
        text = str(token_ids[:limit].tolist())
    return printable(text, limit)


def _log(exchange: HTTPExchange, generation: Generation) -> None:
    """Add the counts and times of an admitted request to its line in the log."""
    reasons = sorted({choice.finish_reason or "none" for choice in generation.choices})
    exchange.log |= {
        "prompt_tokens": generation.num_prompt_tokens,
        "cached_tokens": generation.num_cached_tokens,
        "completion_tokens": generation.num_tokens,
        "finish_reasons": reasons,
        **generation.times.log_fields(),
    }
