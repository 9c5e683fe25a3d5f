"""Bars, the comparison with the authors' recipe, and refused students."""

import pytest

from benchmarks.quality import students, verdict
from tests.quality.made_rows import HALF, cell, rows, trained


def test_verdict():
    """Bars, the authors' recipe, and students that lose the far prompt."""
    good, bad = (rows(HALF, cell(2 + gap)) for gap in (0.006, 0.008))
    lines, kept = verdict.verdict(good)
    assert kept and any(line.startswith("met: K 50.0%, g = 1") for line in lines)
    assert sum(line.startswith("not measured:") for line in lines) == len(verdict.BARS) - 1
    lines, kept = verdict.verdict(bad)
    assert not kept and any(line.startswith("not met: K 50.0%") for line in lines)

    assert verdict.verdict([trained("authors", (2e-3, 2.1))])[1], "nothing to compare with"

    lines, kept = verdict.verdict(rows(HALF, cell(2.0, far=2.2)))
    assert kept and lines[-1].startswith(
        "refused: K 50.0%, g = 1, closed-form, untrained, served with boundary"
    )
    assert "0.20 nats [0.20, 0.20] (KL 0.10) on the 20 tokens" in lines[-1]


@pytest.mark.parametrize(
    ("ours", "rates", "seeds", "outcome"),
    [
        (2.1, [(4e-3, 2.2), (2e-3, 2.3), (8e-3, 2.3)], 1, "met"),
        (2.3, [(4e-3, 2.2), (2e-3, 2.3), (8e-3, 2.3)], 1, "not met"),
        (2.1, [(4e-3, 2.2), (2e-3, 2.3)], 1, "undecided"),  # a larger one may be better
        (2.19, [(4e-3, 2.2), (2e-3, 2.3), (8e-3, 2.3)], 3, "undecided"),  # within the seeds' spread
        (2.3, [(4e-3, 2.2), (2e-3, 2.3)], 1, "not met"),
    ],
)
def test_against_the_authors_recipe(ours, rates, seeds, outcome):
    pair = [trained("closed-form", (2e-3, ours), seeds=seeds), trained("authors", *rates)]
    lines, kept = verdict.verdict(pair)
    (line,) = (line for line in lines if "authors' recipe" in line)
    assert line.startswith(f"{outcome}: K 50.0%, g = 2") and kept == (outcome != "not met")
    assert ("at the edge of those tried" in line) == (len(rates) == 2)
    assert line.endswith("far tokens +0.000 nats, theirs +0.000 nats")


@pytest.mark.parametrize(
    ("ours", "outcome"),
    [
        ([20.9] * 24 + [22.1] * 24, "met"),  # lower on the average, and on most draws
        ([18.0] * 24 + [25.8] * 24, "undecided"),
        ([22.1] * 24 + [22.3] * 24, "not met"),
    ],
)
def test_with_one_seed_each_the_difference_over_the_files_decides(ours, outcome):
    student = trained("closed-form", (2e-3, 2.19 if outcome != "not met" else 2.21))
    authors = trained("authors", (4e-3, 2.2), (2e-3, 2.3), (8e-3, 2.3))
    far = [20.0] * 48
    student["documents"], authors["documents"] = (
        {"text": text, "far": far} for text in (ours, [22.0] * 48)
    )
    assert verdict.against(student, authors) == outcome


def test_without_sums_of_files_the_intervals_must_not_overlap():
    ours = trained("closed-form", (2e-3, 2.19))
    authors = trained("authors", (4e-3, 2.2), (2e-3, 2.3), (8e-3, 2.3))
    for row in (ours, authors):
        del row["documents"]
    assert verdict.against(ours, authors) == "met"
    ours["all"]["above"]["high"] = authors["all"]["above"]["low"] + 1e-3
    assert verdict.against(ours, authors) == "undecided"
    worse = trained("closed-form", (2e-3, 2.25))
    del worse["documents"]
    assert verdict.against(worse, authors) == "not met"
    worse["all"]["above"]["low"] = authors["all"]["above"]["high"] - 1e-3
    assert verdict.against(worse, authors) == "undecided"


def test_bars_of_own_keys_and_values_are_of_students_fitted_to_them():
    served, fitted = (
        rows(
            students.Arm(4, 1, "closed-form", 0, generated_kv),
            cell(2.0, far=2.2, modes=("boundary", "own")),
        )
        for generated_kv in ("boundary", "own")
    )
    assert verdict.verdict(served)[1]
    lines, kept = verdict.verdict(fitted)
    assert not kept and any(
        "not met: K 50.0%, g = 1, closed-form, own, untrained, served with own: far" in x
        for x in lines
    )


def test_a_gain_on_far_tokens_is_a_deviation_too():
    """Bars of far tokens have two sides, and a large KL there refuses a student without a loss."""
    (own,) = (
        row
        for row in rows(
            students.Arm(4, 1, "closed-form", 0, "own"), cell(2.0, modes=("boundary", "own"))
        )
        if row["mode"] == "own"
    )
    for lost, kl, met, refused in (
        (-0.02, 0.01, True, False),
        (-0.2, 0.01, False, False),
        (0.0, 0.2, True, True),
    ):
        row = with_far(own, lost)
        row["far"]["kl"] = {"value": kl}
        lines, _ = verdict.verdict([row])
        (line,) = (line for line in lines if "with own: far tokens" in line and "met" in line[:8])
        assert line.startswith("met") == met
        assert verdict.is_refused(row) == refused == lines[-1].startswith("refused")


