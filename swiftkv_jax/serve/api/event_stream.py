"""Answers of which every part has an event of its own: the Responses API's and Anthropic's."""

from __future__ import annotations

from typing import Any, Protocol

from ..app import App
from ..errors import APIError
from ..http.exchange import HTTPExchange
from ..service.generation import Choice, Generation, TextDelta
from .generate import server_timing
from .run import changes


class EventWriter(Protocol):
    """One answer, as it grows, and the events that tell how."""

    answer: dict[str, Any]
    """The whole answer, after `end`."""

    def add(self, generation: Generation, delta: TextDelta) -> bytes:
        """Events of what has become certain."""
        ...

    def end(self, generation: Generation, choice: Choice) -> bytes:
        """The last events, when all has been added."""
        ...

    def fail(self, error: APIError) -> bytes:
        """The last events of an answer that cannot go on."""
        ...


class StreamBody(Protocol):
    stream: bool | None


async def answer_in_events(
    app: App,
    exchange: HTTPExchange,
    body: StreamBody,
    generation: Generation,
    writer: EventWriter,
) -> None:
    """Send an answer of one choice, whole or as a stream. Raises `APIError` and `ClientGone`."""
    (part,) = generation.parts
    (choice,) = part.choices
    exchange.error_events = writer.fail
    silence = app.options.sse_keep_alive if body.stream else None
    async for _ in changes(exchange, generation, silence=silence):
        if not choice.is_ready:
            continue
        events = writer.add(generation, choice.take())
        if generation.is_done:
            events += writer.end(generation, choice)
        if body.stream and events:
            if not exchange.status:
                exchange.extra["server-timing"] = server_timing(generation, whole=False)
            await exchange.send_events(events, more=not generation.is_done)
    if not body.stream:
        exchange.extra["server-timing"] = server_timing(generation)
        await exchange.send_json(200, writer.answer)
