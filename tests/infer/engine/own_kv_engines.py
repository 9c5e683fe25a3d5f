"""Engines of a tiny model in each mode of `generated_kv`, what they answer, and what the oracle
does."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.model.config import GeneratedKV
from tests import own_kv_oracle, tiny
from tests.infer.engine import test_engine

LENGTH, TAIL = 64, 6
LONG = pytest.mark.long
HF = {
    "g=1": tiny.hf_config(num_hidden_layers=4, num_key_value_layers=2),
    "g=2": tiny.hf_config(
        num_key_value_layers=2, key_value_group_size=2, shared_kv_heads=[[0, 1], [1, 0]] * 2
    ),
    # Two cache layers, and own keys and values of four: in two pages each.
    "g=4": tiny.hf_config(num_hidden_layers=5, num_key_value_layers=1, key_value_group_size=4),
}
TENSORS = {shape: tiny.tensors_for(hf) for shape, hf in HF.items()}


class Mode(NamedTuple):
    generated_kv: GeneratedKV | None
    exact_tail: int
    shape: str = "g=1"


MODES = {
    "boundary": Mode(None, 0),
    "own": Mode("own", 0),
    "tail 1": Mode("own", 1),
    "tail 6": Mode("own", TAIL),
}
GROUPED = {
    f"{name} {shape}": mode._replace(shape=shape)
    for name, mode in MODES.items()
    for shape in ("g=2", "g=4")
}

FLOAT32 = 5e-7
"""Above the error of float32 in an entry of the cache, as a share of its head's largest."""


def mode_of(name: str) -> Mode:
    return (MODES | GROUPED)[name]


@functools.cache
def model(shape: str = "g=1") -> skv.Model:
    return tiny.model_of(HF[shape], TENSORS[shape])


def options(mode: str = "tail 6", **fields: Any) -> EngineOptions:
    kv, tail, _ = mode_of(mode)
    defaults = {"max_model_len": LENGTH, "generated_kv": kv, "exact_tail": tail or None}
    return test_engine.options(**defaults | fields)


@functools.cache
def engine_of(mode: str, *fields: tuple[str, Any]) -> Engine[ModelRunner]:
    return Engine.from_model(model(mode_of(mode).shape), options(mode, **dict(fields)))


prompts_of = functools.partial(test_engine.prompts_of, longest=24)


def run(engine: Engine, requests) -> list[tuple[list[int], list[float]]]:
    """(tokens, their log-probabilities) of each request."""
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
    for number, output in engine.run(requests):
        found[number][0].extend(output.token_ids)
        found[number][1].extend(entry.logprob for entry in output.logprobs or ())
    return found


def greedy(prompt, count: int = 5, **fields: Any) -> Request:
    return Request(prompt, SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0), **fields)


def oracle_logprobs(mode: str, request, answer: list[int], **fields: Any) -> np.ndarray:
    """The oracle's [M, V] of the M tokens of an answer, or of those that a request scores."""
    kv, tail, shape = mode_of(mode)
    if isinstance(request, ScoreRequest):
        row, start = request.tokens, request.start
    else:
        row, start = (*request.prompt, *answer), len(request.prompt)
    own = (np.arange(len(row)) >= start - tail) & (kv == "own")
    logits = own_kv_oracle.logits(HF[shape], TENSORS[shape], row, own, **fields)[start - 1 : -1]
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))
