"""Fields of other servers: each is refused with what to write instead, which the docs list."""

import re
from pathlib import Path

import pytest

from swiftkv_jax.serve.bodies.decoding import INSTEAD

DOCS = Path(__file__).parents[2] / "docs" / "server.md"


@pytest.mark.parametrize("path", INSTEAD)
def test_a_refusal_says_what_to_write_instead(running, path):
    head, _, last = path.rpartition(".")
    value = {"type": "json_object", last: {}} if head else 1
    body = {"messages": [{"role": "user", "content": "hi"}], head or last: value}
    status, answer = running.post("/v1/chat/completions", body)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "unknown_field", path)
    assert error["message"] == f"there is no field {last!r}: {INSTEAD[path]}"


def test_within_other_objects_a_field_is_only_unknown(running):
    body = {"messages": [{"role": "user", "content": "hi", "options": 1}]}
    _, answer = running.post("/v1/chat/completions", body)
    assert answer["error"]["message"] == "there is no field 'options'"
    _, answer = running.post("/v1/responses", {"input": "hi", "options": 1})
    assert answer["error"]["message"] == "there is no field 'options'"


def test_the_docs_list_them():
    text = DOCS.read_text(encoding="utf-8")
    section = text.partition("### Fields of other servers")[2].partition("\n### ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert {path.rpartition(".")[2] for path in INSTEAD} <= named
