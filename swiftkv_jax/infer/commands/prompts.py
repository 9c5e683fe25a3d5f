"""From a row of input to a request. What a row says of sampling goes before what the command says.

A row is `{"id"?, "prompt" | "prompt_token_ids" | "messages", ...}` with any field of
`SamplingParams`, or a line of OpenAI's batch files, `{"custom_id", "method", "url", "body":
{...}}`. https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import DataError, UsageError
from ..engine.requests import Request
from ..engine.sampling_params import SamplingParams
from ..text import brings_first_token, encode, encode_chat

SOURCES = ("prompt", "prompt_token_ids", "messages")
URLS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
ENVELOPE = {"model", "user", "metadata", "store", "stream", "stream_options", "service_tier"}
"""Fields of a request to a server that say nothing of its tokens."""


def read_text(path: Path) -> str:
    """A file as one prompt. Raises `DataError` if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


class Reader:
    """Makes requests of rows."""

    def __init__(self, tokenizer: Any, params: SamplingParams, *, warn: Callable[[str], None]):
        """`tokenizer` may be None: then there are only token ids. `warn` hears of each oddity
        once."""
        self._tokenizer, self._params, self._warn = tokenizer, params, warn
        self._warned = False

    def from_text(self, number: int, text: str) -> Request:
        """A prompt that the command line gave. Raises `UsageError`."""
        return Request(self._encode(text), self._params, rng_stream=number)

    def from_row(self, number: int, row: Mapping[str, Any]) -> Request:
        """Row `number` of a file, without its id. Raises `UsageError` that names the field."""
        fields = dict(_of_batch(row) if "body" in row else row)
        sources = [name for name in SOURCES if name in fields]
        if len(sources) != 1:
            raise UsageError(
                f"expected one of {', '.join(SOURCES)}; got {', '.join(sources) or 'neither'}"
            )
        value = fields.pop(sources[0])
        params = SamplingParams.from_json(_chat_logprobs(fields), self._params)
        if params.stop and self._tokenizer is None:
            raise UsageError(
                "stop needs a tokenizer, and this checkpoint has none: use stop_token_ids"
            )
        # Rows that share the command's seed must differ; one that names its own gets the same
        # answer wherever it stands.
        return Request(
            self._token_ids(sources[0], value),
            params,
            rng_stream=number if fields.get("seed") is None else 0,
        )

    def _token_ids(self, source: str, value: Any) -> list[int]:
        if source == "prompt_token_ids" or (source == "prompt" and isinstance(value, list)):
            if not isinstance(value, list) or not all(type(token) is int for token in value):
                raise UsageError(f"{source} must be a list of whole numbers")
            return value
        if self._tokenizer is None:
            raise UsageError(
                f"{source} needs a tokenizer, and this checkpoint has none: give prompt_token_ids"
            )
        if source == "prompt":
            if not isinstance(value, str):
                raise UsageError("prompt must be a string")
            return self._encode(value)
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise UsageError("messages must be a list of objects with role and content")
        return encode_chat(self._tokenizer, value)

    def _encode(self, text: str) -> list[int]:
        if brings_first_token(self._tokenizer, text) and not self._warned:
            self._warned = True
            self._warn(
                f"warning: a prompt begins with {self._tokenizer.bos_token}; it is taken as that "
                f"token, and no second one is added"
            )
        return encode(self._tokenizer, text)


def _of_batch(row: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a line of a batch file, without what says nothing of tokens."""
    body, method, url = row["body"], row.get("method", "POST"), row.get("url")
    if unknown := set(row) - {"method", "url", "body"}:
        raise UsageError(
            f"{', '.join(sorted(unknown))}: not a field of a batch line, which has custom_id, "
            f"method, url and body"
        )
    if method != "POST" or url not in URLS:
        raise UsageError(
            f"method and url must be POST and one of {', '.join(URLS)}; got {method!r} and {url!r}"
        )
    if not isinstance(body, dict):
        raise UsageError(f"body must be an object, got {type(body).__name__}")
    if URLS[url] not in body:
        raise UsageError(f"body has no {URLS[url]}, which {url} takes")
    return {name: value for name, value in body.items() if name not in ENVELOPE}


def _chat_logprobs(fields: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's chat says `logprobs` true or false, and how many in `top_logprobs`; its completions,
    and ours, a number. Raises `UsageError` if they contradict each other."""
    if not isinstance(fields.get("logprobs"), bool):
        return fields
    if fields.get("top_logprobs") and not fields["logprobs"]:
        raise UsageError(f"top_logprobs={fields['top_logprobs']!r} goes with logprobs true")
    rest = {
        name: value for name, value in fields.items() if name not in ("logprobs", "top_logprobs")
    }
    return rest | {"logprobs": (fields.get("top_logprobs") or 0) if fields["logprobs"] else None}
