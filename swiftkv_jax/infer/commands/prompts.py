"""Requests from rows of input. Sampling parameters of a row replace those of the command.

A row is `{"id"?, "prompt" | "prompt_token_ids" | "messages", ...}` with any field of
`SamplingParams`, or a line of OpenAI's batch files, `{"custom_id", "method", "url", "body":
{...}}`. https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from ...text.special_tokens import brought_first_token
from ..engine.requests import Request
from ..engine.sampling_params import SamplingParams
from ..text import encode, encode_chat

logger = logging.getLogger(__name__)

SOURCES = ("prompt", "prompt_token_ids", "messages")
URLS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
ENVELOPE = {"model", "user", "metadata", "store", "stream", "stream_options", "service_tier"}
"""Fields of a request to a server that do not change its tokens."""


class PromptReader:
    """Makes requests of prompts and of rows."""

    def __init__(self, tokenizer: Any, params: SamplingParams):
        """`tokenizer` None allows token ids only; `params` are the command's."""
        self._tokenizer = tokenizer
        self._params = params
        self._warned = False

    def from_text(self, number: int, text: str) -> Request:
        """Request of prompt `number` of the command line. Raises `UsageError`."""
        return Request(self._encode(text), self._params, rng_stream=number)

    def from_row(self, number: int, row: Mapping[str, Any]) -> Request:
        """Request of row `number` of a file, given without its id. Raises `UsageError` that names
        the field."""
        fields = dict(_body_of(row) if "body" in row else row)
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
        # Rows that share the command's seed must differ; one with a seed of its own gets the same
        # answer at any place in the file.
        return Request(
            self._token_ids(sources[0], value),
            params,
            rng_stream=number if fields.get("seed") is None else 0,
        )

    def _token_ids(self, source: str, value: Any) -> list[int]:
        if source == "prompt_token_ids" or (source == "prompt" and isinstance(value, list)):
            return _check_token_ids(source, value)
        if self._tokenizer is None:
            raise UsageError(
                f"{source} needs a tokenizer, and this checkpoint has none: give prompt_token_ids"
            )
        if source == "prompt":
            if not isinstance(value, str):
                raise UsageError("prompt must be a string")
            return self._encode(value)
        return encode_chat(self._tokenizer, value)

    def _encode(self, text: str) -> list[int]:
        if (first := brought_first_token(self._tokenizer, text)) and not self._warned:
            self._warned = True
            logger.warning(
                f"a prompt begins with {first}; it is taken as that "
                f"token, and no second one is added"
            )
        return encode(self._tokenizer, text)


def _check_token_ids(source: str, value: Any) -> list[int]:
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    several = isinstance(value, list) and all(isinstance(one, str | list) for one in value)
    if source == "prompt" and several:
        raise UsageError(
            f"prompt is a list of {len(value)} prompts: a row has one prompt, so give each a row "
            f"of its own"
        )
    raise UsageError(f"{source} must be a list of whole numbers")


def _body_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Body of a line of a batch file, without the fields of `ENVELOPE`."""
    body = row["body"]
    method = row.get("method", "POST")
    url = row.get("url")
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
    """Turn `logprobs` and `top_logprobs` of OpenAI's chat, a boolean and a number, into the one
    number of its completions. Raises `UsageError` if they contradict each other."""
    if not isinstance(fields.get("logprobs"), bool):
        return fields
    if fields.get("top_logprobs") and not fields["logprobs"]:
        raise UsageError(f"top_logprobs={fields['top_logprobs']!r} goes with logprobs true")
    rest = {
        name: value for name, value in fields.items() if name not in ("logprobs", "top_logprobs")
    }
    if not fields["logprobs"]:
        return rest | {"logprobs": None}
    return rest | {"logprobs": fields.get("top_logprobs") or 0}
