"""What JSON schemas say holds in the answers, to the last digit, or is refused by name."""

import json
import random

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer import StructuredOutputs
from swiftkv_jax.infer.structured.json_schema import FORMATS, checked_schema
from tests.infer.test_structured_outputs import COMPILER, accepts, walk

INT64, UINT64 = 2**63 - 1, 2**64 - 1


def nested(value) -> list[dict]:
    """Schemas whose answers have `value`, at the top and deeper."""
    return [
        {"const": value},
        {"enum": [value]},
        {"enum": [{"a": [value]}]},
        {"$defs": {"v": {"const": value}}, "$ref": "#/$defs/v"},
        {"type": "array", "items": {"anyOf": [{"const": value}]}, "minItems": 1, "maxItems": 1},
    ]


def values(found) -> list:
    if isinstance(found, dict):
        found = list(found.values())
    return [one for each in found for one in values(each)] if isinstance(found, list) else [found]


@pytest.mark.parametrize(
    "value",
    [0, -5, 0.1, -0.0, 1.0, 1e22, -2.5e-7, 2**53, -(2**53), 2**53 + 2, 2**60, -(2**62), INT64],
)
def test_numbers_come_out_exactly(value):
    for schema in nested(value):
        text = walk(StructuredOutputs(json=schema), 0)
        assert text is not None and values(json.loads(text)) == [value], text


@pytest.mark.parametrize(
    "value",
    [
        2**53 + 1,
        -(2**53) - 1,
        -(2**63),  # its limits would overflow
        2**63,
        UINT64,
        10**30 + 1,
        10**400,
        97.59752277630595,  # read one unit off
        1e300,
    ],
)
def test_other_numbers_are_refused_by_name(value):
    for schema in nested(value):
        with pytest.raises(UsageError, match="(const|enum)` in a schema: grammars cannot hold"):
            checked_schema(schema)


def test_floats_are_as_given_or_refused():
    """Of 300, mostly with all the digits that a float may have."""
    rng, held = random.Random(0), 0
    for _ in range(300):
        value = rng.choice([rng.gauss(0, 1), rng.random() * 10 ** rng.randint(-20, 20)])
        try:
            text = walk(StructuredOutputs(json={"const": value}), 0)
        except UsageError:
            continue
        held += 1
        assert text is not None and json.loads(text) == value
    assert held > 200


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "maximum": INT64}, INT64, INT64 + 1),
        ({"type": "integer", "exclusiveMaximum": 2**63}, INT64, INT64 + 1),
        ({"type": ["integer", "null"], "minimum": 0, "maximum": INT64}, INT64, -1),
        ({"type": "integer", "minimum": 2**53, "maximum": 2**53 + 2}, 2**53 + 1, 2**53 + 3),
        ({"type": "integer", "minimum": -(2**62)}, -(2**62), -(2**62) - 1),
        ({"type": "integer", "exclusiveMinimum": 2**53 - 1}, 2**53, 2**53 - 1),
        ({"type": "integer", "exclusiveMinimum": 2.5}, 3, 2),
        ({"type": "number", "minimum": 0.1, "maximum": 99.99}, 99.99, 0.05),
        ({"minimum": -(2**53) + 1, "type": "integer"}, -(2**53) + 1, -(2**53)),
    ],
)
def test_limits_hold_exactly(schema, right, wrong):
    outputs = StructuredOutputs(json=schema)
    assert accepts(outputs, str(right)) and not accepts(outputs, str(wrong))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum"),
        ({"type": "integer", "maximum": 2**53 + 3}, "maximum"),
        ({"type": "integer", "maximum": UINT64}, "maximum"),
        ({"type": "integer", "minimum": -(2**63)}, "minimum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum"),
        ({"type": "integer", "minimum": 2**53, "exclusiveMinimum": True}, "minimum"),
        ({"type": "number", "maximum": INT64}, "maximum"),
        ({"type": "number", "minimum": 97.59752277630595}, "minimum"),
        ({"type": "number", "exclusiveMaximum": 2**60}, "exclusiveMaximum"),
        ({"type": "integer", "multipleOf": 2**53 + 1}, "multipleOf"),
    ],
)
def test_other_limits_are_refused_by_name(schema, keyword):
    for one in (
        schema,
        {"properties": {"a": {"items": schema}}},
        {"$defs": {"a": schema}, "$ref": "#/$defs/a"},
    ):
        with pytest.raises(UsageError, match=f"`{keyword}` in a schema"):
            COMPILER.compile(StructuredOutputs(json=one))


