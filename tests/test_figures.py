"""The figures in the README and the pages are those that were measured."""

import math
import re
from dataclasses import fields

import jax.numpy as jnp
import pytest

from benchmarks.on_gpu import part_rows
from benchmarks.real.cells import Program
from benchmarks.result_files import ON_H100, all_of, real_documents
from swiftkv_jax.model.cache import answer_bytes_per_token, bytes_per_token
from swiftkv_jax.model.cut import choose_generated_kv
from swiftkv_jax.plan import cost
from swiftkv_jax.plan.presets import PRESETS
from swiftkv_jax.plan.tables import decode_bytes
from swiftkv_jax.train.loss.quality import MAX_FAR_LOSS
from tests.compile import test_bundles
from tests.test_docs import README, ROOT, text_of


def test_figures_of_the_readme_are_the_measured_ones():
    readme = text_of(README)
    assert "0.535 of the teacher's" in text_of(ROOT / "docs/measurements.md")
    assert "0.535 of the teacher's" in readme
    student, teacher = (
        [row for row in prefill_rows() if row["variant"] == variant]
        for variant in ("swiftkv", "teacher")
    )
    faster = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(student, teacher, strict=True)]
    sooner = [b["ttft"] / a["ttft"] for a, b in zip(student, teacher, strict=True)]
    ms = [1e3 * row["ttft"] for row in student]
    assert (
        f"prefill of 500 to 8,192 tokens, Llama-3.1-8B, one H100 | {min(faster):.2f}x to "
        f"{max(faster):.2f}x faster, first token {min(sooner):.2f}x to {max(sooner):.2f}x (after "
        f"{min(ms):.0f} to {max(ms):.0f} ms) | measured,"
    ) in readme
    student = part_rows(all_of(f"serve-{ON_H100}"), "offline")[0]
    rate = round(student["tokens_per_s"], -2)
    assert f"another H100 | {student['speed_up']:.2f}x faster: {rate:,.0f} tok" in readme
    shares = [
        1 / row["speed_up"]
        for part in ("decode", "decode-2k", "decode-2k-fp8")
        for row in part_rows(all_of(f"serve-{ON_H100}"), part)
        if "speed_up" in row
    ]
    assert f"measured on one H100 ({min(shares):.2f} to {max(shares):.2f} of it)" in readme
    assert f"more than {MAX_FAR_LOSS} nats there" in " ".join(readme.split())
    config = PRESETS["llama-3.1-8b"]
    whole, two, four = (
        bytes_per_token(config.cut(16, group), jnp.bfloat16) // 1024 for group in (1, 2, 4)
    )
    assert f"{whole} KiB; groups of two {two}, groups of four {four}" in readme
    (calibration,) = all_of(f"calibration-{ON_H100}")
    seconds = calibration["pass"]["seconds"] + calibration["solutions"][0]["seconds"]
    (steps,) = all_of(f"train-step-{ON_H100}")
    rates = [row["tokens"] / row["seconds"] for row in steps["rows"] if row["layers"] == 32
             and "seconds" in row]  # fmt: skip
    hours = 680e6 / rates[0] / 3600
    text = " ".join(readme.split())
    assert f"the calibration took {seconds:.0f} s on one H100" in text
    assert f"680M tokens would take {hours:.0f} hours (extrapolated" in text


def prefill_rows():
    """The rows of the picture of the README, from the shortest prompt to the longest."""
    (found,) = (one for one in all_of(f"serve-{ON_H100}") if "prefill-lengths" in one["parts"]
                and one["date"].startswith("2026-11-28"))  # fmt: skip
    return found["parts"]["prefill-lengths"]["rows"]


