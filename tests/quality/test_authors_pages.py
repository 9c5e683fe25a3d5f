"""What the pages say of students beside those of the authors' recipe is what was measured."""

import itertools
import math

import pytest

from benchmarks import measurements
from benchmarks.quality import verdict
from swiftkv_jax.model.config import GENERATED_KV
from swiftkv_jax.train.recipe import DEMO
from tests.quality.measured import above, above_all, far, page, rows_of, star, student, table_line


@pytest.mark.parametrize("steps", [64, 512])
@pytest.mark.parametrize(("teacher", "lower", "cut"), [("demo", 4, 2), ("t2", 12, 4), ("t2", 8, 2)])
def test_beside_the_authors_recipe(teacher, lower, cut, steps):
    both, noise = [], verdict.spread_over_seeds(list(rows_of(teacher).values()))
    for recipe, start in ("authors", "authors"), ("this package", "closed-form"):
        rows = [student(teacher, group, start, steps, lower=lower) for group in (1, 2, 4)]
        both.append(rows)
        if recipe == "authors":  # "the best of three or more learning rates"
            for row in rows:
                tried = sorted(map(float, row["perplexity_of_rates"]))
                assert len(tried) >= 3 and row["learning_rate"] in tried[1:-1]
        elif teacher == "t2":
            assert {row["learning_rate"] for row in rows} == {DEMO.learning_rate}
        cells = (f"{100 * above_all(row):.1f} %, {far(row):.3f} nats{star(row)}" for row in rows)
        name = f"{teacher}, 1/{cut}, {recipe}, {steps}"
        assert table_line("docs/training.md", name) == f"| {name} | {' | '.join(cells)} |"
    for theirs, ours in list(zip(*both, strict=True))[1:]:  # "with groups", in every cell
        assert verdict.against(ours, theirs, noise) == "met"


def test_beside_the_authors_recipe_without_groups():
    """Perplexities after 512 steps; those within two standard errors are not given."""
    text = page("training.md")
    gaps = {}
    for teacher, cuts in ("demo", (2, 3, 4, 5, 6)), ("t2", (6, 8, 10, 12)):
        noise = verdict.spread_over_seeds(list(rows_of(teacher).values()))
        assert noise is not None
        for lower in cuts:
            both = [
                student(teacher, 1, start, 512, lower=lower) for start in ("closed-form", "authors")
            ]
            ours, theirs = (row["all"]["perplexity"] for row in both)
            error = noise * math.sqrt(sum(1 / len(row["seeds"]) for row in both))
            gap = ours / theirs - 1
            gaps[teacher, lower] = gap if abs(gap) > 2 * error else None
    quarter, three, half = (f"{-100 * (gaps['demo', lower] or 0):.1f} %" for lower in (2, 3, 4))
    assert f"by {quarter} with 25 % of the layers lower, by {three} with 37.5 % and by {half}" in (
        text
    )
    assert gaps["demo", 5] is gaps["demo", 6] is None
    assert gaps["t2", 8] is gaps["t2", 10] is gaps["t2", 12] is None
    assert f"the authors' is lower by {100 * (gaps['t2', 6] or 0):.1f} %" in text
    for lower in 8, 6:
        ours, theirs = (student("t2", 1, s, 512, lower=lower) for s in ("closed-form", "authors"))
        assert (ours["learning_rate"], theirs["learning_rate"]) == (0.002, 0.004)
        assert theirs["perplexity_of_rates"]["0.002"] > ours["all"]["perplexity"]
    (higher,) = (
        row
        for document in measurements.quality_documents()
        if document.get("teacher", {}).get("name") == "t2"
        for row in document["rows"]
        if (row["start"], row["steps"], row["mode"]) == ("closed-form", 512, "boundary")
        and row["learning_rate"] == 0.004
    )
    kept = student("t2", 1, "closed-form", 512, lower=10)
    assert (higher["share"], higher["key_value_group_size"]) == (kept["share"], 1)
    percent, nats = zip(*((100 * above_all(row), far(row)) for row in (higher, kept)), strict=True)
    assert percent[0] > percent[1] and nats[0] > nats[1]  # "no better"
    assert "({:.1f} % instead of {:.1f} %".format(*percent) in text
    assert "{:.3f} nats instead of {:.3f})".format(*nats) in text
    kl = [row["all"]["kl"]["value"] for row in (higher, kept)]
    assert "KL {:.3f} instead of {:.3f},".format(*kl) in text and kl[0] > kl[1]
    for teacher, width, steps in ("demo", 128, 8), ("t2", 384, 24):
        assert 256 * width == steps * DEMO.batch_size * DEMO.max_length
        assert f"{steps} for `{teacher}`" in text.replace("8 steps for", "8 for")


def test_beside_the_authors_recipe_with_own_keys_and_values():
    """What students without groups lose on far tokens, where a loss below 0 is none."""
    text = page("training.md")
    losses = {
        start: [
            far(student("demo", 1, start, steps, serving, fitted="boundary"))
            for steps in (64, 512)
            for serving in ("own", "own+64")
        ]
        for start in ("authors", "closed-form")
    }
    of_authors, of_ours = (f"{min(found):.3f} to {max(found):.3f}" for found in losses.values())
    assert f"the authors' lose {of_authors} nats, this package's {of_ours}" in text
    assert all(a < b for a, b in zip(*losses.values(), strict=True))
    untrained = [
        far(student("demo", 1, "closed-form", 0, serving)) for serving in ("own", "own+64")
    ]
    assert max(untrained) < min(losses["authors"])
    more = []
    for steps, serving, fitted in itertools.product((64, 512), ("own", "own+64"), GENERATED_KV):
        ours, theirs = (
            student("t2", 1, start, steps, serving, 12, kv)
            for start, kv in (("closed-form", fitted), ("authors", "boundary"))
        )
        more.append(max(far(ours), 0) - max(far(theirs), 0))
        for part in "far", "answers":
            assert ours[part]["kl"]["value"] < theirs[part]["kl"]["value"]
    assert f"lose {min(more):.3f} to {max(more):.3f} nats more" in text


def test_why_students_are_mixed_or_worse():
    """Where figures of t1 and t2 go which way."""
    for teacher in "t1", "t2":
        for ours, theirs, outcome in verdict.comparisons(list(rows_of(teacher).values())):
            if outcome not in ("mixed", "not met"):
                continue
            loses_more = max(far(ours), 0) > max(far(theirs), 0)
            if ours["mode"] == "boundary":
                assert (teacher, ours["steps"]) == ("t2", 512)
                assert ours["num_key_value_layers"] <= 8 and ours["key_value_group_size"] == 1
            elif ours["key_value_group_size"] == 1:
                assert loses_more and ours["far"]["kl"]["value"] < theirs["far"]["kl"]["value"]
            else:
                assert loses_more == (verdict.key(ours)[5] == "boundary")
                assert (above(ours) < above(theirs)) == loses_more
