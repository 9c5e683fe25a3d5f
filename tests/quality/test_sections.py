"""Sections and pages of each teacher: the summary, the full table, how the teacher is made."""

from benchmarks.quality import overview, plot, students, table
from benchmarks.quality.sections import made_by, page_name, pages, section
from swiftkv_jax.model.config import GENERATED_KV
from tests.quality.made_rows import HALF, cell, document, rows, trained

PAIR = [
    trained("closed-form", (2e-3, 2.1)),
    trained("authors", (4e-3, 2.2), (2e-3, 2.3), (8e-3, 2.3)),
]


def documents():
    other = document(
        *rows(HALF, cell(2.2)),
        teacher={"name": "t1"},
        date="2025-01-01",
        device={"kind": "NVIDIA H100"},
    )
    return [other, document(*rows(HALF, cell(2.1))), document(*PAIR)]


def test_the_section_has_all_teachers():
    text = section(documents())
    assert text.startswith("## What each cut costs in quality\n")
    assert text.count(table.TERMS) == 1
    assert text.index("The demo model (8 layers)") < text.index("`python -m benchmarks.teachers t1")
    assert f"(results/{page_name('demo')})" in text and f"(results/{page_name('t1')})" in text
    assert "| demo | 4 of 8 | 1 | +10.5%, +0.000 |  |" in text
    assert "| t1 | 4 of 8 | 1 | +22.1%, +0.000 |  |" in text
    required = (
        "K 50.0%, g = 1, closed-form, untrained, served with boundary: perplexity above the teacher"
    )
    assert f"| {required} | +0.70% | +10.52%, missed | +22.14%, missed |" in text
    assert "| demo | `boundary` | `boundary` | 1 | 0 | 0 | 0 |" in text


def test_a_page_for_each_teacher():
    (name, demo), (other, of_t1) = pages(documents())
    assert [name, other] == ["quality-demo.md", "quality-t1.md"]
    assert demo.startswith("# What each cut costs in quality: all students\n")
    assert table.LEGEND in demo and table.LEGEND in of_t1
    assert "Measured on a CPU, in float32." in demo and "TF32" not in demo
    verdicts = [line.split("|")[-2].strip() for line in demo.splitlines() if "| 32 " in line]
    assert "Measured on an NVIDIA H100, in float32 (on the GPU with products in TF32" in of_t1
    assert verdicts == ["", "better"]


def test_a_teacher_is_made_by_its_command():
    """With its number of steps where that is not the default."""
    facts = {"name": "t1", "parameters": 7e6, "steps": 1200, "tokens": 4_915_200}
    found = made_by({"teacher": facts})
    assert found.startswith("`python -m benchmarks.teachers t1 FOLDER --steps 1200` trains")
    assert "under-trained: it had 1,200 steps (4.9M tokens) and the command's default is 4,90" in (
        found
    )
    whole = made_by({"teacher": facts | {"steps": 4900}})
    assert "`python -m benchmarks.teachers t1 FOLDER` trains" in whole and "under" not in whole


def test_the_table_of_cuts():
    """Half of the layers and more; a star for what is refused."""
    lost = students.Arm(4, 2, "closed-form", 64), students.Arm(4, 2, "authors", 512)
    found = [
        *rows(students.Arm(6, 1, "closed-form", 0), cell(2.1)),
        *rows(lost[0], cell(2.1, far=2.2)),
        *rows(lost[1], cell(2.2)),
        *rows(students.Arm(2, 1, "closed-form", 0), cell(2.1)),
    ]
    _, _, *lines = overview.cuts_table({"demo": document(*found)}).splitlines()
    assert lines == [
        "| demo | 6 of 8 | 1 | +10.5%, +0.000 |  |  |  |  |",
        "| demo | 4 of 8 | 2 |  | +10.5%, +0.200 * |  |  | +22.1%, +0.000 |",
    ]


def test_comparisons_are_counted_by_serving():
    """And by what students are made for."""
    modes = ("boundary", "own", "own+64")
    ours = [
        row
        for kv in GENERATED_KV
        for row in rows(students.Arm(4, 1, "closed-form", 32, kv), cell(2.1, modes=modes))
        if (row["mode"], kv) != ("boundary", "own")
    ]
    theirs = rows(students.Arm(4, 1, "authors", 32), cell(2.2, modes=modes))
    for row in theirs:
        row["perplexity_of_rates"] = {"0.001": 9.9, "0.002": 9.0, "0.004": 9.9}
    _, _, *lines = overview.comparisons_table({"t1": document(*ours, *theirs)}).splitlines()
    assert lines == [
        "| t1 | `boundary` | `boundary` | 1 | 0 | 0 | 0 |",
        "| t1 | `own+64` | `boundary` | 1 | 0 | 0 | 0 |",
        "| t1 | `own+64` | `own` | 1 | 0 | 0 | 0 |",
    ]


def test_a_line_of_the_plot_is_one_group_size():
    """Without own keys and values, and for all upper layers where their number is theirs."""
    arms = [
        students.Arm(lower, 2, "closed-form", plot.STEPS, generated_kv)
        for lower in (4, 6)
        for generated_kv in GENERATED_KV
    ]
    found = [row for arm in arms for row in rows(arm, cell(2.1, modes=("boundary", "own")))]
    of_two, of_all = (plot.rows_of(found, 8, group, "closed-form") for group in (2, None))
    assert [row["num_key_value_layers"] for row in of_two] == [6, 4]
    assert [row["num_key_value_layers"] for row in of_all] == [6]
    assert not plot.rows_of(found, 8, 2, "authors")


def test_tables_have_every_column():
    arm = students.Arm(4, 1, "authors", 64)
    found = document(*rows(arm, cell(2.1, far=2.2, modes=("boundary", "own"))))
    lines = [line for line in table.table(found).splitlines() if line.startswith("|")]
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "64 at 0.002" in lines[2] and "+10.52% [+10.52%, +10.52%]" in lines[2]
    assert "+0.200 [+0.200, +0.200] | 0.100 |" in lines[2] and lines[2].endswith("| refused |")


def test_older_results_have_no_divergence_on_far_tokens():
    (row,) = rows(HALF, cell(2.1, far=2.2))
    del row["far"]["kl"]
    assert "+0.200 [+0.200, +0.200] |  |" in table.rows_table([row])
