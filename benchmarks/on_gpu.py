"""What was measured on an H100: a section of the page of measurements, and a page of its own.

All result files count; where one row or part is in several, the newest does.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swiftkv_jax.infer.bench import summary
from swiftkv_jax.plan.hardware import GIB

from . import report
from .kernels.shapes import required
from .markdown import section, table
from .predict.devices import H100
from .serve_targets import judge, missed

TITLE = "Attention, serving and training on an H100"
DEVICE = f"one {H100.kind}"
Documents = Sequence[Mapping[str, Any]]

PRINTED = (
    (
        "the check of two configurations when an engine starts",
        "18 s",
        "`python -m benchmarks.serve`",
    ),
    (
        "tests of the kernels",
        "about 190 of 641 were run, all passed",
        "`make test-gpu`, in several processes",
    ),
    (
        "tokens of a tiny model under four sets of XLA's options for command buffers",
        "equal to those under the defaults; a fifth, unrolled loops, fails with "
        "`CUDA_ERROR_NOT_SUPPORTED`",
        "`python -m benchmarks.command_buffers --shapes smoke`",
    ),
    (
        "training a model of 28.3M parameters from scratch on 131M tokens",
        "468,000 tokens/s, with a measurement of 0.5M held-out tokens every 250 steps",
        "`python -m benchmarks.teachers t2`",
    ),
    (
        "distilling SmolLM2-135M, K = 15 with tap, attention of 2 and 384 neurons, 32,768 tokens a "
        "step, nothing recomputed",
        "246,000 tokens/s, 18.6 % of the published peak; 1,000 steps in 180 s, with the start, "
        "compilation, five evaluations and the export",
        "`python -m benchmarks.distill_real gpu`",
    ),
    ("the demo model's answer", "128 tokens of Python", "`swiftkv infer`"),
)
"""(what, result, command): figures that commands printed, and that are in no result file."""


def summarised(kernels: Documents, serve: Documents, train: Documents, page: str) -> str:
    """The section of the page of measurements, which refers to another `page` for the tables."""
    prefill, decode = part_rows(serve, "prefill"), part_rows(serve, "decode")
    eight = [row for row in prefill if row["cell"]["input_len"] == 8192]
    one, many = ([row for row in decode if row["cell"]["prompts"] == n] for n in (1, 256))
    step = next(row for row in _steps(train) if row["layers"] == 32)
    more = "seconds_per_output_token"
    lines = [
        ("prefill of 8,192 tokens", *(f"{row['tokens_per_s']:,.0f} tokens/s" for row in eight)),
        ("time to the first token of such a prompt", *(f"{1e3 * r['ttft']:.0f} ms" for r in eight)),
        (
            "512 prompts of 2,000 tokens with answers of 250, together",
            *(
                f"{row['tokens_per_s']:,.0f} tokens/s, {row['normalised_flops_per_s'] / 1e12:.0f} "
                "normalised TFLOP/s"
                for row in part_rows(serve, "offline")
            ),
        ),
        (
            "time per output token, 1 and 256 sequences of 1,024 tokens",
            *(
                f"{1e3 * short[more]:.2f} and {1e3 * long[more]:.1f} ms"
                for short, long in zip(one, many, strict=True)
            ),
        ),
    ]
    bounds = [(row["name"], met) for row in attention_rows(kernels) for _, met in required(row)]
    below = [name for name, met in bounds if not met]
    return section(
        TITLE,
        f"Measured on {DEVICE}: Llama-3.1-8B with random weights, K = 16, bfloat16. "
        f"[All figures]({page}).",
        table(("", "SwiftKV", "teacher"), lines),
        f"Prefill with SwiftKV was {eight[0]['speed_up']:.2f} times as fast "
        f"({eight[0]['teacher_flops_over_own']:.2f} by operations), at "
        f"{eight[0]['flops_share']:.0%} of the rate of a large matrix product and "
        f"{eight[0]['flops_per_s'] / H100.published.flops:.0%} of the published peak. Of "
        f"{len(bounds)} rates that a release requires of the kernels, {len(below)} are "
        f"missed: {', '.join(below)}. The distillation "
        f"step of 32 layers takes {step['seconds']:.2f} s for 8,192 tokens, "
        f"{step['mfu_of_peak']:.0%} of the published peak, in {step['peak_bytes'] / GIB:.1f} GiB.",
    )


def full_page(
    checks: Documents,
    kernels: Documents,
    serve: Documents,
    train: Documents,
    calibrations: Documents,
) -> str:
    """The page: kernels, serving, training, calibration."""
    facts = kernels[-1]
    versions, device = facts["versions"], facts["device"]
    rates, bandwidths = (
        sorted(document["roofline"][part] for document in kernels)
        for part in ("flops", "bandwidth")
    )
    return "\n\n".join(
        [
            f"# {TITLE}",
            f"Measured on {DEVICE} on {facts['date'][:10]}: driver {device['driver']}, CUDA 13.0, "
            f"JAX {versions['jax']}, cuDNN {versions['nvidia-cudnn-cu13']}. One run of each "
            "command, with random weights and inputs. Shares are of what a large bfloat16 product "
            f"and a large copy reached in the same run: {rates[0] / 1e12:.0f} to "
            f"{rates[-1] / 1e12:.0f} TFLOP/s and {bandwidths[0] / 1e9:,.0f} to "
            f"{bandwidths[-1] / 1e9:,.0f} GB/s. Predictions are those of "
            "`python -m benchmarks.predict`, made before any of this was measured.",
            "The result files name the commit that was checked out. In the runs until 08:33 UTC, "
            "its copy had two changes that were committed afterwards: `benchmarks.serve --only`, "
            "and copies of at most 1 GiB in the measurement of the roofline.",
            correctness(checks),
            attention(kernels),
            serving(serve),
            training(train),
            calibration(calibrations[-1]),
            section(
                "Besides",
                "These figures were printed by commands and are in no result file.",
                table(("what", "result", "command"), PRINTED),
            ),
        ]
    )


# Correctness ------------------------------------------------------------------


def correctness(checks: Documents) -> str:
    """How many configurations of each kernel were checked."""
    verdicts = {one["kernel"]: one["outcome"] for found in checks for one in found["verdicts"]}
    found = Counter((name.partition(".")[0], outcome) for name, outcome in verdicts.items())
    wanted = checks[-1]["configurations"]
    rows = [
        (
            name,
            str(wanted[name]),
            str(sum(count for (kernel, _), count in found.items() if kernel == name)),
            str(found[name, "right"]),
        )
        for name in wanted
    ]
    return section(
        "Are the kernels right?",
        "Configurations of `swiftkv check-kernels`, several at once. Each is compared three times "
        "with the reference in float32. The time did not suffice for all of them: the gradient of "
        "packed rows at head dim 128 and the products of experts are among those left out.",
        table(("kernels", "configurations", "checked", "right"), rows),
    )


# Attention --------------------------------------------------------------------

KINDS = "prefill", "packed", "chunk", "train", "decode"
"""How names of rows begin, in the order of the table."""


def attention_rows(kernels: Documents) -> list[dict[str, Any]]:
    """The rows that have a result of the Hopper kernels, by kind. `over_op` is how many times as
    fast as this package's op through cuDNN they are, None where that cannot be compared: it copies
    the cache to decode, and gathers chunks."""
    rows: dict[str, dict[str, Any]] = {}
    for document in kernels:
        for row in document["rows"]:
            results = {one["implementation"]: one for one in row["results"] if "seconds" in one}
            if (ours := results.get("hopper")) is None:
                continue
            shape, cudnn = row["shape"], results.get("cudnn")
            whole = "queries" in shape and shape["queries"] == shape["keys"]
            rows[row["name"]] = ours | {
                "name": row["name"],
                "unit": row["unit"],
                "sequences": shape["batch"],
                "over_op": cudnn["seconds"] / ours["seconds"] if cudnn and whole else None,
                "planned_before": "plan" in document["conventions"],
                "others": results,
                "versions": document["versions"],
            }
    return sorted(rows.values(), key=lambda row: KINDS.index(row["name"].split()[0]))


def attention(kernels: Documents) -> str:
    rows = attention_rows(kernels)
    wrong = [row for row in rows if row["status"] == "wrong"]
    lines = [
        (
            row["name"] + (" †" if row in wrong else ""),
            str(row["sequences"]),
            report.duration(row["seconds"]),
            f"{row['rate']:.4g} {row['unit']}",
            f"{row['share_of_roofline']:.0%}",
            f"{row['seconds'] / row['predicted_seconds']:.2f}",
            "" if row["over_op"] is None else f"{row['over_op']:.2f}",
            "; ".join(f"{bound}, {'met' if met else '**missed**'}" for bound, met in required(row)),
        )
        for row in rows
    ]
    heading = "row, sequences, time, rate, of roofline, over predicted, over `cudnn`, release"
    return section(
        "Attention",
        "`python -m benchmarks.kernels`, which explains rows and counts; `8B` has 32 query and 8 "
        "key/value heads of 128 entries. `over predicted` is the measured time over the predicted "
        "one. `over cudnn` is how many times as fast the kernel is as this package's "
        "`implementation='cudnn'`, cuDNN's attention after a transposition of k and v; it is left "
        "out where that op copies a cache as well. cuDNN on operands in its own order, which a "
        "release is compared with, was timed on one row only.",
        table(heading.split(", "), lines),
        *_notes(rows),
    )


def _notes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    decode = [row for row in rows if row["name"].startswith("decode")]
    if planned := [f"`{row['name']}`" for row in decode if not row["planned_before"]]:
        yield (
            f"The times of {' and '.join(planned)} include the plan of the thread blocks, which an "
            "engine makes once a step for all layers: by XLA's compiler three small kernels for "
            "one sequence and seven for 64. The predictions and the other rows leave it out."
        )
    for row in rows:
        ours, others = row["seconds"], row["others"]
        if "torch-flash" in others:
            beside = ", ".join(
                f"{name} {report.duration(others[key]['seconds'])}"
                for key, name in (
                    ("cudnn-btnh", "cuDNN in its own order"),
                    ("jax-mgpu", "JAX's Mosaic kernel in float16 with one fixed tuning"),
                    ("torch-flash", f"FlashAttention in PyTorch {row['versions']['torch']}"),
                )
            )
            yield f"`{row['name']}` takes {report.duration(ours)}; beside it: {beside}."
        if row["status"] == "wrong":
            worst = row["errors"]["dq"]
            yield (
                f"† The benchmark's check refused the gradient of the queries: its worst vector is "
                f"off by {worst['worst_vector']:.3f} of its size, or of a tenth of the root mean "
                "square where that is larger (limit 0.1). Computed in float64 from the same inputs "
                "(seed 471123210, row 12), for the first six queries of each document, with the "
                "output and the gradient of the scores rounded to bfloat16 as flash attention "
                "does, the worst vector is off by 0.230. It is that of a query that sees two keys: "
                f"a small difference of large terms. The error over all vectors is "
                f"{worst['relative']:.4f} (limit 0.02). For this gradient the check now compares "
                "with half of the root mean square; the row has not been run again."
            )


# Serving ----------------------------------------------------------------------


def part_rows(serve: Documents, name: str) -> list[dict[str, Any]]:
    """The rows of a part's newest run."""
    return next(d["parts"][name]["rows"] for d in reversed(serve) if name in d["parts"])