def test_students_of_a_real_model_in_the_readme_are_the_measured_ones():
    documents = {
        (one["model"]["name"], one["settings"]["documents"]): one for one in real_documents()
    }
    document = documents["smollm2-135m", 4]
    layers, rows = document["model"]["layers"], []
    for cell in document["cells"]:
        program = Program(**{field.name: cell.get(field.name, 0) for field in fields(Program)})
        above = [
            f"{100 * text['above']['value']:.1f} ± {100 * text['above']['stderr']:.1f} %"
            for text in cell["texts"].values()
        ]
        far = cell["far"]["lost"]
        nats = f"{far['value']:.2f} ± {far['stderr']:.2f}" + " *" * (far["value"] > MAX_FAR_LOSS)
        lost = [points(cell, task).replace("+0 ", "0 ") for task in ("recall", "identifiers")]
        tokens = cell["trained_tokens"]
        made = f"distilled on {tokens / 1e6:.0f}M tokens" if tokens else "calibration"
        if share := cell.get("restated_share"):
            made += f", {share:.0%} [restated](docs/training.md#data)"
        if program.exact_head and program.prompt_mlp_neurons:
            made += ", [closer states](docs/calibration.md#closer-boundary-states)"
        elif program != Program():
            continue
        if cell["generated_kv"] == "own" and not cell.get("key_value_group_size"):
            rows.append(
                f"| {cell['num_key_value_layers']} of {layers} | {made} | "
                f"{100 * cell['prefill_share']:.0f} % | {', '.join(above)} | {nats} | "
                f"{', '.join(lost)} |"
            )
    shown = [line for line in text_of(README).splitlines() if f" of {layers} | " in line]
    assert len(shown) > 5 and set(shown) <= set(rows)
    kept = [
        next(
            cell
            for cell in documents[name, 1]["cells"]
            if cell["num_key_value_layers"] == cut and not cell["exact_head"]
        )
        for name, cut in (("qwen2.5-coder-0.5b", 16), ("gemma-3-270m", 12))
    ]
    above = [100 * text["above"]["value"] for cell in kept for text in cell["texts"].values()]
    far = [f"{cell['far']['lost']['value']:.2f}" for cell in kept]
    assert (
        "Qwen2.5-Coder-0.5B with 16 of 24 layers and Gemma 3 270M with 12 of 18 recall as before, "
        f"in closed form: at most {max(above):.1f} % of perplexity, far {' and '.join(far)}"
    ) in " ".join(text_of(README).split())
    assert all(cell["tasks"]["recall"]["difference"]["value"] == 0 for cell in kept)
    gemma, qwen = (
        next(
            cell
            for cell in documents[name, 1]["cells"]
            if cell["num_key_value_layers"] == cut and cell["exact_head"]
        )
        for name, cut in (("gemma-3-270m", 9), ("qwen2.5-coder-0.5b", 12))
    )
    lost = [points(cell, task)[1:] for cell in (gemma, qwen) for task in ("recall", "identifiers")]
    assert (
        "At half, calibrated with closer states, Gemma loses {} points of recall and {} of names, "
        "Qwen {} and {}."
    ).format(*lost) in " ".join(text_of(README).split())
    trained = next(
        cell
        for cell in documents["gemma-3-270m", 1]["cells"]
        if cell["trained_tokens"] == 2**18 and cell["restated_share"] == 0.5
    )
    lost = [points(trained, task)[1:] for task in ("recall", "identifiers")]
    above = [f"{100 * text['above']['value']:.1f}" for text in trained["texts"].values()]
    assert (
        "Distilled on 0.26M tokens, half restated, Gemma loses {} and {}, at {} and {} % of "
        "perplexity."
    ).format(*lost, *above) in " ".join(text_of(README).split())
    two = sorted(
        (-cell["num_key_value_layers"], cell["human_eval"])
        for cell in documents["qwen2.5-coder-0.5b", 1]["cells"]
        if "human_eval" in cell
    )
    solved = [f"{100 * one['difference']['value']:+.0f} ± "
              f"{100 * one['difference']['stderr']:.0f}" for _, one in two]  # fmt: skip
    assert (
        f"Of HumanEval's {two[0][1]['problems']} problems, with short prompts, Qwen solves "
        f"{100 * two[0][1]['teacher']:.0f} %, its students with 16 and 12 layers in closed form "
        f"{' and '.join(solved)} points beside it."
    ) in " ".join(text_of(README).split())
    pairs = next(
        cell
        for cell in documents["smollm2-135m", 1]["cells"]
        if cell.get("key_value_group_size") == 2 and cell["generated_kv"] == "own"
    )
    above = pairs["texts"]["english"]["above"]
    lost = f"{100 * above['value']:.1f} ± {100 * above['stderr']:.1f} %"
    assert (
        f"20 of 30 layers of SmolLM2 they lose {lost} and {pairs['far']['lost']['value']:.2f} nats"
    ) in " ".join(text_of(README).split())
    tasks = document["cells"][0]["tasks"]
    (questions,) = {task["questions"] for task in tasks.values()}
    assert (
        f"in points below the teacher's {tasks['recall']['teacher']:.0%} and "
        f"{tasks['identifiers']['teacher']:.0%} of {questions} questions"
    ).replace("%", " %") in " ".join(text_of(README).split())


def points(cell, task):
    """The difference of student and teacher, in points."""
    found = cell["tasks"][task]["difference"]
    return f"{100 * found['value']:+.0f} ± {100 * found['stderr']:.0f}"


