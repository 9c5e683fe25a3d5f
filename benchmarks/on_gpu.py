"""What was measured on an H100: a section of the page of measurements.

All result files count; where one row or part is in several, the newest does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swiftkv_jax.plan.hardware import GIB, hardware_of

from . import report
from .kernels.shapes import required
from .markdown import section, table
from .result_files import ON_H100, all_of
from .serve_targets import judge

Documents = Sequence[Mapping[str, Any]]

DISTILLED = (
    "Distilling SmolLM2-135M, K = 15 with tap, attention of 2 and 384 neurons, "
    "`python -m benchmarks.distill_real gpu`: 246,000 tokens/s, 18.6 % of the published peak."
)
"""What a command printed, and is in no result file."""
_ONE = ", 1 out, 1 prompts"
"""In the labels of prefill."""


def on_h100() -> str:
    kernels = all_of(f"kernels-{ON_H100}")
    serve = all_of(f"serve-{ON_H100}")
    facts = kernels[-1]
    parts = newest_parts(serve)
    kind = facts["device"]["kind"]
    return section(
        "On an H100",
        f"Measured on one {kind} on {facts['date'][:10]}: driver "
        f"{facts['device']['driver']}, JAX {facts['versions']['jax']}, one run of each command. "
        "Serving: Llama-3.1-8B with random weights, K = 16, bfloat16; "
        "`python -m benchmarks.serve`.",
        table(("", "SwiftKV", "teacher"), _serving(parts)),
        _judged(parts, kind),
        *_later(parts),
        *_attention(kernels),
        _checked(all_of(f"check-kernels-{ON_H100}")),
        _training(all_of(f"train-step-{ON_H100}")),
        _calibration(all_of(f"calibration-{ON_H100}")[-1]),
        DISTILLED,
    )


# Serving ----------------------------------------------------------------------


def newest_parts(serve: Documents) -> dict[str, Any]:
    """Name of each part -> its newest run."""
    return {name: part for document in serve for name, part in document["parts"].items()}


def part_rows(serve: Documents, name: str) -> list[dict[str, Any]]:
    """The rows of a part's newest run."""
    return newest_parts(serve)[name]["rows"]


