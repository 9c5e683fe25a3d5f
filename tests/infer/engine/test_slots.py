"""When a slot goes from one sequence to the next."""

import pytest

from tests.infer.engine.mock_requests import ask, check_empty, drain, prompt_of
from tests.infer.mock_model_runner import continuation, mock_engine


def test_a_slot_is_free_when_the_last_call_of_its_sequence_is_sent():
    """The next sequence decodes in the very next call, not in the one after its results."""
    engine, runner = mock_engine(slots=2, steps=4, chunk=16)
    for seed in range(6):
        engine.add_request(ask(prompt_of(seed, 5), 8, ignore_eos=True))
    drain(engine)
    check_empty(engine)
    assert runner.calls[1:] == ["prefill 8", "decode 2", "decode 2"] * 3


def test_a_sequence_without_a_slot_still_counts_as_running():
    engine, _ = mock_engine(slots=1, steps=4)
    engine.add_request(ask(prompt_of(1, 5), 4, ignore_eos=True))
    engine.step()
    assert engine.num_running == 1 and engine.has_work and engine.pages_in_use
    drain(engine)
    assert engine.num_running == 0


def test_a_request_takes_the_pages_of_those_that_end_if_it_needs_them():
    """Without them it would wait for the results, with a slot empty for a call."""
    engine, runner = mock_engine(slots=2, steps=4, chunk=16, num_pages=7)
    for seed in range(6):
        engine.add_request(ask(prompt_of(seed, 5), 8, ignore_eos=True))
    drain(engine)
    check_empty(engine)
    assert runner.calls[1:] == ["prefill 8", "decode 2", "decode 2"] * 3


@pytest.mark.parametrize(("num_pages", "hits"), [(64, 12), (8, 4)])
def test_what_ended_is_shared_unless_its_pages_were_needed(num_pages, hits):
    engine, _ = mock_engine(slots=1, steps=4, num_pages=num_pages)
    prompts = prompt_of(1, 6), prompt_of(2, 17)
    for prompt in prompts:
        engine.add_request(ask(prompt, 8, ignore_eos=True))
    drain(engine)
    engine.add_request(ask(prompts[0] + continuation(prompts[0], 8, ends=False), 1))
    drain(engine)
    assert engine.prefix_stats.hits == hits


def test_running_requests_are_not_preempted_for_pages_of_those_that_end():
    engine, _ = mock_engine(slots=2, steps=4, num_pages=7, reserve_tokens=4)
    engine.add_request(ask(prompt_of(1, 5), 24, ignore_eos=True))
    engine.add_request(ask(prompt_of(2, 5), 4, ignore_eos=True))
    drain(engine)
    check_empty(engine)
    assert engine.stats.preemptions == 0
