"""The cut of a run that names none."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftkv_jax import demo
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.model.cut import CUT_FIELDS
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.train.analysis import chosen_cut
from swiftkv_jax.train.analysis.analyze import recorded_options
from swiftkv_jax.train.analysis.chosen_cut import with_cut
from swiftkv_jax.train.analysis.given_analysis import read_analysis, warn_over_budget, with_analysis
from swiftkv_jax.train.analysis.recommendation import Budget, recommend
from swiftkv_jax.train.loss.quality import PerplexityLoss
from swiftkv_jax.train.recipe import DEMO, Recipe
from swiftkv_jax.train.run_options import make_options
from tests.train.test_recommendation import CUTS, MANY, cut

CONFIG = dataclasses.replace(
    open_any(str(demo.LLAMA)).config, num_layers=30, num_key_value_layers=30
)
SOURCE: Any = SimpleNamespace(config=CONFIG)
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
WITH_NEURONS = [cut(15, 0.5, 0.01, 0.1, prompt_attention_layers=1, prompt_mlp_neurons=64)]


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return dataclasses.replace(DEMO, num_key_value_layers=None, output_dir=tmp_path / "out")


@pytest.fixture
def analyses(monkeypatch) -> Any:
    """Analyses that find these cuts, for this budget, with so many far tokens."""
    found = SimpleNamespace(cuts=CUTS, budget=Budget(), far_tokens=MANY)

    def analyze(recipe, config, mesh):
        if found.budget is None:
            raise DataError("`data`=short: no token to predict in it")
        return recommend(found.cuts, found.budget, found.far_tokens)

    monkeypatch.setattr(chosen_cut, "_analyze", analyze)
    monkeypatch.setattr(chosen_cut, "_peak", lambda recipe, mesh: 1e12)
    return found


def write_analysis(folder: Path, cuts=CUTS, far_tokens: int = MANY, **changes: Any) -> Path:
    """The file of an analysis of the demo model, or of what `changes` say, those of the
    recommendation too."""
    found = recommend(cuts, Budget(), far_tokens)
    assert found is not None
    record = found.record(30, None, ())
    of_file = {name: changes.pop(name) for name in tuple(changes) if name not in record}
    facts = {"model": str(demo.LLAMA), "num_layers": 30, "recommendation": record | changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "analysis.json").write_text(json.dumps(facts | of_file))
    return folder


def warnings_of(log) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelname == "WARNING"]


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
    assert not warnings_of(log)


def test_what_is_named_of_the_cut_stays(recipe, analyses, log):
    named = dataclasses.replace(recipe, exact_head=1, boundary_taps=0, exact_tail=64)
    found = CHOSEN | {"exact_head": 1, "boundary_taps": 0}
    assert cut_of(with_cut(named, SOURCE, MESH)) == found
    assert log.messages[1].startswith("taking K=20 of 30 layers with an exact head, generated_kv")
    assert warnings_of(log) == [
        "`boundary_taps`=0, `exact_head`=1: given instead of what is recommended; the analysis did "
        "not measure this student"
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"prompt_attention_layers": 0}, {"prompt_mlp_neurons": 0}),
        ({"prompt_attention_layers": 2}, {"prompt_mlp_neurons": 64}),
        ({"generated_kv": "boundary"}, {"exact_tail": 0}),
    ],
)
def test_what_goes_with_a_named_part_follows_it(given, expected, recipe, analyses, log):
    """There are no neurons without prompt attention layers, and no tail with boundary."""
    analyses.cuts = WITH_NEURONS
    found = cut_of(with_cut(dataclasses.replace(recipe, **given), SOURCE, MESH))
    assert found.items() >= (given | expected).items()
    assert len(warnings_of(log)) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"prompt_attention_layers": 0, "prompt_mlp_neurons": 64},
        {"prompt_attention_layers": 16},
    ],
)
def test_a_named_part_that_does_not_go_with_the_recommendation(given, recipe, analyses):
    analyses.cuts = WITH_NEURONS
    with pytest.raises(UsageError, match="`num_key_value_layers`=15 with "):
        with_cut(dataclasses.replace(recipe, **given), SOURCE, MESH)


@pytest.mark.parametrize(("asked", "expected"), [(None, 8192), (100, 100), (10**6, 8192)])
def test_an_analysis_fits_to_no_more_tokens_than_the_run(asked, expected, recipe):
    """64 for each of the demo model's 128 entries."""
    recipe = dataclasses.replace(recipe, calibration_tokens=asked)
    assert chosen_cut._options(recipe, CONFIG).calibration_tokens == expected


