"""An engine for students with prompt attention layers, neurons and taps: answers and scores are
those of whole sequences, whatever the chunks, the neighbours and the cache hold."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.model.config import GeneratedKV, LayerKind
from swiftkv_jax.model.mesh import make_mesh
from tests.infer.engine import test_engine
from tests.infer.engine.own_kv_engines import prompts_of
from tests.infer.engine.test_speculation import Answers, answers
from tests.test_boundary import model_of

LENGTH, PAGE = 48, 4


class Case(NamedTuple):
    layers: int
    taps: int
    group: int
    generated_kv: GeneratedKV
    exact_tail: int
    exact_head: int = 0
    neurons: int = 0


CASES = {
    "boundary": Case(2, 1, 1, "boundary", 0, neurons=6),
    "boundary, groups": Case(1, 1, 2, "boundary", 0),
    "boundary, a head": Case(2, 1, 1, "boundary", 0, 1),
    "own, a tail": Case(2, 1, 1, "own", 3, 1),
    "own, a head": Case(1, 1, 1, "own", 0, 1, neurons=5),
    "own, a tail, groups": Case(1, 1, 2, "own", 3, neurons=8),
    "own, groups": Case(3, 0, 2, "own", 0),
}


@functools.cache
def student(name: str) -> skv.Model:
    """With groups also each layer's own order of heads, and a mix of their values."""
    case = CASES[name]
    heads = ((1, 0), (0, 1), (1, 0), (1, 0), (0, 1)) if case.group > 1 else None
    config, llama, delta = model_of(
        case.layers, case.taps, case.group, neurons=case.neurons, shared_kv_heads=heads
    )
    config = dataclasses.replace(
        config,
        generated_kv=case.generated_kv,
        exact_tail=case.exact_tail,
        exact_head=case.exact_head,
    )
    return skv.Model(llama, delta, config)


options = functools.partial(test_engine.options, max_model_len=LENGTH, chunks=(8,))


@functools.cache
def engine_of(name: str) -> Engine[ModelRunner]:
    return Engine.from_model(student(name), options())


def requests_of(seed: int) -> list[Request | ScoreRequest]:
    """Prompts of all lengths, of which some begin alike; two samples of one; scores."""
    params = SamplingParams(max_tokens=7, ignore_eos=True, logprobs=0)
    prompts = [*prompts_of(seed, 6), (5,), tuple(range(20)), (*range(16), 40, 41)]
    both = dataclasses.replace(params, n=2, temperature=1.0)
    rows = prompts_of(seed + 1, 3)
    return [
        *(Request(prompt, params) for prompt in prompts),
        Request(tuple(range(30, 44)), both),
        Request((9,), both),
        *(ScoreRequest((*row, *row[:5]), len(row)) for row in rows),
    ]


@functools.cache
def forward(name: str):
    return jax.jit(
        lambda row, length: jax.nn.log_softmax(
            skv.logits(student(name), row, prompt_lengths=length)[0], axis=-1
        )
    )


def expected_logprobs(name: str, request, tokens: list[int]) -> np.ndarray:
    """The log-probabilities of the tokens of an answer, or of a score, by the whole-sequence
    forward pass."""
    if isinstance(request, ScoreRequest):
        row, start = request.tokens, request.start
    else:
        row, start = (*request.prompt, *tokens), len(request.prompt)
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(row)] = row
    found = np.asarray(forward(name)(padded, jnp.array([start])))
    return found[range(start - 1, len(row) - 1), row[start:]]


def check(name: str, requests, found: Answers) -> None:
    assert sum(len(tokens) for tokens, *_ in found.values()) > 7 * len(requests) - 12
    for (number, _), (tokens, logprobs, _) in found.items():
        expected = expected_logprobs(name, requests[number], tokens)
        np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.short("boundary", "own, a tail, groups")
