"""The OpenAPI document, made from the types of the bodies."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from ... import __version__
from ..protocol import ChatBody, CompletionBody, DetokenizeBody, ScoreBody, TokenizeBody
from .message_bodies import CountTokensBody, MessagesBody
from .response_bodies import ResponsesBody

_BODIES = {
    "/v1/chat/completions": (ChatBody, "Continue a conversation"),
    "/v1/completions": (CompletionBody, "Continue prompts"),
    "/v1/responses": (ResponsesBody, "Answer, in items"),
    "/v1/messages": (MessagesBody, "Answer, in blocks"),
    "/v1/messages/count_tokens": (CountTokensBody, "Number of tokens of a prompt of /v1/messages"),
    "/v1/score": (ScoreBody, "Log-likelihoods of continuations"),
    "/tokenize": (TokenizeBody, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeBody, "Text of token ids"),
}
_GETS = {
    "/v1/models": "Models that are served",
    "/v1/models/{id}": "One of them",
    "/health": "The process answers",
    "/ready": "Requests are taken",
    "/ping": "The same",
    "/tokenizer_info": "Special tokens and chat template, with --enable-tokenizer-info",
    "/metrics": "Metrics for Prometheus",
    "/version": "Version of the package",
    "/load": "Requests that wait and run",
}


@functools.cache
def openapi() -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = [kind for kind, _ in _BODIES.values()]
    references, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
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
    paths: dict[str, Any] = {
        path: {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": reference}},
                },
                "responses": answers,
            }
        }
        for (path, (_, summary)), reference in zip(_BODIES.items(), references, strict=True)
    }
    paths |= {
        path: {"get": {"summary": summary, "responses": answers} | _parameters(path)}
        for path, summary in _GETS.items()
    }
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


def _parameters(path: str) -> dict[str, Any]:
    """The parameter of a path, if it has one."""
    if "{id}" not in path:
        return {}
    found = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {"parameters": [found]}
