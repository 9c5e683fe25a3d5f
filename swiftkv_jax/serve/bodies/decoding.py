"""Decoding of bodies: unknown fields are refused, or left out and named. A number such as 16.0 is
an integer, as in JSON Schema."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from ..errors import APIError, invalid
from ..protocol import Body, Sampling, is_whole

MAX_NULLS = 256
"""Unknown fields of one body that may be null."""
MAX_BRACKETS = 50_000
"""Lists and objects of a body in which such nulls are looked for: each takes about a
microsecond."""

_OTHER_SAMPLERS = "`top_p`, `top_k` and `min_p` are what this server samples by"
_MAX_TOKENS = "the field is `max_tokens`"
_NO_EFFECT = "leave it out: every prefix is cached, and the model stays loaded"

INSTEAD: Mapping[str, str] = {
    "cache_prompt": _NO_EFFECT,
    "dry_multiplier": _OTHER_SAMPLERS,
    "ebnf": "the field is `structured_outputs.grammar`, in Lark",
    "enable_thinking": "the field is `chat_template_kwargs.enable_thinking`",
    "extra_body": "what clients take as `extra_body` are fields of the body itself",
    "format": "the field is `response_format`",
    "grammar": "the field is `structured_outputs.grammar`, in Lark",
    "guided_decoding_backend": "leave it out: there is one",
    "json_schema": "the field is `response_format`, of type 'json_schema'",
    "keep_alive": _NO_EFFECT,
    "max_length": _MAX_TOKENS,
    "max_new_tokens": _MAX_TOKENS,
    "mirostat": _OTHER_SAMPLERS,
    "n_predict": _MAX_TOKENS,
    "n_probs": "the fields are `logprobs` and `top_logprobs`",
    "num_ctx": "the server's --max-model-len says how long a context is",
    "num_predict": _MAX_TOKENS,
    "options": "its fields are fields of the body itself",
    "random_seed": "the field is `seed`",
    "reasoning": "the field is `reasoning_effort`",
    "regex": "the field is `structured_outputs.regex`",
    "repeat_penalty": "the field is `repetition_penalty`",
    "stop_sequences": "the field is `stop`",
    "system": "write a message of role 'system'",
    "tfs_z": _OTHER_SAMPLERS,
    "thinking_budget": "`max_tokens` limits reasoning and answer together",
    "top_a": _OTHER_SAMPLERS,
    "typical_p": _OTHER_SAMPLERS,
    "xtc_probability": _OTHER_SAMPLERS,
    "response_format.schema": "the field is `response_format.json_schema.schema`, with the type "
    "'json_schema'",
}
"""Path of a field that completions and chats do not have -> what to do instead."""

_HALF_PAIR = re.compile(rb'\\u[dD][89abAB][0-9a-fA-F]{2}"')
"""A string that ends in the first half of a pair, which msgspec calls truncated."""


def decode[B: Body](kind: type[B], body: bytes, *, ignore_unknown: bool) -> tuple[B, list[str]]:
    """(body, paths of fields that were ignored). Raises `APIError`."""
    try:
        if not ignore_unknown:
            return _decode(kind, body), []
        fields = msgspec.json.decode(body)
        ignored = sorted(_drop_unknown(fields, _type_info(kind)))
        return msgspec.convert(fields, type=kind), ignored
    except msgspec.ValidationError as error:
        raise _of_validation(
            error, instead=INSTEAD if issubclass(kind, Sampling) else None
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        said = str(error)
        if "truncated" in said and _HALF_PAIR.search(body):
            said = "a text ends in half of a surrogate pair"
        raise invalid(None, f"the body is not JSON: {said}", "invalid_json") from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply", "invalid_json") from None


def convert[T: msgspec.Struct](
    kind: type[T], value: dict[str, Any], at: str, *, ignore_unknown: bool
) -> tuple[T, list[str]]:
    """`decode` for a part of a body, at the path `at`, whose type the part itself says."""
    most = None if ignore_unknown else MAX_NULLS
    dropped = sorted(_drop_unknown(value, _type_info(kind), at, most_nulls=most))
    try:
        return msgspec.convert(value, type=kind), dropped if ignore_unknown else []
    except msgspec.ValidationError as error:
        raise _of_validation(error, at) from None


def _decode[B: Body](kind: type[B], body: bytes) -> B:
    """A body without the unknown fields that are null: clients send back what they were given."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        has_null = b"null" in body and "unknown field" in str(error)
        if not (has_null or "got `float`" in str(error)):
            raise
        if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
            raise
        fields = msgspec.json.decode(body)
        if len(_drop_unknown(fields, _type_info(kind), most_nulls=MAX_NULLS)) > MAX_NULLS:
            raise
    return msgspec.convert(fields, type=kind)


_type_info = functools.cache(inspect.type_info)


def _drop_unknown(
    value: Any, kind: inspect.Type, at: str = "", *, most_nulls: int | None = None
) -> list[str]:
    """Remove the fields that the types of `kind` refuse; with `most_nulls` of them the nulls alone,
    and no more after so many. Returns their paths; `at` is that of `value`. Where `kind` has
    integers, 16.0 becomes 16."""
    if isinstance(kind, inspect.UnionType):
        found = (_drop_unknown(value, one, at, most_nulls=most_nulls) for one in kind.types)
        return [path for paths in found for path in paths]
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        inside = (
            (number, one, kind.item_type, f"{at}[{number}]") for number, one in enumerate(value)
        )
        dropped = []
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        if kind.tag_field is not None and value.get(kind.tag_field) != kind.tag:
            return []  # of a union another one is meant
        prefix = at and f"{at}."
        known = {one.encode_name: one.type for one in kind.fields}
        dropped = [
            name
            for name, one in value.items()
            if name not in known
            and name != kind.tag_field
            and (kind.forbid_unknown_fields if most_nulls is None else one is None)
        ]
        for name in dropped:
            del value[name]
        dropped = [prefix + name for name in dropped]
        inside = (
            (name, value[name], known[name], prefix + name) for name in value.keys() & known.keys()
        )
    else:
        return []
    for place, one, one_kind, path in inside:
        if isinstance(one, float) and is_whole(one) and _takes_integers(one_kind):
            value[place] = int(one)
        dropped += _drop_unknown(one, one_kind, path, most_nulls=most_nulls)
        if most_nulls is not None and len(dropped) > most_nulls:
            break
    return dropped


def _takes_integers(kind: inspect.Type) -> bool:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return any(isinstance(one, inspect.IntType) for one in kinds)


def _of_validation(
    error: msgspec.ValidationError, within: str = "", instead: Mapping[str, str] | None = None
) -> APIError:
    """400 for the value of a field. `within` is the path of what was converted, `instead` says what
    to write for unknown fields."""
    instead = instead or {}
    text, at, path = str(error).rpartition(" - at `$")  # the last: values may look like it
    text, path = (text, path) if at else (path, "")
    path = f"{within}{path.rstrip('`')}".removeprefix(".")
    if text.startswith("Object contains unknown field"):
        name = text.rpartition("field `")[2].rstrip("`")
        path = f"{path}.{name}".removeprefix(".")
        message = f"there is no field {name!r}"
        if path in instead:
            message += f": {instead[path]}"
        return invalid(path, message, "unknown_field")
    if text.startswith("Object missing required field"):
        name = text.rpartition("field `")[2].rstrip("`")
        return invalid(f"{path}.{name}".removeprefix("."), f"`{name}` is missing")
    if not path:
        return invalid(None, f"the body is not a JSON object: {text.lower()}", "invalid_json")
    return invalid(path, f"`{path}`: {text[:1].lower()}{text[1:]}")
