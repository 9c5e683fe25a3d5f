"""Errors as clients get them: OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import UsageError

MAX_MESSAGE = 500
"""Characters of a message: what a client sent wrong must not come back multiplied."""
MAX_PARAM = 100
"""Characters of the path of a field, which may be any name that a client sent."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    414: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class APIError(Exception):
    """A refusal or failure of one request."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """`param` is the path of the field in the body, `headers` are added to the answer's."""
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})
        self.message = _shortened(message, MAX_MESSAGE)
        self.param = None if param is None else _shortened(param, MAX_PARAM)

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": _TYPES[self.status],
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def invalid(param: str | None, message: str, code: str = "invalid_value") -> APIError:
    """400 for the value of a field."""
    return APIError(400, code, message, param=param)


def unsupported(param: str, message: str = "") -> APIError:
    """400 for a field of OpenAI or vLLM that this server cannot honour."""
    return invalid(param, message or f"`{param}` is not supported", "unsupported_parameter")


def request_timeout(seconds: float, limit: float) -> APIError:
    """504 for a request that has taken longer than it may."""
    message = f"the request has run for {seconds:.3g} s, longer than {limit:g} s"
    return APIError(504, "request_timeout", message, headers={"x-should-retry": "false"})


def internal(message: str = "an internal error, which the server's log describes") -> APIError:
    """500 for a request whose handling has failed."""
    return APIError(500, "internal", message)


def of_usage(error: UsageError, names: Mapping[str, str] | None = None) -> APIError:
    """400 for a value that the engine refuses: it names the parameter in backticks. `names` maps
    the engine's names to the body's."""
    text, names = str(error), names or {}
    found = re.search(r"`(\w+)`", text)
    param = None if found is None else names.get(found[1], found[1])
    code = "context_length_exceeded" if "above the limit of" in text else "invalid_value"
    if found is not None and param != found[1]:
        text = text.replace(f"`{found[1]}`", f"`{param}`")
    return invalid(param, text, code)


@contextlib.contextmanager
def renaming(
    names: Mapping[str, str], places: Sequence[str], tools: Sequence[str] | None = None
) -> Iterator[None]:
    """Errors of a chat leave the block in the names of another body: see `_renamed`."""
    try:
        yield
    except APIError as error:
        raise _renamed(error, names, places, tools) from None


def _renamed(
    error: APIError,
    names: Mapping[str, str],
    places: Sequence[str],
    tools: Sequence[str] | None,
) -> APIError:
    """An error of a chat in the names of another body. `names` maps fields of a chat to those of
    the body, `places` are where its messages come from, `tools` where its tools do, None for those
    of the same number. Only what `param` names is renamed, and what is in backticks: the rest of a
    message may be the client's own words."""
    message, param = error.message, error.param
    for chat, name in names.items():
        message = message.replace(f"`{chat}`", f"`{name}`")
        param = name if param == chat else param
    found = re.match(r"messages\[(\d+)\]|tools\[(\d+)\]\.function", param or "")
    if param is not None and found is not None:
        if found[1]:
            here = places[int(found[1])]
        else:
            here = f"tools[{found[2]}]" if tools is None else tools[int(found[2])]
        message = message.replace(found[0], here)
        rest = param[found.end() :].removeprefix(".")
        param = ".".join(filter(None, (here, names.get(rest, rest))))
    return APIError(error.status, error.code, message, param=param, headers=error.headers)


def _shortened(text: str, limit: int) -> str:
    """`printable`, in at most 2.4 bytes of UTF-8 for each character: an error has at most 2 KiB."""
    return printable(text, limit).encode()[: limit * 12 // 5].decode(errors="ignore")


def printable(text: str, limit: int) -> str:
    """`text` in one line of at most `limit` characters, what a terminal would obey escaped."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return escaped[:limit]
