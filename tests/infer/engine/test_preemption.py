"""Pages on demand: sequences get pages as they decode, and when there are none the request that
came last waits again, with the same answer in the end."""

import dataclasses

import pytest

from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from tests import tiny
from tests.infer.engine.test_engine import options
from tests.infer.engine.test_grammar import Digits, expected
from tests.infer.engine.test_scheduler import answers, check_empty
from tests.infer.mock_model_runner import continuation, mock_engine


def ask(number: int, max_tokens: int, **fields) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request([1 + number, 2, 3], params, **fields)


def test_what_may_be_generated_is_not_reserved():
    """Eight requests that may fill the memory run at once, and each gets its answer."""
    engine, _ = mock_engine(slots=8, num_pages=40, reserve_tokens=8, max_model_len=160)
    requests = [ask(number, 120) for number in range(8)]
    for request in requests:
        engine.add_request(request)
    engine.step()
    assert engine.num_running == 8 and engine.pages_in_use <= 8 * 3
    outputs: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
    for number, request in enumerate(requests):
        assert outputs[number] == continuation(request.prompt, 120, ends=False)
    assert engine.stats.preemptions > 3 and engine.load.pages_in_use == 0
    assert engine.stats.prompt_tokens == 8 * 3, "prompts are counted once"
    check_empty(engine)
    engine.reset_stats()
    assert len(list(engine.run([ask(0, 4)]))) and engine.stats.preemptions == 0


def test_the_first_request_is_never_preempted():
    engine, _ = mock_engine(slots=4, num_pages=32, reserve_tokens=3, max_model_len=128)
    for number in range(4):
        engine.add_request(ask(number, 100))
    ends = []
    while engine.has_work:
        steps = engine.stats.decode_calls
        ends += [(o.request_id, steps) for o in engine.step() if o.finish_reason]
    assert [number for number, _ in ends][0] == 0 and len(ends) == 4
    assert engine.stats.preemptions
    assert ends[0][1] <= 100 // 3 + 2, "it decoded in every call"


def test_a_preempted_request_waits_first():
    """Before one that came later, and has no room either."""
    engine, _ = mock_engine(slots=2, num_pages=32, reserve_tokens=3, max_model_len=128)
    for request in (ask(0, 100), ask(1, 100), Request([4] * 100, SamplingParams(max_tokens=4))):
        engine.add_request(request)
    while not engine.stats.preemptions:
        engine.step()
    assert [state.request_id for state in engine._scheduler.waiting] == [1, 2]


def test_a_preempted_request_keeps_its_salt():
    """Also where its prompt filled no page: the first key is made then."""
    engine, _ = mock_engine(slots=2, num_pages=32, reserve_tokens=3, max_model_len=128)
    for number in (0, 1):
        engine.add_request(ask(number, 100, cache_salt="a client's"))
    while not engine.stats.preemptions:
        engine.step()
    (state,) = engine._scheduler.waiting
    assert len(state.page_keys) > 1
    assert state.page_keys == engine.pools[0].keys(state.prefill_token_ids, "a client's")


def test_samples_of_one_prompt_reserve_all():
    engine, _ = mock_engine(slots=4, num_pages=64, reserve_tokens=3)
    params = SamplingParams(max_tokens=40, n=2, ignore_eos=True)
    engine.add_request(Request([1, 2, 3], params))
    engine.step()
    assert engine.pages_in_use == 2 * 11


def test_a_preempted_request_may_be_aborted():
    engine, _ = mock_engine(slots=4, num_pages=32, reserve_tokens=3, max_model_len=128)
    ids = [engine.add_request(ask(number, 100)) for number in range(4)]
    while not engine.stats.preemptions:
        engine.step()
    assert not engine.waiting_request_ids, "it does not count as one that never ran"
    for request_id in reversed(ids):
        engine.abort_request(request_id)
    while engine.has_work:
        assert not engine.step()
    check_empty(engine)


def test_grammars_go_on():
    engine, _ = mock_engine(
        slots=4, num_pages=24, reserve_tokens=3, max_model_len=90, structured_outputs=True
    )
    requests = [
        Request([9, n], SamplingParams(max_tokens=80), grammar=Digits(60)) for n in range(3)
    ]
    found = answers(engine, [ask(7, 60), *requests])
    assert engine.stats.preemptions
    assert all(found[1 + number, 0] == expected(60) for number in range(3))
    check_empty(engine)


MODES = {
    "boundary": {},
    "8 bits": {"kv_cache_dtype": "fp8"},
    "own": {"generated_kv": "own"},
    "own, a tail": {"generated_kv": "own", "exact_tail": 3},
}
SHORT = {("boundary", 1), ("8 bits", 1), ("own, a tail", 2)}


@pytest.mark.short("own, a tail-2")
@pytest.mark.parametrize(
    ("mode", "group"),
    [
        pytest.param(*case, marks=[] if case in SHORT else pytest.mark.long)
        for case in (*((mode, 1) for mode in MODES), ("own", 2), ("own, a tail", 2))
    ],
)
def test_on_a_model(mode, group):
    """Tokens and draws are those of an engine with room, penalties and log-probabilities too."""
    hf = tiny.hf_config(num_hidden_layers=3, num_key_value_layers=1, key_value_group_size=group)
    model = tiny.model_of(hf, tiny.tensors_for(hf))
    common = options(chunks=(16,), scoring=False, **MODES[mode])
    params = SamplingParams(
        max_tokens=60, temperature=0.8, seed=3, presence_penalty=0.7, frequency_penalty=0.3
    )
    params = dataclasses.replace(params, logprobs=1, min_tokens=30, repetition_penalty=1.1)
    requests = [Request([5, 1 + number, 7], params, rng_stream=number) for number in range(4)]
    found, preemptions = [], []
    roomy = Engine.from_model(model, common)
    memory = (28 if group == 1 else 50) * roomy.model_runner.layout.page_bytes(4)
    chosen = dataclasses.replace(common, kv_cache_memory=memory, reserve_tokens=4)
    for engine in (roomy, Engine.from_model(model, chosen)):
        tokens: dict[int, list[int]] = {}
        for number, output in engine.run(requests):
            tokens.setdefault(number, []).extend(output.token_ids)
            assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
        found.append(tokens)
        preemptions.append(engine.stats.preemptions)
        assert engine.stats.compilations == 0
        check_empty(engine)
    assert preemptions[0] == 0 < preemptions[1]
    assert found[0] == found[1]
