"""The width of a call follows what drafts would have been and what a wide step costs."""

import dataclasses
import random
import types
from typing import Any

import numpy as np
import pytest

from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import SpeculativeConfig
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.engine.shadow_drafts import ShadowDrafts, lookup_text
from swiftkv_jax.infer.engine.shapes import DecodeCall, Shapes
from swiftkv_jax.infer.engine.speculation import FIRST_TOKENS
from swiftkv_jax.infer.runner import wide_costs
from tests.infer.engine.test_grammar import Among, Digits
from tests.infer.engine.test_speculation import (
    MODES,
    answers,
    check_equal,
    engines,
    expected_of,
    number_of_texts,
)
from tests.infer.mock_model_runner import mock_engine


def shadow_of(text: list[int], rate: float = 0.5) -> ShadowDrafts:
    return ShadowDrafts(lookup_text(text, [], []), rate)


def test_the_rate_follows_what_drafts_would_have_been():
    shadow = shadow_of([1, 2, 3, 1, 2, 4, 9, 1, 2])
    shadow.add([4], 1)  # what followed 1, 2 last
    assert shadow.rate == pytest.approx(0.55)
    shadow.add([7], 1)
    assert shadow.rate == pytest.approx(0.495)
    shadow.add([5, 5, 5], 4)  # two accepted drafts, and one that was rejected or missing
    assert shadow.rate == pytest.approx((0.495 * 0.81 + 0.19) * 0.9)
    for token in [1, 2, 3, 4, 5] * 20:
        shadow.add([token], 1)
    assert shadow.rate > 0.99
    assert shadow.tokens_of_step(8) == pytest.approx(8, abs=0.1)


def test_drafts_of_the_host():
    shadow = shadow_of([1, 2, 3, 4, 1, 2])
    assert shadow.tokens_at(shadow.draft((), 3)) == [3, 4, 1]
    assert shadow.tokens_at(shadow.draft((7, 3, 4), 9)) == [1, 2]
    assert shadow.tokens_at(shadow.draft((7,), 3)) == []
    for short in ([5], [5, 6]):
        assert not shadow_of(short).draft((), 3)


def adaptive(cost: float, **fields) -> Engine:
    """An engine that adapts, over the runner of another one."""
    _, wide = engines(*MODES[0])
    options = dataclasses.replace(wide.options, speculative=SpeculativeConfig(**fields))
    ends = {"eos_token_ids": wide.eos_token_ids, "options": options}
    engine = Engine(wide.model_runner, config=wide.config, **ends)
    engine._calls._wide_costs = (cost,)
    return engine


def test_a_speculator_that_is_wrong_is_tried_again_later():
    """The runner has none, so its wide steps draft from texts in which nothing repeats."""
    engine = adaptive(1.5, model="some")
    params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=3.0, seed=4)
    requests = [Request([number, 9], params, number) for number in range(6)]
    check_equal(answers(engines(*MODES[0])[0], requests), answers(engine, requests))
    tried = engine.stats.speculation.verify_calls
    calls: Any = engine._calls
    assert 5 < tried < 30 and calls._wide_tokens < 1.05 * 1.5
    calls.add_tokens(sequence := one_with_shadow(), np.arange(2000) % 61, 1)
    assert sequence.shadow.rate > 0.9 and calls._wide_tokens > 2
    before, sequence.matcher = calls._wide_tokens, Digits(9)
    calls.add_tokens(sequence, np.arange(200) % 61, 1)
    assert calls._wide_tokens == before, "a grammar's steps tell nothing of a speculator"


def one_with_shadow() -> Any:
    return types.SimpleNamespace(shadow=shadow_of([*range(61), 0, 1]), matcher=None)


@pytest.mark.parametrize("looks_up", [True, False])
def test_drafts_come_from_a_text_only_where_they_may(looks_up):
    """With a grammar too; and a prediction raises no hopes where it cannot be drafted from."""
    chosen = SpeculativeConfig(model="some", enable_suffix_decoding=looks_up)
    engine, _ = mock_engine(structured_outputs=True, width=4, speculative=chosen)
    params = SamplingParams(max_tokens=20)
    engine.add_request(
        Request([3, 4, 5, 3, 4], params, grammar=Among((3, 4, 5)), prediction=[5, 3, 4, 5, 3, 4])
    )
    engine.step()
    (sequence,) = engine._scheduler.running.values()
    calls = engine._calls
    assert (calls._draft(sequence, 3).tokens == []) is not looks_up
    assert (calls._tokens_of_step(sequence, 4) == FIRST_TOKENS) is not looks_up


