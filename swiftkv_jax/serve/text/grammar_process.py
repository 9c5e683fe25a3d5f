"""Tries a grammar in a process of its own before the server compiles it: what takes too long there
is killed, and what takes too much memory ends with that process alone.

    server --socket--> `python -m` this: has the tokenizer, forks --> a process for each grammar

llguidance limits the work of most constructs, not of all: the intersection of eleven short regular
expressions takes minutes, in which a thread of the server cannot be stopped.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...infer.structured.compile_grammar import TokenizerDescription, compile_grammar

if TYPE_CHECKING:
    from ...infer.engine.grammar import Matcher
    from ...infer.structured.structured_outputs import GrammarCompiler

COMPILE_SECONDS = 2.0
"""Time that one grammar may take."""
COMPILE_BYTES = 512 * 2**20
"""Memory that one grammar may take."""
START_SECONDS = 60.0
"""Time in which the process must have read its tokenizer."""
_BEGUN = b"b"
_GOOD = b"g"
_BAD = b"r"
"""Messages of a process: it has begun; the grammar compiles; it is refused (a reason follows)."""


class GrammarProcessError(Exception):
    """The process has ended, twice, or does not answer."""


class CheckedCompiler:
    """Compiles what has been compiled in another process before. May be used by several threads."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._process = GrammarProcess(compiler.describe_tokenizer())

    def compile_grammar(self, grammar: str) -> Matcher:
        """`GrammarCompiler.compile_grammar`. Raises `GrammarProcessError` too."""
        self._process.check(grammar)
        return self._compiler.compile_grammar(grammar)

    def close(self) -> None:
        self._process.close()


class GrammarProcess:
    """The process, begun at once and again if it has ended. May be used by several threads."""

    def __init__(self, tokenizer: TokenizerDescription):
        self._tokenizer = tempfile.TemporaryFile("w+", encoding="utf-8")
        tokenizer.write(self._tokenizer)
        self._tokenizer.flush()
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting = set[socket.socket]()
        self._process, self._socket = self._start()

    def check(self, grammar: str) -> None:
        """Raises `UsageError` for a grammar that cannot be compiled, or not within its limits, and
        `GrammarProcessError`."""
        for _ in range(2):
            process = self._running()
            with contextlib.suppress(OSError):
                verdict = self._ask(grammar, process)
                if verdict is not None:
                    if verdict:
                        raise UsageError(verdict)
                    return
            with self._lock:  # one that hangs
                _kill(process)
        raise GrammarProcessError("the process that compiles grammars has ended")

    def close(self) -> None:
        """End it; what waits for it ends too."""
        with self._lock:
            self._is_closed = True
            for waiting in self._waiting:  # at once, however long the kernel takes to kill
                with contextlib.suppress(OSError):
                    waiting.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            _kill(self._process)
            self._tokenizer.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, a new one if it has ended."""
        with self._lock:
            if self._is_closed:
                raise GrammarProcessError("the server ends")
            if self._process.poll() is not None:
                self._socket.close()
                self._process, self._socket = self._start()
            return self._process

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._tokenizer.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": path, "RAYON_NUM_THREADS": "1"},
            stdin=self._tokenizer,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # no interrupt from a terminal
        )
        theirs.close()
        return process, ours

    def _waits_no_more(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.discard(connection)

    def _ask(self, grammar: str, process: subprocess.Popen[bytes]) -> str | None:
        """Return why a grammar is refused, "" if it is not; None if the process has ended. Raises
        `OSError`."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(ours)
            with theirs, self._lock:
                socket.send_fds(self._socket, [b"\0"], [theirs.fileno()])
                self._waiting.add(ours)
            stack.callback(self._waits_no_more, ours)
            ours.settimeout(START_SECONDS + COMPILE_SECONDS)
            if ours.recv(1) != _BEGUN:
                return None
            begun = time.monotonic()
            ours.settimeout(2 * COMPILE_SECONDS + 1)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                ours.sendall(grammar.encode())
                ours.shutdown(socket.SHUT_WR)
            answer = _read(ours)
        if answer:
            return answer[1:].decode(errors="replace")
        with self._lock:
            if self._is_closed or process.poll() is not None:  # and what it had begun
                return None
        if time.monotonic() - begun > 0.9 * COMPILE_SECONDS:
            return f"the grammar takes more than {COMPILE_SECONDS:g} s to compile"
        return "the grammar takes too much memory to compile"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children. Does nothing if it has ended: its id may be another's then,
    and its children end by themselves."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(connection: socket.socket) -> bytes:
    """All that comes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


# In the process -----------------------------------------------------------------------------------


def main(requests: socket.socket) -> None:
    """Fork for each connection that comes, until the server has gone."""
    tokenizer = TokenizerDescription.read(sys.stdin).make()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # panics, as clients please
    gc.freeze()

    def compile_one(grammar: str) -> None:
        compile_grammar(tokenizer, grammar).compute_bitmask()

    while True:
        _, given, _, _ = socket.recv_fds(requests, 1, 1)
        if not given:
            return
        with socket.socket(fileno=given[0]) as connection:
            if not os.fork():
                try:
                    requests.close()
                    _limit()
                    _answer(connection, compile_one)
                finally:
                    os._exit(0)


def _limit() -> None:
    """The kernel ends this process when its time or its memory is used up."""
    signal.setitimer(signal.ITIMER_REAL, COMPILE_SECONDS)
    seconds = math.ceil(COMPILE_SECONDS) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + COMPILE_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _answer(connection: socket.socket, compile_one: Callable[[str], None]) -> None:
    connection.sendall(_BEGUN)
    try:
        compile_one(_read(connection).decode())
    except UsageError as error:
        connection.sendall(_BAD + str(error).encode())
    else:
        connection.sendall(_GOOD)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as found:
        main(found)