def serving(serve: Documents) -> str:
    parts = {name: one for document in serve for name, one in document["parts"].items()}
    tables = [
        f"**{name}** (`infer bench {one['mode']}`)\n\n{summary.table(one['mode'], one['rows'])}"
        for name, one in parts.items()
    ]
    predicted = {
        (name, row["label"], row["variant"]): row["seconds"]
        for document in serve
        for name, one in document.get("predicted", {}).items()  # a run that ended early has none
        for row in one["rows"]
    }
    ratios = sorted(
        row["seconds"] / predicted[name, row["label"], row["variant"]]
        for name, one in parts.items()
        for row in one["rows"]
        if (name, row["label"], row["variant"]) in predicted
    )
    ttft = ", ".join(
        f"{row['ttft_speed_up']:.2f}" for row in parts["prefill"]["rows"] if "ttft_speed_up" in row
    )
    return section(
        "Serving",
        "`python -m benchmarks.serve`: Llama-3.1-8B with random weights, K = 16, bfloat16; an "
        "engine of SwiftKV and then one of the teacher. Normalised TFLOP/s count two operations "
        "for each of the teacher's parameters and tokens, and no attention. `host %` is the share "
        "of time in which the host did not wait for the device. The time to the first token (TTFT) "
        "is that of prefill and of one decode step, which computes the first token; SwiftKV's is "
        f"shorter by a factor of {ttft} at the three lengths.",
        "![Rate and speed-up of prefill over the length](../img/prefill-h100.png)",
        *tables,
        "What a release requires was set for an H200, whose memory is 1.43 times as fast:",
        table(("figure", "release", "best", "measured"), judge(parts)),
        f"Missed for a release: {'; '.join(missed(parts)) or 'none'}.",
        f"Measured over predicted times: {ratios[0]:.2f} to {ratios[-1]:.2f}, median "
        f"{statistics.median(ratios):.2f}, of {len(ratios)}.",
        *_left_out(parts),
    )


