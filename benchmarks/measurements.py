"""Write `docs/measurements.md` from the committed results, so that its figures follow them.

    python -m benchmarks.measurements             write the page
    python -m benchmarks.measurements --check     exit 1 if the page is out of date

The newest file of each benchmark in `benchmarks/results/` counts: its name ends in the time. What
comes from tests or from a command that writes no JSON is in `recorded`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .closed_form import limits
from .hf_serve.table import servers
from .http.summary import cost_of_http
from .markdown import anchor, section, table
from .predict.page import summarised
from .quality.sections import sections
from .recorded import asserted, demo, shipped

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "measurements.md"
GIB = 2**30

COMMAND = "python -m benchmarks.measurements"
RESULT_NAMES = {
    "prefill": "infer-prefill-cpu",
    "prefill lengths": "infer-prefill-lengths-cpu",
    "decode": "infer-decode-cpu",
    "decode rows": "infer-decode-rows-cpu",
    "transformers": "hf-baseline-cpu",
    "servers": "hf-serve-cpu",
    "HTTP": "http-timed-device-cpu",
    "HTTP, a model": "http-medium-cpu",
    "8 bits": "kv-quantization-cpu",
    "closed form": "closed-form-cpu",
    "loss": "loss-compiled-for-h200",
    "train step": "train-step-compiled-for-h200",
    "kv projection": "kv-projection-compiled-for-h200",
    "predictions": "predicted-for-h200",
}
"""Subject -> what the names of its result files begin with; they end in the time."""
QUALITY = "quality-*.json"
"""All files count: each has some of the students."""


def newest_path(subject: str) -> Path:
    """The newest result file of a subject. Raises `FileNotFoundError`."""
    name = f"{RESULT_NAMES[subject]}-2*.json"
    if not (found := sorted(RESULTS.glob(name))):
        raise FileNotFoundError(f"{RESULTS} has no {name}")
    return found[-1]


def newest(subject: str) -> dict[str, Any]:
    return json.loads(newest_path(subject).read_text(encoding="utf-8"))


def pair(subject: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(student, teacher) of a run of `infer bench` with one cell."""
    student, teacher = newest(subject)["rows"]
    if (student["variant"], teacher["variant"]) != ("swiftkv", "teacher"):
        raise ValueError(f"{newest_path(subject)}: its rows are not swiftkv and teacher")
    return student, teacher


def prefill_figures() -> dict[str, str]:
    """The figures of prefill on the CPU, as every page prints them."""
    student, teacher = pair("prefill")
    return {
        "speed-up": f"{student['speed_up']:.2f}",
        "rates": f"{student['tokens_per_s']:.0f} and {teacher['tokens_per_s']:.0f} tokens/s",
        "repetitions": str(len(student["repetitions"])),
        "by operations": f"{student['teacher_flops_over_own']:.2f}",
        "ttft": f"{student['ttft_speed_up']:.2f}",
    }


def decode_figures() -> dict[str, str]:
    """The figures of decoding on the CPU."""
    student, teacher = pair("decode")
    times = (1e3 * row["seconds_per_output_token"] for row in (student, teacher))
    return {
        "share": f"{1 / student['speed_up']:.2f}",
        "share of best": f"{1 / student['speed_up_of_best']:.2f}",
        "times": "{:.1f} and {:.1f} ms".format(*times),
        "repetitions": str(len(student["repetitions"])),
    }


def serving() -> str:
    prefill, decode = prefill_figures(), decode_figures()
    rows = [
        (
            "prefill",
            f"{prefill['speed-up']} times as fast ({prefill['rates']}, medians of "
            f"{prefill['repetitions']}; {prefill['by operations']} by operations)",
            "`swiftkv infer bench prefill`",
        ),
        ("time to first token", f"{prefill['ttft']} times as fast", "the same"),
        (
            "time per output token",
            f"{decode['share']} of the teacher's by medians of {decode['repetitions']} "
            f"({decode['times']}), {decode['share of best']} by the best: the same operations, "
            "equal within noise",
            "`swiftkv infer bench decode`",
        ),
    ]
    return section(
        "SwiftKV against its teacher on a CPU",
        "Random weights of `benchmarks/medium` (16 layers of width 1,024, K = 8), prompts of "
        "2,048 tokens, two cores, float32.",
        table(("what", "SwiftKV", "command"), rows),
    )


