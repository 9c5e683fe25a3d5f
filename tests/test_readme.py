"""Figures of the README that come from committed measurements are those of the newest one."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def newest(name: str) -> dict[str, Any]:
    """The latest file of a benchmark: its name ends in the time."""
    return json.loads(max((ROOT / "benchmarks/results").glob(f"{name}-cpu-*.json")).read_text())


def bench_rows(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(student, teacher) of a run with one cell."""
    student, teacher = newest(name)["rows"]
    assert (student["variant"], teacher["variant"]) == ("swiftkv", "teacher")
    return student, teacher


def prefill() -> list[str]:
    student, teacher = bench_rows("infer-prefill")
    rates = (
        f"{student['tokens_per_s']:.0f} and {teacher['tokens_per_s']:.0f} tokens/s, medians "
        f"of {len(student['repetitions'])}"
    )
    ideal = f"{student['teacher_flops_over_own']:.2f} by operations"
    return [
        f"| {student['speed_up']:.2f} times as fast ({rates}",
        ideal,
        f"time to first token {student['ttft_speed_up']:.2f} |",
    ]


def decode() -> list[str]:
    student, teacher = bench_rows("infer-decode")
    times = " and ".join(
        f"{1e3 * row['seconds_per_output_token']:.1f}" for row in (student, teacher)
    )
    return [
        f"{1 / student['speed_up']:.2f} of the teacher's by medians of "
        f"{len(student['repetitions'])} ({times} ms)",
        f"{1 / student['speed_up_of_best']:.2f} by the best",
    ]


def rival() -> list[str]:
    ratios = newest("hf-baseline")["times_as_fast"]
    teacher, student = (
        f"{ratios[name]['ttft']:.2f} and {ratios[name]['tpot']:.2f}"
        for name in ("teacher", "swiftkv")
    )
    return [f"teacher {teacher}, SwiftKV {student} times as fast"]


def eight_bits() -> list[str]:
    cells = {
        (cell["model"], cell["cache"], cell["weights"]): cell["change"]
        for cell in newest("kv-quantization")["cells"]
    }

    def change(cache: str, weights: str) -> str:
        student, teacher = (
            f"{100 * cells[model, cache, weights]:+.2f} %" for model in ("student", "teacher")
        )
        return f"{teacher} (teacher), {student} (student)"

    caches = "; ".join(change(cache, "float32") for cache in ("float8_e4m3fn", "int8"))
    weights = "; ".join(change("float32", weights) for weights in ("fp8", "int8"))
    return [f"| {caches}", f"| {weights}"]


@pytest.mark.parametrize("figures", [prefill, decode, rival, eight_bits])
def test_figures_are_those_that_were_measured(figures):
    for text in figures():
        assert text in README, text
