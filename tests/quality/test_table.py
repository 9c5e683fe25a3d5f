"""Intervals, rows and the table."""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.quality import bootstrap, students, table, verdict
from benchmarks.quality.sections import merged
from swiftkv_jax.train.recipe import DEMO
from tests.quality.made_rows import HALF, cell, document, rows, trained


def test_interval_of_two_documents():
    """A draw has the mean 0, 1/2 or 1, with probabilities 1/4, 1/2, 1/4."""
    drawn = bootstrap.draws(2)
    found = bootstrap.interval([0.0, 1.0], [1, 1], drawn)
    assert found == {"value": 0.5, "low": 0.0, "high": 1.0}
    assert drawn.shape == (bootstrap.RESAMPLES, 2) and (drawn.sum(1) == 2).all()
    assert drawn[:, 0].mean() == pytest.approx(1, abs=0.05)


def test_interval_of_many_documents():
    """About 1.96 standard errors to each side; documents count by their tokens."""
    random, count = np.random.default_rng(1), 400
    values, drawn = random.normal(3, 2, count), bootstrap.draws(count)
    found = bootstrap.interval(10 * values, np.full(count, 10), drawn)
    assert found is not None and found["value"] == pytest.approx(values.mean())
    error = 1.96 * values.std() / math.sqrt(count)
    assert found["high"] - found["value"] == pytest.approx(error, rel=0.1)
    assert found["value"] - found["low"] == pytest.approx(error, rel=0.1)
    weighed = bootstrap.interval([9.0, 1.0], [9, 2], bootstrap.draws(2))
    assert weighed is not None and weighed["value"] == pytest.approx(10 / 11)


def test_nothing_counted_has_no_interval():
    drawn = bootstrap.draws(3)
    assert bootstrap.interval([0, 0, 0], [0, 0, 0], drawn) is None
    assert bootstrap.interval([0, 2, 0], [0, 1, 0], drawn) == {"value": 2, "low": 2, "high": 2}


def test_a_row_compares_with_the_teacher():
    arm = students.Arm(4, 1, "closed-form", 64)
    found, own = rows(
        arm,
        *(cell(nll, modes=("boundary", "own"), seed=seed) for seed, nll in enumerate((2.1, 2.3))),
    )
    assert found["share"] == 0.5 and found["seeds"] == [0, 1] and own["all"] is None
    assert found["all"]["above"]["value"] == pytest.approx(math.expm1(0.2))
    assert found["all"]["perplexity"] == pytest.approx(math.exp(2.2))
    spread = abs(math.exp(2.3) - math.exp(2.1)) / math.sqrt(2)
    assert found["all"]["perplexity_std"] == pytest.approx(spread)
    assert found["all"]["kl"]["value"] == 0.1 and found["all"]["agreement"]["value"] == 0.8
    assert found["recall"]["difference"]["value"] == pytest.approx(-0.1)
    assert found["far"] == {
        "tokens": 20,
        "teacher": 2.0,
        "student": 2.0,
        "student_std": 0.0,
        "difference": {"value": 0.0, "low": 0.0, "high": 0.0},
        "kl": {"value": 0.1, "low": 0.1, "high": 0.1},
    }
    assert found["blocks"] == {"prompts": 2, "teacher": 2, "student": 1} and own["blocks"] is None


def test_the_better_learning_rate_counts():
    untrained, early = rows(HALF, cell(2.1))[0], trained("authors", (4e-3, 2.3), (2e-3, 2.4))
    later = trained("authors", (8e-3, 2.2), (1.6e-2, 2.5))
    found, other = merged([document(early, untrained), document(later)])["rows"][::-1]
    assert other == untrained and found["learning_rate"] == 8e-3
    assert sorted(found["perplexity_of_rates"]) == ["0.002", "0.004", "0.008", "0.016"]
    worse = trained("authors", (1.6e-2, 2.5))
    (kept,) = merged([document(early), document(worse)])["rows"]
    assert kept["learning_rate"] == 4e-3 and len(kept["perplexity_of_rates"]) == 3


def test_the_better_rate_of_this_packages_recipe_counts_too():
    """Rates compared in another mode, as older files have them, say nothing about the new ones."""
    early, later = (trained("closed-form", (rate, loss)) for rate, loss in ((2e-3, 2.1), (4e-3, 2)))
    (found,) = merged([document(early), document(later)])["rows"]
    assert found["learning_rate"] == 4e-3
    assert sorted(found["perplexity_of_rates"]) == ["0.002", "0.004"]
    assert "| 32 at 0.004 |" in table.rows_table([found])
    assert "| 32 |" in table.rows_table([early])
    worse = trained("closed-form", (4e-3, 2.2)) | {"rates_mode": "own"}
    (found,) = merged([document(early), document(worse)])["rows"]
    assert found["learning_rate"] == 4e-3 and list(found["perplexity_of_rates"]) == ["0.004"]


