"""`system_fingerprint`: equal where the same seed gives the same answer."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp

import swiftkv_jax as skv
from swiftkv_jax.serve.app import system_fingerprint
from swiftkv_jax.serve.command import model_facts
from tests.infer.mock_model_runner import mock_engine


def test_facts_of_a_model(checkpoint):
    """They differ with a weight, the mesh and the part of the model that runs, and with nothing
    else."""
    model = skv.load(checkpoint)
    facts = model_facts(model, None, True)
    assert re.fullmatch("[0-9a-f]{8}", facts["weights"])
    assert model_facts(skv.load(checkpoint), skv.make_mesh("1x1"), True) == facts
    norm = model.llama.final_norm
    llama = dataclasses.replace(model.llama, final_norm=norm.at[-1].set(jnp.asarray(2, norm.dtype)))
    other = model_facts(dataclasses.replace(model, llama=llama), None, True)
    assert other != facts and other | {"weights": facts["weights"]} == facts
    mesh = skv.make_mesh("1x2")
    spread = model_facts(skv.load(checkpoint, mesh=mesh), mesh, True)
    assert spread == facts | {"mesh": "{'model': 2}"}
    assert model_facts(model, None, False) != facts


def test_the_fingerprint_is_of_model_and_options():
    facts = {"weights": "01234567", "mesh": "{}"}
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({}, facts),
        ({}, dict(reversed(facts.items()))),
        ({"slots": 4}, facts),
        ({}, facts | {"weights": "01234568"}),
        ({}, facts | {"mesh": "{'model': 2}"}),
        ({"kv_cache_dtype": "fp8"}, facts),
    ]
    found = {system_fingerprint(mock_engine(**options)[0], given) for options, given in cases}
    assert len(found) == 4
    assert all(re.fullmatch(r"swiftkv-[\w.+]+-[0-9a-f]{8}", one) for one in found)


def test_answers_carry_it(running):
    body = {"prompt": "hello", "max_tokens": 2}
    _, answer = running.post("/v1/completions", body)
    assert answer["system_fingerprint"] == running.app.fingerprint
    first, *_ = running.events("/v1/completions", body)
    assert first["system_fingerprint"] == running.app.fingerprint