def test_the_nearest_is_taken_with_a_warning(recipe, analyses, log):
    analyses.budget = Budget(0.001, 0.1)
    assert with_cut(recipe, SOURCE, MESH).num_key_value_layers == 23
    assert log.records[0].levelname == "WARNING"
    assert log.messages[0].startswith("none is within 0.1% of perplexity")


def test_another_start_takes_half(recipe, analyses, log):
    recipe = dataclasses.replace(recipe, init="leader")
    assert with_cut(recipe, SOURCE, MESH) == recipe
    assert log.messages == [
        "half of the layers keep their own keys and values: an analysis is of students in closed "
        "form, not of `init`=leader"
    ]


def three_quarters(recipe):
    return dataclasses.replace(recipe, num_key_value_layers=-(-3 * CONFIG.num_layers // 4))


def test_three_quarters_are_taken_where_there_is_no_recommendation(recipe, analyses, log):
    analyses.budget = None
    assert with_cut(recipe, SOURCE, MESH) == three_quarters(recipe)
    (message,) = log.messages
    assert re.match(r"\d+ of \d+ layers keep their own keys and values: no analysis: ", message)
    assert "`data`=short: no token" in message
    assert not recipe.output_dir.exists()


@pytest.mark.parametrize(
    ("layers", "named", "kept"),
    [
        (28, {}, 21),
        (28, {"key_value_group_size": 2}, 20),
        (28, {"prompt_attention_layers": 10}, 17),
        (3, {}, 2),
        (2, {}, 1),
        (1, {}, None),
    ],
)
def test_three_quarters_or_less_go_with_what_is_named(layers, named, kept, recipe):
    config = dataclasses.replace(CONFIG, num_layers=layers, num_key_value_layers=layers)
    assert chosen_cut.fallback(dataclasses.replace(recipe, **named), config) == kept


@pytest.mark.parametrize("budget", [Budget(), Budget(0.001, 0.1)])
def test_three_quarters_are_taken_where_far_tokens_are_too_few(budget, recipe, analyses, log):
    """By perplexity alone a cut that loses much may be recommended."""
    analyses.budget, analyses.far_tokens = budget, MANY - 1
    assert with_cut(recipe, SOURCE, MESH) == three_quarters(recipe)
    (message,) = log.messages
    assert message.endswith(
        ": too few far tokens to recommend a cut (64 are needed); run swiftkv train analyze with "
        "more rows or longer ones, and name its folder with `analysis`"
    )


def test_an_analysis_that_takes_too_long_is_not_made(recipe, analyses, log, monkeypatch):
    monkeypatch.setattr(chosen_cut, "_peak", lambda recipe, mesh: 1e6)
    assert with_cut(recipe, SOURCE, MESH) == three_quarters(recipe)
    assert "minutes here; run swiftkv train analyze with fewer `cuts`" in log.messages[0]


def test_others_keep_their_cut(recipe, analyses, log):
    """Those that name one, and those of a model that has one."""
    named = dataclasses.replace(recipe, num_key_value_layers=3)
    assert with_cut(named, SOURCE, MESH) == named
    other: Any = SimpleNamespace(config=CONFIG.cut(2))
    assert with_cut(recipe, other, MESH) == recipe
    assert not log.messages


@pytest.mark.parametrize("given", [{}, {"boundary_taps": 0, "exact_head": 1}])
@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_continues_has_its_cut_but_for_what_is_named(
    given, finished, recipe, analyses, log
):
    """Which its fingerprint then refuses, if it differs."""
    (recipe.output_dir / ("model" if finished else "")).mkdir(parents=True)
    (recipe.output_dir / "recipe.json").write_text(
        json.dumps({"config": {"num_layers": 30} | CHOSEN})
    )
    found = with_cut(dataclasses.replace(recipe, **given), SOURCE, MESH)
    assert cut_of(found) == CHOSEN | given
    assert not log.messages


OTHER_OPTIONS = {"data": ["other"]}, {"model": "other"}, {"dtype": "bfloat16"}, {"num_layers": 8}
OTHER_OPTIONS += {"max_length": 256}, {"options": {}}


@pytest.mark.parametrize("changes", [{}, *OTHER_OPTIONS])
def test_the_analysis_of_an_interrupted_run_serves_again(changes, recipe, analyses, log):
    """If it is of the same model, data and options."""
    analyses.budget = None
    options = chosen_cut._options(recipe, CONFIG)
    same = {"data": list(options.data), "dtype": None, "max_length": 512}
    same |= {"options": recorded_options(options)}
    folder = write_analysis(recipe.output_dir / "analysis", **(same | changes))
    found = with_cut(recipe, SOURCE, MESH)
    if changes:
        assert found == three_quarters(recipe) and "`data`=short" in log.messages[0]
    else:
        assert cut_of(found) == CHOSEN
        first = f"taking the analysis in {folder} again; remove it to make another"
        assert log.messages[0] == first and len(log.messages) == 3


def test_a_given_analysis(recipe, tmp_path, log):
    folder = write_analysis(tmp_path)
    for path in (folder, folder / "analysis.json"):
        given = dataclasses.replace(recipe, analysis=str(path))
        assert cut_of(with_cut(given, SOURCE, MESH)) == CHOSEN
    assert log.messages[0].startswith("recommended within 2% of perplexity and 0.15 nats")
    assert log.messages[1].startswith("taking K=20 of 30 layers with a tap")
    assert not warnings_of(log)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"within_budget": False}, "none is within 2% of perplexity"),
        ({"far_tokens": MANY - 1}, "recommended within 2% of perplexity alone: K=20"),
        ({"model": "/models/another"}, "it is of the model another, and this one is llama"),
    ],
)
def test_what_a_given_analysis_warns_of(changes, message, recipe, tmp_path, log):
    given = dataclasses.replace(recipe, analysis=str(write_analysis(tmp_path, **changes)))
    assert with_analysis(given, CONFIG).num_key_value_layers == 20
    (warning,) = warnings_of(log)
    assert message in warning


