"""Errors as clients get them: OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import ContextLengthError, UsageError, spelled

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
        self.param = param and _shortened(param, MAX_PARAM)

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": _TYPES[self.status],
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class PromptTooLong(APIError):
    """400 for a prompt that does not fit the model's context, by itself or with the new tokens that
    are asked for. Its message is OpenAI's, by which clients tell it from other errors, with the
    code after it: LangChain looks for that in the text of an error, where openai 3 leaves it out.
    `message_events` writes Anthropic's."""

    def __init__(
        self,
        param: str | None,
        *,
        prompt_tokens: int,
        limit: int,
        new_tokens: int = 0,
        is_chat: bool = False,
        at_least: bool = False,
    ):
        """`limit` is the largest number of tokens of a prompt and its answer. With `at_least` the
        prompt may have more than `prompt_tokens`."""
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.limit = limit
        self.bound = "at least " if at_least else ""
        message = f"This model's maximum context length is {limit} tokens"
        total = prompt_tokens + new_tokens
        if not new_tokens:
            what = "messages" if is_chat else "prompt"
            message += (
                f". However, your {what} resulted in {self.bound}{prompt_tokens} tokens. Please "
                f"reduce the length of the {what}."
            )
        elif is_chat:
            message += (
                f". However, you requested {total} tokens ({prompt_tokens} in the messages, "
                f"{new_tokens} in the completion). Please reduce the length of the messages or "
                f"completion."
            )
        else:
            message += (
                f", however you requested {total} tokens ({prompt_tokens} in your prompt; "
                f"{new_tokens} for the completion). Please reduce your prompt; or completion "
                f"length."
            )
        code = "context_length_exceeded"
        super().__init__(400, code, f"{message} ({code})", param=param)


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
    """400 for a value that the engine refuses. `names` maps the engine's names to the body's."""
    if isinstance(error, ContextLengthError):
        return PromptTooLong(
            None, prompt_tokens=error.prompt_tokens, limit=error.limit, new_tokens=error.new_tokens
        )
    names = names or {}
    param = names.get(error.option or "", error.option)
    return invalid(param, _renamed(str(error), names), error.code)


@contextlib.contextmanager
def renaming(
    names: Mapping[str, str], places: Sequence[str], tools: Sequence[str] | None = None
) -> Iterator[None]:
    """Errors of a chat leave the block in the names of another body. `names` maps fields of a chat
    to those of the body, `places` are where its messages come from, `tools` where its tools do,
    None for those of the same number. Only what `param` names is renamed, and what is in backticks:
    the rest of a message may be the client's own words."""
    try:
        yield
    except APIError as error:
        message = _renamed(error.message, names)
        param = names.get(error.param or "", error.param)
        found = re.match(r"messages\[(\d+)\]|tools\[(\d+)\]\.function", param or "")
        if param is not None and found is not None:
            here = f"tools[{found[2]}]"
            if found[1]:
                here = places[int(found[1])]
            elif tools is not None:
                here = tools[int(found[2])]
            message = message.replace(found[0], here)
            rest = param[found.end() :].removeprefix(".")
            param = ".".join(filter(None, (here, names.get(rest, rest))))
        error.message = _shortened(message, MAX_MESSAGE)
        error.param = param and _shortened(param, MAX_PARAM)
        raise


def _renamed(message: str, names: Mapping[str, str]) -> str:
    """`message` with other names of fields."""
    return spelled(message, lambda name: f"`{names[name]}`" if name in names else None)


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
