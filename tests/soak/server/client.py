"""HTTP as bytes, and many clients at once, which is what a client library keeps one from."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NamedTuple


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes
    is_whole: bool
    """It did not end before its end."""


def request(
    path: str, body: Any, *, method: str = "POST", headers: Mapping[str, str] | None = None
) -> bytes:
    """The bytes of a request after which the server closes the connection; `body` is JSON or
    bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    usual = {"Host": "127.0.0.1", "Content-Type": "application/json", "Connection": "close"}
    usual |= {"Content-Length": str(len(content))} | dict(headers or {})
    lines = "".join(f"{name}: {value}\r\n" for name, value in usual.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + content


def responses(content: bytes, *, head: bool = False) -> Iterator[Response]:
    """The responses that a server has sent. `head`: without their bodies. Raises `ValueError` for
    what is none."""
    while content:
        start, found, rest = content.partition(b"\r\n\r\n")
        first, *lines = start.decode("latin-1").split("\r\n")
        if not (matched := re.fullmatch(r"HTTP/1\.1 (\d{3})( .*)?", first)):
            raise ValueError(f"no response: {content[:200]!r}")
        status = int(matched[1])
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if status == 100:
            content = rest
            continue
        if headers.get("transfer-encoding") == "chunked" and not head:
            body, content, is_whole = _chunks(rest)
        elif "content-length" not in headers and not head:  # to a client of HTTP/1.0: until the end
            body, content, is_whole = rest, b"", True
        else:
            length = 0 if head else int(headers["content-length"])
            body, content, is_whole = rest[:length], rest[length:], len(rest) >= length
        yield Response(status, headers, body, bool(found) and is_whole)


def _chunks(content: bytes) -> tuple[bytes, bytes, bool]:
    """(body, what follows it, whether it is whole)"""
    body = b""
    while True:
        line, found, rest = content.partition(b"\r\n")
        if not found:
            return body, b"", False
        size = int(line, 16)
        if not size:
            return body, rest[2:], rest[:2] == b"\r\n"
        if len(rest) < size + 2:
            return body + rest[:size], b"", False
        body, content = body + rest[:size], rest[size + 2 :]


@contextlib.asynccontextmanager
async def connected(
    port: int, content: bytes = b"", **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection over which `content` was sent. It is reset at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22, **options)
    try:
        if content:
            writer.write(content)
        yield reader, writer
    finally:
        writer.transport.abort()


async def talk(port: int, content: bytes, *, seconds: float = 30.0) -> bytes:
    """What comes back until the server closes the connection, or so many seconds are over."""
    answer = b""
    async with connected(port, content) as (reader, _):
        with contextlib.suppress(OSError):
            try:
                async with asyncio.timeout(seconds):
                    while more := await reader.read(2**18):
                        answer += more
            except TimeoutError:
                pass
    return answer


async def ask(port: int, path: str, body: Any, *, method: str = "POST") -> Response:
    """One whole response."""
    (found,) = responses(await talk(port, request(path, body, method=method)))
    return found


async def latency(port: int, body: Any, seconds: float, *, pause: float) -> list[float]:
    """Seconds that a completion takes, asked for again and again."""
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.monotonic()
        answer = await ask(port, "/v1/completions", body)
        assert answer.status == 200, answer
        found.append(time.monotonic() - begun)
        await asyncio.sleep(pause)
    return found


def events(body: bytes) -> list[Any]:
    """The data of a stream's events, [DONE] as a text. Raises `ValueError` for a line that is no
    part of one."""
    found: list[Any] = []
    for line in body.decode().split("\n"):
        field, _, value = line.partition(": ")
        if field == "data":
            found.append(value if value == "[DONE]" else json.loads(value))
        elif field not in ("", "event"):  # a comment has no field
            raise ValueError(f"no part of an event: {line[:200]!r}")
    return found


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
