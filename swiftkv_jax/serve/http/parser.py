"""HTTP/1.1 as h11 parses it, with what RFC 9112 asks for besides: empty lines before a request,
targets in absolute form, other versions refused, and the end of a connection whose framing is in
doubt."""

from __future__ import annotations

import re
from typing import Any

import h11

MAX_EMPTY_LINES = 8
"""Empty lines before one request. Some clients send one after a body (RFC 9112, 2.2)."""

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)
_AUTHORITY = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]+|\[[0-9a-f:.]+\])(?::[0-9]*)?", re.IGNORECASE)


class Parser(h11.Connection):
    """The requests of one connection."""

    def __init__(self, max_header_bytes: int):
        super().__init__(h11.SERVER, max_header_bytes)
        self._empty_lines = 0
        """Since the last request."""

    def next_event(self) -> Any:
        """Return the next event in the buffer: `h11.Connection.next_event`."""
        if self.their_state in (h11.MUST_CLOSE, h11.CLOSED):  # nothing is a request any more
            self._receive_buffer.maybe_extract_at_most(len(self._receive_buffer))
            return h11.NEED_DATA
        if self.their_state is h11.IDLE and not self._skip_empty_lines():
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._empty_lines = 0
            if not event.http_version.startswith(b"1."):
                raise h11.RemoteProtocolError("only HTTP/1 is spoken here")
            if _is_ambiguous(event):
                self._cstate.process_keep_alive_disabled()
            return in_origin_form(event)
        return event

    def _skip_empty_lines(self) -> bool:
        """Take empty lines from the buffer. False if it holds half of one."""
        while self._empty_lines < MAX_EMPTY_LINES:
            begin = bytes(self._receive_buffer)[:2]
            if begin != b"\r\n" and begin[:1] != b"\n":
                return begin != b"\r"
            self._receive_buffer.maybe_extract_at_most(1 if begin[:1] == b"\n" else 2)
            self._empty_lines += 1
        return True


def _is_ambiguous(request: h11.Request) -> bool:
    """Return whether a proxy may have read another length of the body (RFC 9112, 6.1): the
    connection ends with the answer, since what follows may not be meant as a request."""
    names = {name for name, _ in request.headers}
    return b"transfer-encoding" in names and (
        b"content-length" in names or request.http_version < b"1.1"
    )


def in_origin_form(request: h11.Request) -> h11.Request:
    """A request whose target may be in absolute form, with the path alone; the host of the target
    replaces the header `Host` (RFC 9112, 3.2.2). Raises `h11.RemoteProtocolError`."""
    found = _ABSOLUTE.fullmatch(request.target)
    if found is None:
        return request
    host, target = found.groups()
    if not _AUTHORITY.fullmatch(host):
        raise h11.RemoteProtocolError("the target has no valid host")
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=b"/" + target.removeprefix(b"/"),
        headers=[(b"host", host), *headers],
        http_version=request.http_version,
    )
