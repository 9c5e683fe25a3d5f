"""`bench`: which work is timed, and that it is all of it and nothing else."""

import math

import numpy as np
import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer import Engine
from swiftkv_jax.infer.bench import timing
from swiftkv_jax.infer.bench.cells import Cell, arrival_times
from swiftkv_jax.infer.engine.options import SpeculativeConfig
from tests.infer.bench.conftest import CELL
from tests.infer.mock_model_runner import continuation, mock_engine


@pytest.fixture
def engine(bench_engine) -> Engine:
    assert not bench_engine.has_work
    return bench_engine


def test_prefill_runs_all_tokens_but_the_last_and_decodes_nothing(engine, monkeypatch):
    chunks, decoded, alone = [], [], []
    run_chunk = engine.model_runner.run_chunk

    def run(chunk):
        chunks.append(chunk.num_tokens)
        return run_chunk(chunk)

    monkeypatch.setattr(engine.model_runner, "run_chunk", run)
    monkeypatch.setattr(engine.model_runner, "run_decode", lambda *args: decoded.append(args))
    monkeypatch.setattr(engine, "run", lambda requests: alone.extend(requests) or iter([None]))
    raw = timing.prefill(engine, CELL, seed=3)
    assert sum(chunks) == 2 * 20 and len(chunks) == 3  # of at most 16 tokens
    assert not decoded
    assert [len(request.prompt) for request in alone] == [21]
    assert raw["chunks"] == 3 and 0 < raw["ttft"] and 0 < raw["seconds"]
    monkeypatch.undo()
    engine.step()
    assert not engine.has_work and not engine.pages_in_use


def test_decoding_times_full_rows_after_a_first_call(engine, monkeypatch):
    tokens, read = [], engine.model_runner.read

    def spy(handle):
        result = read(handle)
        if result is not None:
            tokens.append(result.token)
        return result

    monkeypatch.setattr(engine.model_runner, "read", spy)
    raw = timing.decode(engine, CELL, seed=3)
    monkeypatch.undo()
    assert np.shape(tokens) == (4, 2, 2)  # 8 tokens in calls of 2, for two rows
    assert np.min(tokens) >= 0, "a row had ended while it was timed"
    assert raw["steps"] == 6
    assert 0 <= raw["idle"] <= raw["seconds"]
    alike = timing._requests(engine, CELL, 3, 2)
    generated = [[] for _ in alike]
    for number, output in engine.run(alike):
        generated[number] += output.token_ids
    assert np.concatenate(tokens, axis=1).tolist() == generated, (
        "the rows did not continue their prompts"
    )


def test_rows_predict_their_own_answers_but_for_a_share():
    drafting, _ = mock_engine(width=3, speculative=SpeculativeConfig(num_speculative_tokens=2))
    cell = Cell(9, 24, prompts=2, prediction_error=0.25)
    plain = timing._requests(drafting, cell, 3, cell.prompts)
    answers = [continuation(one.prompt, 24, ends=False) for one in plain]
    requests = timing._with_predictions(drafting, plain, 0.25, 3)
    assert [one.prompt for one in requests] == [one.prompt for one in plain]
    right = np.mean([np.equal(one.prediction, answers[at]) for at, one in enumerate(requests)])
    assert 0.6 < right < 0.9
    raw = timing.decode(drafting, cell, seed=3)
    assert 24 - 6 <= raw["steps"] < 24 and not drafting.has_work
    assert 0 < raw["accepted_tokens"] < raw["draft_tokens"] <= 2 * raw["drafts"]
    with pytest.raises(UsageError, match="`output_len`=4 must be at least 6"):
        timing.decode(drafting, Cell(9, 4, 2), seed=3)


def test_offline_counts_every_token(engine):
    raw = timing.measure("offline", engine, Cell(input_len=9, output_len=5, prompts=5), 7)
    assert raw["new_tokens"] == 25
    assert (raw["compilations"], raw["prefix_hits"]) == (0, 0)
    assert 0 <= raw["idle"] <= raw["seconds"]


def test_a_cache_too_small_for_all_rows_is_refused(engine):
    rows = engine.model_runner.shapes.num_pages  # a row has at least two pages
    with pytest.raises(UsageError, match="holds .* rows: lower `batch` or `input_len`"):
        timing.prefill(engine, Cell(input_len=21, output_len=1, prompts=rows), seed=3)
    engine.step()
    assert not engine.has_work and not engine.pages_in_use


def test_every_repetition_has_its_own_prompts(engine):
    first, again, other = (timing._requests(engine, CELL, seed, 2) for seed in (1, 1, 2))
    assert [r.prompt for r in first] == [r.prompt for r in again] != [r.prompt for r in other]
    assert first[0].prompt != first[1].prompt


@pytest.mark.parametrize("limit", [None, 1])
def test_latency_counts_from_arrival(engine, limit, monkeypatch):
    inside, most = set(), []
    add_request, step = engine.add_request, engine.step

    def submitted(request):
        inside.add(id := add_request(request))
        most.append(len(inside))
        return id

    def stepped():
        outputs = step()
        inside.difference_update(one.request_id for one in outputs if one.finish_reason)
        return outputs

    monkeypatch.setattr(engine, "add_request", submitted)
    monkeypatch.setattr(engine, "step", stepped)
    raw = timing.latency(
        engine, Cell(9, 6, prompts=4, request_rate=math.inf, max_concurrency=limit), seed=5
    )
    assert max(most) == (limit or 4)
    assert raw["new_tokens"] == 24 and len(raw["ttft"]) == len(raw["e2e"]) == 4
    assert len(raw["itl"]) == 4 * 2  # 6 tokens in calls of 2
    for ttft, tpot, e2e in zip(raw["ttft"], raw["tpot"], raw["e2e"], strict=True):
        assert tpot == pytest.approx((e2e - ttft) / 5)


def test_arrivals_are_a_poisson_process():
    gaps = np.diff(arrival_times(4000, 5.0, seed=1))
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.1) and gaps.std() == pytest.approx(
        1 / 5, rel=0.1
    )
    assert arrival_times(3, math.inf, seed=1) == [0, 0, 0]