def test_calls_are_narrow_where_nothing_is_copied():
    """Without a prediction, with one that is wrong, and wide with one that is right."""
    narrow, _ = engines(*MODES[0])
    engine, rng = adaptive(1.5), random.Random(3)
    params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=3.0, seed=4)
    requests = [Request([number, 9], params, number) for number in range(6)]
    expected = expected_of(narrow, requests)
    check_equal(expected, answers(engine, requests))
    engine.reset_stats()
    check_equal(expected, answers(engine, requests))
    assert engine.stats.speculation.verify_calls <= 2
    wrong = [dataclasses.replace(one, prediction=rng.sample(range(61), 48)) for one in requests[:1]]
    answers(engine, wrong)
    assert 1 <= engine.stats.speculation.verify_calls < 16
    engine.reset_stats()
    right = [dataclasses.replace(requests[0], prediction=expected[0, 0][0])]
    answers(engine, right)
    assert engine.stats.speculation.accepted_tokens > 30
    assert engine.stats.decode_calls < 16


def test_the_margin_is_over_the_cost_of_the_rows_that_run():
    engine, runner = mock_engine(width=4, speculative=SpeculativeConfig())
    engine.add_request(Request([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    (sequence,) = engine._scheduler.running.values()
    for cost, width in ((1.7, 4), (1.8, 1)):  # 1 + 1/2 + 1/4 + 1/8 tokens are expected
        engine._calls._wide_costs = (cost,)
        sequence.shadow = shadow_of([1, 2, 3])
        assert engine._calls.choose([sequence]).width == width
    assert runner.wide_costs == (1.0,)


def test_costs_are_those_of_steps(monkeypatch):
    """Process 0 has measured them for all: what is chosen must be the same everywhere."""
    _, runner = mock_engine(slots=2, steps=6, width=3)
    filled, clock = [], [0.0]

    def run(program, slots):
        assert slots == [[0, 1]] and program.rows == 2
        clock[0] += 9.0 if program.width > 1 else 6.0

    monkeypatch.setattr(wide_costs.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(wide_costs, "from_process_0", lambda costs: (*costs, "of process 0"))
    shapes: Shapes = runner.shapes
    assert shapes.wide_call(2) == DecodeCall(2, 3)
    found = wide_costs.measure_wide_costs(shapes, lambda of: filled.append(of(2)), run)
    assert found == (9.0 / 2 / (6.0 / 6), "of process 0")
    assert filled[0].remaining.tolist() == [32, 32] and not filled[-1].remaining.any()
    narrow = dataclasses.replace(shapes, widths=())
    assert wide_costs.measure_wide_costs(narrow, filled.append, run) == ()


@pytest.mark.parametrize(("seconds", "cost"), [(0.01, 2.0), (0.04, 2.0), (0.5, 4.0)])
def test_a_slow_first_call_is_no_cost(monkeypatch, seconds, cost):
    """Of a wide step that takes as long as two narrow ones, and the first as long as four; unless
    one call of each takes seconds."""
    _, runner = mock_engine(slots=1, steps=8, width=8)
    clock, calls = [0.0], []

    def run(program, slots):
        first = program.width not in calls
        calls.append(program.width)
        clock[0] += seconds * (8 if program.width == 1 else 4 if first else 2)

    monkeypatch.setattr(wide_costs.time, "perf_counter", lambda: clock[0])
    found = wide_costs.measure_wide_costs(runner.shapes, lambda of: of(1), run)
    assert found == pytest.approx((cost,))
    assert clock[0] < 1.5 or len(calls) == 2


def test_costs_are_measured_for_each_size():
    _, wide = engines(*MODES[0])
    assert [cost > 0 for cost in wide.model_runner.wide_costs] == [True]


@pytest.mark.parametrize("cost", [1e9, 0.0], ids=["narrow", "wide"])
def test_the_device_has_the_text_of_a_sequence(cost):
    """Calls of both widths write what they emit, so that later ones find it. Nothing of the longer
    text before it in the slot stays."""
    engine = adaptive(cost)
    params = SamplingParams(max_tokens=21, ignore_eos=True, temperature=1.0, seed=2)
    answers(engine, [Request([*range(3, 40)], params)])
    found = answers(engine, [Request([5, 9], params)])[0, 0][0]
    assert number_of_texts(engine, [[5, 9, *found]]) == 1
