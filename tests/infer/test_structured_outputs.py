"""Grammars of JSON schemas, regular expressions and the rest, walked at random over a tokenizer of
single characters."""

import contextlib
import json
import re

import numpy as np
import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer import GrammarCompiler, StructuredOutputs
from swiftkv_jax.infer.structured.structured_outputs import MAX_REGEX_LENGTH
from tests.infer.mock_model_runner import END, VOCAB
from tests.serve.conftest import make_tokenizer

TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, vocab_size=VOCAB, eos_token_ids=[END])


def allowed(matcher) -> list[int]:
    masks = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    matcher.fill_masks([matcher], masks)
    return [token for token in range(VOCAB) if masks[0, token // 32] >> np.uint32(token % 32) & 1]


def accepts(outputs: StructuredOutputs, text: str) -> bool:
    """True if `text` is a whole output."""
    matcher = COMPILER.compile(outputs)
    for token in TOKENIZER(text)["input_ids"]:
        if matcher.is_ended or token not in allowed(matcher):
            return False
        matcher.accept(token)
    return matcher.is_ended or END in allowed(matcher)


def walk(outputs: StructuredOutputs, seed: int, longest: int = 400) -> str | None:
    """A random output, which ends when it can; None if it does not end."""
    matcher, rng, ids = COMPILER.compile(outputs), np.random.default_rng(seed), []
    while not matcher.is_ended and len(ids) < longest:
        possible = allowed(matcher)
        assert possible and not matcher.error
        token = END if END in possible and len(ids) > 20 else int(rng.choice(possible))
        if token == END:
            return TOKENIZER.decode(ids)
        matcher.accept(token)
        ids.append(token)
    return TOKENIZER.decode(ids) if matcher.is_ended else None


TYPES = {
    "integer": ({"type": "integer", "minimum": -3, "maximum": 40}, lambda v: -3 <= v <= 40),
    "string": ({"type": "string", "maxLength": 6}, lambda v: len(v) <= 6),
    "pattern": (
        {"type": "string", "pattern": "^[a-c]{2}$"},
        lambda v: bool(re.fullmatch("[a-c]{2}", v)),
    ),
    "list": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        lambda v: 1 <= len(v) <= 3 and all(isinstance(one, bool) for one in v),
    ),
    "enum": ({"enum": ["a", 1, None]}, lambda v: v in ("a", 1, None)),
}


def test_random_schemas():
    """150 schemas of random properties; what they admit has their form."""
    rng, ended = np.random.default_rng(0), 0
    for seed in range(150):
        names = rng.permutation(list(TYPES))[: rng.integers(1, 4)].tolist()
        required = [name for name in names if rng.random() < 0.6]
        schema = {
            "type": "object",
            "properties": {name: TYPES[name][0] for name in names},
            "required": required,
            "additionalProperties": False,
        }
        text = walk(StructuredOutputs(json=schema), seed)
        if text is None:
            continue
        ended += 1
        found = json.loads(text)
        assert set(required) <= set(found) <= set(names), text
        assert all(TYPES[name][1](value) for name, value in found.items()), text
        assert not re.search(r"\s{17}", text)
    assert ended > 120


@pytest.mark.parametrize(
    ("outputs", "right", "wrong"),
    [
        (StructuredOutputs(regex="[a-c]{3}x+"), "abcxx", "abx"),
        (StructuredOutputs(choice=["yes", "no (not)"]), "no (not)", "no"),
        (StructuredOutputs(grammar='start: "a" b*\nb: "b" | "c"'), "abcb", "ba"),
        (StructuredOutputs(json=True), '{"a": [1, {"b": "c"}]}', "[1]"),
        (StructuredOutputs(json='{"type": "integer"}'), "12", "1.5"),
        (StructuredOutputs(json={"enum": ["x"]}), '"x"', '"y"'),
        # One key has one spelling, and spaces end.
        (StructuredOutputs(json=True), '{"a": 1}', '{"\\u0061": 1}'),
        (StructuredOutputs(json=True), "{" + " " * 16 + "}", "{" + " " * 17 + "}"),
    ],
)
def test_what_they_accept(outputs, right, wrong):
    assert accepts(outputs, right) and not accepts(outputs, wrong)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "json": True}, "exactly one"),
        ({"choice": []}, "1 to 512"),
        ({"choice": ["a" * 70_000]}, "characters in all"),
        ({"regex": "a" * 4097}, "1 to 4096"),
        ({"regex": ""}, "1 to 4096"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json": "{"}, "not a JSON schema"),
        ({"json": {"type": "nope"}}, "refused"),
        ({"json": {"not": {"type": "string"}}}, "refused"),
        ({"json": {"$ref": "http://somewhere/x"}}, "refused"),
        ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"json": {"properties": {"a": {"pattern": "a" * 5000}}}}, "pattern"),
        ({"json": {"multipleOf": 1_000_003}}, "multipleOf"),
        ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}}, "multipleOf"),
        ({"json": {"prefixItems": [{"multipleOf": 9973}] * 100}}, "multipleOf"),
        ({"json": {"multipleOf": 1e-300}}, "multipleOf"),
        ({"json": {"multipleOf": 10**400}}, "multipleOf"),
        ({"grammar": 'start: %json {"multipleOf": 1000003}'}, "multipleOf"),
        ({"grammar": r'start: %json {"multiple\u004ff": 1000003}'}, "multipleOf"),
        ({"regex": "(a"}, "refused"),
        ({"regex": r"[^\s\S]"}, "no first token"),
        ({"grammar": "start: x"}, "refused"),
        ({"grammar": "start: start"}, "no first token"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        COMPILER.compile(StructuredOutputs(**fields))


def test_copies_go_their_own_ways():
    first = COMPILER.compile(StructuredOutputs(regex="ab|cd"))
    second = first.copy()
    a, c = TOKENIZER("ac")["input_ids"]
    first.accept(a)
    second.accept(c)
    assert allowed(first) == TOKENIZER("b")["input_ids"]
    assert allowed(second) == TOKENIZER("d")["input_ids"]


def test_regular_expressions_of_a_grammar_are_limited():
    """As those by themselves are, wherever they stand; texts and comments are not."""
    long = "a" * (MAX_REGEX_LENGTH + 1)
    for regex in (long, r"\/" + long, "[0-9]\n" + long):
        with pytest.raises(UsageError, match="a regular expression in `grammar` has more than"):
            StructuredOutputs(grammar=f'start: A "/" B\nA: /b/ // a/b\nB: /{regex}/i')
    for text in (f'start: "{long}"', f'start: "/{long}/"', f"// /{long}/\nstart: /a/"):
        StructuredOutputs(grammar=text)
    StructuredOutputs(grammar=f"start: A B\nA: /{long[1:]}/\nB: /{long[1:]}/")


@pytest.mark.parametrize("mark", ['"', "/"])
def test_what_does_not_end_is_looked_at_once(mark):
    """Quadratic, this takes half a minute, in which no other thread runs."""
    grammar = f"start: {mark}" + f"\\{mark}" * 32_000
    with contextlib.suppress(UsageError):
        StructuredOutputs(grammar=grammar)


def test_multiples_that_schemas_ask_for():
    for schema in ({"multipleOf": 0.01}, {"items": [{"multipleOf": 0.01}, {"multipleOf": 1000}]}):
        COMPILER.compile(StructuredOutputs(json={"type": "number", **schema}))
