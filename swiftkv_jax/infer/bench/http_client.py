"""Streamed completions over HTTP/1.1, timed as they arrive. Reads the socket itself: a client
library costs more than the server."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

from .cells import Timed


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
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def first_model(self) -> str:
        """The id of the server's first model. Raises `OSError`, `http.client.HTTPException`,
        `ValueError` and `LookupError`."""
        connection = http.client.HTTPConnection(self._host, self._port)
        connection.request("GET", f"{self._root}/v1/models", headers=self._headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if response.status != 200:
            raise ValueError(f"GET /v1/models is {response.status}: {_shortened(content)}")
        return json.loads(content)["data"][0]["id"]

    async def complete(self, body: dict[str, Any]) -> Timed:
        """Ask for a streamed completion and read it to its end. A failure is in `error`."""
        timed = Timed()
        writer = None
        content = json.dumps(body).encode()
        headers = {"Host": f"{self._host}:{self._port}", "Content-Length": len(content)}
        lines = [f"{name}: {value}\r\n" for name, value in (self._headers | headers).items()]
        head = f"POST {self._root}/v1/completions HTTP/1.1\r\n{''.join(lines)}\r\n".encode()
        try:
            reader, writer = await self._connection()
            timed.sent = time.perf_counter()
            writer.write(head + content)
            await writer.drain()
            status, received = await _head(reader)
            if status == 200:
                await _events(reader, received, timed)
                self._idle.append((reader, writer))
                return timed
            content = b"".join([part async for part in _body(reader, received)])
            timed.error = f"{status}: {_shortened(content)}"
        except (OSError, EOFError, ValueError) as error:
            timed.error = f"{type(error).__name__}: {error}"
        if writer is not None:
            writer.close()
        return timed

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
        return await asyncio.open_connection(self._host, self._port, limit=2**22)


def _shortened(content: bytes) -> str:
    return content[:200].decode(errors="replace")


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
            if event == b"data: [DONE]":
                done = True
                continue
            if not event.startswith(b"data: "):
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
