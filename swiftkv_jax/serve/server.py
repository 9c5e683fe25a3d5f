"""A server from its socket to its end: it listens before the model is loaded, takes requests once
it is, and after a signal lets what was admitted end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import uvicorn

from ..cli import ERROR, INTERRUPTED, OK, OUT_OF_MEMORY
from ..errors import OutOfMemoryError, UsageError
from .api.routes import asgi
from .app import App, Loaded
from .distributed.followers import Followers
from .http.auth import Keys
from .http.connection import with_options
from .options import ServerOptions
from .service.load_log import log_load

logger = logging.getLogger(__name__)


class Report(Protocol):
    """Reports the progress of a start: the phase, and how many programs of all are compiled."""

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None: ...


BACKLOG = 2048
PERSIST_SHARE = 0.25
"""Part of the time for a shutdown that is kept for writing the prefix cache to disk."""
STOP_SECONDS = 5.0
"""Time that the last step of the engine has."""
SWITCH_SECONDS = 0.0005
"""Longest that the engine's thread or that of the connections waits for the interpreter while the
other computes (`sys.setswitchinterval`; Python's default is ten times as long). New tokens come
just before the engine plans its next call: with 256 slots they waited 2 ms for that, now 0.9."""


class _Server(uvicorn.Server):
    """uvicorn without handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `OSError` that says where."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        found.close()
        if isinstance(error, OverflowError):
            raise UsageError(f"`port`={port} must be from 0 to 65535") from None
        error.add_note(f"cannot listen on {host}:{port}")
        raise
    return found


def listen_unix(path: Path) -> socket.socket:
    """A Unix domain socket that listens. One that a server has left behind is replaced; any other
    file is not. Raises `OSError` that says where."""
    found = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        found.bind(str(path))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        error.add_note(f"cannot listen on {path}")
        raise
    return found


@contextlib.contextmanager
def removing_unix(path: Path) -> Iterator[None]:
    """Remove a Unix domain socket at the end of the block, unless the file is another by then: the
    next server's, which replaced it."""
    made = _identity(path)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if _identity(path) == made:
                path.unlink()


def _identity(path: Path) -> tuple[int, ...]:
    """Facts of a file that stay, with a time, since the number of one that is gone is given
    again."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _answers(path: Path) -> bool:
    """Return whether a process listens on a Unix domain socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed; None is asyncio's own."""
    return uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()


async def serve(
    options: ServerOptions,
    model_name: str,
    listener: socket.socket,
    load: Callable[[Report], Loaded],
    *,
    handle_signals: bool = True,
    read_keys: Callable[[], Mapping[str, str]] | None = None,
    on_start: Callable[[App, Callable[[], None]], None] | None = None,
    followers: Followers | None = None,
) -> int:
    """Serve until a signal; returns the exit code. Raises what `load` raises. With `followers` a
    failure ends the process.

    `load` makes the engine, in a thread of its own, and reports what it is at. `read_keys` gives
    the keys anew after SIGHUP. `on_start` gets the application and a function that does what a
    signal does.
    """
    app = App(options, model_name)
    loop = asyncio.get_running_loop()
    switch_seconds = sys.getswitchinterval()
    # Any client can cause its warnings, with advice for other servers.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        asgi(app),
        http=with_options(options),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=3600,  # `Connection` has its own
        timeout_graceful_shutdown=1,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    server = _Server(config)
    stopping = _Stopping(app)
    if handle_signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.signal)
        if read_keys is not None:
            loop.add_signal_handler(signal.SIGHUP, _reload_keys, app, read_keys)
    app.service.metrics.num_connections = lambda: len(server.server_state.connections)
    if on_start is not None:
        on_start(app, stopping.signal)
    web = asyncio.ensure_future(server.serve(sockets=[listener]))
    closing = asyncio.ensure_future(stopping.wait())
    watching = asyncio.ensure_future(app.service.watch())
    watching.add_done_callback(functools.partial(_watch_ended, app))
    tasks = [watching, closing]
    gc.freeze()  # collections while the model is loaded leave out the modules, which stay
    loading = _in_thread(functools.partial(_load_all, app, load))
    try:
        await asyncio.wait([loading, closing], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return await _abandon(server, web, followers)
        loaded = loading.result()
        # Everything that is there now stays: a full collection would stop both threads.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_SECONDS)
        app.service.open(loaded.engine, loaded.prefill_rate, followers)
        logger.info("%s is ready", app.model_names[0])
        failed = asyncio.ensure_future(app.service.failed.wait())
        tasks += [failed, asyncio.ensure_future(log_load(app.service))]
        await asyncio.wait([closing, failed], return_when=asyncio.FIRST_COMPLETED)
        if app.service.failure is not None:
            await asyncio.sleep(0.2)  # errors are sent
        server.should_exit = True
        await web
        return await _stop_engine(app, followers, stopping)
    finally:
        server.should_exit = True
        if app.service.kv_events is not None:
            app.service.kv_events.close()
        for task in tasks:
            task.cancel()
        if not web.done():
            await web
        gc.unfreeze()
        sys.setswitchinterval(switch_seconds)


def _load_all(app: App, load: Callable[[Report], Loaded]) -> Loaded:
    """Load the model and prepare the application for it: in a thread."""

    def report(phase: str, done: int = 0, total: int = 0) -> None:
        app.service.start = {"phase": phase}
        if total:
            app.service.start |= {"done": done, "total": total}

    found = load(report)
    app.prepare(found)
    return found


async def _stop_engine(app: App, followers: Followers | None, stopping: _Stopping) -> int:
    """End the engine's thread and the pools; returns the exit code. If something does not end in
    time, the process does, here. The prefix cache is written to disk until the time for a shutdown
    is over, or a second signal comes."""
    failure = app.service.failure
    code = OK
    if failure is not None:
        code = OUT_OF_MEMORY if _is_out_of_memory(failure) else ERROR
    stop = functools.partial(app.service.engine.stop, STOP_SECONDS)
    if not await asyncio.get_running_loop().run_in_executor(None, stop):
        if not isinstance(failure, ConnectionError):
            faulthandler.dump_traceback(all_threads=True)
        end(code or ERROR, followers)  # the step that hangs will not end
    seconds = stopping.deadline - time.monotonic()
    if failure is None and seconds > 0:
        persist = functools.partial(app.service.engine.persist, seconds)
        writing = asyncio.get_running_loop().run_in_executor(None, persist)
        await _first(seconds + STOP_SECONDS, asyncio.wait([writing]), stopping.second.wait())
        if not writing.done():
            end(code, followers)
        await writing
    if not app.close() or (followers is not None and code):
        end(code, followers)  # else threads, or processes that have ended, were waited for
    return code


class _Stopping:
    """Signal handling: the first signal lets admitted requests end, the second aborts them."""

    def __init__(self, app: App):
        self._app = app
        self._signals = 0
        self._first, self.second = asyncio.Event(), asyncio.Event()
        self.deadline = 0.0
        """`time.monotonic()` at which the time for a shutdown is over."""

    def signal(self) -> None:
        self._signals += 1
        self._first.set()
        if self._signals == 2:
            self.deadline = time.monotonic()
            self.second.set()
        elif self._signals > 2:
            os._exit(INTERRUPTED)

    async def wait(self) -> None:
        """Return when it is time to close."""
        await self._first.wait()
        service = self._app.service
        options = self._app.options
        if not service.is_open:
            service.state = "draining"
            return
        service.is_shutting_down = True
        await _first(options.shutdown_delay, self.second.wait())
        logger.info("shutting down: %d requests are unfinished", service.num_admitted)
        service.state = "draining"
        service.stop_reading()
        if not self.second.is_set():
            self.deadline = time.monotonic() + options.shutdown_timeout
        share = 1 - PERSIST_SHARE * service.engine.persists
        await _first(share * options.shutdown_timeout, self.second.wait(), service.idle.wait())
        if not service.idle.is_set():
            service.abort_all()
            await _first(5.0, self.second.wait(), service.idle.wait())


async def _first(seconds: float, *events: Coroutine[Any, Any, Any]) -> None:
    """Wait for one of some events, for so many seconds at most."""
    waits = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _reload_keys(app: App, read_keys: Callable[[], Mapping[str, str]]) -> None:
    """Accept the keys that there are now, and no others. A file that cannot be read changes
    nothing."""
    try:
        keys = read_keys()
    except (UsageError, OSError, UnicodeDecodeError) as error:
        logger.error("the keys stay as they were: %s", error)
        return
    app.keys = Keys(keys)
    logger.info("keys read again: %s", ", ".join(keys))


def _watch_ended(app: App, watching: asyncio.Future[None]) -> None:
    """Fail the server if its watch has failed: requests rely on it for their time limits."""
    if not watching.cancelled() and (error := watching.exception()) is not None:
        app.service.fail(error)


async def _abandon(
    server: uvicorn.Server, web: asyncio.Future[None], followers: Followers | None
) -> NoReturn:
    """End a start: the thread that loads cannot be stopped, and need not be."""
    server.should_exit = True
    await web
    logger.info("stopped before the model was ready")
    end(OK, followers)


def end(code: int, followers: Followers | None) -> NoReturn:
    """End the process at once, whatever its threads wait for."""
    if followers is not None:
        followers.close("its message says why" if code else "")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, OutOfMemoryError | MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _in_thread[T](work: Callable[[], T]) -> asyncio.Future[T]:
    """Result of `work` in a thread that does not hold up the end of the process."""
    result = concurrent.futures.Future[T]()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="start of the engine", daemon=True).start()
    return asyncio.wrap_future(result)
