"""Weights replaced in an engine: answers are those of a fresh one, and nothing is compiled."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine.cache_events import PageRemoved
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import ScoreRequest
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.infer.runner.serving_form import shard_model
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.quantization import Scheme, quantize
from swiftkv_jax.model.stacks import cast
from tests import tiny
from tests.infer.engine.mock_requests import ask, check_empty, drain, prompt_of
from tests.infer.engine.test_engine import collect, prompts_of, small
from tests.infer.mock_model_runner import mock_engine

HF = tiny.hf_config(num_hidden_layers=3, num_key_value_layers=1, key_value_group_size=2)
REQUESTS = [ask(prompt, 6, ignore_eos=True) for prompt in prompts_of(0, 4)]


@functools.cache
def model(seed: int) -> skv.Model:
    return tiny.model_of(HF, tiny.tensors_for(HF, seed))


@pytest.mark.parametrize("shape", [None, pytest.param("1x2", marks=pytest.mark.long)])
def test_answers_are_those_of_a_fresh_engine(shape, compilations):
    mesh = None if shape is None else make_mesh(shape)
    first, second = (
        model(seed) if mesh is None else shard_model(model(seed), mesh) for seed in (0, 1)
    )
    engine, fresh = (Engine.from_model(each, small()) for each in (first, second))
    expected = [collect(each, REQUESTS) for each in (engine, fresh)]
    assert expected[0] != expected[1]
    copied = jax.tree.map(jnp.copy, first)
    compilations.clear()
    engine.update_weights(second)
    assert collect(engine, REQUESTS) == expected[1]
    engine.update_weights(copied, donate=True)
    assert collect(engine, REQUESTS) == expected[0]
    assert not compilations and copied.llama.lower.gate.is_deleted()
    with pytest.raises(UsageError, match="was donated before: its arrays are deleted"):
        engine.update_weights(copied, donate=True)
    assert collect(engine, REQUESTS) == expected[0], "nothing has changed"
    engine.update_weights(jax.tree.map(np.asarray, second))
    assert collect(engine, REQUESTS) == expected[1]


@pytest.mark.parametrize("quantized", [False, True], ids=["", "int8"])
def test_a_master_copy_of_the_delta_is_served_in_the_dtype_of_the_weights(quantized):
    narrow = tiny.model_of(HF, tiny.tensors_for(HF), jnp.bfloat16)
    delta = narrow.swiftkv
    assert delta is not None
    if quantized:
        delta = dataclasses.replace(delta, q=quantize(delta.q, 1, Scheme("int8")))
        narrow = dataclasses.replace(narrow, swiftkv=delta)
    delta = cast(delta, jnp.float32)
    assert delta.norm.dtype == jnp.float32
    master = dataclasses.replace(narrow, swiftkv=delta)
    runner = build_model_runner(master, small())
    expected = build_model_runner(narrow, small()).weights
    jax.tree.map(np.testing.assert_array_equal, runner.weights, expected)
    assert dtypes(runner.weights) == dtypes(expected)
    runner.update_weights(master, donate=False)
    assert dtypes(runner.weights) == dtypes(expected)
    tokens = [[1, 2, 3]]
    assert jax.eval_shape(lambda model: skv.logits(model, tokens), master).shape == (1, 3, 61)


def dtypes(tree) -> list[Any]:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def test_a_model_that_does_not_fit_changes_nothing():
    engine, given = Engine.from_model(model(0), small()), model(1)
    expected = collect(engine, REQUESTS)
    longer = dataclasses.replace(given.config, max_position_embeddings=256)
    embed = given.llama.embed.astype("bfloat16")
    others: list[tuple[Any, str]] = [
        (dataclasses.replace(given, config=longer), "not the config and parts"),
        (dataclasses.replace(given, swiftkv=None), "not the config and parts"),
        (
            dataclasses.replace(given, llama=dataclasses.replace(given.llama, embed=embed)),
            r"llama.embed is bfloat16\[61, 32\], the one that is served is float32\[61, 32\]",
        ),
        ("DIR", "must be a Model"),
    ]
    for other, text in others:
        with pytest.raises(UsageError, match=text):
            engine.update_weights(other)
    assert collect(engine, REQUESTS) == expected


def test_while_requests_run_it_is_refused_and_afterwards_the_prefix_cache_is_empty():
    engine, runner = mock_engine(dp_size=2)
    events = engine.record_cache_events()
    for seed in range(4):
        engine.add_request(ask(prompt_of(seed, 20)))
        with pytest.raises(UsageError, match="requests run: end or abort them"):
            engine.update_weights(model(0))
        engine.step()
    drain(engine)
    assert "update" not in runner.calls
    stored = [key for event in events.take() for key in getattr(event, "keys", ())]
    engine.update_weights(model(0))
    assert runner.calls[-1] == "update"
    removed = [event.key for event in events.take() if isinstance(event, PageRemoved)]
    assert sorted(stored) == sorted(removed) != []
    engine.reset_stats()
    engine.add_request(ask(prompt_of(0, 20)))
    drain(engine)
    assert engine.prefix_stats.hits == 0
    check_empty(engine)
    outputs = engine.run([ask(prompt_of(0, 20), 30, ignore_eos=True)])
    next(outputs)
    outputs.close()  # its last call has not been read
    engine.update_weights(model(0))
    assert runner.calls[-1] == "update" and not engine.has_work
    scored = engine.add_request(ScoreRequest(prompt_of(1, 10), 1))
    engine.step()  # sends all of it, and reads nothing
    with pytest.raises(UsageError, match="requests run"):
        engine.update_weights(model(0))
    assert [one.request_id for one in drain(engine)] == [scored]