def test_more_seeds_count_then_the_newest():
    one, other, three = (
        trained("closed-form", (2e-3, loss), seeds=seeds)
        for loss, seeds in ((2.1, 1), (2.2, 1), (2.3, 3))
    )
    for found, expected in (([one, other], other), ([one, three], three), ([three, one], three)):
        (row,) = merged([document(each) for each in found])["rows"]
        assert row["all"] == expected["all"] and row["seeds"] == expected["seeds"]


def test_merged_rows():
    """In order, with what any run has generated, and not what is fitted to own keys and values but
    served without; on one text."""
    generated, newer = (rows(HALF, cell(2.1))[0] for _ in range(2))
    own = students.Arm(4, 1, "closed-form", 0, "own")
    fitted = rows(own, cell(2.1, modes=("boundary", "own")))
    lower = rows(students.Arm(6, 1, "authors", 0), cell(2.1))
    found = merged([document(generated), document(newer | {"blocks": None}, *fitted, *lower)])
    shown = [(row["share"], row["start"], row["mode"]) for row in found["rows"]]
    assert shown == [
        (0.75, "authors", "boundary"),
        (0.5, "closed-form", "boundary"),
        (0.5, "closed-form", "own"),
    ]
    assert found["rows"][1]["blocks"] == generated["blocks"]
    with pytest.raises(ValueError, match="other: not the text of quality"):
        merged([document(generated), document(newer, documents=3, command="other")])


def test_the_plan():
    """Group sizes divide the upper layers, a leader needs a group, few steps come first."""
    arms = students.plan(8, [3, 4], [1, 2, 4, None], ["authors", "leader"], [64, 0])
    untrained = [dataclasses.astuple(arm)[:4] for arm in arms[: len(arms) // 2]]
    assert untrained == [
        (4, 1, "authors", 0),
        (4, 2, "authors", 0),
        (4, 2, "leader", 0),
        (4, 4, "authors", 0),
        (4, 4, "leader", 0),
        (3, 1, "authors", 0),
        (3, 5, "authors", 0),
        (3, 5, "leader", 0),
    ]
    assert [arm.steps for arm in arms] == [0] * 8 + [64] * 8
    names = {arm.name(rate, seed) for arm in arms for rate in (0.1, 0.2) for seed in (0, 1)}
    assert len(names) == 8 + 4 * 8
    assert sum(arm.uses_authors_recipe for arm in arms) == 5, "the authors' recipe, trained"


def test_the_plan_for_own_keys_and_values():
    """The closed form, under names of its own."""
    arms = students.plan(8, [4], [1, 2], students.STARTS, [0, 64], "own")
    assert [dataclasses.astuple(arm) for arm in arms] == [
        (4, group, "closed-form", steps, "own", "distillation", False)
        for steps in (0, 64)
        for group in (1, 2)
    ]
    assert [arm.name(0.002, 0) for arm in arms if arm.key_value_group_size == 1] == [
        "4-1-closed-form-own-0",
        "4-1-closed-form-own-64-0.002-seed0",
    ]
    assert all(arm.recipe(DEMO, 0.002, 0).generated_kv == "own" for arm in arms)


def test_the_plan_for_training_with_own_keys_and_values():
    """What is trained with groups; its rows stand apart from those that are scaled in the end."""
    arms = students.plan(8, [4], [1, 2], students.STARTS, [0, 64], "own", trains_own=True)
    assert [arm.name(0.002, 0) for arm in arms] == ["4-2-closed-form-train-own-64-0.002-seed0"]
    assert not arms[0].scales_trained_queries
    scaled = dataclasses.replace(arms[0], trains_own=False)
    found = merged([document(*rows(arm, cell(2.1, modes=("own",)))) for arm in (scaled, arms[0])])
    shown = table.rows_table(found["rows"])
    assert "| closed-form, own |" in shown and "| closed-form, own (trained for it) |" in shown


def test_the_plan_for_cross_entropy():
    """What is trained, by this package's recipe, and compared with no bar."""
    arms = students.plan(8, [4], [2], students.STARTS, [0, 64], "boundary", "cross-entropy")
    assert [(arm.start, arm.steps) for arm in arms] == [("leader", 64), ("closed-form", 64)]
    assert arms[1].name(0.002, 1) == "4-2-closed-form-cross-entropy-64-0.002-seed1"
    (row,) = rows(arms[1], cell(9.0))
    assert row["loss"] == "cross-entropy" and verdict.verdict([row])[1]
