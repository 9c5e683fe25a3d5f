"""With a speculator an engine emits the same tokens, and drafts from the state of the last one."""

import dataclasses
import json

import numpy as np
import pytest

from swiftkv_jax.errors import CheckpointError, ConfigError, UsageError
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import SpeculativeConfig, parse_speculative_config
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.build import check_speculative
from swiftkv_jax.model.mesh import make_mesh
from tests import test_speculator as heads
from tests.infer.engine.own_kv_engines import LONG, engine_of, model, options
from tests.infer.engine.test_speculation import answers, check_equal, expected_of, requests_of


@pytest.mark.parametrize("mesh", [None, pytest.param((2, 2), marks=LONG)], ids=str)
def test_tokens_are_the_same_and_states_those_of_the_last(mesh, tmp_path):
    folder = heads.write(tmp_path / "head", heads.ARCTIC, heads.published(heads.ARCTIC))
    speculative = SpeculativeConfig(
        model=str(folder), num_speculative_tokens=3, enable_adaptive_verification=False
    )
    chosen = options(
        "boundary",
        scoring=False,
        chunks=(16,),
        max_num_seqs=8 if mesh else 4,
        speculative=speculative,
    )
    engine = Engine.from_model(model(), chosen, mesh=None if mesh is None else make_mesh(mesh))
    requests = requests_of(5, 12)
    expected = expected_of(engine_of("boundary"), requests)
    check_equal(expected, answers(engine, requests))
    # A random head is wrong nearly always, and the lookup of a match shorter than its drafts is
    # left to it.
    drafted = engine.stats.speculation
    assert drafted.draft_tokens > 200 and drafted.accepted_tokens < drafted.draft_tokens / 4
    greedy = [
        Request([5 + number, 9], SamplingParams(max_tokens=number, ignore_eos=True))
        for number in range(17, 25)
    ]
    right = expected_of(engine_of("boundary"), greedy)
    predicted = [
        dataclasses.replace(one, prediction=right[number, 0][0])
        for number, one in enumerate(greedy)
    ]
    before = drafted.accepted_tokens
    check_equal(right, answers(engine, predicted))
    assert drafted.accepted_tokens - before > 40, "steps end at all of their places"
    check_states(engine)
    engine.update_weights(model())
    narrow = [dataclasses.replace(one, speculative=False) for one in greedy]
    verified = drafted.verify_calls
    check_equal(right, answers(engine, narrow))
    assert drafted.verify_calls == verified
    check_states(engine)
    check_equal(right, answers(engine, predicted))


def check_states(engine: Engine) -> None:
    """The last token of each slot is the likeliest after the state that it has."""
    batch = engine.model_runner._state.batch
    hidden, token = np.asarray(batch.hidden), np.asarray(batch.token)
    has_state = hidden.any(axis=1)
    assert has_state.sum() >= 4
    likeliest = (hidden @ np.asarray(model().llama.lm_head).T).argmax(axis=1)
    np.testing.assert_array_equal(likeliest[has_state], token[has_state])


def test_options_of_a_speculator(tmp_path):
    text = '{"method": "%s", "model": "x", "num_speculative_tokens": 3}'
    wanted = SpeculativeConfig(model="x", num_speculative_tokens=3)
    for method in ("mlp_speculator", "arctic"):
        assert parse_speculative_config(text % method) == wanted
    assert parse_speculative_config('{"model": "x"}') == SpeculativeConfig(model="x")
    for fields, message in (
        ({"method": "arctic"}, "'arctic' needs `model`, its folder"),
        ({"method": "ngram", "model": "x"}, "'ngram' goes without `model`"),
        ({"method": "eagle3", "model": "x"}, "'eagle3' attends to hidden states of the prompt"),
        ({"method": "mtp"}, "'mtp' attends to hidden states of the prompt's tokens"),
        ({"method": "suffix"}, "'suffix' is not one of ngram, ngram_gpu, mlp_speculator, arctic"),
        ({"enable_suffix_decoding": False}, "`speculative_config.enable_suffix_decoding`=False"),
        ({"model": ""}, "`speculative_config.model`='' must be the folder of a speculator, or its"),
    ):
        with pytest.raises(UsageError) as error:
            parse_speculative_config(json.dumps(fields))
        assert message in str(error.value)
    other = heads.ARCTIC | {"vocab_size": 62}
    narrow = heads.IBM | {"emb_dim": 16}
    eagle = other | {"architectures": ["Eagle3Speculator"]}
    for name, fields, error_type, message in (
        ("other", other, UsageError, "its vocab_size is 62, the model's 61"),
        ("narrow", narrow, UsageError, "its hidden_size is 16, the model's 32"),
        ("eagle", eagle, ConfigError, "config.json: 'Eagle3Speculator' attends"),
        ("missing", None, CheckpointError, "missing"),
    ):
        folder = tmp_path / name
        if fields is not None:
            heads.write(folder, fields, {})  # weights come later
        with pytest.raises(error_type, match=message):
            check_speculative(SpeculativeConfig(model=str(folder)), model().config)