def _serving(parts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Lines of a table of student and teacher."""
    lines = []
    prefill = parts["prefill"]["rows"]
    for length in (2048, 8192, 32768):
        pair = [row for row in prefill if row["cell"]["input_len"] == length]
        lines.append((f"prefill of {length:,} tokens", *map(_prefill, pair)))
    for rows in (1, 256):
        pair = [row for row in parts["decode"]["rows"] if row["cell"]["prompts"] == rows]
        times = (f"{1e3 * row['seconds_per_output_token']:.2f} ms" for row in pair)
        lines.append((f"time per output token, {rows} x 1,024 tokens", *times))
    rates = (f"{row['tokens_per_s']:,.0f} tokens/s" for row in parts["offline"]["rows"])
    lines.append(("512 prompts of 2,000 tokens with answers of 250, together", *rates))
    return lines


def _judged(parts: Mapping[str, Any], kind: str) -> str:
    """The targets of a release that are missed, each with its figure."""
    judged = judge(parts, kind)
    found = [
        f"{name.partition(', ')[2].replace(_ONE, '')} {figure} (required: {least})"
        for name, least, figure, met in judged
        if not met
    ]
    return (
        f"Of {len(judged)} figures that a release requires of an H100, these are missed: "
        f"{'; '.join(found) or 'none'}. Latency under load was not measured."
    )


def _prefill(row: Mapping[str, Any]) -> str:
    text = f"{row['tokens_per_s']:,.0f} tokens/s, first token after {1e3 * row['ttft']:.0f} ms"
    if "speed_up" in row:
        by_operations = row["teacher_flops_over_own"]
        text += f"; {row['speed_up']:.2f} times as fast, {by_operations:.2f} by operations"
    return text


def _later(parts: Mapping[str, Any]) -> list[str]:
    """What a quarter of an hour measured two days later: short prompts, and 8-bit arithmetic."""
    names = ("prefill-lengths", "offline-student", "prefill-w8a8", "decode-w8a8")
    lines = [
        (
            row["label"].replace(_ONE, ""),
            row["variant"],
            "FP8" if name.endswith("w8a8") else "bfloat16",
            f"{row['tokens_per_s']:,.0f} tokens/s",
            _time(row),
        )
        for name in names
        for row in parts[name]["rows"]
    ]
    return [
        f"Two days later ({parts[names[0]]['date'][:10]}), on another H100, after chunks, schedule "
        "and products had changed: `swiftkv infer bench`. "
        "FP8 is of weights and activations, compiled without XLA's autotuning and its Triton "
        "products. One row of decoding in FP8 was slow because its program had 13 GiB of "
        "temporaries: since fixed, not measured again.",
        table(("", "variant", "products", "rate", "time"), lines),
    ]


def _time(row: Mapping[str, Any]) -> str:
    if "ttft" in row:
        return f"first token after {1e3 * row['ttft']:.1f} ms"
    if "seconds_per_output_token" in row:
        return f"{1e3 * row['seconds_per_output_token']:.2f} ms per output token"
    return f"{row['seconds']:.1f} s, device idle {row['idle_share']:.1%}"


# Kernels ----------------------------------------------------------------------


def attention_rows(kernels: Documents) -> list[dict[str, Any]]:
    """The newest row of each name that has a result of the Hopper kernels."""
    rows: dict[str, dict[str, Any]] = {}
    for document in kernels:
        for row in document["rows"]:
            results = {one["implementation"]: one for one in row["results"] if "seconds" in one}
            if "hopper" in results:
                about = {"name": row["name"], "unit": row["unit"], "others": results}
                rows[row["name"]] = results["hopper"] | about
    return list(rows.values())


def _attention(kernels: Documents) -> list[str]:
    rows = attention_rows(kernels)
    lines = [
        (
            row["name"],
            report.duration(row["seconds"]),
            f"{row['rate']:.4g} {row['unit']}",
            f"{row['share_of_roofline']:.0%}",
            f"{bound}, {'met' if met else '**missed**'}",
        )
        for row in rows
        for bound, met in required(row)
    ]
    beside = next(row for row in rows if "torch-flash" in row["others"])
    others = ", ".join(
        f"{name} {report.duration(beside['others'][one]['seconds'])}"
        for one, name in (
            ("cudnn-btnh", "cuDNN"),
            ("jax-mgpu", "JAX's Mosaic kernel in float16"),
            ("torch-flash", "FlashAttention in PyTorch"),
        )
    )
    right = sum(row["status"] == "ok" for row in rows)
    return [
        "Attention, `python -m benchmarks.kernels`; `8B` has 32 query and 8 key/value heads of 128 "
        "entries. Shares are of what a large product or copy reached in the same run. Rows with "
        "a release target:",
        table(("row", "time", "rate", "of roofline", "release"), lines),
        f"`{beside['name']}` takes {report.duration(beside['seconds'])}, for comparison {others}. "
        f"Of {len(rows)} rows {right} passed the check of their results; one gradient failed a "
        "tolerance that was too strict for bfloat16 and has been widened.",
    ]


def _checked(checks: Documents) -> str:
    verdicts = {one["kernel"]: one["outcome"] for found in checks for one in found["verdicts"]}
    right = sum(outcome == "right" for outcome in verdicts.values())
    wanted = sum(checks[-1]["configurations"].values())
    return (
        f"`swiftkv check-kernels` compared {len(verdicts)} of {wanted} configurations with the "
        f"reference in float32 before time ran out: {right} were right. The gradient of packed "
        "rows at head dim 128 and the products of experts were left out."
    )


# Training and calibration -------------------------------------------------------


def _training(train: Documents) -> str:
    rows = [row for document in train for row in document["rows"] if "seconds" in row]
    steps = {row["name"]: row for row in rows}.values()
    whole = next(row for row in steps if row["layers"] == 32)
    errors = sorted(row["plan_error"] for row in steps)
    return (
        f"The distillation step of 32 layers, `python -m benchmarks.train_step`: "
        f"{report.duration(whole['seconds'])} for 8,192 tokens, {whole['mfu_of_peak']:.0%} of the "
        f"published peak, in {whole['peak_bytes'] / GIB:.1f} GiB. The planned memory of "
        f"{len(steps)} steps is {errors[0]:+.1%} to {errors[-1]:+.1%} off."
    )


def _calibration(document: Mapping[str, Any]) -> str:
    """The pass over the teacher on the device, and the solutions on the host."""
    found = document["pass"]
    hardware = hardware_of(document["device"]["kind"])
    assert hardware is not None
    alone, pairs = (one["seconds"] for one in document["solutions"])
    share = found["flops"] / found["seconds"] / hardware.flops
    return (
        f"Calibration of Llama-3.1-8B, K = 16: the pass over {found['tokens']:,} tokens took "
        f"{found['seconds']:.1f} s, {share:.0%} of the published peak, in "
        f"{found['peak_bytes'] / GIB:.1f} GiB; the solution on the host's "
        f"{document['host']['cores']} cores {alone:.1f} s without groups and {pairs:.1f} s in "
        "pairs."
    )
