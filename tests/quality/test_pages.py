"""Figures of quality that the pages quote are the measured ones."""

from pathlib import Path

import jax.numpy as jnp

from benchmarks import measurements
from benchmarks.quality import table
from benchmarks.quality.sections import by_teacher
from swiftkv_jax import cost
from swiftkv_jax.cache import bytes_per_token
from swiftkv_jax.cut import choose_generated_kv
from swiftkv_jax.presets import PRESETS
from swiftkv_jax.train.serving_plan import answer_bytes

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
    """Perplexity without training, and what students lose on far tokens, of both teachers."""
    text, rows = page("calibration.md"), {name: rows_of(name) for name in ("demo", "t1")}
    mode = "boundary", "boundary", "distillation"
    for group in 1, 2, 4:
        cells = [
            f"{rows['demo'][4, group, start, 0, *mode]['all']['above']['value']:+.2%}"
            for start in ("authors", "closed-form")
        ]
        assert f"| {group} | {' | '.join(cells)} |" in text
    students = [("closed-form", 0), ("closed-form", 64), ("closed-form", 512)]
    students += [("authors", 64), ("authors", 512)]
    for name, lower in ("demo", 4), ("t1", 8):
        for group in 1, 2, 4:
            found = [rows[name].get((lower, group, *student, *mode)) for student in students]
            cells = [f" {far(row):+.2f} |" if row else " |" for row in found]
            assert f"| {name} | {group} |{''.join(cells)}" in text
    quarter = [far(row) for key, row in rows["demo"].items() if key[0] == 2]
    assert quarter and min(quarter) > 1, "every student of the demo model loses more than a nat"


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


def own(row: table.Row) -> str:
    return f"{above(row):+.2%} | {far(row):+.3f}"


def test_generated_keys_and_values():
    """Without training, with groups, and what the scale of their queries does."""
    text, rows = page("generated-kv.md"), {name: rows_of(name) for name in ("demo", "t1")}
    for name, lower, layers in ("demo", 4, 8), ("demo", 3, 8), ("t1", 8, 16):
        cells = [
            own(rows[name][lower, 1, "closed-form", 0, "own+64", fitted, "distillation"])
            for fitted in ("boundary", "own")
        ]
        assert f"| {name} | {lower} of {layers} | {' | '.join(cells)} |" in text
    demo = rows["demo"]
    for group in 2, 4:
        for steps in 64, 512:
            cells = [
                own(demo[4, group, "closed-form", steps, mode, fitted, "distillation"])
                for mode, fitted in (("boundary", "boundary"), ("own+64", "own"))
            ]
            assert f"| {group} | {steps} | {' | '.join(cells)} |" in text
        cells = [
            own(demo[4, group, "closed-form", 64, "own+64", fitted, "distillation"])
            for fitted in ("boundary", "own")
        ]
        assert f"| {group} | {' | '.join(cells)} |" in text
    student, trained = (
        demo[4, 1, "closed-form", steps, "own+64", "own", "distillation"] for steps in (0, 64)
    )
    assert above(trained) > above(student) and far(trained) > far(student), "did not improve"


def test_the_cost_of_generated_keys_and_values():
    """The table is counted by the formulas of plans."""
    text, llama = page("generated-kv.md"), PRESETS["llama-3.1-8b"]
    for lower, group, mode, tail in (
        (16, 1, "boundary", 0),
        (16, 1, "own", 0),
        (16, 1, "own", 64),
        (16, 4, "boundary", 0),
        (16, 4, "own", 64),
        (12, 4, "own", 64),
    ):
        config = choose_generated_kv(llama.cut(lower, group), mode, tail)
        prefill, decode = (
            flops(config, 8192, swiftkv=True) / flops(config, 8192, swiftkv=False)
            for flops in (cost.prefill_flops, cost.decode_flops)
        )
        prompt, answer = (
            f"{bytes_of(config, jnp.dtype(jnp.bfloat16), swiftkv=True) / 1024:.0f} KiB"
            for bytes_of in (bytes_per_token, answer_bytes)
        )
        cells = lower, group, f"`{mode}`", tail, f"{prefill:.3f}", f"{decode:.3f}", prompt, answer
        assert f"| {' | '.join(map(str, cells))} |" in text
    short = [
        cost.prefill_flops(config, 1024, swiftkv=True)
        / cost.prefill_flops(config, 1024, swiftkv=False)
        for config in (choose_generated_kv(llama.cut(16), "own", tail) for tail in (64, 0))
    ]
    assert "pays more for it: {:.3f} instead of {:.3f} of".format(*short) in text
