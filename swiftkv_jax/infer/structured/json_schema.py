"""JSON schemas of clients, checked and made ready for llguidance.

What it would change without a word is refused: it holds numbers in 64-bit floats, which not all
integers fit, reads some floats one unit off, and drops control characters. What JSON Schema calls
an annotation is left out, and so are dialects that it does not know.
"""

from __future__ import annotations

import decimal
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import UsageError
from .compile_grammar import one_line

MAX_GRAMMAR_LENGTH = 64 * 1024
"""Characters of a schema or a grammar."""
MAX_REGEX_LENGTH = 4096
MAX_DEPTH = 64
"""Depth to which a schema may be nested."""
MAX_MULTIPLE = 200_000
"""Limit of the sum and of the least common multiple of a schema's values of `multipleOf`, as whole
numbers of their last decimal place. A compiled `multipleOf` has as many states."""
FORMATS = frozenset(
    "date date-time duration email hostname ipv4 ipv6 time unknown uri uuid".split()
)
"""Values of `format` that llguidance follows. By JSON Schema 2020-12 (Validation, 7.2.1) `format`
is an annotation, and a value that is not known fails nothing."""
_DIALECTS = {
    uri.partition("://")[2]: uri
    for uri in (
        "http://json-schema.org/draft-04/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    )
}
"""URIs of the dialects that llguidance has, by what stands behind their scheme: with the other
one it looks for them elsewhere."""
_DROPPED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that llguidance drops from a text; it escapes \b, \f, \n, \r and \t."""
_MAX_INTEGER = 2**62
"""llguidance computes limits of integers in 64 bits."""
_LIMITS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"
_LITERALS = "const", "enum"
_DATA = "default", "example", "examples"
_SCHEMAS_BY_NAME = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
)
_NAME = r"(?:[^\\^$.|?*+()\[\]{}\n]|\\[^\w\s])+"
_LITERAL_NAMES = re.compile(rf"\^(?:({_NAME})|\((?:\?:)?({_NAME}(?:\|{_NAME})*)\))\$")
"""A pattern of names that are spelled out, `^(a|b)$`."""
_MANY_NAMES = re.compile(r"[*+{.]|(?<!\()\?|\\[A-Za-z]|\[\^|\[[^\]]*-|^.{65}")
"""Syntax with which a pattern fits more names than a schema declares, or takes long to tell."""


def checked_schema(schema: str | bool | Mapping[str, Any] | None) -> dict[str, Any]:
    """A JSON schema as an object, as llguidance is to get it. Raises `UsageError` for one that is
    none, is too large, or has numbers or texts that an answer would not have exactly."""
    multiples: list[Any] = []
    made = _prepared(read_schema(schema), multiples)
    _check_multiples(multiples)
    return made


def read_schema(schema: str | bool | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A JSON schema as an object. Raises `UsageError` for one that is none, or too large."""
    if schema is True:
        return {"type": "object"}
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"`json` is not a JSON schema: {one_line(error)}") from None
    if not isinstance(found, Mapping):
        raise UsageError("`json` must be a JSON schema, that is an object, or True")
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise UsageError(f"`json` has more than {MAX_GRAMMAR_LENGTH} characters")
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [each for one in level for each in _inside(one)]
        if not level:
            return found
    raise UsageError(f"`json` is nested more than {MAX_DEPTH} deep")


def _inside(value: Any) -> list[Any]:
    """Objects and lists within one."""
    return [each for each in _parts(value) if isinstance(each, Mapping | list)]


