"""Figures of quality that the pages quote are the measured ones."""

from pathlib import Path

from benchmarks import measurements
from benchmarks.quality import table
from benchmarks.quality.sections import by_teacher

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(teacher: str) -> dict[tuple, table.Row]:
    rows = by_teacher(measurements.quality_documents())[teacher]["rows"]
    return {table.key(row): row for row in rows}


def far(row: table.Row) -> float:
    return row["far"]["difference"]["value"]


def above(row: table.Row) -> float:
    return row["answers"]["above"]["value"]


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def test_calibration():
    """The table of own keys and values, and what students lose on far tokens, of both teachers."""
    text, demo, t1 = page("calibration.md"), rows_of("demo"), rows_of("t1")
    for lower in 4, 3:
        for fitted in "boundary", "own":
            row = demo[lower, 1, "closed-form", 0, "own+64", fitted, "distillation"]
            assert f"| {100 * above(row):+.2f} % | {far(row):.3f} |" in text

    def losses(rows, lower: int, steps: int, start: str = "closed-form") -> list[float]:
        mode = "boundary", "boundary", "distillation"
        return [far(rows[lower, group, start, steps, *mode]) for group in (2, 4)]

    for steps, start, sentence in (
        (0, "closed-form", "students lose {:.2f} and {:.2f} nats"),
        (64, "closed-form", "after 64 steps (0.26M tokens) it is {:.2f} and {:.2f}"),
        (512, "closed-form", "after 512 {:.2f} and {:.2f},"),
        (64, "authors", "and {:.2f} and {:.2f} after 64 with the authors' start"),
    ):
        assert sentence.format(*losses(demo, 4, steps, start)) in text
    (two, four), (later, four_later) = (losses(t1, 8, steps) for steps in (0, 64))
    sentence = f"leave it at {later:.2f} nats, {two:.2f} before; the 4-way one goes from "
    assert f"{sentence}{four:.2f} to {four_later:.2f}." in text
    rows = [t1[8, group, "authors", 64, "boundary", "boundary", "distillation"] for group in (2, 4)]
    excess = " and ".join(f"{100 * row['all']['above']['value']:.1f}" for row in rows)
    lost = " and ".join(f"{far(row):.2f}" for row in rows)
    assert f"best learning rate reach {excess} % there, {lost} nats." in text


def test_the_limits_of_the_closed_form():
    text, cells = page("calibration.md"), measurements.newest("closed form")["cells"]
    default, *_, most = (
        cell for cell in cells if cell["exact"] == "nothing" and cell["tokens"] > 2**14
    )
    assert f"demo model's {100 * default['above']:.2f} % at 50 %" in text
    assert most["tokens"] == 2**20 and f"tokens bring it to {100 * most['above']:.2f} %" in text
    for cell in cells:
        if cell["exact"] != "nothing":
            assert 0.45 < cell["above"] / default["above"] < 0.55, "about half"


def test_own_keys_and_values():
    """Beside shared caches, and without them at 37.5 %."""
    text, demo = page("serving.md"), rows_of("demo")
    for group in 2, 4:
        for steps in 64, 512:
            boundary, own = (
                demo[4, group, "closed-form", steps, mode, fitted, "distillation"]
                for mode, fitted in (("boundary", "boundary"), ("own+64", "own"))
            )
            cells = [f"{above(row):+.2%} | {far(row):+.3f}" for row in (boundary, own)]
            assert f"| {group} | {steps} | {' | '.join(cells)} |" in text
    unscaled = demo[4, 4, "closed-form", 64, "own+64", "boundary", "distillation"]
    assert f"4-way student loses {far(unscaled):.2f} nats on far tokens after 64 steps" in text
    before, after = (
        demo[3, 1, "closed-form", 0, "own+64", fitted, "distillation"]
        for fitted in ("boundary", "own")
    )
    assert f"that leaves {far(after):.2f} nats of a loss of {far(before):.2f}" in text
