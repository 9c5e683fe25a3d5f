"""What was measured on an H100: a section of the page of measurements, and a page of its own."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swiftkv_jax.hardware import GIB
from swiftkv_jax.infer.bench import summary

from . import report
from .kernels.shapes import TARGETS
from .markdown import section, table
from .serve_targets import judge

TITLE = "Attention, serving and training on an H100"
DEVICE = "one NVIDIA H100 80GB HBM3"
Documents = Sequence[Mapping[str, Any]]


def summarised(kernels: Documents, serve: Documents, train: Documents, page: str) -> str:
    """The section of the page of measurements, which refers to another `page` for the tables."""
    prefill, decode = part_rows(serve, "prefill"), part_rows(serve, "decode")
    eight = [row for row in prefill if row["cell"]["input_len"] == 8192]
    one, many = ([row for row in decode if row["cell"]["prompts"] == n] for n in (1, 256))
    rows = {row["name"]: row for row in attention_rows(kernels)}
    step = next(row for row in _steps(train) if row["layers"] == 32)
    tokens, more = "tokens_per_s", "seconds_per_output_token"
    lines = [
        ("prefill of 8,192 tokens", *(f"{row[tokens]:,.0f} tokens/s" for row in eight)),
        ("time to the first token of such a prompt", *(f"{1e3 * r['ttft']:.0f} ms" for r in eight)),
        (
            "time per output token, 1 and 256 sequences of 1,024 tokens",
            *(
                f"{1e3 * a[more]:.2f} and {1e3 * b[more]:.1f} ms"
                for a, b in zip(one, many, strict=True)
            ),
        ),
    ]
    fast, small = rows["prefill 8B 16k"], rows["decode 1x32k fp8"]
    return section(
        TITLE,
        f"Measured on {DEVICE}: Llama-3.1-8B with random weights, K = 16, bfloat16. "
        f"[All figures]({page}).",
        table(("", "SwiftKV", "teacher"), lines),
        f"Prefill with SwiftKV was {eight[0]['speed_up']:.2f} times as fast "
        f"({eight[0]['teacher_flops_over_own']:.2f} by operations), at "
        f"{eight[0]['flops_share']:.0%} of the rate of a large matrix product: "
        f"{eight[0]['normalised_flops_per_s'] / 1e12:,.0f} TFLOP/s, normalised to the teacher's "
        f"operations. The prefill kernel "
        f"reached {fast['rate']:.0f} TFLOP/s on rows of 16k, {fast['over_cudnn']:.2f} times "
        f"cuDNN. Decoding one long sequence from an fp8 cache misses its bar: the kernel reads at "
        f"{small['share_of_roofline']:.0%} of the copy's bandwidth. The distillation step of 32 "
        f"layers takes {step['seconds']:.2f} s for 8,192 tokens, {step['mfu_of_peak']:.0%} of the "
        f"published peak, in {step['peak_bytes'] / GIB:.1f} GiB.",
    )


def full_page(checks: Documents, kernels: Documents, serve: Documents, train: Documents) -> str:
    """The page: kernels, serving, training."""
    facts = kernels[-1]
    versions, device = facts["versions"], facts["device"]
    return "\n\n".join(
        [
            f"# {TITLE}",
            f"Measured on {DEVICE} on {facts['date'][:10]}: driver {device['driver']}, CUDA 13.0, "
            f"JAX {versions['jax']}, cuDNN {versions['nvidia-cudnn-cu13']}. One run of each "
            "command, with random weights and inputs. A large bfloat16 product ran at "
            f"{_product(facts):.0f} TFLOP/s and a large copy at {_copy(facts):,.0f} GB/s; shares "
            "are of these. Predictions are those of `python -m benchmarks.predict`, made before "
            "any of this was measured.",
            correctness(checks),
            attention(kernels),
            serving(serve),
            training(train),
        ]
    )


def _product(document: Mapping[str, Any]) -> float:
    return document["roofline"]["flops"] / 1e12


def _copy(document: Mapping[str, Any]) -> float:
    return document["roofline"]["bandwidth"] / 1e9


# Correctness ------------------------------------------------------------------


def correctness(checks: Documents) -> str:
    """How many configurations of each kernel were checked."""
    found = Counter(
        (one["kernel"].partition(".")[0], one["outcome"])
        for document in checks
        for one in document["verdicts"]
    )
    wanted = checks[-1]["configurations"]
    rows = [
        (name, str(wanted[name]), str(sum(n for (kernel, _), n in found.items() if kernel == name)))
        + (str(found[name, "right"]),)
        for name in wanted
    ]
    return section(
        "Are the kernels right?",
        "`swiftkv check-kernels` compares each configuration three times with the reference in "
        "float32. The time did not suffice for all of them; none was wrong.",
        table(("kernels", "configurations", "checked", "right"), rows),
    )


# Attention --------------------------------------------------------------------


def attention_rows(kernels: Documents) -> list[dict[str, Any]]:
    """The rows that have a result of the Hopper kernels, in the order of measurement; `over_cudnn`
    is how many times as fast they are, None where cuDNN has none."""
    rows = []
    for row in (row for document in kernels for row in document["rows"]):
        results = {one["implementation"]: one for one in row["results"] if "seconds" in one}
        if (ours := results.get("hopper")) is None:
            continue
        cudnn = [results[name]["seconds"] for name in ("cudnn", "cudnn-btnh") if name in results]
        rows.append(
            ours
            | {
                "name": row["name"],
                "unit": row["unit"],
                "over_cudnn": min(cudnn) / ours["seconds"] if cudnn else None,
                "others": results,
            }
        )
    return rows


def attention(kernels: Documents) -> str:
    rows = attention_rows(kernels)
    lines = [
        (
            row["name"] + (" †" if row["status"] == "wrong" else ""),
            report.duration(row["seconds"]),
            f"{row['rate']:.4g} {row['unit']}",
            f"{row['share_of_roofline']:.0%}",
            f"{row['seconds'] / row['predicted_seconds']:.2f}",
            "" if row["over_cudnn"] is None else f"{row['over_cudnn']:.2f}",
            _required(row),
        )
        for row in rows
    ]
    others = next(row["others"] for row in rows if "torch-flash" in row["others"])
    beside = ", ".join(
        f"{name} {report.duration(others[key]['seconds'])}"
        for key, name in (
            ("jax-mgpu", "JAX's own Mosaic kernel"),
            ("torch-flash", "PyTorch's FlashAttention"),
            ("xla", "XLA's form"),
        )
    )
    return section(
        "Attention",
        "`python -m benchmarks.kernels`, which explains rows and counts. `8B` has 32 query and 8 "
        "key/value heads of 128 entries; `64x2k` are 64 sequences of 2,048 tokens. `over "
        "predicted` is the measured time over the predicted one, `over cuDNN` how many times as "
        "fast as cuDNN the kernel is.",
        table(
            ("row", "time", "rate", "of roofline", "over predicted", "over cuDNN", "release"), lines
        ),
        "The times of decoding include the plan of its thread blocks, which an engine makes once a "
        "step for all layers: by XLA's compiler three small kernels for one sequence and seven for "
        "64, about 2 us each. `benchmarks.kernels` leaves them out now.",
        f"Others on `prefill 8B 8k`: {beside}.",
        *_footnote(rows),
    )


def _required(row: Mapping[str, Any]) -> str:
    """What a release requires of the row, and whether it is met."""
    cells = []
    for target in TARGETS:
        if target.row != row["name"]:
            continue
        if target.measure == "ratio_to_cudnn":
            value, bound = row["over_cudnn"], "as fast as cuDNN"
        else:
            value = row[target.measure]
            is_rate = target.measure == "rate"
            bound = f"≥ {target.value:g} {row['unit']}" if is_rate else f"≥ {target.value:.0%}"
        if value is not None:
            cells.append(bound + (", met" if value >= target.value else ", **missed**"))
    return "; ".join(cells)


def _footnote(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if any(row["status"] == "wrong" for row in rows):
        yield (
            "† The benchmark's check refused the gradient of the queries: in one of 524,288 "
            "vectors the error was 0.232 of the vector's size, or of a tenth of the root mean "
            "square where that is larger (limit 0.1). It is that of a query that sees two keys: "
            "a small difference of large terms. The same inputs in float64 give 0.230 there if the "
            "output and the gradient of the scores are rounded to bfloat16, as flash attention "
            "does. The error over all vectors is 0.0025 (limit 0.02). The check compares with half "
            "of the root mean square now, which gives 0.06; the row has not been run again."
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
        for name, one in document["predicted"].items()
        for row in one["rows"]
    }
    ratios = sorted(
        row["seconds"] / predicted[name, row["label"], row["variant"]]
        for name, one in parts.items()
        for row in one["rows"]
        if (name, row["label"], row["variant"]) in predicted
    )
    return section(
        "Serving",
        "`python -m benchmarks.serve`: Llama-3.1-8B with random weights, K = 16, bfloat16; an "
        "engine of SwiftKV and then one of the teacher. Normalised TFLOP/s are the operations that "
        "the teacher would need, a second. `host %` is the share of time in which the host did "
        "not wait for the device.",
        "![Rate and speed-up of prefill over the length](../img/prefill-h100.png)",
        *tables,
        "What a release requires was set for an H200, whose memory is 1.43 times as fast:",
        table(("figure", "release", "best", "measured"), judge(parts)),
        f"Measured over predicted times: {ratios[0]:.2f} to {ratios[-1]:.2f}, median "
        f"{statistics.median(ratios):.2f}, of {len(ratios)}.",
        "Offline throughput was not measured: the benchmark refused to begin, because 256 "
        "sequences of 2,250 tokens do not fit into the cache together. It queues them now.",
    )


# Training ---------------------------------------------------------------------


def _steps(train: Documents) -> list[dict[str, Any]]:
    return [row for document in train for row in document["rows"] if "seconds" in row]


def training(train: Documents) -> str:
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
        for row in _steps(train)
    ]
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
    )