def lengths() -> str:
    result = newest("prefill lengths")
    student = [row for row in result["rows"] if row["variant"] == "swiftkv"]
    load, repetitions = result["host"]["load"][0], len(student[0]["repetitions"])
    rows = [
        (
            f"{row['cell']['input_len']:,}",
            f"{row['speed_up']:.2f}",
            f"{row['speed_up_in_cpu_time']:.2f}",
            f"{row['teacher_flops_over_own']:.2f}",
        )
        for row in student
    ]
    return section(
        "Prefill over the length of the prompt",
        f"The same model, medians of {repetitions}, on a machine with much other work (a load of "
        f"{load:.1f} on {result['host']['cores']} cores): rates are far below those above. Only "
        "the ratios tell, by processor time more than by the clock.",
        table(("tokens", "times as fast", "by processor time", "by operations"), rows),
        "![Speed-up and rate of prefill over the length](img/prefill.png)",
    )


def decode_rows() -> str:
    result = newest("decode rows")
    found = result["rows"]
    first, last = found[0], found[-1]
    between = last["cell"]["prompts"] - first["cell"]["prompts"]
    further = (last["seconds_per_output_token"] - first["seconds_per_output_token"]) / between
    rows = [
        (
            str(row["cell"]["prompts"]),
            f"{1e3 * row['seconds_per_output_token']:.1f} ms",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['bandwidth_share']:.0%}",
        )
        for row in found
    ]
    roofline = result["roofline"]
    return section(
        "Decoding many rows on a CPU",
        f"The demo model's shipped student, prompts of {first['cell']['input_len']} tokens, "
        f"{len(first['repetitions'])} repetitions, beside a large copy at "
        f"{roofline['bandwidth'] / 1e9:.1f} GB/s and a large product at "
        f"{roofline['flops'] / 1e9:,.0f} GFLOP/s, measured in the same run: "
        f"{1e6 * further:.0f} us for each further row; `swiftkv infer bench decode --batch "
        f"{','.join(str(row['cell']['prompts']) for row in found)}`.",
        table(("rows", "a step", "tokens/s", "of the copy's bandwidth"), rows),
    )


def transformers() -> str:
    result = newest("transformers")
    ratios, times = result["times_as_fast"], result["repetitions"]["transformers"]
    versions = result.get("transformers") or result["rival"]
    further = sorted(1e3 * repetition["tpot"] for repetition in times)
    rows = [
        (name, f"{ratios[key]['ttft']:.2f}", f"{ratios[key]['tpot']:.2f}")
        for name, key in (("teacher", "teacher"), ("SwiftKV", "swiftkv"))
    ]
    return section(
        "The same weights in Hugging Face transformers",
        f"transformers {versions['transformers'].rsplit('.', 1)[0]} on PyTorch "
        f"{versions['torch'].split('+')[0].rsplit('.', 1)[0]}, {result['threads']} threads, the "
        "same model and prompts; `python -m benchmarks.hf_baseline`. How many times as fast "
        "this package is, medians of "
        f"{len(times)}:",
        table(("", "time to first token", "further tokens"), rows),
        f"Measured on a machine with other work: transformers' further tokens took "
        f"{further[0]:.0f} to {further[-1]:.0f} ms, so only the first column tells. The teacher's "
        f"tokens are the same as transformers' in {result['same_tokens']} of {len(times)} runs.",
    )


def http_servers() -> str:
    return servers(newest("servers"))


def loss_figures() -> dict[str, float]:
    """GiB of temporaries of the distillation loss, by row."""
    return {row["name"]: row["temporary_bytes"] / GIB for row in newest("loss")["rows"]}


def loss() -> str:
    result, gib = newest("loss"), loss_figures()
    rows = [
        (
            name,
            f"{gib[f'{row}, fused']:.2f} GiB",
            f"{gib[f'{row}, naive']:.1f} GiB",
        )
        for name, row in (
            ("forward KL", "forward"),
            ("reverse KL", "reverse"),
            ("Jensen-Shannon", "jsd"),
            ("forward KL over the top 64", "forward, top 64"),
        )
    ]
    return section(
        "Memory of the distillation loss, by the H200 compiler",
        f"Temporaries for {result['tokens']:,} x {result['vocabulary']:,} logits, forward and "
        "gradient; `python -m benchmarks.loss`.",
        table(("divergence", "in chunks, as here", "all logits at once"), rows),
    )


def train_step() -> str:
    result = newest("train step")
    long = [row for row in result["savings"] if row["document"] == row["length"]]
    names = {"mlp": "`mlp`, the default", "layer": "`layer`", "none": "`none`"}
    saved = {row["remat"]: f"{row['counted']['saved']:.1%}" for row in long}
    errors = sorted(row["plan_error"] for row in result["rows"])
    return section(
        "The distillation step, by the H200 compiler",
        "Operations of one step at Llama-3.1-8B shape, K = 16, against a teacher and a student "
        "that are two models; `python -m benchmarks.train_step`.",
        table(("`--remat`", "fewer operations"), [(names[key], saved[key]) for key in names]),
        f"The memory plan of {len(result['rows'])} such steps is {errors[0]:+.1%} to "
        f"{errors[-1]:+.1%} off the compiler's peak.",
    )


