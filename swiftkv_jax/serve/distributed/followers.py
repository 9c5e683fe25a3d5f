"""Process 0 of a server over several processes: its connections to the others.

Each process has an engine over the same mesh, and all make the same calls in the same order. What
is to be called comes from process 0 alone, in a frame before each step; deadlines and clients that
leave are aborts in it. While there is nothing to do a frame comes every few seconds.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ...errors import UsageError
from ...infer.engine.requests import Request, ScoreRequest
from ..options import is_loopback
from .channel import Channel
from .frames import FROM_FOLLOWER, HELLO, Abort, Done, Failed, Hello, Last, Ready, Welcome, frames

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""Time in which all followers have connected."""
HELLO_SECONDS = 5.0
"""Time that a connection has for its first message."""
MAX_HELLO_BYTES = 64 * 1024
IDLE_SECONDS = 5.0
"""Time between two frames where there is nothing to do."""
END_SECONDS = 2.0
"""Time that followers have to end after the last frame."""


class Followers:
    """The other processes, from the time they have connected."""

    def __init__(self, channels: Mapping[int, Channel], stall_timeout: float):
        """`channels` by the number of the process. `stall_timeout` is what `ServerOptions` has."""
        self._channels = dict(channels)
        self._unanswered: dict[int, collections.deque[float]] = {
            process: collections.deque() for process in channels
        }
        """Times at which the frames were sent that a follower has not taken a step for."""
        self._ready = {process: threading.Event() for process in channels}
        self._failed, self._lock = threading.Event(), threading.Lock()
        self._failure: ConnectionError | None = None
        self._on_failure: Callable[[ConnectionError], None] | None = None
        self._closing = False
        self.idle_seconds = min(IDLE_SECONDS, stall_timeout / 2)
        """Seconds after which a frame is sent though there is nothing to do."""
        self._threads = [
            threading.Thread(target=self._receive, args=(process,), daemon=True)
            for process in channels
        ]
        for channel in self._channels.values():
            channel.set_timeout(stall_timeout)
        for thread in self._threads:
            thread.start()

    def watch(self, on_failure: Callable[[ConnectionError], None]) -> None:
        """Call `on_failure` in some thread, once, when a follower has failed or ended; at once if
        one has already."""
        with self._lock:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def wait_ready(self) -> None:
        """Return when all have compiled their programs. Raises `ConnectionError` if one fails."""
        for ready in self._ready.values():
            while not ready.wait(0.2):
                if self._failure is not None:
                    raise self._failure

    def send(
        self,
        step: int,
        pages_in_use: int,
        aborts: list[Abort],
        requests: Sequence[Request | ScoreRequest],
    ) -> None:
        """Send the commands that all engines apply before step `step`. Raises `OSError` if a
        follower is gone."""
        for frame in frames(step, pages_in_use, aborts, requests):
            for process, channel in self._channels.items():
                if not frame.goes_on:
                    self._unanswered[process].append(time.monotonic())
                channel.send(frame)

    def silence(self) -> tuple[float, int]:
        """(seconds since the oldest frame was sent that a follower has not answered, that
        follower); 0 seconds if there is none."""
        now = time.monotonic()
        each = ((tuple(sent), process) for process, sent in self._unanswered.items())
        return max((now - sent[0] if sent else 0.0, process) for sent, process in each)

    def cause(self, error: BaseException) -> BaseException:
        """Return why a step has failed: the end of a follower, if there was one, else `error`."""
        self._failed.wait(1.0)  # it may be noticed a moment later
        return self._failure or error

    def close(self, error: str = "") -> None:
        """Send the last frame, with an error if there was one, and wait until the followers have
        closed their connections, for `END_SECONDS` at most."""
        self._closing = True
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.set_timeout(END_SECONDS)
                channel.send(Last(error))
        deadline = time.monotonic() + END_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        for channel in self._channels.values():
            channel.close()

    def _receive(self, process: int) -> None:
        """Take what a follower sends, to the end of its connection."""
        channel = self._channels[process]
        while True:
            try:
                message = channel.receive(FROM_FOLLOWER)
            except TimeoutError:  # `silence` says whether one is due
                continue
            except OSError as error:
                return self._fail(f"process {process} has ended ({error})")
            match message:
                case Ready():
                    self._ready[process].set()
                case Done():
                    self._unanswered[process].popleft()
                case Failed():
                    return self._fail(f"process {process} has failed: {message.error}")

    def _fail(self, message: str) -> None:
        with self._lock:
            if self._closing or self._failure is not None:
                return
            self._failure = ConnectionError(message)
            callback = self._on_failure
        self._failed.set()
        if callback is not None:
            callback(self._failure)


