"""What a caller may ask for: every value in its range is taken, every other refused by name,
whether from Python or from JSON."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from swiftkv_jax import UsageError
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from tests.infer.engine.mock_requests import ask, check_empty, drain
from tests.infer.mock_model_runner import mock_engine

REFUSED = [
    ({"max_tokens": 0}, "`max_tokens`=0 must be an integer from 1 to 2147483647"),
    ({"max_tokens": 2**31}, "`max_tokens`=2147483648 must be"),
    ({"max_tokens": 1.0}, "`max_tokens`=1.0 must be"),
    ({"max_tokens": True}, "`max_tokens`=True must be"),
    ({"max_tokens": "9"}, "`max_tokens`='9' must be"),
    ({"max_tokens": None}, "`max_tokens`=None must be"),
    ({"temperature": -0.5}, "`temperature`=-0.5 must be a number from 0 to 100 (0 is greedy)"),
    ({"temperature": float("nan")}, "`temperature`=nan must be"),
    ({"temperature": float("inf")}, "`temperature`=inf must be"),
    ({"temperature": 10**400}, "`temperature`=1000000"),
    ({"temperature": True}, "`temperature`=True must be"),
    ({"temperature": "1"}, "`temperature`='1' must be"),
    ({"temperature": 1 + 0j}, "`temperature`=(1+0j) must be"),
    ({"top_k": -2}, "`top_k`=-2 must be an integer from -1 to 2147483647 (0 and -1 are off)"),
    ({"top_k": 2.5}, "`top_k`=2.5 must be"),
    ({"top_p": -0.1}, "`top_p`=-0.1 must be a number from 0 to 1 (1 is off)"),
    ({"top_p": 1.01}, "`top_p`=1.01 must be"),
    ({"top_p": float("nan")}, "`top_p`=nan must be"),
    ({"min_p": -0.1}, "`min_p`=-0.1 must be a number from 0 to 1 (0 is off)"),
    ({"min_p": 1.1}, "`min_p`=1.1 must be"),
    (
        {"repetition_penalty": 0},
        "`repetition_penalty`=0 must be a number from 0.01 to 100 (1 is off)",
    ),
    ({"repetition_penalty": 101}, "`repetition_penalty`=101 must be"),
    ({"repetition_penalty": float("inf")}, "`repetition_penalty`=inf must be"),
    ({"presence_penalty": 2.1}, "`presence_penalty`=2.1 must be a number from -2 to 2 (0 is off)"),
    ({"presence_penalty": -2.1}, "`presence_penalty`=-2.1 must be"),
    (
        {"frequency_penalty": -2.1},
        "`frequency_penalty`=-2.1 must be a number from -2 to 2 (0 is off)",
    ),
    ({"frequency_penalty": float("nan")}, "`frequency_penalty`=nan must be"),
    ({"logit_bias": [1]}, "`logit_bias`=[1] must map token ids to numbers"),
    ({"logit_bias": {-1: 1.0}}, "`logit_bias`: token=-1 must be an integer from 0 to"),
    ({"logit_bias": {"5": 1.0}}, "`logit_bias`: token='5' must be"),
    ({"logit_bias": {True: 1.0}}, "`logit_bias`: token=True must be"),
    ({"logit_bias": {5: 101}}, "`logit_bias`[5]=101 must be a number from -100 to 100"),
    ({"logit_bias": {5: float("nan")}}, "`logit_bias`[5]=nan must be"),
    (
        {"logit_bias": {i: 1.0 for i in range(301)}},
        "`logit_bias` has 301 entries; at most 300 are possible",
    ),
    (
        {"seed": -(2**63) - 1},
        "`seed`=-9223372036854775809 must be an integer from -9223372036854775808 to "
        "9223372036854775807",
    ),
    ({"seed": 2**63}, "`seed`=9223372036854775808 must be"),
    ({"n": 0}, "`n`=0 must be an integer from 1 to 16"),
    ({"n": 17}, "`n`=17 must be"),
    ({"stop": 5}, "`stop`=5 must be a list of strings"),
    ({"stop": ["a", 5]}, "`stop`=5 must be a string of 1 to 256 characters"),
    ({"stop": [""]}, "`stop`='' must be a string of 1 to 256 characters"),
    ({"stop": ""}, "`stop`='' must be"),
    ({"stop": ["a" * 257]}, "`stop`='aaaaaaaaaaaa"),
    ({"stop": ["a"] * 17}, "`stop` has 17 entries; at most 16 are possible"),
    ({"stop_token_ids": 5}, "`stop_token_ids`=5 must be a list of token ids"),
    ({"stop_token_ids": "5"}, "`stop_token_ids`='5' must be a list of token ids"),
    ({"stop_token_ids": [-1]}, "`stop_token_ids`=-1 must be an integer from 0 to"),
    (
        {"stop_token_ids": list(range(17))},
        "`stop_token_ids` has 17 entries; at most 16 are possible",
    ),
    ({"min_tokens": -1}, "`min_tokens`=-1 must be an integer from 0 to 128 (at most max_tokens)"),
    ({"max_tokens": 5, "min_tokens": 6}, "`min_tokens`=6 must be an integer from 0 to 5"),
    ({"ignore_eos": 1}, "`ignore_eos`=1 must be true or false"),
    ({"logprobs": -1}, "`logprobs`=-1 must be an integer from 0 to 20"),
    ({"logprobs": 21}, "`logprobs`=21 must be"),
    ({"logprobs": True}, "`logprobs`=True must be"),
]


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(UsageError) as error:
        function(*args, **kwargs)
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_a_value_out_of_range_is_refused_by_name(fields, message):
    assert refusal(SamplingParams, **fields).startswith(message)
    with pytest.raises(UsageError) as error:
        SamplingParams(**fields)
    assert error.value.option in fields


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1, "min_tokens": 1, "n": 16, "seed": 2**63 - 1, "logprobs": 20},
        {"temperature": 100, "top_k": -1, "top_p": 1, "min_p": 1},
        {"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": 2},
        {
            "stop": ("a" * 256,) * 16,
            "stop_token_ids": tuple(range(16)),
            "logit_bias": {i: -100.0 for i in range(300)},
        },
        {"logprobs": 0, "ignore_eos": True, "top_p": 0, "seed": -(2**63)},
    ],
    ids=str,
)
def test_the_ends_of_each_range_are_taken(fields):
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields
    assert SamplingParams.from_json(fields, SamplingParams()) == params


def test_values_are_kept_as_plain_python():
    fields: dict[str, Any] = {
        "max_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "stop": "end",
        "stop_token_ids": [np.int32(4)],
    }
    params = SamplingParams(**fields, logit_bias={7: 1})
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("end",), (4,), {7: 1.0})
    assert [
        type(value) for value in (params.max_tokens, params.temperature, params.stop_token_ids[0])
    ] == [int, float, int]
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(dataclasses.replace(params))


def test_json_changes_what_it_names():
    defaults = SamplingParams(
        max_tokens=9, temperature=0.5, stop=("x",), logprobs=2, logit_bias={1: 1.0}
    )
    fields = {"top_p": 0.9, "stop": "y", "logit_bias": {"17": 2, "0": -1}}
    changed = dataclasses.replace(defaults, top_p=0.9, stop=("y",), logit_bias={17: 2.0, 0: -1.0})
    assert SamplingParams.from_json(fields, defaults) == changed
    assert SamplingParams.from_json({"stop": ["a", "b"]}, defaults).stop == ("a", "b")
    assert SamplingParams.from_json({}, defaults) == defaults


def test_json_null_leaves_the_default_but_for_logprobs():
    defaults = SamplingParams(temperature=0.5, stop=("x",), logprobs=2)
    assert SamplingParams.from_json({"temperature": None, "stop": None}, defaults) == defaults
    assert SamplingParams.from_json({"logprobs": None}, defaults).logprobs is None


@pytest.mark.parametrize("alias", ["max_completion_tokens", "max_new_tokens"])
def test_json_aliases(alias):
    assert SamplingParams.from_json({alias: 7}, SamplingParams()).max_tokens == 7
    assert refusal(
        SamplingParams.from_json, {"max_tokens": 7, alias: 7}, SamplingParams()
    ).startswith(f"`{alias}` says `max_tokens` a second time")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 2}, "`best_of` is not supported"),
        ({"suffix": "x"}, "`suffix` is not supported"),
        ({"response_format": {"type": "json_object"}}, "`response_format` is not supported"),
        ({"guided_json": {}}, "`guided_json` is not supported"),
        ({"guided_regex": "a"}, "`guided_regex` is not supported"),
        ({"bad_words": ["x"]}, "`bad_words` is not supported"),
        ({"length_penalty": 0.5}, "`length_penalty` is not supported"),
        ({"use_beam_search": True}, "`use_beam_search` is not supported"),
        ({"truncate_prompt_tokens": 5}, "`truncate_prompt_tokens` is not supported"),
        ({"top_a": 0.1}, "`top_a` is not supported"),
        ({"typical_p": 0.9}, "`typical_p` is not supported"),
        ({"top_logprobs": 5}, "`top_logprobs` is not supported"),
        (
            {"temprature": 1},
            "'temprature' is not a sampling parameter; known are frequency_penalty, ignore_eos,",
        ),
        ({"temprature": None}, "'temprature' is not"),
        ({"x" * 9999: 1}, "'xxxxxxxxxxxx"),
        ({"temperature": "hot"}, "`temperature`='hot' must be"),
        ({"max_new_tokens": 0}, "`max_tokens`=0 must be"),
        ({"logprobs": True}, "`logprobs`=True must be"),
        ({"logit_bias": {"x": 1}}, "`logit_bias`: token='x' must be"),
        ({"logit_bias": {"-5": 1}}, "`logit_bias`: token='-5' must be"),
        ({"logit_bias": {"05": 1}}, "`logit_bias`: token='05' must be"),
        ({"logit_bias": {"5.0": 1}}, "`logit_bias`: token='5.0' must be"),
        ({"logit_bias": {"9" * 9999: 1}}, "`logit_bias`: token='999"),
        ({"logit_bias": {"5": True}}, "`logit_bias`[5]=True must be"),
        ({"stop": {}}, "`stop`={} must be a list of strings"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_json_that_cannot_be_honoured_is_refused_by_name(fields, message):
    assert refusal(SamplingParams.from_json, fields, SamplingParams()).startswith(message)


def test_json_of_what_is_not_supported_but_asks_for_nothing():
    fields = {
        "best_of": 1,
        "suffix": None,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "bad_words": [],
        "response_format": {"type": "text"},
    }
    assert SamplingParams.from_json(fields, SamplingParams()) == SamplingParams()


def test_token_ids_must_be_in_the_vocabulary():
    SamplingParams(logit_bias={99: 1.0}, stop_token_ids=(99,)).check_vocabulary(100)
    for name, params in (
        ("logit_bias", SamplingParams(logit_bias={100: 1.0})),
        ("stop_token_ids", SamplingParams(stop_token_ids=(5, 100))),
    ):
        assert (
            refusal(params.check_vocabulary, 100)
            == f"`{name}`: token 100 is outside the vocabulary, 0 to 99"
        )


def test_too_many_end_tokens_are_refused_before_a_step():
    engine, _ = mock_engine()
    engine.eos_token_ids = tuple(range(20))
    with pytest.raises(UsageError, match="`stop_token_ids` and .* are 25 together; at most 24"):
        engine.add_request(ask([1], stop_token_ids=list(range(20, 25))))
    engine.add_request(ask([1], stop_token_ids=list(range(20, 24))))
    engine.add_request(ask([1], stop_token_ids=list(range(20, 25)), ignore_eos=True))
    drain(engine)
    check_empty(engine)
