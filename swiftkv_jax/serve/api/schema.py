"""The OpenAPI document, made from the types of the bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ... import __version__
from ..protocol import Body


def openapi(routes: Iterable[tuple[str, str, str, type[Body] | None]]) -> dict[str, Any]:
    """OpenAPI 3.1 of (path, methods, summary, type of the body)."""
    routes = list(routes)
    kinds = [kind for *_, kind in routes if kind is not None]
    references, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    reference_of = dict(zip(kinds, references, strict=True))
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "string"},
                },
            }
        },
    }
    answers = {
        "200": {"description": "OK"},
        "default": {
            "description": "An error",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        },
    }
    paths = {}
    for path, methods, summary, kind in routes:
        operation: dict[str, Any] = {"summary": summary, "responses": answers}
        if kind is not None:
            content = {"application/json": {"schema": reference_of[kind]}}
            operation["requestBody"] = {"required": True, "content": content}
        if "{id" in path:
            parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [parameter]
        paths[path.replace(":path", "")] = {methods.split()[0].lower(): operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "swiftkv-jax", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }
