"""Speculation: whatever drafts are, the tokens are those of width 1."""

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import SpeculativeConfig, parse_speculative_config
from swiftkv_jax.infer.engine.requests import Drafts, Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.model.config import LayerKind
from swiftkv_jax.model.mesh import make_mesh
from tests.infer.engine.own_kv_engines import LONG, engine_of, mode_of, model, options
from tests.infer.mock_model_runner import mock_engine

MODES = [("boundary", 4, 48), ("own", 2, 48), ("tail 6 g=2", 4, 96)]
Answers = dict[tuple[int, int], tuple[list[int], list[float], str]]


@functools.cache
def engines(mode: str, width: int, pages: int) -> tuple[Engine, Engine]:
    """(one of width 1; one that speculates, in two steps a call with width 2, with memory for three
    long sequences of four in `pages`)."""
    narrow = engine_of(mode)
    chosen = options(
        mode,
        scoring=False,
        decode_steps=4,
        speculative=SpeculativeConfig(
            num_speculative_tokens=width - 1, enable_adaptive_verification=False
        ),
        reserve_tokens=4,
        kv_cache_memory=pages * narrow.model_runner.layout.page_bytes(4),
    )
    return narrow, Engine.from_model(model(mode_of(mode).shape), chosen)


def answers(engine: Engine, requests) -> Answers:
    found: Answers = {}
    for number, output in engine.run(requests):
        tokens, logprobs, _ = found.get((number, output.sample), ([], [], ""))
        ends = [] if output.stop_token is None else [output.stop_token]
        entries = [*(output.logprobs or ()), *filter(None, [output.stop_logprob])]
        found[number, output.sample] = (
            tokens + output.token_ids + ends,
            logprobs + [entry.logprob for entry in entries],
            output.finish_reason or "",
        )
    assert engine.pages_in_use == 0
    return found


def expected_of(narrow: Engine, requests: Sequence[Request]) -> Answers:
    return answers(narrow, [dataclasses.replace(one, prediction=()) for one in requests])


def check_equal(first: Answers, second: Answers, atol: float = 1e-4) -> None:
    assert first.keys() == second.keys()
    for key, (tokens, logprobs, reason) in first.items():
        assert second[key][0] == tokens and second[key][2] == reason, key
        np.testing.assert_allclose(second[key][1], logprobs, atol=atol)


def number_of_texts(engine: Engine, texts: Sequence[Sequence[int]]) -> int:
    """How many of these texts a slot has for lookups, with nothing behind."""
    rows = np.asarray(engine.model_runner._state.history)
    padded = [np.pad(one, (0, rows.shape[1] - len(one)), constant_values=-1) for one in texts]
    return sum((rows == one).all(axis=1).any() for one in padded)


def requests_of(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)

    def params(length: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=length,
            temperature=rng.choice([0, 0, 0.3, 1.0, 1.5]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 1.0, 0.6]),
            min_p=rng.choice([0.0, 0.0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            logit_bias=rng.choice([{}, {}, {7: 2.0}]),
            min_tokens=rng.choice([0, 0, min(4, length)]),
            stop_token_ids=tuple(rng.sample(range(61), rng.choice([0, 3]))),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, 0, 3]),
            n=rng.choice([1, 1, 1, 3]),
            seed=rng.randrange(1000),
        )

    def text(length: int) -> list[int]:
        few = rng.sample(range(61), rng.choice([1, 3, 61]))
        return [rng.choice(few) for _ in range(length)]

    return [
        Request(
            text(rng.randint(1, 24)),
            params(rng.randint(1, 36)),
            rng_stream=number,
            prediction=text(rng.choice([0, 0, 20])),
            speculative=rng.random() < 0.9,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "mode",
    [
        *(MODES[0], MODES[2]),
        *(pytest.param(mode, marks=LONG) for mode in (MODES[1], ("tail 1 g=4", 4, 144))),
    ],
    ids=str,
)
def test_random_requests_get_the_same_tokens(mode):
    narrow, wide = engines(*mode)
    requests = requests_of(mode[1], 20)
    expected = expected_of(narrow, requests)
    check_equal(expected, answers(wide, requests))
    predicted = [
        Request(one.prompt, one.params, one.rng_stream, prediction=expected[number, 0][0])
        for number, one in enumerate(requests)
    ]
    before = wide.stats.speculation.accepted_tokens
    check_equal(expected, answers(wide, predicted))
    assert wide.stats.speculation.accepted_tokens - before > 100


def test_with_few_pages_sequences_are_preempted():
    narrow, wide = engines(*MODES[0])
    requests = [
        Request([number, 5, 9], SamplingParams(max_tokens=60, ignore_eos=True, seed=number))
        for number in range(6)
    ]
    expected = answers(narrow, requests)
    wide.reset_stats()
    check_equal(expected, answers(wide, requests))
    assert wide.stats.preemptions
    texts = [[*one.prompt, *expected[number, 0][0]] for number, one in enumerate(requests)]
    assert number_of_texts(wide, texts) == 4, "that of the last sequence of each slot"


def test_counts_of_drafts_outlast_a_preemption():
    """What was in flight is lost."""
    chosen = SpeculativeConfig(enable_adaptive_verification=False)
    engine, _ = mock_engine(num_pages=20, width=3, reserve_tokens=4, speculative=chosen)
    params, found = SamplingParams(max_tokens=40, ignore_eos=True), {}
    for number, output in engine.run([Request([seed, 5, 9], params) for seed in range(4)]):
        assert output.drafts.tokens >= found.get(number, Drafts()).tokens
        found[number] = output.drafts
    assert engine.stats.preemptions
    counted = sum(drafts.tokens for drafts in found.values())
    assert 0.8 < counted / engine.stats.speculation.draft_tokens <= 1


def test_penalties_count_the_drafts_before_a_place():
    narrow, wide = engines(*MODES[0])
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": {7: 9.0, 8: 6.0}}
    request = Request(
        [3, 7], SamplingParams(max_tokens=30, ignore_eos=True, **params), prediction=[7] * 24
    )
    expected = expected_of(narrow, [request])
    assert {7, 8} < set(expected[0, 0][0]), "the penalties change the answer"
    check_equal(expected, answers(wide, [request]))


def test_nothing_is_accepted_past_a_stop():
    narrow, wide = engines(*MODES[0])
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5)
    answer = answers(narrow, [Request([5, 9, 2], params)])[0, 0][0]
    for stop in range(8, 12):
        stopping = dataclasses.replace(params, stop_token_ids=(answer[stop],), logprobs=0)
        request = Request([5, 9, 2], stopping, prediction=answer)
        expected = expected_of(narrow, [request])
        assert expected[0, 0][2] == "stop"
        check_equal(expected, answers(wide, [request]))


def test_a_right_prediction_saves_steps():
    narrow, wide = engines(*MODES[0])
    params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=1.0, seed=8)
    answer = answers(narrow, [Request([5, 9], params)])[0, 0][0]
    wide.reset_stats()
    answers(wide, [Request([5, 9], params, prediction=answer)])
    counted = wide.stats.speculation
    # The last step may have no place for drafts.
    assert counted.accepted_tokens == counted.draft_tokens >= 48 * 3 // 4 - 1
    assert counted.verify_calls <= 13


def drafts_of(engine: Engine, request: Request) -> Drafts:
    """Those of the whole answer, which the engine has counted too."""
    before = engine.stats.copy().speculation
    *_, (_, last) = engine.run([request])
    now = engine.stats.speculation
    assert last.drafts.steps == now.drafts - before.drafts
    assert last.drafts.tokens == now.draft_tokens - before.draft_tokens
    assert last.drafts.accepted == now.accepted_tokens - before.accepted_tokens
    by_place = np.subtract(now.accepted_per_position, before.accepted_per_position)
    assert by_place.sum() == last.drafts.accepted and (np.diff(by_place) <= 0).all()
    return last.drafts


def test_drafts_of_the_prediction_are_told_from_others():
    narrow, wide = engines(*MODES[0])
    params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={7: 60.0})
    sevens = drafts_of(wide, Request([5, 9], params, prediction=[8] * 20))
    assert sevens.accepted > 10 and sevens.predicted == sevens.tokens - sevens.accepted == 3
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=8)
    answer = answers(narrow, [Request([5, 9], params)])[0, 0][0]
    wrong = [*answer[:12], *([60 - answer[12]] * 3), *answer[12:]]
    prediction: Any = np.array(wrong)
    found = drafts_of(wide, Request([5, 9], params, prediction=prediction))
    assert found.predicted > found.predicted_accepted >= 12 and found.accepted < found.tokens


def test_a_prediction_that_cannot_be_used_is_refused():
    narrow, wide = engines(*MODES[0])
    short = SamplingParams(max_tokens=4)
    with pytest.raises(UsageError, match=r"`prediction` needs .*`speculative`"):
        narrow.add_request(Request([1], short, prediction=[2]))
    for prediction, message in (([61], "outside the vocabulary"), ([1] * 65, "at most 64 tokens")):
        with pytest.raises(UsageError, match=message):
            wide.add_request(Request([1], short, prediction=prediction))
    wrong: Any
    for wrong in (None, 5, "text"):
        with pytest.raises(UsageError, match="the prediction must be a list of token ids, got"):
            narrow.add_request(Request([1], short, prediction=wrong))
    for wrong in (None, "no", 1):
        with pytest.raises(UsageError, match=f"`speculative`={wrong!r} must be True or False"):
            wide.add_request(Request([1], short, speculative=wrong))


def test_options_of_speculation():
    for field, value in (
        ("num_speculative_tokens", 16),
        ("prompt_lookup_min", 0),
        ("prompt_lookup_max", 1),
        ("enable_adaptive_verification", 1),
    ):
        with pytest.raises(UsageError, match=f"`speculative_config.{field}`={value}"):
            dataclasses.replace(SpeculativeConfig(), **{field: value})
    assert parse_speculative_config("{}") == SpeculativeConfig()
    one = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 1}')
    assert one == SpeculativeConfig(num_speculative_tokens=1)
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"draft": "x"}', "`speculative_config.draft` is not supported"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_speculative_config(text)
    shared = options("own g=2", speculative=SpeculativeConfig(num_speculative_tokens=3))
    with pytest.raises(UsageError, match="needs `exact_tail` of 1 or more"):
        Engine.from_model(model("g=2"), shared)


WINDOW_AND_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "layer_kinds": (LayerKind(window=9), LayerKind()) * 2,
}


@pytest.mark.parametrize(
    ("fields", "mesh", "changed"),
    [
        ({}, None, WINDOW_AND_EXPERTS),
        ({"kv_cache_dtype": "int8"}, None, {}),
        pytest.param({"kv_cache_dtype": "fp8"}, None, {}, marks=LONG),
        pytest.param({}, (2, 2), {}, marks=LONG),
    ],
    ids=["a window and experts", "int8 cache", "fp8 cache", "mesh 2x2"],
)
def test_with_other_caches_layers_and_devices(fields, mesh, changed):
    """One engine: without drafts by request, and then with them. An 8-bit cache of tokens that came
    in a block may round otherwise, by a unit in the last place of a product."""
    chosen = options(
        "boundary",
        scoring=False,
        chunks=(16,),
        max_num_seqs=8 if mesh else 4,
        speculative=SpeculativeConfig(num_speculative_tokens=3, enable_adaptive_verification=False),
        **fields,
    )
    made = model()
    if changed:
        made = dummy_model(dataclasses.replace(made.config, **changed), jnp.float32, teacher=False)
    engine = Engine.from_model(made, chosen, mesh=None if mesh is None else make_mesh(mesh))
    requests = [
        dataclasses.replace(one, speculative=False, prediction=()) for one in requests_of(7, 16)
    ]
    expected = answers(engine, requests)
    drafting = [
        dataclasses.replace(one, speculative=True, prediction=expected[number, 0][0])
        for number, one in enumerate(requests)
    ]
    found = answers(engine, drafting)
    assert engine.stats.speculation.accepted_tokens > 80
    if "kv_cache_dtype" in fields:
        differ = [key for key in expected if found[key][0] != expected[key][0]]
        assert len(differ) <= 1
        for key in set(expected) - set(differ):
            np.testing.assert_allclose(found[key][1], expected[key][1], atol=1e-3)
    else:
        check_equal(expected, found)
