"""The processes of a server but process 0: each runs an engine over the same mesh, and takes from
process 0 what to call. They answer no HTTP."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ... import cli
from ...errors import UsageError, reason_of
from ...infer.engine.engine import Engine
from ...infer.engine.grammar import Matcher
from ...infer.engine.requests import Request, ScoreRequest
from .channel import Channel
from .followers import CONNECT_SECONDS
from .frames import (
    FROM_PROCESS_0,
    Abort,
    Done,
    Failed,
    Frame,
    Hello,
    Last,
    Makers,
    Ready,
    Welcome,
    apply_commands,
    request_of,
)

MAX_GRAMMARS = 32
"""Compiled grammars that are kept: the prompts of one request share one."""

FAIL_SECONDS = 1.0
"""Time after a failure in which the end of process 0 is noticed, or its answer comes."""


def connect(host: str, port: int, secret: bytes, process: int, facts: Mapping[str, str]) -> Channel:
    """The connection of a follower to process 0. Raises `ConnectionError`, and `UsageError` if that
    refuses its `facts`."""
    with contextlib.ExitStack() as on_error:
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
            channel = Channel(connection, CONNECT_SECONDS)
            on_error.callback(channel.close)
            channel.send(Hello(secret, process, dict(facts)))
            welcome = channel.receive(FROM_PROCESS_0)
        except OSError as error:
            message = f"cannot connect to process 0 at {host}:{port}"
            raise ConnectionError(f"{message}: {reason_of(error)}") from None
        assert isinstance(welcome, Welcome)
        if welcome.refused:
            raise UsageError(welcome.refused)
        on_error.pop_all()
        return channel


class Commands(NamedTuple):
    """Apply the commands that come before a step."""

    step: int
    pages_in_use: int
    aborts: list[Abort]
    requests: list[Request | ScoreRequest]


class Follower:
    """A process that follows process 0."""

    def __init__(
        self, channel: Channel, *, silence: float, end: Callable[[str], None] | None = None
    ):
        """`silence` in seconds of process 0, from its first frame on, is its end. `end` is called
        in a thread of this object, while another may wait for devices for ever: it ends the process
        with an error, or with "" as it was asked to. None does so by `os._exit`."""
        self._channel = channel
        self._silence = silence
        self._end = end or _end_process
        self._commands: queue.SimpleQueue[Commands | None] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._failing = False
        self._makers: Makers | None = None
        self._thread = threading.Thread(target=self._receive, name="frames", daemon=True)
        self._thread.start()

    def run(
        self,
        engine: Engine,
        compile_grammar: Callable[[str], Matcher] | None,
        spelling_of: Callable[[int], bytes],
    ) -> None:
        """Follow until the last frame; the last two are those of `Makers`. Raises what a step
        raises, and `RuntimeError` if the engine differs from that of process 0."""
        self._engine = engine
        compile_once = functools.lru_cache(MAX_GRAMMARS)(compile_grammar or _no_grammars)
        self._makers = Makers(compile_once, spelling_of, engine.config.vocab_size)
        gc.collect()
        gc.freeze()
        self._channel.set_timeout(self._silence)
        self._channel.send(Ready())
        num_steps = 0
        while (commands := self._commands.get()) is not None:
            state = num_steps, engine.pages_in_use
            if state != commands[:2]:
                raise RuntimeError(
                    f"the engines differ: {state[1]} pages after {state[0]} steps, "
                    f"{commands.pages_in_use} after {commands.step} in process 0"
                )
            apply_commands(engine, commands.aborts, commands.requests)
            if engine.has_work:
                engine.step()
                num_steps += 1
            # Process 0 does not wait long for steps before the last frame. If it has ended without
            # one, `_receive` notices.
            with contextlib.suppress(OSError):
                self._channel.send(Done(commands.step))

    def fail(self, error: BaseException) -> None:
        """Send process 0 why this one ends. Where that has ended, which may be the reason, this
        does not return."""
        self._failing, line = True, str(error).partition("\n")[0]
        with contextlib.suppress(OSError):
            self._channel.send(Failed(f"{type(error).__name__}: {line}"))
        if threading.current_thread() is not self._thread:
            self._thread.join(FAIL_SECONDS)

    def close(self) -> None:
        self._channel.close()

    def _receive(self) -> None:
        """Take frames, to the last one."""
        try:
            requests: list[Request | ScoreRequest] = []
            aborts: list[Abort] = []
            frame = None
            while True:
                try:
                    frame = self._channel.receive(FROM_PROCESS_0)
                except TimeoutError:
                    if frame is None:  # nothing is due before all are ready
                        continue
                    raise
                if isinstance(frame, Last):
                    break
                assert isinstance(frame, Frame) and self._makers is not None
                requests += [request_of(sent, self._makers) for sent in frame.requests]
                aborts += frame.aborts
                if not frame.goes_on:
                    self._commands.put(Commands(frame.step, frame.pages_in_use, aborts, requests))
                    aborts = []
                    requests = []
        except TimeoutError:
            return self._end(f"process 0 has sent nothing for {self._silence:.0f} s")
        except OSError as error:
            return self._end(f"process 0 has ended ({error})")
        except Exception as error:
            self.fail(error)
            return self._end(f"unexpected {type(error).__name__}: {error}")
        if self._failing:  # its own error is the one to be seen
            return
        if frame.error:
            self._end(f"process 0 has failed: {frame.error}")
        elif self._engine is None:  # its start cannot be stopped, and need not be
            self._end("")
        else:
            self._commands.put(None)


def ignore_signals() -> None:
    """SIGTERM, SIGINT and SIGHUP come to all processes of a job: what process 0 has accepted still
    runs, and its last frame ends this one."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _end_process(error: str) -> None:
    os._exit(cli.fail(error, cli.ERROR) if error else cli.OK)


def _no_grammars(grammar: str) -> Matcher:
    raise UsageError("this process follows no grammars")
