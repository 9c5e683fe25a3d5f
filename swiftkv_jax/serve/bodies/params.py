"""Conversion of a body's fields into `SamplingParams`: each is honoured exactly, or refused by
name."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UsageError
from ...infer.engine.sampling_params import MAX_BIASES, MAX_LOGPROBS, SamplingParams, is_neutral
from ..errors import PromptTooLong, invalid, of_usage, renaming, unsupported
from ..options import DEFAULT_TEMPERATURE, MAX_LOGPROB_ENTRIES, ServerOptions
from ..protocol import Body, ChatBody, CompletionBody, Message, Sampling, refused_fields
from ..text.prompts import Truncation

MAX_STOP_CHARACTERS = 512
"""Characters of all stop strings."""
MAX_TEMPERATURE = 2
"""Highest temperature, as at OpenAI."""
COMPLETION_MAX_TOKENS = 16
"""`max_tokens` of a completion that names none, as at OpenAI."""

_OTHER_RULES = {"max_tokens", "min_tokens", "seed", "stop", "logit_bias", "logprobs"}
_AS_GIVEN = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in Sampling.__struct_fields__ and field.name not in _OTHER_RULES
]
"""Fields of a body that are sampling parameters as they are."""


def refuse_unsupported(body: Sampling) -> None:
    """Raise `APIError` for a field that this server cannot honour and that asks for something."""
    refuse_fields(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "`best_of` must be equal to `n`")
    stream = body.stream_options
    if stream is not None and not body.stream:
        raise invalid("stream_options", "`stream_options` needs `stream`")
    if stream is not None and stream.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    for name, pattern in (
        ("cache_salt", r"[^@/\\\0]{1,128}"),
        ("request_id", r"[a-zA-Z0-9_.:-]{1,128}"),
    ):
        value = getattr(body, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise invalid(name, f"`{name}` must be 1 to 128 characters like {pattern[:-7]}")
    if body.metadata is not None and len(body.metadata) > 16:
        raise invalid("metadata", "`metadata` has at most 16 pairs")


def priority_of(body: Sampling, options: ServerOptions) -> int:
    """Lower ones come first. Raises `APIError`."""
    priority = body.priority or 0
    if priority and options.scheduling_policy != "priority":
        raise unsupported("priority", "`priority` needs the server's --scheduling-policy priority")
    if not -(2**31) <= priority < 2**31:
        raise invalid("priority", f"`priority`={priority} must be an integer of 32 bits")
    return priority


def refuse_fields(body: Body) -> None:
    """Raise `APIError` for a field marked as `Refused` that asks for something."""
    for name, refused in refused_fields(type(body)).items():
        if not is_neutral(getattr(body, name), refused.neutral):
            raise unsupported(name, refused.reason)


def truncation_of(body: ChatBody | CompletionBody, max_model_len: int) -> Truncation | None:
    """Return how the prompts of a body are shortened; None leaves them whole. Raises `APIError`."""
    limit = body.truncate_prompt_tokens
    side = body.truncation_side
    if limit is None:
        if side is not None:
            raise invalid("truncation_side", "`truncation_side` needs `truncate_prompt_tokens`")
        return None
    if isinstance(body, ChatBody):
        tokens = _chat_max_tokens(body) or 1
        if side == "right":
            raise unsupported(
                "truncation_side", "`truncation_side`: the end of a chat is its answer's beginning"
            )
    else:
        tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if limit == -1:
        limit = max(max_model_len - tokens, 1)
    elif not 1 <= limit <= max_model_len:
        raise invalid(
            "truncate_prompt_tokens",
            f"`truncate_prompt_tokens`={limit} must be -1 or from 1 to {max_model_len}",
        )
    return Truncation(limit, side or "left")


def sampling_params(
    body: ChatBody | CompletionBody,
    defaults: Mapping[str, Any],
    options: ServerOptions,
    *,
    prompt_tokens: int,
    max_model_len: int,
    max_num_seqs: int,
    most_new_tokens: Callable[[int, SamplingParams], int],
) -> SamplingParams:
    """The parameters of a body whose longest prompt has `prompt_tokens`. `defaults` are fields of
    `SamplingParams` for what it leaves out. `most_new_tokens` of a prompt's length and parameters
    are those that fit the cache. Raises `APIError`."""
    names: dict[str, str] = {}
    given: dict[str, Any] = {
        name: value for name in _AS_GIVEN if (value := getattr(body, name)) is not None
    }
    max_tokens = "max_tokens"
    too_long = "prompt"
    room = max_model_len - prompt_tokens
    if isinstance(body, ChatBody):
        tokens = _chat_max_tokens(body)
        if tokens is None:
            tokens = min(room, options.default_max_tokens or room)
            if (logprobs := _logprobs(body)) is not None:
                entries = (body.n or 1) * max(logprobs + 1, 1)
                tokens = min(tokens, MAX_LOGPROB_ENTRIES // entries)
            tokens = max(tokens, 1)
        too_long = "messages"
        if body.max_completion_tokens is not None:
            max_tokens = names["max_tokens"] = "max_completion_tokens"
    else:
        tokens = body.max_tokens
        if tokens is None:
            tokens = min(COMPLETION_MAX_TOKENS, max(room, 1))
        if tokens == 0 and not body.echo:
            raise invalid("max_tokens", "`max_tokens`=0 needs `echo`")
    if prompt_tokens + tokens > max_model_len:
        raise PromptTooLong(
            max_tokens if room > 0 else too_long,
            prompt_tokens=prompt_tokens,
            limit=max_model_len,
            new_tokens=tokens,
            is_chat=isinstance(body, ChatBody),
        )
    given["max_tokens"] = tokens
    if tokens == 0 and isinstance(body, CompletionBody):
        given["max_tokens"] = 1  # nothing is generated: the prompt is echoed
    given["min_tokens"] = body.min_tokens or 0
    given["seed"] = body.seed
    if body.seed is None:
        given["seed"] = secrets.randbits(63)
    given["logprobs"] = _logprobs(body)
    if body.stop is not None:
        stops = body.stop
        if isinstance(stops, str):
            stops = [stops]
        if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
            raise invalid("stop", f"`stop` has more than {MAX_STOP_CHARACTERS} characters in all")
        given["stop"] = tuple(stops)
    if body.logit_bias is not None:
        if len(body.logit_bias) > MAX_BIASES:
            entries = len(body.logit_bias)
            message = f"`logit_bias`: {entries} entries are above the limit of {MAX_BIASES}"
            raise invalid("logit_bias", message)
        given["logit_bias"] = {_token(key): bias for key, bias in body.logit_bias.items()}
    if (body.temperature or 0) > MAX_TEMPERATURE:
        raise invalid("temperature", f"`temperature` must be from 0 to {MAX_TEMPERATURE}")
    if (body.n or 1) > max_num_seqs:
        raise invalid("n", f"`n`={body.n} samples do not fit into {max_num_seqs} slots")
    if isinstance(body, ChatBody) and body.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    try:
        params = SamplingParams(
            **dict[str, Any](temperature=DEFAULT_TEMPERATURE) | dict(defaults) | given
        )
        if params.n > 1 and isinstance(body, ChatBody) and _chat_max_tokens(body) is None:
            tokens = max(most_new_tokens(prompt_tokens, params), 1)
            return dataclasses.replace(params, max_tokens=tokens)
        return params
    except UsageError as error:
        raise of_usage(error, names) from None


def _chat_max_tokens(body: ChatBody) -> int | None:
    first = body.max_completion_tokens
    second = body.max_tokens
    if first is not None and second is not None and first != second:
        raise invalid(
            "max_tokens", f"`max_tokens`={second} and `max_completion_tokens`={first} differ"
        )
    return second if first is None else first


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("top_logprobs", "`top_logprobs` needs `logprobs`")
        return None
    return body.top_logprobs or 0


def predicted_text(body: Sampling, *, possible: bool) -> str:
    """The text that a body predicts; empty without a prediction, and with an empty one. `possible`
    is whether the server takes any. Raises `APIError`."""
    if body.prediction is None:
        return ""
    with renaming({}, ["prediction"]):
        message = Message(role="assistant", content=body.prediction.content)
        text = message.rendered(0)["content"] or ""
    if text and not possible:
        raise unsupported("prediction", "`prediction` needs the server's --speculative-config")
    return text


def check_prompt_logprobs(body: ChatBody | CompletionBody, *, scoring: bool) -> None:
    """Raise `APIError` for `prompt_logprobs` that this server does not give. `scoring` is whether
    it gives any."""
    count = body.prompt_logprobs
    if count is None:
        return
    if not scoring:
        message = "`prompt_logprobs` needs the server's --enable-scoring"
        raise unsupported("prompt_logprobs", message)
    if body.stream:
        raise unsupported("stream", "`stream` does not go with `prompt_logprobs`")
    if not 0 <= count <= MAX_LOGPROBS:
        message = f"`prompt_logprobs`={count} must be from 0 to {MAX_LOGPROBS}"
        raise invalid("prompt_logprobs", message)


def check_logprob_entries(
    body: ChatBody | CompletionBody, params: SamplingParams, *, prompts: int, echoed: int
) -> None:
    """Raise `APIError` for more log-probabilities than one answer may hold. `echoed` are the
    tokens of its prompts, as often as it lists them."""
    if params.logprobs is not None:
        tokens = prompts * params.n * params.max_tokens
        if isinstance(body, CompletionBody) and body.echo:
            tokens += echoed
        _check_entries(tokens, params.logprobs, "logprobs", "`max_tokens`, `n` or `logprobs`")
    if body.prompt_logprobs is not None:
        lower = "`n` or `prompt_logprobs`"
        _check_entries(echoed, body.prompt_logprobs, "prompt_logprobs", lower)


def _check_entries(tokens: int, count: int, param: str, lower: str) -> None:
    if tokens * (count + 1) > MAX_LOGPROB_ENTRIES:
        raise invalid(
            param,
            f"{tokens} tokens with {count + 1} log-probabilities each are above the limit of "
            f"{MAX_LOGPROB_ENTRIES}: lower {lower}",
        )


def _token(key: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
        raise invalid("logit_bias", f"`logit_bias`: {key!r} is not a token id")
    return int(key)
