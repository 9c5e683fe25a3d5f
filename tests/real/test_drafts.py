"""Drafts on SmolLM2-135M-Instruct: JSON of a schema and answers that repeat a passage have the
tokens that they have without, in fewer steps."""

import dataclasses
import json
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest

import swiftkv_jax as skv
from examples.real_models import path_of
from swiftkv_jax.infer import (
    Engine,
    EngineOptions,
    GrammarCompiler,
    Request,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputs,
)
from swiftkv_jax.infer.text import encode_chat

TEXT = {"type": "string", "minLength": 1, "maxLength": 24}
YEAR = {"type": "integer", "minimum": 1500, "maximum": 2025}
PLACE = {"city": TEXT, "country": TEXT}
CODE = {"type": "string", "pattern": "^[A-Z]{3}$"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a famous person from": {"name": TEXT, "profession": TEXT, "birth_year": YEAR},
    "the weather today in": {
        "location": PLACE,
        "condition": {"enum": ["sunny", "cloudy", "rainy", "snowy"]},
        "celsius": {"type": "integer", "minimum": -40, "maximum": 50},
    },
    "books about": {
        "books": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {"title": TEXT, "author": TEXT, "published": YEAR},
        }
    },
    "a flight to": {"departure": {"airport": CODE, **PLACE}, "arrival": {"airport": CODE, **PLACE}},
    "a review of a hotel in": {
        "hotel_name": TEXT,
        "overall_rating": {"enum": [1, 2, 3, 4, 5]},
        "would_recommend": {"type": "boolean"},
        "summary": TEXT,
    },
}
"""What to write about a country, and the properties of the JSON; all are required."""
COUNTRIES = (
    "France Japan Brazil Kenya Canada India Norway Peru Egypt Greece "
    "Italy Mexico Chile Spain Turkey Ghana Poland China Cuba Iceland"
).split()
PASSAGES = sorted((text for text in topics.values() if 500 < len(text) < 2000), key=len)[:20]


class Answer(NamedTuple):
    tokens: list[int]
    finish_reason: str
    accepted: int
    """Drafts that were emitted."""


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    """An object with these properties, where an entry without a type is one with such."""

    def entry(value: dict[str, Any]) -> dict[str, Any]:
        if "items" in value:
            return {**value, "items": entry(value["items"])}
        return value if {"type", "enum"} & value.keys() else schema_of(value)

    entries = {name: entry(value) for name, value in properties.items()}
    return {
        "type": "object",
        "properties": entries,
        "required": [*entries],
        "additionalProperties": False,
    }


def answers(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    found: list[Answer] = [Answer([], "", 0)] * len(requests)
    for number, output in engine.run(requests):
        tokens = found[number].tokens + output.token_ids
        found[number] = Answer(tokens, output.finish_reason or "", output.drafts.accepted)
    return found


def tokens_a_step(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[Answer]]:
    """Those of the requests with drafts, and the answers, which are the same without drafts."""
    plain = answers(engine, [dataclasses.replace(one, speculative=False) for one in requests])
    found = answers(engine, requests)
    assert all(one.tokens == other.tokens for one, other in zip(found, plain, strict=True))
    assert not any(one.accepted for one in plain)
    count = sum(len(one.tokens) for one in found)
    return count / (count - sum(one.accepted for one in found)), found


@pytest.fixture(scope="module")
def model():
    return skv.load(path_of("smollm2"))


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    options = EngineOptions(
        max_model_len=1024,
        max_num_seqs=8,
        structured_outputs=True,
        speculative=SpeculativeConfig(enable_adaptive_verification=False),
    )
    return Engine.from_model(model, options)


def request(model, text: str, grammar=None) -> Request:
    prompt = encode_chat(model.tokenizer, [{"role": "user", "content": text}])
    return Request(prompt, SamplingParams(max_tokens=160), grammar=grammar)


def test_json(model, engine):
    ends = {"vocab_size": engine.config.vocab_size, "eos_token_ids": engine.eos_token_ids}
    compiler = GrammarCompiler(model.tokenizer, **ends)
    requests = []
    for subject, properties in SCHEMAS.items():
        schema = schema_of(properties)
        grammar = compiler.compile(StructuredOutputs(json=schema))
        for country in COUNTRIES:
            text = f"Write JSON about {subject} {country}. Schema: {json.dumps(schema)}"
            requests.append(request(model, text, grammar))
    rate, found = tokens_a_step(engine, requests)
    print(f"JSON: {rate:.2f} tokens a step")
    assert rate >= 1.4
    whole = [one for one in found if one.finish_reason == "stop"]
    assert len(whole) >= 90
    for one in whole:
        json.loads(model.tokenizer.decode(one.tokens))


def test_passages(model, engine):
    texts = [f"Repeat this text, word by word:\n\n{passage}" for passage in PASSAGES]
    rate, _ = tokens_a_step(engine, [request(model, text) for text in texts])
    print(f"passages: {rate:.2f} tokens a step")
    assert rate >= 2
