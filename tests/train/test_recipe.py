"""Recipes: the authors' settings, and the fields that a run must keep to be continued."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from swiftkv_jax import Config
from swiftkv_jax.checkpoints.digest import digest_all
from swiftkv_jax.errors import UsageError
from swiftkv_jax.train.__main__ import parser, recipe_from
from swiftkv_jax.train.recipe import (
    AUTHORS_RECIPE,
    STEERING,
    Recipe,
    parse_resume,
)
from swiftkv_jax.train.run.setup import (
    check_loss,
    check_recorded,
    cut_model,
    fingerprint,
    write_settings,
)
from tests import tiny

RECIPE = Recipe(model="m", data=("d",), output_dir=Path("o"), max_length=64)
AUTHORS = {
    "init": "authors",
    "loss_average": "positions",
    "loss_mask": "unshifted",
    "padding": "joined",
    "hidden_loss": "absolute",
    "hidden_loss_weight": 1.0,
}


def test_the_authors_recipe():
    """The settings of the authors' trainer, on the command line as in Python, and others over
    them."""
    assert AUTHORS_RECIPE == AUTHORS
    flags = ["--model", "m", "--data", "d", "--output-dir", "o"]
    plain = recipe_from(parser().parse_args(flags))
    authors = recipe_from(parser().parse_args([*flags, "--recipe", "authors"]))
    assert authors == dataclasses.replace(plain, **AUTHORS)
    changed = {name: value for name, value in AUTHORS.items() if getattr(plain, name) != value}
    assert changed == AUTHORS
    mixed = parser().parse_args([*flags, "--recipe", "authors", "--padding", "separate"])
    assert recipe_from(mixed) == dataclasses.replace(authors, padding="separate")


def test_epochs_and_steps():
    """Epochs take the place of the demo's own steps; both at once would contradict each other."""
    assert recipe_from(parser().parse_args(["--num-train-epochs", "3"])).max_steps is None
    both = parser().parse_args(["--num-train-epochs", "3", "--max-steps", "5"])
    with pytest.raises(UsageError, match="`max_steps` or `num_train_epochs`, not both"):
        recipe_from(both)


def config_of(**changes: Any) -> Config:
    """Six layers, cut at 2, of the others two share a cache."""
    hf = tiny.hf_config(key_value_group_size=2)
    return dataclasses.replace(tiny.model_of(hf, tiny.tensors_for(hf)).config, **changes)


@pytest.mark.parametrize("layer", [0, 2, -5])
def test_a_hidden_state_that_cannot_differ_is_refused(layer):
    """States up to the one that enters layer 2 are the teacher's."""
    recipe = dataclasses.replace(RECIPE, hidden_loss_layer=layer)
    with pytest.raises(UsageError, match="teacher and student have the same state there"):
        check_loss(recipe, config_of())
    check_loss(dataclasses.replace(recipe, hidden_loss_weight=0.0), config_of())
    check_loss(dataclasses.replace(recipe, hidden_loss_layer=3), config_of())


def test_a_delta_needs_no_closed_form():
    """Keys with norms have no closed form for groups; a delta that is there can be trained."""
    config = config_of(qk_norm="head")
    assert cut_model(RECIPE, config) == config
    with pytest.raises(UsageError, match="no closed form"):
        cut_model(dataclasses.replace(RECIPE, key_value_group_size=4), config)


def test_an_exact_head_or_own_keys_that_are_dropped_do_not_hinder_a_cut():
    kept = config_of(key_value_group_size=1, exact_head=1, generated_kv="own", exact_tail=4)
    dropped = dataclasses.replace(kept, exact_head=0, generated_kv="boundary", exact_tail=0)
    recipe = dataclasses.replace(
        RECIPE, init="authors", key_value_group_size=2, exact_head=0, generated_kv="boundary"
    )
    assert cut_model(recipe, kept) == dropped.cut(2, 2)
    with pytest.raises(UsageError, match="exact_head=1 needs key_value_group_size=1"):
        cut_model(dataclasses.replace(recipe, exact_head=None), kept)


# Continuing a run -------------------------------------------------------------


def found(**fields: Any) -> dict[str, Any]:
    hf = tiny.hf_config()
    model = tiny.model_of(hf, tiny.tensors_for(hf))
    recipe = Recipe(**{"model": "m", "data": ("d",), "output_dir": Path("o")} | fields)
    data: Any = SimpleNamespace(fingerprint="0badc0de")
    result = fingerprint(recipe, model, "5eed", data, 7)
    assert result.pop("base_model") == digest_all(jax.tree.leaves(model.llama))
    return result


FINGERPRINT = {
    "batch_size": 8,
    "max_length": 8192,
    "learning_rate": 2e-4,
    "lr_schedule": "linear",
    "warmup_ratio": 0.05,
    "max_grad_norm": 1.0,
    "temperature": 2.0,
    "kl": "forward",
    "kl_top_k": None,
    "hidden_loss_weight": 0.1,
    "hidden_loss": "relative",
    "hidden_loss_layer": -2,
    "loss_average": "targets",
    "loss_mask": "shifted",
    "padding": "separate",
    "seed": 0,
    "steps": 7,
    "dtype": "float32",
    "num_key_value_layers": 2,
    "key_value_group_size": 1,
    "prompt_attention_layers": 0,
    "prompt_mlp_neurons": 0,
    "boundary_taps": 0,
    "exact_head": 0,
    "generated_kv": "boundary",
    "exact_tail": 0,
    "first_delta": "5eed",
    "data": "0badc0de",
}
"""In the checkpoints: with another fingerprint runs could not be continued."""
OTHER = {"lr_schedule": "cosine", "kl": "jsd", "kl_top_k": 5, "hidden_loss_layer": -3}
OTHER |= {name: AUTHORS[name] for name in ("hidden_loss", "loss_average", "loss_mask", "padding")}


@pytest.mark.parametrize("name", STEERING)
def test_a_run_is_not_continued_with_another(name):
    value = OTHER.get(name)
    if value is None:
        value = getattr(Recipe, name) * 2 or 1
    assert found(**{name: value}) == FINGERPRINT | {name: value}
    assert found() == FINGERPRINT


def test_losses_on_other_text_of_the_same_path_are_not_compared(tmp_path, log):
    recipe = dataclasses.replace(RECIPE, eval_data="e", eval_steps=1, output_dir=tmp_path)
    best = dataclasses.replace(recipe, load_best_model_at_end=True)
    config = config_of()
    text: Any = SimpleNamespace(fingerprint="old")
    other: Any = SimpleNamespace(fingerprint="new")
    write_settings(recipe, config, text, 7, "a CPU")
    check_recorded(best, config, text)
    with pytest.raises(UsageError, match="`eval_data`=e: the run was measured with other text"):
        check_recorded(best, config, other)
    assert not log.messages
    check_recorded(recipe, config, other)
    assert log.messages[0].startswith("`eval_data` has changed")


def test_a_run_may_continue_from_its_start():
    assert parse_resume("0") == 0
    with pytest.raises(UsageError):
        parse_resume("-1")