def test_numbers_that_are_no_keywords_are_left_alone():
    """A property may be called so, and a default decides nothing."""
    for schema in (
        {"properties": {"minimum": {"type": "string"}, "const": {"type": "integer"}}},
        {"type": "integer", "default": UINT64, "examples": [UINT64]},
    ):
        assert checked_schema(schema) == schema
        COMPILER.compile(StructuredOutputs(json=schema))


@pytest.mark.parametrize("character", ["\0", "\x0b", "\x1b", "\x7f"])
def test_control_characters_are_refused_by_name(character):
    for schema in [*nested(f"a{character}b"), {"type": "string", "pattern": f"a{character}"}]:
        with pytest.raises(UsageError, match="(const|enum|pattern)` in a schema: .* character"):
            checked_schema(schema)


def test_other_control_characters_come_out_exactly():
    text = walk(StructuredOutputs(json={"const": "\b\f\n\r\t"}), 0)
    assert text is not None and json.loads(text) == "\b\f\n\r\t"


# Dialects -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dialect",
    [
        *("http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-06/schema"),
        *("https://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-07/schema"),
        *("http://json-schema.org/draft/2020-12/schema", "http://json-schema.org/schema#"),
        *(
            "https://json-schema.org/draft/2019-09/schema#",
            "http://json-schema.org/draft-03/schema",
        ),
        *("https://spec.openapis.org/oas/3.1/dialect/base", ""),
    ],
)
def test_dialects_in_all_spellings_are_taken(dialect):
    inner = {"$schema": dialect, "$id": "https://example.com/a", "type": "integer"}
    for schema in (inner, {"type": "array", "items": inner, "minItems": 1}):
        COMPILER.compile(StructuredOutputs(json={"$schema": dialect} | schema))


def test_a_dialect_in_the_other_scheme_is_followed():
    """Items are a list before 2020-12, and no other item is a text then."""
    items = {"type": "array", "items": [{"type": "integer"}], "additionalItems": False}
    for scheme in ("http", "https"):
        outputs = StructuredOutputs(
            json=items | {"$schema": f"{scheme}://json-schema.org/draft-07/schema#"}
        )
        assert accepts(outputs, "[1]") and not accepts(outputs, "[1,2]")
    schema = {"properties": {"$schema": {"type": "string"}}}
    assert checked_schema(schema) == schema


# Formats ------------------------------------------------------------------------------------------


def test_formats_that_llguidance_knows_are_followed():
    for name in FORMATS - {"unknown"}:
        assert not accepts(StructuredOutputs(json={"type": "string", "format": name}), '"!"'), name
        assert checked_schema({"format": name}) == {"format": name}


@pytest.mark.parametrize("name", ["path", "binary", "password", "base64", "cuid", "x/y", ""])
def test_other_formats_are_annotations(name):
    """Wherever they stand."""
    text = {"type": "string", "format": name, "maxLength": 3}
    for schema, answer in (
        (text, '"!"'),
        ({"type": "array", "items": text, "minItems": 1}, '["!"]'),
        ({"anyOf": [text, {"type": "null"}]}, '"!"'),
        ({"allOf": [text]}, '"!"'),
        ({"$defs": {"p": text}, "$ref": "#/$defs/p"}, '"!"'),
        ({"definitions": {"format": text}, "$ref": "#/definitions/format"}, '"!"'),
        ({"components": {"schemas": {"P": text}}, "$ref": "#/components/schemas/P"}, '"!"'),
        ({"patternProperties": {"^a$": text}, "type": "object"}, '{"a":"!"}'),
        ({"additionalProperties": text, "type": "object"}, '{"a":"!"}'),
        ({"prefixItems": [text], "type": "array"}, '["!"]'),
        ({"type": "object", "properties": {"format": text}}, '{"format":"!"}'),
    ):
        outputs = StructuredOutputs(json=schema)
        assert accepts(outputs, answer), schema
        assert not accepts(outputs, answer.replace("!", "!!!!")), schema


