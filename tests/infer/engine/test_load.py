"""What an engine says of its own load and of what it has done."""

import random

import pytest

from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.engine.stats import Load
from tests import tiny
from tests.infer.engine.test_engine import options
from tests.infer.engine.test_scheduler import drain
from tests.infer.mock_model_runner import VOCAB, mock_engine

IDLE = Load(0, 0, 0, 0, 0, 0)


def request(length: int, max_tokens: int = 4, **params) -> Request:
    return Request([1] * length, SamplingParams(max_tokens=max_tokens, **params))


def test_a_queue_that_is_worked_off():
    engine, _ = mock_engine(slots=2, chunk=8, page_size=4)
    idle = IDLE._replace(num_pages=engine.load.num_pages)
    assert engine.load == idle and idle.num_pages == engine.model_runner.shapes.num_pages
    lengths = (9, 5, 60, 9)
    for length in lengths:
        engine.add_request(request(length))
    # The last token of a prompt is the input of the first decode step
    assert engine.load == idle._replace(num_waiting=4, num_queued_tokens=sum(lengths) - 4)
    seen = [engine.load]
    while engine.has_work:
        engine.step()
        seen.append(engine.load)
    assert seen[-1] == idle
    assert max(load.num_running for load in seen) == 2
    assert any(load.num_prefilling for load in seen)
    queued = [load.num_queued_tokens for load in seen]
    assert queued == sorted(queued, reverse=True) and len(set(queued)) > 3


def test_it_is_that_of_the_requests_at_any_time():
    """Requests, scores and aborts at random."""
    engine, _ = mock_engine(slots=3, chunk=8, page_size=4, dp_size=2)
    idle, rng, ids = engine.load, random.Random(0), []
    for _ in range(200):
        for _ in range(rng.choice((0, 0, 1, 3))):
            tokens = [rng.randrange(1, VOCAB) for _ in range(rng.randint(2, 30))]
            params = SamplingParams(max_tokens=rng.randint(1, 6), n=rng.randint(1, 3))
            scored = ScoreRequest(tokens, rng.randint(1, len(tokens) - 1))
            ids.append(engine.add_request(rng.choice((Request(tokens, params), scored))))
        if ids and rng.random() < 0.3:
            engine.abort_request(rng.choice(ids))
        if engine.has_work:
            engine.step()
        load = engine.load
        assert load.pages_in_use == engine.pages_in_use <= load.num_pages
        assert load.num_running == engine.num_running
        states = [state for state in engine._requests.values() if not state.sequences]
        assert load.num_waiting + load.num_prefilling <= len(engine._requests)
        assert load.num_queued_tokens <= sum(len(s.prefill_token_ids) for s in states) + sum(
            len(s.prefill_token_ids) for s in engine._scheduler.prefilling
        )
    while engine.has_work:
        engine.step()
    assert engine.load == idle


def test_requests_that_are_skipped():
    """A request that does not fit is skipped for a later one."""
    engine, _ = mock_engine(slots=2, chunk=64, page_size=4, num_pages=12, max_model_len=48)
    ids = [engine.add_request(request(length, 8)) for length in (20, 40, 4)]
    first = {output.request_id: None for output in drain(engine)}
    assert list(first) == [ids[0], ids[2], ids[1]]
    assert engine.stats.num_times_skipped == 1


@pytest.mark.short("boundary")
@pytest.mark.parametrize(
    ("more", "through_all_layers"),
    [
        pytest.param({}, 0, id="boundary"),
        pytest.param({"generated_kv": "own"}, 0, id="own", marks=pytest.mark.long),
        # The last token is the input of the first decode step.
        pytest.param({"generated_kv": "own", "exact_tail": 4}, 3, id="own, a tail"),
    ],
)
def test_tokens_of_prefill(more, through_all_layers):
    """How many skipped the upper layers, and how many only filled calls of a compiled size."""
    hf = tiny.hf_config(num_hidden_layers=3, num_key_value_layers=1)
    model = tiny.model_of(hf, tiny.tensors_for(hf))
    engine = Engine.from_model(model, options(chunks=(8, 32), **more))
    lengths, stats = (40, 5), engine.stats
    for length in lengths:
        tokens = [length, *range(1, length)]  # no common prefix
        list(engine.run([Request(tokens, SamplingParams(max_tokens=2))]))
    prefilled = sum(lengths) - len(lengths)
    assert stats.prefilled_tokens == prefilled
    assert stats.lower_layer_tokens == prefilled - len(lengths) * through_all_layers
    assert stats.padding_tokens == 32 + 8 + 8 - prefilled
    list(engine.run([ScoreRequest([7] * 12, 5)]))
    assert stats.prefilled_tokens - prefilled == 11
    skipped = stats.lower_layer_tokens - (prefilled - len(lengths) * through_all_layers)
    # Token 4 predicts the first that is scored. Of the prompt before it, the last 4 have a tail.
    assert skipped == (1 if through_all_layers else 4)