def test_an_analysis_of_a_model_with_other_layers(recipe, tmp_path):
    given = dataclasses.replace(recipe, analysis=str(write_analysis(tmp_path, num_layers=16)))
    with pytest.raises(UsageError, match="of a model of 16 layers, and this one has 30"):
        with_analysis(given, CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_key_value_layers": "5"},
            "recommendation.num_key_value_layers='5': expected a",
        ),
        ({"exact_tail": 1.5}, "recommendation.exact_tail=1.5: expected a whole number"),
        ({"boundary_taps": True}, "recommendation.boundary_taps=True: expected a whole number"),
        ({"exact_head": None}, "recommendation.exact_head=None: expected a whole number"),
        ({"within_budget": 1}, "recommendation.within_budget=1: expected true or false"),
        ({"generated_kv": "none"}, "generated_kv='none': expected boundary or own"),
        ({"perplexity_loss": "2%"}, "recommendation.perplexity_loss='2%': expected a number"),
        ({"far_nats": []}, r"recommendation.far_nats=\[\]: expected a number or null"),
        ({"num_layers": "30"}, "num_layers='30': expected a whole number"),
        ({"model": None}, "model=None: expected a path"),
        ({"recommendation": 5}, "recommendation=5: expected a JSON object"),
    ],
)
def test_a_field_of_a_wrong_type(changes, message, tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path}/analysis.json: .*{message}"):
        read_analysis(write_analysis(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{}", UsageError, "no recommendation in analysis.json; run swiftkv train"),
        ('{"recommendation": null}', UsageError, "no recommendation in analysis.json; run"),
        ("[]", DataError, "analysis.json: expected a JSON object"),
        ("x", DataError, "analysis.json: not valid JSON"),
        (None, UsageError, "`analysis`=.*: no analysis.json there; run"),
    ],
)
def test_a_file_that_recommends_nothing(text, error, message, tmp_path):
    if text is not None:
        (tmp_path / "analysis.json").write_text(text)
    with pytest.raises(error, match=message):
        read_analysis(tmp_path)


@pytest.mark.parametrize(
    ("lost", "layers", "warns"),
    [
        (PerplexityLoss(0.015, 0.001), 20, True),
        (PerplexityLoss(0.015, 0.006), 20, False),
        (PerplexityLoss(), 20, False),
        (PerplexityLoss(0.029), 20, False),  # warned of anyway
        (PerplexityLoss(0.015), 15, False),
    ],
)
def test_a_student_that_loses_more_than_its_cut_was_chosen_for(lost, layers, warns, recipe, log):
    """Another K was not recommended, and without an analysis none was."""
    config = CONFIG.cut(layers)
    warn_over_budget(recipe, config, lost, "distil it")
    assert not log.messages
    write_analysis(recipe.output_dir / "analysis", max_perplexity_loss=0.01)
    warn_over_budget(recipe, config, lost, "distil it")
    assert log.messages == warns * [
        "the student loses 1.5% ± 0.1% of perplexity on held-out text, more than the 1% that the "
        "cut was chosen for: distil it"
    ]


def test_an_analysis_replaces_the_cut_of_the_demo():
    given = {"analysis": "runs/a"}
    recipe = make_options(given, demo=DEMO, dry_run=False)
    assert recipe.num_key_value_layers is None and recipe.analysis == "runs/a"


def test_the_demo_names_its_cut():
    assert DEMO.num_key_value_layers == open_any(str(demo.LLAMA)).config.num_layers // 2
