"""One streamed completion over HTTP/1.1, timed as it arrives. Reads the socket itself: a client
library costs more than the server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any


@dataclasses.dataclass
class Timed:
    """Times and counts of one request. Times are `time.perf_counter()` seconds."""

    sent: float = 0.0
    """Time when the first byte is written: the body is encoded before."""
    arrivals: list[float] = dataclasses.field(default_factory=list)
    """Times of the events with text."""
    num_tokens: int = 0
    """Tokens of the answer, by the server's count where it gives one."""
    num_prompt_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None if there is one token only."""
        return (self.e2e - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Times between events, as vLLM's client takes them."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [after - before for before, after in pairs]


class Client:
    """Connections to one server, kept for the next request."""

    def __init__(self, base_url: str, *, api_key: str | None = None):
        """`base_url` ends before /v1. Raises `ValueError` for what is no URL of HTTP."""
        url = urllib.parse.urlsplit(base_url)
        if url.scheme != "http" or not url.hostname:
            raise ValueError(f"{base_url!r} is not like http://127.0.0.1:8000")
        self._host = url.hostname
        self._port = url.port or 80
        self._root = url.path.rstrip("/")
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def complete(self, body: dict[str, Any]) -> Timed:
        """Ask for a streamed completion and read it to its end. A failure is in `error`."""
        timed = Timed()
        writer = None
        try:
            reader, writer = await self._connection()
            content = self._encode("POST", "/v1/completions", body)
            timed.sent = time.perf_counter()
            writer.write(content)
            await writer.drain()
            status, headers = await _head(reader)
            if status == 200:
                await _events(reader, headers, timed)
                self._idle.append((reader, writer))
                return timed
            content = b"".join([part async for part in _body(reader, headers)])
            timed.error = f"{status}: {content[:200].decode(errors='replace')}"
        except (OSError, EOFError, ValueError) as error:
            timed.error = f"{type(error).__name__}: {error}"
        if writer is not None:
            writer.close()
        return timed

    async def get(self, path: str) -> Any:
        """JSON of a route. Raises `OSError` and `ValueError`."""
        reader, writer = await self._connection()
        writer.write(self._encode("GET", path, None))
        await writer.drain()
        status, headers = await _head(reader)
        content = b"".join([part async for part in _body(reader, headers)])
        self._idle.append((reader, writer))
        if status != 200:
            raise ValueError(f"GET {path} is {status}: {content[:200].decode(errors='replace')}")
        return json.loads(content)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
        return await asyncio.open_connection(self._host, self._port, limit=2**22)

    def _encode(self, method: str, path: str, body: Any) -> bytes:
        """The bytes of a request."""
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {self._root}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"{self._key}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """(status, headers)"""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The parts of a body as they come."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    else:
        yield await reader.readexactly(int(headers.get("content-length", 0)))


async def _events(reader: asyncio.StreamReader, headers: dict[str, str], timed: Timed) -> None:
    """Read a stream of events, which ends in [DONE] or in a finish reason. Raises `ValueError` for
    one that reports an error or is cut."""
    rest = b""
    counted = 0
    done = False
    async for part in _body(reader, headers):
        now = time.perf_counter()
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: "):
                continue
            if event == b"data: [DONE]":
                done = True
                continue
            found = json.loads(event[6:])
            if "error" in found:
                raise ValueError(str(found["error"].get("message", found["error"])))
            for choice in found["choices"]:
                counted += 1
                finished = choice.get("finish_reason") is not None
                done = done or finished
                if choice.get("text") or finished:
                    timed.arrivals.append(now)
            if usage := found.get("usage"):
                timed.num_tokens = usage["completion_tokens"]
                timed.num_prompt_tokens = usage["prompt_tokens"]
    if not done or not timed.arrivals:
        raise ValueError("the stream was cut")
    timed.num_tokens = timed.num_tokens or counted