def _parts(value: Any) -> Iterable[Any]:
    """The values in an object or a list; none in anything else."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def _prepared(schema: Any, multiples: list[Any]) -> Any:
    """A schema, or a list of some. What `multipleOf` says is added to `multiples`."""
    if isinstance(schema, list):
        return [_prepared(one, multiples) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    if "x-guidance" in schema:
        raise UsageError("`x-guidance` in a schema is not supported")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and len(pattern) > MAX_REGEX_LENGTH:
        raise UsageError(f"`pattern` in a schema has more than {MAX_REGEX_LENGTH} characters")
    _check_text("pattern", pattern)
    multiples.append(schema.get("multipleOf"))
    _check_limits(schema)
    made = {}
    for keyword, value in schema.items():
        if keyword in _LITERALS:
            _check_literal(keyword, value)
        if keyword == "$schema":
            if (name := str(value).removesuffix("#").partition("://")[2]) in _DIALECTS:
                made[keyword] = _DIALECTS[name]
        elif keyword in _LITERALS or keyword in _DATA:
            made[keyword] = value
        elif keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            made[keyword] = {name: _prepared(one, multiples) for name, one in value.items()}
        elif not _is_annotation(keyword, value):
            made[keyword] = _prepared(value, multiples)  # a `$ref` may point into any keyword
    if isinstance(made.get("patternProperties"), dict):
        _join_patterns(made)
    return made


def _is_annotation(keyword: str, value: Any) -> bool:
    """Return whether a keyword asks for nothing that llguidance follows, or for what holds
    anyway."""
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    return keyword == "propertyNames" and value in ({"type": "string"}, {}, True)


def _join_patterns(schema: dict[str, Any]) -> None:
    """Give what patterns say of declared properties, and of required ones, to these. A pattern that
    no other name fits would let an answer begin a property that it cannot name."""
    given = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(given, dict) or not isinstance(required, list):
        return  # llguidance says what is wrong with it
    properties = dict(given)
    patterns = {}
    declared = {**given, **{name: None for name in required if isinstance(name, str)}}
    for pattern, said in schema["patternProperties"].items():
        spelled = _LITERAL_NAMES.fullmatch(pattern)
        written = (spelled[1] or spelled[2]) if spelled else ""
        names = {re.sub(r"\\(.)", r"\1", name) for name in re.findall(_NAME, written)}
        if spelled and names <= declared.keys():
            for name in declared.keys() & names:
                old = properties.get(name, True)
                properties[name] = said if old is True else {"allOf": [old, said]}
            continue
        if not spelled and _is_of_few(pattern) and (name := _first_match(pattern, declared)):
            raise UsageError(
                f"`patternProperties` in a schema: {pattern!r} fits the declared property "
                f"{name!r}; declare all of its names, or spell them out as ^(a|b)$"
            )
        patterns[pattern] = said
    schema |= {"patternProperties": patterns} | ({"properties": properties} if properties else {})


def _is_of_few(pattern: str) -> bool:
    """Return whether few names fit a pattern."""
    outside = re.sub(r"\([^()]*\)", "", pattern)
    is_anchored = pattern[:1] == "^" and pattern[-1:] == "$" and "|" not in outside
    return is_anchored and not _MANY_NAMES.search(pattern)


def _first_match(pattern: str, names: Mapping[str, Any]) -> str | None:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return None  # llguidance says what is wrong with it
    return next((name for name in names if compiled.search(name)), None)


# Texts and numbers --------------------------------------------------------------------------------


def _check_literal(keyword: str, value: Any) -> None:
    """Raise `UsageError` for a number or a text that an answer would not have exactly."""
    level = [value]
    while level:
        for one in level:
            _check_text(keyword, one)
            if type(one) in (int, float) and not _is_exact_literal(one):
                raise _inexact(keyword, one, "a text instead")
        level = [each for one in level for each in _parts(one)]


def _check_text(keyword: str, value: Any) -> None:
    """Raise `UsageError` for a text with characters that an answer would lack."""
    if isinstance(value, str) and (found := _DROPPED.search(value)):
        raise UsageError(
            f"`{keyword}` in a schema: grammars cannot hold the control character {found[0]!r}; "
            f"leave it out"
        )


def _check_limits(schema: Mapping[str, Any]) -> None:
    """Raise `UsageError` for limits that would be others."""
    types = schema.get("type", "number")
    is_integer = "number" not in (types if isinstance(types, list) else [types])
    for keyword in _LIMITS:
        value: Any = schema.get(keyword)
        if type(value) not in (int, float):
            continue
        is_upper = keyword.endswith("aximum")
        excludes = keyword[:2] == "ex" or schema.get(f"exclusive{keyword.capitalize()}") is True
        if not _is_exact_limit(value, is_integer, excludes):
            largest = is_integer and is_upper and value == 2**63 - (not excludes)
            if not largest:
                raise _inexact(keyword, value, f"one within {2**53}")


def _inexact(keyword: str, value: float, instead: str) -> UsageError:
    return UsageError(
        f"`{keyword}` in a schema: grammars cannot hold {repr(value)[:40]} exactly; give {instead}"
    )


def _is_exact_literal(value: float) -> bool:
    if isinstance(value, float):  # written without an exponent, by its shortest digits
        is_whole = abs(value) >= 2**53
        return _is_read_right(value) and (
            not is_whole or int(decimal.Decimal(repr(value))) == value
        )
    return value == 2**63 - 1 or (abs(value) <= _MAX_INTEGER and float(value) == value)


def _is_exact_limit(value: float, is_integer: bool, excludes: bool) -> bool:
    if abs(value) > _MAX_INTEGER or not _is_read_right(value):
        return False
    if is_integer:  # what is excluded is a limit moved by 1
        return not excludes or value % 1 != 0 or abs(value) < 2**53
    return decimal.Decimal(repr(float(value))) == decimal.Decimal(repr(value))


def _is_read_right(value: float) -> bool:
    """Return whether serde_json, without its feature `float_roundtrip`, reads a number as it is: it
    rounds the digits, and again their product with a power of ten."""
    if isinstance(value, int):
        return float(value) == value
    mantissa, _, written = repr(abs(value)).partition("e")
    whole, _, places = mantissa.partition(".")
    digits = float(int(whole + places))
    exponent = int(written or 0) - len(places)
    if exponent >= 0:
        return digits * float(f"1e{exponent}") == abs(value)
    if exponent < -308:
        digits = digits / 1e308
        exponent += 308
    return digits / float(f"1e{-exponent}") == abs(value)


def _check_multiples(values: Sequence[Any]) -> None:
    """Check all values of one schema; what is no number above 0 is refused when it is compiled."""
    numbers = [decimal.Decimal(str(one)) for one in values if type(one) in (int, float) and one > 0]
    if not numbers or not all(number.is_finite() for number in numbers):
        return
    places = max(max(0, -int(number.normalize().as_tuple().exponent)) for number in numbers)
    if places <= 12 and max(numbers) <= MAX_MULTIPLE:
        scaled = [int(number.scaleb(places)) for number in numbers]
        if max(sum(scaled), math.lcm(*scaled)) <= MAX_MULTIPLE:
            return
    raise UsageError("`multipleOf` in a schema: too large, or too many together")
