"""The cut of a run that names none."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from swiftkv_jax import demo
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.cut import CUT_FIELDS
from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.mesh import make_mesh
from swiftkv_jax.train import chosen_cut
from swiftkv_jax.train.chosen_cut import with_cut
from swiftkv_jax.train.given_analysis import recommended_cut
from swiftkv_jax.train.recipe import DEMO, Recipe
from swiftkv_jax.train.recommendation import Budget, recommend
from tests.train.test_recommendation import CUTS, MANY

SOURCE: Any = open_any(str(demo.LLAMA))
CHOSEN = {
    "num_key_value_layers": 20,
    "key_value_group_size": 1,
    "prompt_attention_layers": 0,
    "prompt_mlp_neurons": 0,
    "boundary_taps": 1,
    "exact_head": 0,
    "generated_kv": "own",
    "exact_tail": 64,
}


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return dataclasses.replace(DEMO, num_key_value_layers=None, output_dir=tmp_path / "out")


@pytest.fixture
def analyses(monkeypatch):
    """Analyses that found `CUTS`, for the budget in the list."""
    budgets = [Budget()]

    def analyze(recipe, config, mesh):
        if budgets[0] is None:
            raise DataError("`data`=short: no token to predict in it")
        return SimpleNamespace(recommendation=recommend(CUTS, budgets[0], MANY), num_layers=30)

    monkeypatch.setattr(chosen_cut, "_analyze", analyze)
    monkeypatch.setattr(chosen_cut, "_peak", lambda recipe, mesh: 1e12)
    return budgets


def cut_of(recipe: Recipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in CUT_FIELDS}


MESH = make_mesh((1, 1))


def test_the_recommendation_is_taken_and_said(recipe, analyses, log):
    assert cut_of(with_cut(recipe, SOURCE, MESH)) == CHOSEN
    first, second = log.messages
    assert first.startswith("recommended within 2% of perplexity and 0.15 nats on far tokens: K=20")
    assert second == (
        "taking K=20 of 30 layers with a tap, generated_kv own and a tail of 64; name another with "
        "`num_key_value_layers`"
    )
    assert not any(record.levelname == "WARNING" for record in log.records)


def test_what_is_named_of_the_cut_stays(recipe, analyses, log):
    named = dataclasses.replace(recipe, exact_head=1, boundary_taps=0)
    found = CHOSEN | {"exact_head": 1, "boundary_taps": 0}
    assert cut_of(with_cut(named, SOURCE, MESH)) == found
    assert log.messages[1].startswith("taking K=20 of 30 layers with an exact head, generated_kv")


@pytest.mark.parametrize(("asked", "expected"), [(None, 8192), (100, 100), (10**6, 8192)])
def test_an_analysis_fits_to_no_more_tokens_than_the_run(asked, expected, recipe):
    """64 for each of the demo model's 128 entries."""
    recipe = dataclasses.replace(recipe, calibration_tokens=asked)
    assert chosen_cut._options(recipe, SOURCE.config).calibration_tokens == expected


def test_the_nearest_is_taken_with_a_warning(recipe, analyses, log):
    analyses[0] = Budget(0.001, 0.1)
    assert with_cut(recipe, SOURCE, MESH).num_key_value_layers == 23
    assert log.records[0].levelname == "WARNING"
    assert log.messages[0].startswith("none is within 0.1% of perplexity")


@pytest.mark.parametrize(
    ("budget", "changes", "reason"),
    [
        (None, {}, "no analysis: `data`=short: no token"),
        (Budget(), {"init": "leader"}, "of students in closed form, not of `init`=leader"),
    ],
)
def test_half_is_taken_where_there_is_no_recommendation(
    budget, changes, reason, recipe, analyses, log
):
    analyses[0] = budget
    recipe = dataclasses.replace(recipe, **changes)
    assert with_cut(recipe, SOURCE, MESH) == recipe
    assert log.messages[0].startswith("half of the layers keep their own keys and values: ")
    assert reason in log.messages[0]
    assert not recipe.output_dir.exists()


def test_an_analysis_that_takes_too_long_is_not_made(recipe, analyses, log, monkeypatch):
    monkeypatch.setattr(chosen_cut, "_peak", lambda recipe, mesh: 1e6)
    assert with_cut(recipe, SOURCE, MESH) == recipe
    assert "minutes here; run swiftkv train analyze with fewer `cuts`" in log.messages[0]


def test_others_keep_their_cut(recipe, analyses, log):
    """Those that name one, those of a model that has one, and runs that continue."""
    named = dataclasses.replace(recipe, num_key_value_layers=3)
    assert with_cut(named, SOURCE, MESH) == named
    cut: Any = SimpleNamespace(config=SOURCE.config.cut(2))
    assert with_cut(recipe, cut, MESH) == recipe
    recipe.output_dir.mkdir()
    (recipe.output_dir / "recipe.json").write_text(
        json.dumps({"config": {"num_layers": 8} | CHOSEN})
    )
    assert cut_of(with_cut(recipe, SOURCE, MESH)) == CHOSEN
    assert not log.messages


def test_a_given_analysis(tmp_path):
    found = recommend(CUTS, Budget(), MANY)
    assert found is not None
    (tmp_path / "analysis.json").write_text(
        json.dumps({"recommendation": found.record(30, None, ())})
    )
    assert recommended_cut(tmp_path) == recommended_cut(tmp_path / "analysis.json") == CHOSEN


@pytest.mark.parametrize("text", ["{}", '{"recommendation": null}', "[]", "x"])
def test_an_analysis_without_a_recommendation(text, tmp_path):
    (tmp_path / "analysis.json").write_text(text)
    with pytest.raises(UsageError, match="no recommendation in analysis.json; run swiftkv train"):
        recommended_cut(tmp_path)


def test_an_analysis_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="`analysis`=.*: No such file"):
        recommended_cut(tmp_path / "none")


def test_the_demo_names_its_cut():
    assert DEMO.num_key_value_layers == SOURCE.config.num_layers // 2
