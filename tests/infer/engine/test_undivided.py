"""Ctrl-C and errors within a step: an engine is whole afterwards, or refuses to go on."""

import signal

import pytest

from swiftkv_jax.infer.engine.requests import Request
from tests.infer.engine.mock_requests import ask, check_empty, drain, prompt_of
from tests.infer.mock_model_runner import continuation, mock_engine

PROMPTS = [prompt_of(seed, 21) for seed in range(3)]
REQUESTS = [ask(prompt, 9, ignore_eos=True) for prompt in PROMPTS]
EXPECTED = {at: continuation(prompt, 9, ends=False) for at, prompt in enumerate(PROMPTS)}


def answers(engine, requests=REQUESTS) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, output in engine.run(requests):
        found.setdefault(number, []).extend(output.token_ids)
    return found


def on_call(runner, monkeypatch, name: str, act) -> None:
    """Let the model runner act before the second call of a method."""
    method, calls = getattr(runner, name), []

    def acting(*args):
        calls.append(name)
        if len(calls) == 2:
            act()
        return method(*args)

    monkeypatch.setattr(runner, name, acting)


@pytest.fixture
def with_sigint():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


CALLS = ["run_chunk", "add_sequences", "update_pages", "run_decode", "read"]


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_run_leaves_a_whole_engine(name, monkeypatch, with_sigint):
    engine, runner = mock_engine()
    ended = []

    def interrupt():
        signal.raise_signal(signal.SIGINT)
        ended.append(False)  # the step goes on

    on_call(runner, monkeypatch, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        answers(engine)
    assert ended and not engine.failed
    assert answers(engine) == EXPECTED
    check_empty(engine)


def test_an_interrupt_comes_between_two_requests_and_two_aborts(monkeypatch, with_sigint):
    engine, _ = mock_engine()
    added = engine._scheduler.add

    def requests():
        yield from REQUESTS

    def interrupted(state):
        added(state)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine._scheduler, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(engine.run(requests()))
    check_empty(engine)
    monkeypatch.undo()
    abort, outputs = engine._scheduler.abort, engine.run(REQUESTS)
    next(outputs)
    monkeypatch.setattr(
        engine._scheduler, "abort", lambda state: (signal.raise_signal(signal.SIGINT), abort(state))
    )
    with pytest.raises(KeyboardInterrupt):
        outputs.close()
    drain(engine)
    check_empty(engine)


@pytest.mark.parametrize("error", [KeyError("lost"), KeyboardInterrupt()])
def test_an_error_in_a_step_is_the_end_of_an_engine(error, monkeypatch):
    engine, runner = mock_engine()
    answers(engine, REQUESTS[:1])
    cached, written = dict(engine.pools[0]._page_of), []
    monkeypatch.setattr(engine.pools[0], "persist", written.append)

    def fail():
        raise error

    on_call(runner, monkeypatch, "read", fail)
    with pytest.raises(type(error)):
        answers(engine, [ask(prompt_of(9, 3), 30, ignore_eos=True)])
    assert engine.failed and engine.pools[0]._page_of == cached
    calls = [
        engine.step,
        lambda: engine.add_request(Request([1])),
        lambda: engine.abort_request(1),
        lambda: engine.update_weights(None),  # type: ignore[arg-type]
        lambda: answers(engine),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="between two states: make a new one"):
            call()
    engine.persist_prefix_cache(1)
    assert not written


def test_a_request_that_cannot_be_read_changes_nothing():
    engine, _ = mock_engine()
    with pytest.raises(TypeError):
        engine.add_request(Request(PROMPTS[0], REQUESTS[0].params, page_keys=5))  # type: ignore[arg-type]
    check_empty(engine)
    assert answers(engine) == EXPECTED
