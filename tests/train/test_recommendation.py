"""The choice among measured cuts, on made-up numbers."""

import dataclasses
import json
from typing import Any

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.train.analysis.recommendation import Budget, parse_budget, recommend
from swiftkv_jax.train.analysis.sweep import CutResult
from swiftkv_jax.train.loss.quality import MIN_FAR_TOKENS


def cut(k: int, prefill: float, perplexity: float, far: float | None, **fields: Any) -> CutResult:
    values = {
        "key_value_group_size": 1,
        "prompt_attention_layers": 0,
        "prompt_mlp_neurons": 0,
        "boundary_taps": 0,
        "exact_head": 0,
        "generated_kv": "own",
        "exact_tail": 64,
        "tokens": 1000,
        "kl": 0.01,
        "agreement": 0.9,
        "teacher_perplexity": 5.0,
        "student_perplexity": 5.0 * (1 + perplexity),
        "perplexity_loss_error": 0.002,
        "far_nats_error": None if far is None else 0.03,
        "kv_bytes_per_token": 1024,
        "kv_bytes_share": 1.0,
        "layers": [],
        "r2": [],
    }
    return CutResult(
        num_key_value_layers=k,
        prefill_flops_share=prefill,
        perplexity_loss=perplexity,
        far_nats=far,
        **(values | fields),
    )


CUTS = [
    cut(15, 0.53, 0.14, 1.48),
    cut(15, 0.54, 0.056, 0.5, boundary_taps=1),
    cut(18, 0.63, 0.0181, 0.17, boundary_taps=1),
    cut(20, 0.69, 0.018, 0.12, boundary_taps=1),
    cut(20, 0.68, 0.017, 0.226),
    cut(23, 0.78, 0.004, 0.05),
]
MANY = MIN_FAR_TOKENS


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(), (20, 1)),  # exactly at both borders, with its errors
        (Budget(0.0199, 0.15), (23, 0)),
        (Budget(0.02, None), (20, 0)),
        (Budget(None, 0.149), (23, 0)),
        (Budget(0.06, 0.6), (15, 1)),
        (Budget(1.0, 10.0), (15, 0)),
    ],
)
def test_the_cheapest_within_the_budget(budget, expected):
    found = recommend(CUTS, budget, MANY)
    assert found is not None and found.within_budget
    assert (found.num_key_value_layers, found.boundary_taps) == expected
    assert recommend(CUTS[::-1], budget, MANY) == found, "the order does not count"


def test_none_within_the_budget():
    """The one that misses by the smallest share of a limit, and by how much."""
    found = recommend(CUTS, Budget(0.001, 0.1), MANY)
    assert found is not None and not found.within_budget
    assert found.num_key_value_layers == 23, "6 times one limit, 0.8 of the other"
    text = found.describe(30)
    assert text.startswith("none is within 0.1% of perplexity and 0.1 nats on far tokens, by 0.5% ")
    assert "of perplexity: the nearest is K=23 of 30 layers" in text
    assert found.command("m", ["d"]).startswith("swiftkv train --model m --data d --num-key-")
    found = recommend(CUTS[:2], Budget(), MANY)
    assert found is not None and found.boundary_taps == 1
    assert "by 3.8% of perplexity and 0.380 nats:" in found.describe(30)


def test_ties_are_broken_by_the_cache_then_by_divergence():
    small = cut(10, 0.5, 0.01, 0.1, kv_bytes_per_token=512, kl=0.5)
    near = cut(11, 0.5, 0.01, 0.1, kl=0.001)
    far = cut(12, 0.5, 0.01, 0.1, kl=0.1)
    for cuts, k in (([far, near, small], 10), ([far, near], 11)):
        found = recommend(cuts, Budget(), MANY)
        assert found is not None and found.num_key_value_layers == k


def test_a_gain_is_within_every_budget():
    found = recommend([cut(4, 0.5, -0.003, -0.04)], Budget(1e-6, 1e-6), MANY)
    assert found is not None and found.within_budget


def test_too_few_far_tokens():
    """Perplexity alone decides, and the sentence says so; with nothing else there is no answer."""
    found = recommend(CUTS, Budget(), MANY - 1)
    assert found is not None and (found.num_key_value_layers, found.boundary_taps) == (20, 0)
    sentence = found.describe(30)
    assert found.far_is_unknown and "too few to say (64 are needed: measure more rows)" in sentence
    assert sentence.startswith("recommended within 2% of perplexity alone: ")
    assert recommend(CUTS, Budget(None, 0.1), MANY - 1) is None
    assert recommend([], Budget(), MANY) is None


def test_the_record_names_the_command():
    found = recommend(CUTS, Budget(), MANY)
    assert found is not None
    record = json.loads(json.dumps(found.record(30, "a model", ["x.jsonl"])))
    assert record["command"] == (
        "swiftkv train calibrate --model 'a model' --data x.jsonl --num-key-value-layers 20 "
        "--boundary-taps 1 --generated-kv own --exact-tail 64 --output-dir runs/cut"
    )
    assert record["sentence"] == (
        "recommended within 2% of perplexity and 0.15 nats on far tokens: K=20 of 30 layers with "
        "a tap, generated_kv own and a tail of 64; +1.8% ± 0.2% of perplexity, +0.120 ± 0.030 "
        "nats on far tokens; 69.0% of the teacher's prefill"
    )
    names = {field.name for field in dataclasses.fields(found)}
    assert names | {"sentence", "command"} == record.keys()
    short = found.record(30, "a model", ["x.jsonl"], None, 1024)["command"]
    assert "--data x.jsonl --max-length 1024 --num-key-value-layers 20" in short


def test_errors_that_are_unknown():
    """Those of a single row are not shown and count as none."""
    unknown: dict[str, Any] = {"perplexity_loss_error": None, "far_nats_error": None}
    found = recommend([dataclasses.replace(each, **unknown) for each in CUTS], Budget(), MANY)
    known = recommend(CUTS, Budget(), MANY)
    assert found is not None and known is not None
    assert found == dataclasses.replace(known, **unknown)
    assert "; +1.8% of perplexity, +0.120 nats on far tokens; " in found.describe(30)


@pytest.mark.parametrize(
    ("perplexity", "far", "expected"),
    [
        (None, None, Budget(0.02, 0.15)),
        ("2%", None, Budget(0.02, None)),
        ("0.02", None, Budget(0.02, None)),
        (" 150 % ", 0.3, Budget(1.5, 0.3)),
        (None, 0.1, Budget(None, 0.1)),
    ],
)
def test_budgets(perplexity, far, expected):
    assert parse_budget(perplexity, far) == expected


@pytest.mark.parametrize(
    ("perplexity", "far", "message"),
    [
        ("2", None, "`max_perplexity_loss`='2': expected a percentage above 0"),
        ("0%", None, "percentage above 0"),
        ("-1%", None, "percentage above 0"),
        ("nan", None, "percentage above 0"),
        ("two", None, "percentage above 0"),
        (None, 0.0, "`max_far_loss`=0.0: must be above 0 nats"),
        (None, float("inf"), "above 0 nats and finite"),
        (None, float("nan"), "above 0 nats and finite"),
    ],
)
def test_refuses_budgets(perplexity, far, message):
    with pytest.raises(UsageError, match=message):
        parse_budget(perplexity, far)