def test_what_is_called_format_and_is_none_stays():
    for schema in (
        {"const": {"format": "path"}},
        {"enum": [{"format": "path"}]},
        {"properties": {"format": {"const": "path"}}, "required": ["format"]},
    ):
        assert checked_schema(schema) == schema
    outputs = StructuredOutputs(json={"const": {"format": "path"}})
    assert accepts(outputs, '{"format":"path"}')


# Objects ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["^(score|tags)$", "^(?:tags|score)$", "^(score|tags|a\\.b)$"])
def test_a_pattern_that_only_declared_names_fit(pattern):
    """llguidance would begin a property after these, and then have no name for it."""
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer"}, "tags": {}, "a.b": False},
        "patternProperties": {pattern: {"type": ["integer", "array"], "maximum": 9}},
        "additionalProperties": False,
    }
    outputs = StructuredOutputs(json=schema)
    for answer in ('{"score":5,"tags":[]}', '{"tags":5}', "{}"):
        assert accepts(outputs, answer), answer
    for answer in ('{"score":10}', '{"score":[]}', '{"tags":"a"}', '{"x":1}'):
        assert not accepts(outputs, answer), answer
    for seed in range(10):
        text = walk(outputs, seed)
        assert text is None or set(json.loads(text)) <= {"score", "tags"}


@pytest.mark.parametrize("properties", [{}, {"properties": {}}, {"properties": {"b": {}}}])
@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("^a$", "a"),
        ("^(a)$", "a"),
        ("^<think>$", "<think>"),
        ("^x=1, \"y'!%&;~`$", "x=1, \"y'!%&;~`"),
        (r"^\(a\|b\)\+\^$", "(a|b)+^"),
    ],
)
def test_a_pattern_that_only_a_required_name_fits(pattern, name, properties):
    schema = {
        "type": "object",
        "patternProperties": {pattern: {"type": "boolean"}},
        "required": [name],
        "additionalProperties": False,
    } | properties
    outputs = StructuredOutputs(json=schema)
    key = json.dumps(name)
    assert accepts(outputs, f"{{{key}: true}}")
    for answer in ("{}", f"{{{key}: 5}}", '{"x": true}'):
        assert not accepts(outputs, answer), answer
    for seed in range(5):
        text = walk(outputs, seed)
        assert text is None or type(json.loads(text)[name]) is bool


def test_other_patterns_beside_declared_names():
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer"}},
        "patternProperties": {"^[a-z]+$": {"type": ["integer", "array"]}},
        "additionalProperties": False,
    }
    outputs = StructuredOutputs(json=schema)
    assert accepts(outputs, '{"score":5,"tags":[]}') and not accepts(outputs, '{"score":[]}')
    for pattern in ("^[a-z]{5}$", "^s|x$", "^s.ore$", "^(score|x)$"):
        schema["patternProperties"] = {pattern: {"type": ["integer", "array"]}}
        outputs = StructuredOutputs(json=schema)
        assert accepts(outputs, '{"score":5}') and not accepts(outputs, '{"score":[]}'), pattern
    schema["patternProperties"] = {"^[s]core$": {}}
    with pytest.raises(UsageError, match="fits the declared property 'score'"):
        COMPILER.compile(StructuredOutputs(json=schema))


def test_names_that_may_be_any_text():
    """`propertyNames` as Zod writes it for a record; other names are refused, with a remedy."""
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert checked_schema(schema | {"propertyNames": {"type": "string"}}) == schema
    with pytest.raises(UsageError, match=r'"propertyNames".*leave these keywords out'):
        COMPILER.compile(StructuredOutputs(json=schema | {"propertyNames": {"enum": ["a"]}}))


@pytest.mark.parametrize(
    ("schema", "remedy"),
    [
        ({"type": "array", "uniqueItems": True}, "leave these keywords out"),
        ({"type": "string", "pattern": "^(?!a)b$"}, "write the pattern without it"),
        ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}, "use `anyOf`"),
    ],
)
def test_what_is_refused_has_a_remedy(schema, remedy):
    with pytest.raises(UsageError, match=remedy):
        COMPILER.compile(StructuredOutputs(json=schema))