def with_far(row: verdict.Row, lost: float, width: float = 0.0, spread: float = 0.0) -> verdict.Row:
    """The row with a loss on far tokens, whose interval has a width to each side."""
    difference = {"value": lost, "low": lost - width, "high": lost + width}
    row.pop("documents", None)
    return row | {"far": row["far"] | {"difference": difference, "student_std": spread}}


BEST = [(4e-3, 2.2), (2e-3, 2.3), (8e-3, 2.3)]
AT_EDGE = BEST[:2]


@pytest.mark.parametrize(
    ("ours", "lost", "authors_lost", "width", "rates", "outcome"),
    [
        (2.1, 0.05, 0.05, 0.0, BEST, "met"),
        (2.1, 0.02, 0.05, 0.01, BEST, "met"),
        (2.1, 0.06, 0.05, 0.01, BEST, "met"),  # the intervals overlap
        (2.1, 0.08, 0.05, 0.01, BEST, "mixed"),
        (2.1, -0.01, -0.2, 0.001, BEST, "met"),  # below 0 is no gain
        (2.1, 0.02, -0.2, 0.001, BEST, "mixed"),
        (2.3, 0.02, 0.05, 0.01, BEST, "mixed"),
        (2.3, 0.05, 0.05, 0.01, BEST, "not met"),
        (2.3, 0.08, 0.05, 0.01, BEST, "not met"),
        (2.2, 0.02, 0.05, 0.01, BEST, "undecided"),  # far tokens alone are not enough
        (2.2, 0.08, 0.05, 0.01, BEST, "not met"),
        (2.1, 0.08, 0.05, 0.01, AT_EDGE, "not met"),  # another rate may have a lower perplexity
        (2.3, 0.02, 0.05, 0.01, AT_EDGE, "not met"),
    ],
)
def test_far_tokens_count_as_perplexity_does(ours, lost, authors_lost, width, rates, outcome):
    pair = (
        with_far(trained("closed-form", (2e-3, ours)), lost, width),
        with_far(trained("authors", *rates), authors_lost, width),
    )
    assert verdict.against(*pair) == outcome
    lines, kept = verdict.verdict(pair)
    assert any(line.startswith(f"{outcome}: K 50.0%, g = 2") for line in lines)
    assert kept == (outcome in ("met", "undecided"))


@pytest.mark.parametrize(
    ("lost", "outcome"), [(0.052, "met"), (0.055, "mixed"), (0.04, "met"), (0.05, "met")]
)
def test_far_tokens_by_the_spread_over_seeds(lost, outcome):
    """Two standard errors are 0.003 here, in which the row of one seed counts as spread alike."""
    ours = with_far(trained("closed-form", (2e-3, 2.0), seeds=2), lost, 1.0, spread=0.0012247)
    authors = with_far(trained("authors", *BEST), 0.05, 1.0)
    assert verdict.against(ours, authors) == outcome


def test_without_far_tokens_perplexity_decides():
    ours = trained("closed-form", (2e-3, 2.1)) | {"far": None}
    assert verdict.against(ours, trained("authors", *BEST)) == "met"


def of_files(row: verdict.Row, text: list[float], far: list[float]) -> verdict.Row:
    return row | {"documents": {"text": text, "far": far}}


@pytest.mark.parametrize(("low", "outcome"), [(-0.004, "met"), (0.004, "mixed")])
def test_a_gain_on_far_tokens_counts_as_nothing_over_the_files(low, outcome):
    """Beside one, a loss is one if its own interval is above 0, whatever the sums of files say."""
    ours = with_far(trained("closed-form", (2e-3, 2.1)), 0.005)
    ours["far"]["difference"]["low"] = low
    authors = with_far(trained("authors", *BEST), -0.2)
    pair = of_files(ours, [21.0] * 9, [20.05] * 9), of_files(authors, [22.0] * 9, [18.0] * 9)
    assert verdict.against(*pair) == outcome


@pytest.mark.parametrize(
    ("ours", "noise", "outcome"),
    [
        (2.19, None, "met"),  # by files alone
        (2.19, 0.001, "met"),
        (2.19, 0.01, "undecided"),  # within the spread over seeds
        (2.21, 0.01, "not met"),  # by files, which is enough against us
    ],
)
def test_one_seed_has_the_spread_of_others(ours, noise, outcome):
    student = of_files(trained("closed-form", (2e-3, ours)), [10 * ours] * 9, [20.0] * 9)
    authors = of_files(trained("authors", *BEST), [22.0] * 9, [20.0] * 9)
    assert verdict.against(student, authors, noise) == outcome


def test_several_seeds_have_to_differ_over_the_files_too():
    ours, authors = trained("closed-form", (2e-3, 2.1), seeds=3), trained("authors", *BEST)
    assert verdict.against(ours, authors) == "met"
    mixed = [18.0] * 5 + [24.8] * 4
    assert (
        verdict.against(
            of_files(ours, mixed, [20.0] * 9), of_files(authors, [22.0] * 9, [20.0] * 9)
        )
        == "undecided"
    )


def test_the_spread_over_seeds_is_the_median():
    several = [trained("closed-form", (2e-3, 2.0), seeds=n) for n in (2, 3, 9)]
    spreads = [row["all"]["perplexity_std"] / row["all"]["perplexity"] for row in several]
    assert verdict.spread_over_seeds([*several, trained("authors", *BEST)]) == sorted(spreads)[1]
    assert verdict.spread_over_seeds([trained("authors", *BEST)]) is None
