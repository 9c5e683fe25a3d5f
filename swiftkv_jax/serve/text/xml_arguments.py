"""Arguments of calls that are written as text between tags, as JSON of their declared types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_MAX_REFS = 16
_NOTHING: Mapping[str, Any] = {}


def argument_schema(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the schema of one argument from that of all."""
    properties = resolved(schema, schema).get("properties")
    if not isinstance(properties, Mapping):
        return _NOTHING
    return resolved(properties.get(name), schema)


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema without the references at its top, which are read in `root`."""
    for _ in range(_MAX_REFS):
        if not isinstance(schema, Mapping):
            return _NOTHING
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = root
        for part in reference.removeprefix("#").split("/")[1:]:
            if not isinstance(schema, Mapping):
                return _NOTHING
            schema = schema.get(part.replace("~1", "/").replace("~0", "~"))
    return _NOTHING


def types_of(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Types that a schema without references at its top allows; empty if it does not say."""
    if (values := literals_of(schema)) is not None:
        return {_type_of(value) for value in values}
    if "type" in schema:
        types = schema["type"]
        if not isinstance(types, list):
            types = [types]
        return set(map(str, types))
    for keyword in ("anyOf", "oneOf", "allOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and depth < _MAX_REFS:
            found = [types_of(resolved(one, root), root, depth + 1) for one in options]
            if keyword == "allOf":
                return next(filter(None, found), set())
            if not all(found):
                return set()
            return set().union(*found)
    if "properties" in schema:
        return {"object"}
    if "items" in schema or "prefixItems" in schema:
        return {"array"}
    return set()


def literals_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of `const` or `enum`; None without these."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def argument_json(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """The JSON of an argument. Where a text is allowed it is one, except for null; what is not of
    its declared type stays a text too."""
    for value in literals_of(schema) or ():
        written = value if isinstance(value, str) else json.dumps(value)
        if text == written or (
            not isinstance(value, str) and text.strip() in (written, str(value))
        ):
            return json.dumps(value, ensure_ascii=False)
    types = types_of(schema, root)
    trimmed = text.strip()
    if "null" in types and trimmed in ("null", "None"):  # as Jinja writes it
        return "null"
    if "string" not in types:
        if "boolean" in types and trimmed.lower() in ("true", "false"):
            return trimmed.lower()
        if (number := _NUMBER.fullmatch(trimmed)) and (
            "number" in types or ("integer" in types and not any(number.groups()))
        ):
            return trimmed
        if trimmed[:1] in ("{", "[") and _is_json(trimmed, types):
            return trimmed
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str, types: set[str]) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return _type_of(value) in types


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")
