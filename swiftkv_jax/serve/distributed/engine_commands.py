"""Commands at the beginning of an engine step, the same in every process of a mesh."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import UsageError
from ...infer.engine.engine import Engine
from ...infer.engine.requests import Request, ScoreRequest

Abort = tuple[int, int | None]
"""The engine's id of a request, and a sample of it or None for all."""


def apply_commands(
    engine: Engine, aborts: Iterable[Abort], requests: Iterable[Request | ScoreRequest]
) -> list[int | UsageError]:
    """Abort and add requests, with the same calls in every process. Returns the engine's id of each
    request, or why it can never run."""
    for request_id, sample in aborts:
        engine.abort_request(request_id, sample)
    added: list[int | UsageError] = []
    for request in requests:
        try:
            added.append(engine.add_request(request))
        except UsageError as error:
            added.append(error)
    return added