# Connections ----------------------------------------------------------------------------------


def listen(host: str) -> socket.socket:
    """A socket that listens on the interface which has the address of `host`, at a free port.
    Raises `OSError`."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    address = str(address[0])
    if ipaddress.ip_address(address).is_loopback and not is_loopback(host):
        # Some systems give a machine's own name a loopback address, which others do not reach.
        family = socket.AF_INET
        address = ""
    try:
        return socket.create_server((address, 0), family=family)
    except OSError as error:
        error.add_note(f"cannot listen on {address}, the coordinator's address, for the followers")
        raise


def accept_followers(
    listener: socket.socket,
    secret: bytes,
    num_processes: int,
    facts: Mapping[str, str],
    *,
    seconds: float = CONNECT_SECONDS,
) -> dict[int, Channel]:
    """A connection to each process but 0. Connections without the `secret` are closed.

    Raises `UsageError` for a process whose `facts` differ from those of this one, and if one does
    not connect in `seconds`; those that have connected get the error as the last frame.
    """
    channels: dict[int, Channel] = {}
    missing = set(range(1, num_processes))
    deadline = time.monotonic() + seconds
    try:
        while missing := missing - channels.keys():
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            _accept(listener, secret, missing, facts, channels)
    except TimeoutError:
        host, port = listener.getsockname()[:2]
        error = UsageError(
            f"process {min(missing)} has not connected to process 0 within {seconds:.0f} s, at "
            f"{host}, port {port}: a firewall?"
        )
    except UsageError as refusal:
        error = refusal
    else:
        return channels
    Followers(channels, HELLO_SECONDS).close(str(error))
    raise error


def _accept(
    listener: socket.socket,
    secret: bytes,
    missing: set[int],
    facts: Mapping[str, str],
    channels: dict[int, Channel],
) -> None:
    """Add the next connection to `channels` if it is that of a follower, else close it. Raises
    `UsageError` if the follower is refused."""
    connection, _ = listener.accept()
    channel = Channel(connection, HELLO_SECONDS)
    hello = _authenticated(channel, secret, missing)
    if hello is None:
        channel.close()
        return
    channels[hello.process] = channel
    difference = _difference(facts, hello)
    channel.send(Welcome(difference))
    if difference:
        raise UsageError(difference)


def _authenticated(channel: Channel, secret: bytes, missing: set[int]) -> Hello | None:
    """The first message of a connection, if it has the secret and is from one of the processes that
    are `missing`; else None."""
    try:
        hello = channel.receive(HELLO, MAX_HELLO_BYTES)
    except OSError as error:
        logger.warning("a connection that is not from a follower: %s", error)
        return None
    if not hmac.compare_digest(hello.secret, secret):
        logger.warning("a connection that is not from a follower: without the secret")
        return None
    if hello.process not in missing:
        logger.warning("a connection of process %d, which is not missing", hello.process)
        return None
    return hello


def _difference(facts: Mapping[str, str], hello: Hello) -> str:
    """Return what differs between a process and process 0; "" if nothing does."""
    for name in sorted(facts.keys() | hello.facts.keys()):
        ours = facts.get(name, "none")
        others = hello.facts.get(name, "none")
        if ours != others:
            return (
                f"`{name}`={others} in process {hello.process}, {ours} in process 0: all processes "
                f"run the same command"
            )
    return ""
