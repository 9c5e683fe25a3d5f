"""A server over a mesh of several processes, from the time they have joined: process 0 answers
HTTP, the others follow it. One that fails ends all."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import secrets
import socket
from collections.abc import Callable
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from .. import cli
from ..checkpoints.hub import repository_of
from ..cli.model_loading import setup_model_devices
from ..cli.model_options import ModelOptions
from ..infer.engine.options import EngineOptions
from ..process.distributed import coordinator_host, run_on_process_0
from .app import Loaded
from .distributed.follower import Follower, connect, ignore_signals
from .distributed.followers import Followers, accept_followers, listen
from .server import Report, end
from .text.token_text import TokenSpellings

SECRET_BYTES = 32
SILENCE_SECONDS = 5.0
"""Time after twice the stall timeout, when process 0 ends by itself, in which it may be silent."""
PACKAGES = ("swiftkv-jax", "jax", "jaxlib", "llguidance")
"""Packages of which all processes have the same version."""
_OWN = ("model", "coordinator_address", "num_processes", "process_id", "compile_cache")
"""Fields of `ModelOptions` that may differ."""

Load = Callable[[Report], Loaded]
"""Makes what a server needs, and reports how far it is."""


def run(
    model_options: ModelOptions,
    engine_options: EngineOptions,
    stall_timeout: float,
    load: Callable[[Mesh | None, Report], Loaded],
    serve: Callable[[Load, Followers | None], int],
) -> int:
    """Join the other processes and run this one's part; returns the exit code. `load` runs in all
    of them, `serve` in process 0.

    Raises `UsageError` if they cannot be joined. Any later error ends the process: JAX, at its end,
    would wait for the others.
    """
    mesh = setup_model_devices(model_options)
    if jax.process_count() == 1:  # a launcher, but of one process
        return serve(lambda report: load(mesh, report), None)
    facts = _facts(model_options, engine_options)
    host = coordinator_host()
    listener, secret, port = _meeting_point(host)
    followers = follower = None

    def load_all(report: Report) -> Loaded:
        assert followers is not None
        loaded = load(mesh, report)
        followers.wait_ready()
        return loaded

    try:
        if listener is None:
            channel = connect(host, port, secret, jax.process_index(), facts)
            ignore_signals()
            follower = Follower(channel, silence=2 * stall_timeout + SILENCE_SECONDS)
            _follow(follower, load(mesh, _ignore))
            return cli.OK
        with listener:
            channels = accept_followers(listener, secret, jax.process_count(), facts)
        followers = Followers(channels, stall_timeout)
        followers.watch(lambda error: _end_with(error, followers))  # while this one loads
        code = serve(load_all, followers)
        followers.close()
        return code
    except Exception as error:
        if follower is not None:
            follower.fail(error)
        _end_with(error, followers)


def _meeting_point(host: str) -> tuple[socket.socket | None, bytes, int]:
    """(socket that listens in process 0 and None in the others, secret, port), the last two the
    same in all processes."""
    listeners: list[socket.socket] = []

    def begin() -> tuple[np.ndarray, int]:
        listeners.append(listen(host))
        secret = np.frombuffer(secrets.token_bytes(SECRET_BYTES), np.uint8)
        return secret, listeners[0].getsockname()[1]

    secret, port = run_on_process_0(begin, (np.zeros(SECRET_BYTES, np.uint8), 0))
    return next(iter(listeners), None), secret.tobytes(), port


def _follow(follower: Follower, loaded: Loaded) -> None:
    """Take the steps of process 0, to its end."""
    spellings = TokenSpellings(loaded.tokenizer)
    follower.run(
        loaded.engine,
        loaded.compiler and loaded.compiler.compile_grammar,
        lambda token_id: spellings[token_id].content,
    )
    follower.close()


def _end_with(error: Exception, followers: Followers | None) -> NoReturn:
    """Write an error, end the followers of this process, then the process."""
    code = cli.report(error, cli.log_parser())
    end(code, followers)


def _facts(model_options: ModelOptions, engine_options: EngineOptions) -> dict[str, str]:
    """Return the facts that have to be equal in all processes, by name."""
    found = {name: str(importlib.metadata.version(name)) for name in PACKAGES}
    found["commit"] = str(repository_of(model_options.path))  # where a branch has moved meanwhile
    for options in (model_options, engine_options):
        names = (field.name for field in dataclasses.fields(options))
        found |= {name: str(getattr(options, name)) for name in names if name not in _OWN}
    return found


def _ignore(phase: str, done: int = 0, total: int = 0) -> None:
    """A follower has no `/ready` that would report the phase of its start."""