@pytest.mark.parametrize(
    "name", [*list(CASES)[:-1], pytest.param("own, groups", marks=pytest.mark.long)]
)
def test_answers_and_scores_are_those_of_whole_sequences(name):
    """Cold, and over the pages that the first run has left."""
    engine, requests = engine_of(name), requests_of(0)
    cold = answers(engine, requests)
    check(name, requests, cold)
    hits = engine.prefix_stats.hits
    warm = answers(engine, requests)
    assert engine.prefix_stats.hits > hits
    check(name, requests, warm)
    assert {key: answer[0] for key, answer in warm.items()} == {
        key: answer[0] for key, answer in cold.items()
    }
    assert engine.stats.compilations == 0


def test_a_cached_prefix_answers_as_a_cold_one():
    """Bit for bit: full pages, of a prompt that ends with one and of one that does not."""
    engine = engine_of("boundary")
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0)
    for length in (3 * PAGE + 1, 3 * PAGE + 3):
        request = Request(tuple((7 * at + length) % 61 for at in range(length)), params)
        cold, hits = answers(engine, [request]), engine.prefix_stats.hits
        assert answers(engine, [request]) == cold
        assert engine.prefix_stats.hits == hits + 3 * PAGE


def test_a_prompt_may_go_on_from_pages_of_the_same_chunk():
    """The second prompt begins with a page that the first one writes in the same chunk; later ones
    with pages that decoding wrote."""
    engine = engine_of("boundary")
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    start = tuple(range(50, 50 + PAGE))
    requests = [Request((*start, *rest), params) for rest in ((1, 2), (3, 4))]
    before = engine.prefix_stats.hits
    found = answers(engine, requests)
    assert engine.prefix_stats.hits == before + PAGE
    check("boundary", requests, found)
    generated = found[0, 0][0]
    more = [Request((*requests[0].prompt, *generated[:5], last), params) for last in (9, 10)]
    before = engine.prefix_stats.hits
    check("boundary", more, answers(engine, more))
    assert engine.prefix_stats.hits == before + 2 * 2 * PAGE


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("boundary, groups", {"kv_cache_dtype": "int8"}, marks=pytest.mark.long),
        pytest.param("own, a tail", {}, marks=pytest.mark.long),
        ("boundary", {}),
    ],
    ids=str,
)
def test_a_preempted_request_goes_on(name, fields):
    """Tokens are those of an engine with room."""
    common = options(**fields)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=3)
    requests = [Request((5, 1 + number, 7), params, rng_stream=number) for number in range(4)]
    roomy = engine_of(name) if not fields else Engine.from_model(student(name), common)
    memory = 20 * roomy.model_runner.layout.page_bytes(PAGE)
    narrow = dataclasses.replace(common, kv_cache_memory=memory, reserve_tokens=4)
    tight = Engine.from_model(student(name), narrow)
    assert answers(tight, requests) == answers(roomy, requests)
    assert roomy.stats.preemptions == 0 < tight.stats.preemptions


@pytest.mark.short("own, a tail, groups-shape1")
@pytest.mark.parametrize(("name", "shape"), [("boundary", (2, 2)), ("own, a tail, groups", (1, 4))])
def test_a_mesh_changes_nothing(name, shape):
    """Rows, heads and widths are split; with (1, 4) there are copies of the two key/value heads."""
    requests = requests_of(3)
    engine = Engine.from_model(
        student(name), options(decode_rows=(4 // shape[0],)), mesh=make_mesh(shape)
    )
    check(name, requests, answers(engine, requests))
    assert engine.stats.compilations == 0


def test_windows_give_back_no_page_that_a_tap_reads():
    """With windows of one position no token sees the page before its own, but the tap of its first
    token reads it."""
    config, llama, delta = model_of(1, 1, 1, layer_kinds=(LayerKind(window=1),))
    model = skv.Model(llama, delta, config)
    engine = Engine.from_model(model, options(scoring=False))
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
    requests = [Request(tuple(range(first, first + 11)), params) for first in (0, 20)]
    for (number, _), (tokens, logprobs, _) in answers(engine, requests * 2).items():
        row = (*(requests * 2)[number].prompt, *tokens)
        logits = skv.logits(model, np.array([row]))[0, 10:-1]
        expected = jax.nn.log_softmax(logits, axis=-1)[np.arange(8), np.array(tokens)]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
