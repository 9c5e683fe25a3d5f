"""Prompts as arrays, with page keys that another thread has made."""

import numpy as np

from swiftkv_jax.infer.engine.page_pool import page_keys
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from tests.infer.engine.test_scheduler import answers, prompt_of
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