def _left_out(parts: Mapping[str, Any]) -> Iterator[str]:
    if not any(one["mode"] == "offline" for one in parts.values()):
        yield (
            "Offline throughput was not measured: the benchmark refused to begin, because 256 "
            "sequences of 2,250 tokens do not fit into the cache together. It queues them now."
        )
    if not any(one["mode"] == "latency" for one in parts.values()):
        yield "Latency under load was not measured."


# Training ---------------------------------------------------------------------


def _steps(train: Documents) -> list[dict[str, Any]]:
    """The newest measurement of each step."""
    rows = (row for document in train for row in document["rows"] if "seconds" in row)
    return list({row["name"]: row for row in rows}.values())


def training(train: Documents) -> str:
    steps = _steps(train)
    lines = [
        (
            row["name"],
            report.duration(row["seconds"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['mfu_of_peak']:.0%}",
            f"{row['busy_of_product']:.0%}",
            f"{row['peak_bytes'] / GIB:.2f} GiB",
            f"{row['plan_error']:+.1%}",
        )
        for row in steps
    ]
    measured = {row["name"] for row in steps}
    missing = dict.fromkeys(row["name"] for document in train for row in document["rows"])
    left_out = "; ".join(name for name in missing if name not in measured)
    return section(
        "The distillation step",
        "`python -m benchmarks.train_step`: layers of Llama-3.1-8B's shape, half of them upper "
        "ones, packed rows of 8,192 tokens. MFU counts the model's operations, of the published "
        "989 TFLOP/s; `busy` also those that are computed again, of a large product's rate here. "
        "The last column is how far the planned memory is from the peak.",
        table(
            ("step", "time", "tokens/s", "MFU", "busy", "peak of memory", "plan"),
            lines,
        ),
        *([f"Not measured, for lack of time: {left_out}."] if left_out else []),
    )


# Calibration ------------------------------------------------------------------


def calibration(document: Mapping[str, Any]) -> str:
    """The pass over the teacher on the device, and the solutions on the host."""
    found, peak = document["pass"], document["roofline"]["published"]["flops"]
    first, second = (one["seconds"] for one in document["solutions"])
    return section(
        "Calibration",
        f"`python -m benchmarks.calibration`: Llama-3.1-8B, K = 16, rows of {found['length']:,} "
        f"tokens. The pass over {found['tokens']:,} tokens took {found['seconds']:.1f} s, "
        f"{found['of_product']:.0%} of the rate of a large product and "
        f"{found['flops'] / found['seconds'] / peak:.0%} of the published peak, in "
        f"{found['peak_bytes'] / GIB:.1f} GiB. The solution on {document['host']['cores']} cores "
        f"of the host took {first:.1f} s without groups and {second:.1f} s in groups of two.",
    )
