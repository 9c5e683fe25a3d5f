"""`Engine.run`: which requests it takes and when, and which outputs it yields."""

import collections
from collections.abc import Iterator

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer import Engine, Request, SamplingParams, ScoreRequest
from tests.infer.mock_model_runner import VOCAB, continuation, mock_engine


def ask(first: int, max_tokens: int = 8, **fields) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)
    return Request([first, 2, 3], params)


def expected(first: int, max_tokens: int = 8, sample: int = 0) -> list[int]:
    return continuation([first, 2, 3], max_tokens, sample, ends=False)


def answers(outputs) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, output in outputs:
        found.setdefault(number, []).extend(output.token_ids)
    return found


def check_empty(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    assert engine.pages_in_use == 0 and not engine._requests


def test_no_requests_give_no_outputs():
    engine, _ = mock_engine()
    assert list(engine.run([])) == list(engine.run(iter(()))) == []


def test_what_is_no_request_is_refused():
    engine, _ = mock_engine()
    with pytest.raises(UsageError, match="`requests` must be an iterable of requests, got Request"):
        list(engine.run(ask(1)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="request 0: `params` must be SamplingParams, got dict"):
        list(engine.run([Request([1], {"max_tokens": 3})]))  # type: ignore[arg-type]


@pytest.mark.parametrize("in_flight", [None, 1, 3, 100])
def test_requests_are_numbered_from_zero_in_their_order(in_flight):
    engine, _ = mock_engine()
    engine.add_request(ask(90))  # so that ids and numbers differ; its outputs are dropped
    numbers = range(1, 60)
    found = answers(engine.run((ask(n) for n in numbers), in_flight=in_flight))
    assert found == {number: expected(n) for number, n in enumerate(numbers)}


def test_at_most_so_many_requests_are_unfinished():
    engine, _ = mock_engine()
    taken = ended = 0

    def requests() -> Iterator[Request]:
        nonlocal taken
        for n in range(50):
            taken += 1
            yield ask(n + 1)

    for _, output in engine.run(requests(), in_flight=3):
        assert taken - ended <= 3
        ended += output.finish_reason is not None
    assert ended == 50


def test_at_most_32_requests_are_taken_between_two_steps():
    engine, _ = mock_engine()
    taken: collections.Counter[int] = collections.Counter()

    def requests() -> Iterator[Request]:
        for n in range(90):
            taken[engine.stats.decode_calls] += 1
            yield ask(n + 1)

    assert len(answers(engine.run(requests()))) == 90
    assert taken == {0: 32, 1: 32, 2: 26}


def test_none_asks_again_after_the_next_step():
    engine, _ = mock_engine()
    asked = 0

    def requests() -> Iterator[Request | None]:
        nonlocal asked
        yield from (None, None, ask(1))
        while engine.has_work:
            asked += 1
            yield None
        yield from (None, ask(2))

    assert answers(engine.run(requests(), in_flight=2)) == {0: expected(1), 1: expected(2)}
    assert asked > 2


def test_a_request_that_can_never_run_is_named():
    engine, runner = mock_engine()
    requests = [ask(1), ask(2), ask(VOCAB)]
    with pytest.raises(UsageError, match=f"request 2: the prompt: token id {VOCAB} is outside"):
        next(engine.run(requests))
    assert runner.calls == ["prepare"], "a sequence is checked before the first request runs"
    check_empty(engine)
    with pytest.raises(UsageError, match="request 2: the prompt: token id"):
        list(engine.run(iter(requests), in_flight=1))
    assert len(runner.calls) > 1
    check_empty(engine)


@pytest.mark.parametrize("in_flight", [None, 2])
def test_requests_that_can_never_run_are_handed_to_on_invalid(in_flight):
    engine, _ = mock_engine()
    requests = [ask(VOCAB), ask(1), ScoreRequest([1, 2], 5), ask(2)]
    invalid: dict[int, UsageError] = {}
    outputs = engine.run(requests, in_flight=in_flight, on_invalid=invalid.__setitem__)
    assert answers(outputs) == {1: expected(1), 3: expected(2)}
    assert list(invalid) == [0, 2] and "`start`=5" in str(invalid[2])


def test_an_error_of_the_iterator_aborts_the_requests():
    engine, _ = mock_engine()

    def requests() -> Iterator[Request]:
        yield ask(1, 30)
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        list(engine.run(requests(), in_flight=1))
    check_empty(engine)


def test_the_caller_may_abort_between_outputs():
    engine, _ = mock_engine()
    found: dict[tuple[int, int], int] = {}
    for number, output in engine.run([ask(1, 30, n=2), ask(2, 30, n=2), ask(3, 30)]):
        key = number, output.sample
        found[key] = found.get(key, 0) + len(output.token_ids)
        if key == (0, 1):
            engine.abort_request(output.request_id, 1)
        if number == 1:
            engine.abort_request(output.request_id)
    assert found == {(0, 0): 30, (0, 1): 3, (1, 0): 3, (2, 0): 30}
    check_empty(engine)


def test_in_flight_is_checked():
    engine, _ = mock_engine()
    with pytest.raises(UsageError, match="`in_flight`=0 must be at least 1"):
        next(engine.run([ask(1)], in_flight=0))
