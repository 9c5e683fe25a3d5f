"""Values drawn from the schemas of an OpenAPI document."""

import random
import string
from collections.abc import Mapping
from typing import Any

WORDS = (
    "",
    "a",
    "hello",
    "user",
    "漢字 🤖",
    "a\x00b",
    "<|user|>",
    "{}",
    "x" * 300,
    "text",
    "[a-z]+",
)
NUMBERS = (0, 1, -1, 2, 3, 16, 97, 1.5, -0.5, 1e-9, 1e300, 2**31, 2**63, -(2**63), 2**64)
MAX_DEPTH = 6


class Generator:
    """Bodies of the routes of a document, valid by their schemas; most ask for too much."""

    def __init__(self, document: Mapping[str, Any], rng: random.Random):
        self._schemas, self._rng = document["components"]["schemas"], rng
        self.bodies = {
            path: item["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, item in document["paths"].items()
            if "post" in item
        }
        """Path -> schema of its body."""

    def body(self, path: str) -> Any:
        return self._value(self.bodies[path], 0)

    def _value(self, schema: Mapping[str, Any], depth: int) -> Any:
        rng = self._rng
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._value(rng.choice(schema[name]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        match rng.choice(kind) if isinstance(kind, list) else kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                count = 0 if depth > MAX_DEPTH else rng.choice((0, 1, 1, 1, 2, 5))
                return [self._value(schema.get("items") or {}, depth + 1) for _ in range(count)]
            case "string":
                if "pattern" in schema:  # of names
                    return "".join(rng.choices(string.ascii_letters, k=rng.randint(1, 64)))
                return rng.choice(WORDS)
            case "integer":
                return rng.choice([one for one in NUMBERS if isinstance(one, int)])
            case "number":
                return rng.choice(NUMBERS)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case None:
                return self.any_value(depth)
            case other:
                raise AssertionError(f"a type that is not generated: {other!r}")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """All that is required, and few of the fields that are not: one of them that is refused
        would hide the others."""
        rng, known = self._rng, schema.get("properties", {})
        required = set(schema.get("required", ()))
        optional = sorted(known.keys() - required)
        chosen = rng.sample(optional, min(rng.choice((0, 1, 1, 2, 3, 8)), len(optional)))
        found = {name: self._value(known[name], depth + 1) for name in [*required, *chosen]}
        if isinstance(more := schema.get("additionalProperties"), Mapping) and depth <= MAX_DEPTH:
            for _ in range(rng.choice((0, 1, 2))):
                found[rng.choice((*WORDS, "5", "017"))] = self._value(more, depth + 1)
        return found

    def any_value(self, depth: int = 0) -> Any:
        """Any JSON."""
        rng = self._rng
        if depth <= MAX_DEPTH and rng.random() < 0.3:
            inside = [self.any_value(depth + 1) for _ in range(rng.choice((0, 1, 3)))]
            return inside if rng.random() < 0.5 else {rng.choice(WORDS): one for one in inside}
        return rng.choice((None, True, False, *NUMBERS, *WORDS))