def kv_projection_figure() -> str:
    """The largest share of a chunk's time that a fused projection kernel could save."""
    return f"{newest('kv projection')['largest_saving']:.1%}".replace("%", " %")


def kv_projection() -> str:
    return section(
        "The keys and values of the upper layers, by the H200 compiler",
        "One matrix product makes all upper keys and values of a chunk. A kernel that fuses norm, "
        f"product, rotary embedding and cache write could save at most {kv_projection_figure()} of "
        "a prefill chunk's time, by bytes moved, so it is left to XLA; "
        "`python -m benchmarks.kv_projection`.",
    )


def eight_bits() -> str:
    result = newest("8 bits")
    cells = {(c["model"], c["cache"], c["weights"]): c for c in result["cells"]}

    def change(model: str, cache: str, weights: str) -> str:
        return f"{100 * cells[model, cache, weights]['change']:+.2f} %"

    kinds = (
        ("fp8 cache", "float8_e4m3fn", "float32"),
        ("int8 cache", "int8", "float32"),
        ("fp8 weights", "float32", "fp8"),
        ("int8 weights", "float32", "int8"),
        ("both fp8", "float8_e4m3fn", "fp8"),
        ("both int8", "int8", "int8"),
    )
    rows = [
        (name, change("teacher", cache, weights), change("student", cache, weights))
        for name, cache, weights in kinds
    ]
    scored = cells["teacher", "float32", "float32"]["scored_tokens"]
    return section(
        "Perplexity with 8 bits",
        f"Change against float32 on held-out text, {scored:,} tokens, demo model and shipped "
        "student; `python -m benchmarks.kv_quantization`.",
        table(("", "teacher", "student"), rows),
    )


def of(make: Callable[..., str], *subjects: str) -> Callable[[], str]:
    """The section that `make` makes of the newest results of some subjects."""
    return lambda: make(*map(newest, subjects))


def quality_documents() -> list[dict[str, Any]]:
    """The results of `benchmarks.quality`."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(QUALITY))]


def sources() -> str:
    rows = []
    paths = [(subject, newest_path(subject)) for subject in RESULT_NAMES]
    paths += [("quality", path) for path in sorted(RESULTS.glob(QUALITY))]
    for subject, path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        where = result["device"]["kind"]
        for verb in ("compiled", "predicted"):
            if machine := result.get(f"{verb}_for"):
                where = f"{verb} for {machine}"
        versions = result["versions"]
        link = f"[{path.name}](../benchmarks/results/{path.name})"
        rows.append(
            (
                subject,
                link,
                where,
                f"Python {versions['python']}, JAX {versions['jax']}",
                result["date"][:10],
            )
        )
    return section(
        "Files",
        "The results that this page was made from. Each holds its command, versions and commit. "
        "Older files name the modules as they were called then.",
        table(("subject", "file", "device", "versions", "date"), rows),
    )


SECTIONS = (
    serving,
    lengths,
    decode_rows,
    transformers,
    of(cost_of_http, "HTTP", "HTTP, a model"),
    http_servers,
    asserted,
    loss,
    train_step,
    kv_projection,
    of(summarised, "predictions"),
    eight_bits,
)
LAST_SECTIONS = (of(limits, "closed form"), shipped, demo, sources)


def page() -> str:
    """The whole page."""
    parts = [make() for make in SECTIONS]
    parts += [*sections(quality_documents()), *(make() for make in LAST_SECTIONS)]
    titles = [part.splitlines()[0].removeprefix("## ") for part in parts]
    contents = " · ".join(f"[{title}](#{anchor(title)})" for title in titles)
    return (
        "\n\n".join(
            [
                "# Measurements",
                contents,
                f"<!-- Written by {COMMAND}: change that, not this. -->",
                'On two CPU cores (x86-64, float32) with the commands named. Sections that say "by '
                'the H200 compiler" were compiled only, the one that says "predicted" is of a '
                "model: **no GPU or TPU has been timed yet**.",
                *parts,
            ]
        )
        + "\n"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is out of date")
    args = parser.parse_args(argv)
    text = page()
    if not args.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"error: {PAGE.relative_to(ROOT)} is out of date: run {COMMAND}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