def test_cycles_on_the_page_of_kernels_are_the_counted_ones():
    kernels = text_of(ROOT / "docs" / "kernels-internals.md")
    for (chip, cache_format), (positions, *bundles) in test_bundles.DECODE.items():
        cycles = round(test_bundles.copy_cycles(chip, cache_format, positions))
        cells = chip, cache_format, positions, *bundles, f"{cycles:,}"
        assert f"| {' | '.join(map(str, cells))} |" in kernels


SERVED = (  # layers below the cut, of a group, how answers are served, exact tail
    (16, 1, "boundary", 0),
    (16, 1, "own", 0),
    (16, 1, "own", 64),
    (16, 4, "boundary", 0),
    (16, 4, "own", 64),
    (12, 1, "own", 64),
    (12, 4, "own", 64),
)


@pytest.mark.parametrize(("lower", "group", "mode", "tail"), SERVED)
def test_the_cost_of_generated_keys_and_values(lower, group, mode, tail):
    """The table is counted by the formulas of plans."""
    text = text_of(ROOT / "docs/generated-kv.md")
    config = choose_generated_kv(PRESETS["llama-3.1-8b"].cut(lower, group), mode, tail)
    bfloat16 = jnp.dtype(jnp.bfloat16)
    student, teacher = (
        (
            cost.prefill_flops(config, 8192, swiftkv=swiftkv),
            cost.decode_flops(config, 8192, swiftkv=swiftkv),
            decode_bytes(config, bfloat16, 8192, swiftkv=swiftkv),
        )
        for swiftkv in (True, False)
    )
    shares = (f"{one / other:.3f}" for one, other in zip(student, teacher, strict=True))
    sizes = (
        f"{bytes_of(config, bfloat16, swiftkv=True) / 1024:.0f} KiB"
        for bytes_of in (bytes_per_token, answer_bytes_per_token)
    )
    cells = lower, group, f"`{mode}`", tail, *shares, *sizes
    assert f"| {' | '.join(map(str, cells))} |" in text
    if (lower, group, mode) == (16, 1, "own"):
        flops = (cost.prefill_flops(config, 1024, swiftkv=swiftkv) for swiftkv in (True, False))
        ours, whole = flops
        shown = {64: "pays more for it: {:.3f} instead", 0: "instead of {:.3f} of"}[tail]
        assert shown.format(ours / whole) in " ".join(text.split())


def test_the_recorded_demo_of_a_real_model_holds_its_bars():
    """Of untrained students at most 70 % and 60 % of the teacher's prefill, a tap at half of the
    layers, the recommended student beside copied projections, and the time of it all."""
    page = text_of(ROOT / "docs/real-models.md")
    rows = [
        [float(number) for number in re.findall(r"[-+]?\d+\.?\d*(?=[%*\s]|$)", line)]
        + [line.count("*")]
        for line in page.splitlines()
        if re.match(r"\d\d +\d\d\.\d% ", line)
    ]
    names = "k", "layers", "tap", "lost", "far", "prefill", "star"
    students = [
        dict(zip(names, (row[at] for at in (0, 2, 4, 9, 11, 13, 14)), strict=True)) for row in rows
    ]
    assert len(students) >= 15 and {student["k"] for student in students} >= {11, 15, 18, 19, 26}
    for student in students:
        assert bool(student["star"]) == (student["far"] > MAX_FAR_LOSS)
    for prefill, lost, far in ((70.0, 2.0, 0.15), (60.0, 4.0, 0.35)):
        assert any(
            student["prefill"] <= prefill and student["lost"] <= lost and student["far"] <= far
            for student in students
        ), f"at most {prefill} % of the prefill"
    half = [student for student in students if student["k"] == 15]
    plain = next(student for student in half if not student["tap"])
    tapped = next(student for student in half if student["tap"] and not student["layers"])
    gap = math.log1p(tapped["lost"] / 100) / math.log1p(plain["lost"] / 100)
    assert gap <= 0.65, "of the log perplexity that is lost without a tap"
    lost = {
        name: (float(share), float(far))
        for name, share, far in re.findall(
            r"^(copied|calibrated) .*? ([-+][\d.]+)% .* ([-+][\d.]+)$", page, re.M
        )
    }
    assert all(new < old for new, old in zip(lost["calibrated"], lost["copied"], strict=True))
    assert lost["calibrated"][0] <= 2.0 and lost["calibrated"][1] <= MAX_FAR_LOSS
    (after,) = re.findall(r"the same after 6 steps .*\(([-+][\d.]+)%\)", page)
    assert float(after) < lost["calibrated"][0]
    assert re.search(r"answers that are right +3 of 3 +[1-3] of 3", page)
    (minutes,) = re.findall(r"In (\d+) minutes on two CPU cores", page)
    assert int(minutes) <= 25
