"""Figures of small teachers' students that the pages quote are those of the result files."""

import functools
import itertools
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import students
from benchmarks.result_files import newest, quality_documents
from swiftkv_jax.model.cache import answer_bytes_per_token, bytes_per_token
from swiftkv_jax.model.config import GeneratedKV
from swiftkv_jax.model.cut import choose_generated_kv
from swiftkv_jax.plan import cost
from swiftkv_jax.plan.presets import PRESETS
from swiftkv_jax.plan.tables import decode_bytes
from swiftkv_jax.train.loss.quality import MAX_FAR_LOSS

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
HALF = {"demo": 4, "t2": 8}
"""Half of each teacher's layers."""
LAYERS = {"demo": 8, "t2": 16}


@functools.cache
def rows_of(teacher: str) -> dict[tuple, students.Row]:
    """By `students.key`; not to be changed."""
    rows = students.by_teacher(quality_documents())[teacher]["rows"]
    return {students.key(row): row for row in rows}


def far(row: students.Row) -> float:
    return row["far"]["difference"]["value"]


def star(row: students.Row) -> str:
    return " *" if far(row) > MAX_FAR_LOSS else ""


def far_cells(rows: Iterable[students.Row]) -> str:
    """Of a table."""
    return "".join(f" {far(row):+.3f}{star(row)} |" for row in rows)


def above(row: students.Row) -> float:
    return row["answers"]["above"]["value"]


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def student(
    teacher: str,
    group: int,
    start: str,
    steps: int,
    serving: str = "boundary",
    lower: int | None = None,
    fitted: str | None = None,
):
    """A student with half of the layers cut, unless `lower` says how many are left, and trained for
    what it is served with unless `fitted` says for what."""
    mode = serving, fitted or serving.split("+")[0], "distillation"
    return rows_of(teacher)[lower or HALF[teacher], group, start, steps, *mode]


def above_all(row: students.Row) -> float:
    return row["all"]["above"]["value"]


def table_line(page: str, name: str) -> str:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {name} |"))
    return line


