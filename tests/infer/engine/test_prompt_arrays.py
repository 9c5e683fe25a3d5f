"""Prompts as arrays, with page keys that another thread has made."""

import numpy as np
import pytest

from swiftkv_jax.infer.engine.options import SpeculativeConfig
from swiftkv_jax.infer.engine.page_pool import page_keys
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from tests.infer.engine.test_scheduler import answers, check, drain, prompt_of
from tests.infer.mock_model_runner import mock_engine


def test_arrays_and_keys_made_elsewhere_are_those_of_lists():
    engine, _ = mock_engine()
    prompt = prompt_of(3, 17)
    array, params = np.asarray(prompt, np.int32), SamplingParams(max_tokens=4)
    expected = answers(engine, [Request(prompt, params)])
    keys = page_keys(prompt, 4)
    made = [{"page_keys": keys}, {"page_keys": None}]
    for fields in made:
        request = Request(array, params, **fields)  # type: ignore[arg-type]
        assert answers(engine, [request]) == expected
    assert engine.prefix_stats.hits == 32
    # They are believed: nothing else looks at what the pages hold.
    salted = Request(prompt, params, page_keys=page_keys(prompt, 4, "another"))
    ((_, output), *_) = engine.run([salted])
    assert output.num_cached_tokens == 0
    without, _ = mock_engine(enable_prefix_caching=False)
    assert answers(without, [Request(prompt, params, page_keys=keys)] * 2)[1, 0] == expected[0, 0]
    assert without.prefix_stats.hits == 0


@pytest.mark.parametrize("make", [list, np.array, lambda ids: memoryview(np.array(ids))])
def test_the_caller_may_change_what_it_has_asked(make):
    """The engine keeps tokens of its own: of a prompt, a prediction, and a text that is scored."""
    ids, other = prompt_of(3, 17), prompt_of(4, 17)
    params = SamplingParams(max_tokens=9, ignore_eos=True)

    def requests(tokens) -> list[Request | ScoreRequest]:
        return [Request(tokens, params, prediction=tokens), ScoreRequest(tokens, 1)]

    engine, _ = mock_engine(width=4, speculative=SpeculativeConfig())
    given = make(ids)
    numbers = {engine.add_request(one): number for number, one in enumerate(requests(given))}
    given[:] = make(other)
    found: dict[tuple[int, int], list[int]] = {}
    for output in drain(engine):
        key = numbers[output.request_id], output.sample
        found.setdefault(key, []).extend(output.token_ids)
    # The prefix cache knows the pages by the tokens that they hold.
    for tokens in (ids, other):
        expected = answers(engine, requests(tokens))
        assert (found == expected) == (tokens is ids)
        for number, request in enumerate(requests(tokens)):
            check(request, 0, expected[number, 0])
