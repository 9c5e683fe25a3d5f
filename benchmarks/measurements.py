"""Write `docs/measurements.md` and `docs/results/` from the committed results.

    python -m benchmarks.measurements             write the pages
    python -m benchmarks.measurements --check     exit 1 if a page is out of date

The newest file of each benchmark in `benchmarks/results/` counts: its name ends in the time. What
comes from tests or from a command that writes no JSON is in `recorded`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swiftkv_jax import cli

from .closed_form import limits
from .hf_serve.table import servers
from .hidden_loss import hidden_loss
from .http.summary import cost_of_http
from .markdown import anchor, section, table
from .on_gpu import full_page as gpu_page
from .on_gpu import summarised as gpu_summary
from .predict.page import full_page, summarised
from .quality import sections as quality
from .real import table as real
from .recorded import asserted, demo, shipped
from .result_files import (
    ALL_RESULT_NAMES,
    all_of,
    files_page,
    is_measured,
    newest,
    newest_path,
    quality_documents,
    real_documents,
)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "measurements.md"
TABLES = "results"
"""Folder of the pages with the long tables, beside `PAGE`."""
H100, PREDICTIONS, FILES = "h100.md", "predicted-h200.md", "files.md"
GIB = 2**30

COMMAND = "python -m benchmarks.measurements"


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
        f"The same model, medians of {repetitions}; load {load:.1f} on {result['host']['cores']} "
        f"cores at the start.",
        table(("tokens", "times as fast", "by CPU time", "by operations"), rows),
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
        f"The shipped student of the demo model, prompts of {first['cell']['input_len']} tokens, "
        f"{len(first['repetitions'])} repetitions. Each further row takes {1e6 * further:.0f} us. "
        f"The same run measured the fastest of three copies, of 16 to 256 MiB, at "
        f"{roofline['bandwidth'] / 1e9:.1f} GB/s and a large matrix product at "
        f"{roofline['flops'] / 1e9:,.0f} GFLOP/s. `swiftkv infer bench decode "
        f"--batch {','.join(str(row['cell']['prompts']) for row in found)}`.",
        table(("rows", "time of a step", "tokens/s", "of the copy's bandwidth"), rows),
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
        "same model and prompts; `python -m benchmarks.hf_baseline`. The table says how many times "
        f"as fast this package is, medians of {len(times)}:",
        table(("", "time to first token", "further tokens"), rows),
        f"The further tokens of transformers took {further[0]:.0f} to {further[-1]:.0f} ms each. "
        f"The teacher's tokens are the same as those of transformers in {result['same_tokens']} of "
        f"{len(times)} runs.",
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
        f"Temporary memory of the loss and its gradient for {result['tokens']:,} x "
        f"{result['vocabulary']:,} logits; `python -m benchmarks.loss`.",
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
        "The operations that one step saves at Llama-3.1-8B shape, K = 16, against two separate "
        "models for teacher and student; `python -m benchmarks.train_step`. The memory that this "
        f"package plans for {len(result['rows'])} such steps differs from the compiler's peak by "
        f"{errors[0]:+.1%} to {errors[-1]:+.1%}.",
        table(("`--remat`", "fewer operations"), [(names[key], saved[key]) for key in names]),
    )


def kv_projection_figure() -> str:
    """The largest share of a chunk's time that a fused projection kernel could save."""
    return f"{newest('kv projection')['largest_saving']:.1%}".replace("%", " %")


def kv_projection() -> str:
    return section(
        "The keys and values of the upper layers, by the H200 compiler",
        "One matrix product makes all upper keys and values of a chunk. A kernel that fuses the "
        "norm, the product, the rotary embedding and the cache write could save at most "
        f"{kv_projection_figure()} of a prefill chunk's time, by the bytes it would not move. So "
        "this is left to XLA; `python -m benchmarks.kv_projection`.",
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
        f"The change against float32 on {scored:,} held-out tokens, for the demo model and the "
        "shipped student; `python -m benchmarks.kv_quantization`.",
        table(("", "teacher", "student"), rows),
    )


def of(make: Callable[..., str], *subjects: str) -> Callable[[], str | None]:
    """The section that `make` makes of the newest results of some subjects; None where one was not
    measured."""
    return lambda: make(*map(newest, subjects)) if all(map(is_measured, subjects)) else None


def predictions() -> str:
    return summarised(newest("predictions"), f"{TABLES}/{PREDICTIONS}")


def on_h100() -> str:
    kernels, serve, train = (all_of(f"{name}, H100") for name in ("kernels", "serve", "train-step"))
    return gpu_summary(kernels, serve, train, f"{TABLES}/{H100}")


def sources() -> str:
    return section(
        "Files",
        "Each result file holds its command, versions and, if it ran in a checkout, commit. "
        f"[All result files]({TABLES}/{FILES}).",
    )


SECTIONS = (
    on_h100,
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
    predictions,
    eight_bits,
)
LAST_SECTIONS = (
    of(limits, "closed form", "closed form, t1", "closed form, t2"),
    of(hidden_loss, "hidden loss"),
    shipped,
    demo,
    sources,
)
MARK = f"<!-- Written by {COMMAND}: change that, not this. -->"


def pages() -> Iterator[tuple[Path, str]]:
    """(file, text) of the page of measurements and of those with the long tables."""
    yield PAGE, page()
    tables = [
        *quality.pages(quality_documents()),
        (H100, gpu_page(*map(all_of, ALL_RESULT_NAMES))),
        (PREDICTIONS, full_page(newest("predictions"))),
        (FILES, files_page()),
    ]
    for name, text in tables:
        title, _, rest = text.partition("\n\n")
        back = f"[All measurements](../{PAGE.name})"
        yield PAGE.parent / TABLES / name, "\n\n".join([title, back, MARK, rest]) + "\n"


def page() -> str:
    """The page of measurements."""
    parts = [make() for make in SECTIONS]
    parts += [real.section(real_documents()), quality.section(quality_documents())]
    parts = [part for part in parts + [make() for make in LAST_SECTIONS] if part is not None]
    titles = [part.splitlines()[0].removeprefix("## ") for part in parts]
    contents = " · ".join(f"[{title}](#{anchor(title)})" for title in titles)
    return (
        "\n\n".join(
            [
                "# Measurements",
                contents,
                MARK,
                "The first section was measured on an H100, as were students of the teachers t1 "
                "and t2, everything else on two CPU cores (x86-64, float32), with the commands "
                "named. **Nothing has run on a TPU yet.** "
                'Sections that say "by the H200 compiler" come from programs that were compiled '
                'but not run, and the section that says "predicted" from a performance model.',
                *parts,
            ]
        )
        + "\n"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is out of date")
    args = parser.parse_args(argv)
    for path, text in pages():
        if not args.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"error: {path.relative_to(ROOT)} is out of date: run {COMMAND}", file=sys.stderr)
            return cli.ERROR
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