def test_calibration():
    """Perplexity without training, and what students lose on far tokens, of both teachers."""
    text, rows = page("calibration.md"), {name: rows_of(name) for name in HALF}
    mode = "boundary", "boundary", "distillation"
    for group in 1, 2, 4:
        cells = [
            f"{rows['demo'][4, group, start, 0, *mode]['all']['above']['value']:+.2%}"
            for start in ("authors", "closed-form")
        ]
        assert f"| {group} | {' | '.join(cells)} |" in text
    students = [("authors", 0), ("closed-form", 0), ("closed-form", 64), ("closed-form", 512)]
    students += [("authors", 64), ("authors", 512)]
    for name, lower in ("demo", 4), ("t2", 12), ("t2", 10), ("t2", 8):
        for group in (1, 2) if lower == 10 else (1, 2, 4):
            found = [rows[name][lower, group, *student, *mode] for student in students]
            assert f"| {name}, {lower} of {LAYERS[name]} | {group} |{far_cells(found)}" in text
    for name, layers in LAYERS.items():
        quarter = [far(row) for key, row in rows[name].items() if key[0] == layers // 4]
        assert quarter and min(quarter) > 1, "every student loses more than a nat"
    copied, fitted = (
        "{value:.3f} nats [{low:.3f}, {high:.3f}]".format(**found["far"]["difference"])
        for found in (rows["t2"][10, 1, start, 0, *mode] for start in ("authors", "closed-form"))
    )
    assert f"{copied} against {fitted.replace(' nats', '')} at K = 10 of t2" in text
    of_t1 = [
        [rows_of("t1")[lower, 1, start, 0, *mode] for start in ("authors", "closed-form")]
        for lower in (10, 8)
    ]
    ten, eight = (f"{far(copy):.3f} against {far(fit):.3f}" for copy, fit in of_t1)
    assert f"{ten} at K = 10 and {eight} at K = 8" in text
    for name in HALF:
        shown = rows[name][HALF[name], 1, "closed-form", 0, *mode]
        shown = 100 * shown["far"]["tokens"] / shown["answers"]["tokens"]
        assert f"{shown:.1f} %" in text
    for lower in 12, 10, 8, 6, 4:
        plain, served = (
            rows["t2"][lower, 1, "closed-form", 0, *how, "distillation"]
            for how in (("boundary", "boundary"), ("own+64", "own"))
        )
        cells = (
            f"{error:+.2%} | {far(row):+.3f}{star(row)}"
            for error, row in ((above_all(plain), plain), (above(served), served))
        )
        assert f"| {lower} of 16 | {' | '.join(cells)} |" in text


def test_the_limits_of_the_closed_form():
    text, cells = page("calibration.md"), newest("closed-form-cpu")["cells"]
    default, *_, most = (
        cell for cell in cells if cell["exact"] == "nothing" and cell["tokens"] > 2**14
    )
    assert f"demo model's {100 * default['above']:.2f} % at 50 %" in text
    assert most["tokens"] == 2**20 and f"tokens bring it to {100 * most['above']:.2f} %" in text
    for cell in cells:
        if cell["exact"] != "nothing":
            assert 0.45 < cell["above"] / default["above"] < 0.55, "about half"
    keys, values = (
        next(cell["far"] for cell in cells if cell["exact"] == name) for name in ("keys", "values")
    )
    assert f"{default['far']:.3f} nats, none with exact keys, {values:.3f} with exact val" in text
    assert keys <= 0


def test_blocks_that_parse_hide_what_is_lost_on_far_tokens():
    text, demo = page("generated-kv.md"), rows_of("demo")
    copied = [
        [demo[4, group, "authors", 0, mode, "boundary", "distillation"] for group in (2, 4)]
        for mode in ("boundary", "own+64")
    ]
    (two, four), tail = ([row["blocks"]["student"] for row in rows] for rows in copied)
    teacher = copied[0][0]["blocks"]
    assert f"Of {teacher['prompts']} functions that the demo model" in text
    assert f"{teacher['teacher']} parse" in text and f"{two} and {four} do with `bound" in text
    assert f"and {tail[0]} and {tail[1]} with `own` and a tail of 64" in text
    assert [round(far(row)) for row in copied[1]] == [2, 2], "these students lose 2 nats"


def own(row: students.Row) -> str:
    return f"{above(row):+.2%} | {far(row):+.3f}"


def test_generated_keys_and_values():
    """Without training, with groups, and what the scale of their queries does."""
    text, rows = page("generated-kv.md"), {name: rows_of(name) for name in HALF}
    for name, lower in ("demo", 4), ("demo", 3), ("t2", 12), ("t2", 10), ("t2", 8):
        cells = [
            own(rows[name][lower, 1, "closed-form", 0, "own+64", fitted, "distillation"])
            for fitted in ("boundary", "own")
        ]
        assert f"| {name} | {lower} of {LAYERS[name]} | {' | '.join(cells)} |" in text
    demo = rows["demo"]
    serving = ("boundary", "boundary"), ("own+64", "boundary"), ("own+64", "own")
    raised: dict[str, float] = {}
    for (name, lower), group, steps in itertools.product(
        (("demo", 4), ("t2", 12)), (2, 4), (64, 512)
    ):
        found = [
            rows[name][lower, group, "closed-form", steps, *how, "distillation"] for how in serving
        ]
        where = f"| {name} | {lower} of {LAYERS[name]} | {group} | {steps} |"
        assert f"{where} {' | '.join(map(own, found))} |" in text
        assert {row["learning_rate"] for row in found} == {0.008 if name == "demo" else 0.002}
        _, plain, scaled = found
        assert far(scaled) < far(plain) and above(scaled) > above(plain) - 5e-4
        raised[name] = max(raised.get(name, 0.0), above(scaled) - above(plain))
        of_far = [f"{row['far']['kl']['value']:.3f}" for row in (plain, scaled)]
        if (name, steps) != ("t2", 64):  # of those the page says that it rises
            assert " to ".join(of_far) in text
        assert (of_far[0] > of_far[1]) == ((name, steps) == ("demo", 512))
        if (name, steps) == ("t2", 512):
            assert far(plain) < MAX_FAR_LOSS, "below the limit without scaling too"
    assert "by at most {:.1f} %, for t2 by up to {:.1f} %".format(
        100 * raised["demo"], 100 * raised["t2"]
    ) in text.replace("for demo by at most", "by at most")
    opposite, scaled = (
        [demo[4, g, "closed-form", 64, "own+64", order, "distillation"] for g in (2, 4)]
        for order in ("train-own", "own")
    )
    assert all(far(one) > far(other) for one, other in zip(opposite, scaled, strict=True))
    of_two, of_four = (f"{far(row):+.3f}" for row in opposite)
    assert f"{of_two} nats with groups of 2 and {of_four} with groups of 4" in text
    averages = ", ".join(f"{above(row) * 100:+.2f} %" for row in opposite)
    of_far = ", ".join(f"{row['far']['kl']['value']:.3f}" for row in opposite)
    assert f"Perplexity ({averages}) and the KL on far tokens ({of_far})" in text
    for name, lower in ("demo", 4), ("t2", 12), ("t2", 10), ("t2", 8):
        trained = [
            rows[name][lower, 1, "closed-form", steps, "own+64", "own", "distillation"]
            for steps in (0, 64, 512)
        ]
        for row in trained:
            kl, of_far = row["answers"]["kl"]["value"], row["far"]["kl"]["value"]
            cells = f"{above(row):+.2%} | {kl:.4f} | {far(row):+.3f} | {of_far:.4f}"
            where = f"| {name} | {lower} of {LAYERS[name]} | {row['steps']} |"
            assert f"{where} {cells} |" in text
        late_enough = (name, lower) != ("t2", 8)
        assert all((far(row) > far(trained[0])) == late_enough for row in trained[1:])
        assert above(trained[2]) < above(trained[0]), "nearer on average"
    lower = demo[3, 1, "closed-form", 64, "own+64", "own", "distillation"]
    assert f"{far(lower):+.3f} nats after 64 steps" in text and far(lower) > MAX_FAR_LOSS


def test_the_cost_of_generated_keys_and_values():
    """The table is counted by the formulas of plans."""
    text, llama = page("generated-kv.md"), PRESETS["llama-3.1-8b"]
    served: tuple[tuple[int, int, GeneratedKV, int], ...] = (
        (16, 1, "boundary", 0),
        (16, 1, "own", 0),
        (16, 1, "own", 64),
        (16, 4, "boundary", 0),
        (16, 4, "own", 64),
        (12, 1, "own", 64),
        (12, 4, "own", 64),
    )
    for lower, group, mode, tail in served:
        config = choose_generated_kv(llama.cut(lower, group), mode, tail)
        prefill, decode = (
            flops(config, 8192, swiftkv=True) / flops(config, 8192, swiftkv=False)
            for flops in (cost.prefill_flops, cost.decode_flops)
        )
        prompt, answer = (
            f"{bytes_of(config, jnp.dtype(jnp.bfloat16), swiftkv=True) / 1024:.0f} KiB"
            for bytes_of in (bytes_per_token, answer_bytes_per_token)
        )
        read, floor = (
            decode_bytes(config, jnp.dtype(jnp.bfloat16), 8192, swiftkv=swiftkv)
            for swiftkv in (True, False)
        )
        counts = (f"{count:.3f}" for count in (prefill, decode, read / floor))
        cells = lower, group, f"`{mode}`", tail, *counts, prompt, answer
        assert f"| {' | '.join(map(str, cells))} |" in text
    short = [
        cost.prefill_flops(config, 1024, swiftkv=True)
        / cost.prefill_flops(config, 1024, swiftkv=False)
        for config in (choose_generated_kv(llama.cut(16), "own", tail) for tail in (64, 0))
    ]
    assert "pays more for it: {:.3f} instead of {:.3f} of".format(*short) in text


def test_the_limit_of_far_tokens_in_the_readme():
    assert f"more than {MAX_FAR_LOSS} nats there" in page("../README.md")


def analysis_of_t2() -> list[dict]:
    file = DOCS / "img" / "data" / "analysis-t2.json"
    return json.loads(file.read_text(encoding="utf-8"))["cuts"]


def test_choosing_the_cut():
    """The analysis of t2, and what own keys and values and training make of its cuts."""
    text = page("training.md")
    cuts = {cut["num_key_value_layers"]: cut for cut in analysis_of_t2()}
    for k in 6, 8, 9, 10, 11, 12:
        cut, fits = cuts[k], [fit["r2_k"] for fit in cuts[k]["layers"][1:]]
        lost = f"{cut['far_nats']:+.3f}" + " *" * (cut["far_nats"] > MAX_FAR_LOSS)
        cells = (
            f"{k / 16:.1%} | {cut['kl']:.3f} | {cut['student_perplexity']:.2f} | {lost} | "
            f"{cut['prefill_flops_share']:.0%} | {statistics.mean(fits):.3f}"
        )
        assert f"| {k} | {cells} |" in text
    assert 0.3 < cuts[10]["far_nats"] / cuts[9]["far_nats"] < 0.36, "falls to a third"
    of_layer = [cuts[k]["layers"][11 - k]["r2_k"] for k in (10, 9)]
    assert "layer 10 with R² {:.3f}, from that of layer 9 with {:.3f}".format(*of_layer) in text
    modes = ("boundary", "boundary"), ("own+64", "own"), ("own+64", "boundary")
    rows = rows_of("t2")
    columns = (0, 0), (64, 0), (512, 0), (0, 1), (64, 1), (512, 1), (64, 2), (512, 2)
    for lower in 12, 10, 8:
        found = [
            rows[lower, 1, "closed-form", steps, *modes[mode], "distillation"]
            for steps, mode in columns
        ]
        assert f"| {lower} |{far_cells(found)}" in text
    plain = rows[10, 1, "closed-form", 0, *modes[0], "distillation"]
    tokens = f"{plain['far']['tokens']:,}"
    assert f"K = 10 {far(plain):.3f}" in text and f"On the {tokens} of" in text


@pytest.mark.parametrize("steps", [64, 512])
@pytest.mark.parametrize(("teacher", "lower", "cut"), [("demo", 4, 2), ("t2", 12, 4), ("t2", 8, 2)])
def test_beside_the_authors_recipe(teacher, lower, cut, steps):
    """With groups this package's recipe gives the lower figures in every cell."""
    both = []
    for recipe, start in ("authors", "authors"), ("this package", "closed-form"):
        rows = [student(teacher, group, start, steps, lower=lower) for group in (1, 2, 4)]
        both.append(rows)
        cells = (f"{100 * above_all(row):.1f} %, {far(row):.3f} nats{star(row)}" for row in rows)
        name = f"{teacher}, 1/{cut}, {recipe}, {steps}"
        assert table_line("docs/training.md", name) == f"| {name} | {' | '.join(cells)} |"
    for theirs, ours in list(zip(*both, strict=True))[1:]:
        assert above_all(ours) < above_all(theirs) and far(ours) < far(theirs)


# Joining ---------------------------------------------------------------------------


def row(rate: float, perplexity: float, seeds: int = 1, **changed) -> students.Row:
    fields = {"num_key_value_layers": 4, "key_value_group_size": 1, "start": "authors"}
    fields |= {"steps": 64, "mode": "boundary", "learning_rate": rate, "blocks": None}
    rates = {f"{rate:g}": perplexity}
    return fields | {"perplexity_of_rates": rates, "seeds": [0] * seeds} | changed


def document(*rows: students.Row, tokens: int = 100):
    rows = tuple(one | {"answers": {"tokens": tokens}} for one in rows)
    return {"command": "c", "documents": 2, "prompt": 256, "tokens_per_step": 8, "rows": list(rows)}


def test_the_best_rate_of_a_student_counts_then_more_seeds():
    (found,) = students.joined([document(row(0.1, 9.0)), document(row(0.2, 8.0))])["rows"]
    assert found["learning_rate"] == 0.2
    (found,) = students.joined([document(row(0.1, 7.0)), document(row(0.2, 8.0))])["rows"]
    assert found["learning_rate"] == 0.1 and set(found["perplexity_of_rates"]) == {"0.1", "0.2"}
    (found,) = students.joined([document(row(0.1, 7.0, seeds=3)), document(row(0.1, 8.0))])["rows"]
    assert len(found["seeds"]) == 3
    own = row(0.1, 7.0, generated_kv="own")
    assert students.joined([document(row(0.1, 7.0), own)])["rows"][1:] == []


def test_results_of_different_texts_are_not_joined():
    with pytest.raises(ValueError, match="not the text of c"):
        students.joined([document(row(0.1, 7.0)), document(row(0.1, 7.0), tokens=99)])
