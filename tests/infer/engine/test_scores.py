"""Scores in the engine: in chunks, from what is cached, and in parts."""

import pytest

from swiftkv_jax.infer.engine.requests import LogprobArrays, ScoreRequest
from tests.infer.engine.test_scheduler import ask, check, check_empty, drain, prompt_of
from tests.infer.mock_model_runner import VOCAB, mock_engine, next_token


def test_scores_run_in_chunks_and_reuse_what_comes_before():
    engine, _ = mock_engine(chunk=8)
    tokens = prompt_of(2, 30)
    list(engine.run([ask(tokens[:20], 1)]))
    for start, cached in ((25, 20), (1, 0), (17, 16), (29, 28)):
        ((_, event),) = engine.run([ScoreRequest(tokens, start)])
        assert event.token_ids == [next_token(tokens[:at]) for at in range(start, 30)]
        assert event.logprobs is not None and len(event.logprobs) == 30 - start
        assert event.num_cached_tokens == cached  # whole pages before the first scored position
    check_empty(engine)


@pytest.mark.parametrize(("length", "sizes"), [(2049, [2048]), (4096, [2048, 2047])])
def test_long_scores_come_in_parts(length, sizes):
    engine, _ = mock_engine(chunk=200, num_pages=1100, max_model_len=4096)
    tokens = prompt_of(8, length)
    request, outputs = ScoreRequest(tokens, 1, top_logprobs=2), []
    engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            outputs.append(output)
            if output.finish_reason is None:
                assert engine.stats.prefilled_tokens < length - 1, "a part waited for the end"
    assert [len(output.token_ids) for output in outputs] == sizes
    assert [output.finish_reason for output in outputs] == [None] * (len(sizes) - 1) + ["stop"]
    found = [token for output in outputs for token in output.token_ids]
    check(request, 0, found)
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    assert [entry.logprob for entry in entries] == [-token for token in found]
    assert [entry.top_logprobs for entry in entries] == [
        ((token, 0.0), ((token + 1) % VOCAB, -1.0)) for token in found
    ]
    check_empty(engine)


def test_scores_are_arrays_of_their_own():
    """What the device returned is not kept."""
    engine, _ = mock_engine()
    ((_, output),) = engine.run([ScoreRequest(prompt_of(1, 12), 3, top_logprobs=3)])
    logprobs = output.logprobs
    assert isinstance(logprobs, LogprobArrays) and logprobs.top_ids.shape == (9, 3)
    arrays = (logprobs.logprob, logprobs.top_ids, logprobs.top_logprobs)
    assert all(array.base is None for array in arrays)
    assert list(logprobs[2:4]) == [logprobs[2], logprobs[3]] and len(logprobs[2:4]) == 2
    assert logprobs[-1] == list(logprobs)[8] and type(logprobs[0].logprob) is float
    with pytest.raises(IndexError):
        logprobs[9]


def test_long_scores_that_are_aborted_leave_nothing():
    engine, _ = mock_engine(chunk=200, num_pages=1100, max_model_len=4096)
    outputs = engine.run([ScoreRequest(prompt_of(8, 4096), 1)])
    assert next(outputs)[1].finish_reason is None
    outputs.close()
    drain(engine)
    check_empty(engine)
