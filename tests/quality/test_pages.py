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
    """What students lose on far tokens, of both teachers."""
    text, demo, t1 = page("calibration.md"), rows_of("demo"), rows_of("t1")
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
