"""Write `docs/measurements.md` from the committed results.

    python -m benchmarks.measurements             write the page
    python -m benchmarks.measurements --check     exit 1 if the page is out of date

The newest file of each benchmark in `benchmarks/results/` counts: its name ends in the time. What
comes from tests or from a command that writes no JSON is in `recorded`.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from swiftkv_jax.plan.hardware import GIB

from . import students
from .markdown import anchor, section, table, write
from .on_gpu import on_h100
from .real import table as real
from .recorded import asserted, demo, shipped
from .result_files import newest, newest_path, quality_documents, real_documents

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "measurements.md"
COMMAND = "python -m benchmarks.measurements"
MARK = f"<!-- Written by {COMMAND}: change that, not this. -->"


# On a CPU ---------------------------------------------------------------------


def pair(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(student, teacher) of a run of `infer bench` with one cell."""
    student, teacher = newest(name)["rows"]
    if (student["variant"], teacher["variant"]) != ("swiftkv", "teacher"):
        raise ValueError(f"{newest_path(name)}: its rows are not swiftkv and teacher")
    return student, teacher


def on_cpu() -> str:
    return section(
        "SwiftKV against its teacher on a CPU",
        "Random weights of `benchmarks/medium` (16 layers of width 1,024, K = 8), prompts of "
        "2,048 tokens, two cores, float32.",
        table(("what", "SwiftKV", "command"), [*_prefill(), _decode()]),
        _lengths(),
        _many_rows(),
    )


def _prefill() -> list[tuple[str, str, str]]:
    student, teacher = pair("infer-prefill-cpu")
    first = (
        f"{student['speed_up']:.2f} times as fast ({student['tokens_per_s']:.0f} and "
        f"{teacher['tokens_per_s']:.0f} tokens/s, medians of {len(student['repetitions'])}; "
        f"{student['teacher_flops_over_own']:.2f} by operations)"
    )
    ttft = f"{student['ttft_speed_up']:.2f} times as fast"
    return [
        ("prefill", first, "`swiftkv infer bench prefill`"),
        ("time to first token", ttft, "the same"),
    ]


def _decode() -> tuple[str, str, str]:
    student, teacher = pair("infer-decode-cpu")
    ours, theirs = (1e3 * row["seconds_per_output_token"] for row in (student, teacher))
    text = (
        f"{1 / student['speed_up']:.2f} of the teacher's by medians of "
        f"{len(student['repetitions'])} ({ours:.1f} and {theirs:.1f} ms), "
        f"{1 / student['speed_up_of_best']:.2f} by the best: the same operations, equal within "
        "noise"
    )
    return "time per output token", text, "`swiftkv infer bench decode`"


def _lengths() -> str:
    rows = newest("infer-prefill-lengths-cpu")["rows"]
    rates = ", ".join(
        f"{row['speed_up']:.2f} at {row['cell']['input_len']:,}"
        for row in rows
        if row["variant"] == "swiftkv"
    )
    return f"Over the length of the prompt, prefill is so many times as fast: {rates} tokens."


def _many_rows() -> str:
    result = newest("infer-decode-rows-cpu")
    rows = "; ".join(
        f"{row['cell']['prompts']}: {1e3 * row['seconds_per_output_token']:.1f} ms, "
        f"{row['tokens_per_s']:,.0f} tokens/s"
        for row in result["rows"]
    )
    return (
        "A decode step of the shipped student of the demo model after prompts of "
        f"{result['rows'][0]['cell']['input_len']} tokens, by the number of rows: {rows}."
    )


def beside_transformers() -> str:
    alone = newest("hf-baseline-cpu")
    streams = newest("beside-transformers-cpu")
    served = newest("hf-serve-cpu")
    ratios = alone["times_as_fast"]
    repetitions = alone["repetitions"]["transformers"]
    versions = streams["versions_of_transformers"]
    floors = streams["floors"]
    same = "the same text" if streams["same_text"] else "ANOTHER TEXT"
    columns = ("512 in: first token", "further", "2,048 in: first token", "further")
    return section(
        "The same weights in Hugging Face transformers",
        f"transformers {versions['transformers']} on PyTorch {versions['torch']}, the model of the "
        "section above. In one process each, 2,048 tokens in, this package was so many times as "
        f"fast, by medians of {len(repetitions)} on two cores: the teacher "
        f"{ratios['teacher']['ttft']:.2f} to the first token and {ratios['teacher']['tpot']:.2f} "
        f"for further ones, SwiftKV {ratios['swiftkv']['ttft']:.2f} and "
        f"{ratios['swiftkv']['tpot']:.2f}.",
        f"As servers, later ({streams['date'][:10]}), `python -m benchmarks.beside_transformers "
        f"--clients 1`: one client of each in turn on {streams['cores']} cores, the best of "
        f"{len(streams['speed'][0]['rounds'])} rounds, answers of 64 and of 32 tokens. The teacher "
        f"and transformers write {same}. A floor is what the machine allowed at the rates measured "
        f"before the rounds: {floors['flops_per_s'] / 1e9:.0f} GFLOP/s of float32 products for "
        f"the prompt, {floors['bytes_per_s'] / 1e9:.1f} GB/s of reading memory for each pass over "
        "the weights; rates vary, so a time may be below it.",
        table(("server", *columns), _streams(streams)),
        "With 16 clients on both cores, before that, a request each of 512 tokens and an answer of "
        "64, and with 2,048 and 32:",
        table(
            ("server", "512 / 64: tokens/s", "first token", "2,048 / 32: tokens/s", "first token"),
            _servers(served),
        ),
        _heeded(served),
    )


def _streams(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Times of one client's tokens by each server, and the floors of the two of this package."""
    found = dict[str, list[str]]()
    for row in result["speed"]:
        if row["clients"] == 1:
            ttft, tpot = (
                min(one[name]["p50"] for one in row["rounds"]) for name in ("ttft", "tpot")
            )
            found.setdefault(row["server"], []).extend(_stream(ttft, tpot))
    for name in ("teacher", "swiftkv"):
        floor = result["floors"][name]
        times = (_stream(ttft, floor["tpot"]) for ttft in floor["ttft"].values())
        found[f"{name}, floor"] = [one for pair in times for one in pair]
    return [(name, *figures) for name, figures in found.items()]


def _stream(ttft: float, tpot: float) -> tuple[str, str]:
    return f"{ttft:.2f} s", f"{1e3 * tpot:.1f} ms"


CLIENTS = 16


def _servers(result: dict[str, Any]) -> list[tuple[str, ...]]:
    found = dict[str, list[str]]()
    for row in result["speed"]:
        if row["clients"] == CLIENTS:
            figures = f"{row['tokens_per_s']:,.0f}", f"{row['ttft_median']:.1f} s"
            found.setdefault(row["server"], []).extend(figures)
    return [(name, *figures) for name, figures in found.items()]


def _heeded(result: dict[str, Any]) -> str:
    """How many parameters of a request each server honours."""
    counts = []
    asked = {}
    for server, answers in result["behaviour"].items():
        asked = {what: answer for what, answer in answers.items() if what.startswith("`")}
        heeded = list(asked.values()).count("honoured")
        counts.append(f"{server} {heeded}")
    return (
        f"Of these parameters of `/v1/completions`: {', '.join(asked)}, servers honour: "
        f"{'; '.join(counts)}."
    )


def cost_of_http() -> str:
    timed = newest("http-timed-device-cpu")
    model = newest("http-medium-cpu")
    cells = timed["cells"]
    return section(
        "What HTTP costs",
        "The same requests are sent to the engine alone and through the server in turn; medians of "
        f"{timed['repetitions']}. A simulated device computes nothing and takes "
        f"{1e3 * timed['step_seconds']:g} ms for a decode step and "
        f"{1e3 * timed['chunk_seconds']:g} ms for a chunk of 2,048 tokens. Prompts have "
        f"{timed['input_len']} tokens, answers {timed['output_len']}. The last columns are what "
        "HTTP adds to the median time to the first token, of requests that are alone and of those "
        "that arrive at half of the engine's throughput.",
        table(
            ("slots", "steps a call", "tokens/s alone", "over HTTP", "alone", "half load"),
            [_http_line(cell) for cell in cells if cell["prompts"] == "token ids"],
        ),
        "A server makes calls of 4 or 8 steps under load. Calls of one step at 256 slots show "
        "where the host is the limit. With the model of `benchmarks/medium` computed on both cores "
        f"the server reaches {_share(model['cells'][0]):.1f}% of the engine's throughput.",
    )


def _http_line(cell: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(cell["rows"]),
        str(cell["steps"]),
        f"{cell['bare']['tokens_per_s']:,.0f}",
        f"{_share(cell):.1f}%",
        f"{1e3 * cell['added_ttft_alone_p50']:+.2f} ms",
        f"{1e3 * cell['added_ttft_half_p50']:+.2f} ms",
    )


def _share(cell: dict[str, Any]) -> float:
    """Throughput over HTTP in percent of the engine's alone: the median repetition."""
    runs = zip(cell["runs"]["bare"], cell["runs"]["served"], strict=True)
    return statistics.median(
        100 * served["tokens_per_s"] / bare["tokens_per_s"] for bare, served in runs
    )


# Compiled or predicted ----------------------------------------------------------


def loss_figures() -> dict[str, float]:
    """GiB of temporaries of the distillation loss, by row."""
    rows = newest("loss-compiled-for-h200")["rows"]
    return {row["name"]: row["temporary_bytes"] / GIB for row in rows}


def kv_projection_figure() -> str:
    """The largest share of a chunk's time that a fused projection kernel could save."""
    share = newest("kv-projection-compiled-for-h200")["largest_saving"]
    return f"{100 * share:.1f} %"


def for_h200() -> str:
    """What was compiled for an H200 or predicted of it, and never ran there."""
    gib = loss_figures()
    step = newest("train-step-compiled-for-h200")
    losses = [
        (name, f"{gib[f'{row}, fused']:.2f} GiB", f"{gib[f'{row}, naive']:.1f} GiB")
        for name, row in (
            ("forward KL", "forward"),
            ("reverse KL", "reverse"),
            ("Jensen-Shannon", "jsd"),
            ("forward KL over the top 64", "forward, top 64"),
        )
    ]
    saved = ", ".join(
        f"{row['counted']['saved']:.1%} with `--remat {row['remat']}`"
        for row in step["savings"]
        if row["document"] == row["length"]
    )
    errors = sorted(row["plan_error"] for row in step["rows"])
    return section(
        "Compiled for an H200, not run",
        "Temporary memory of the distillation loss and its gradient, for 8,192 x 128,256 logits:",
        table(("divergence", "in chunks, as here", "all logits at once"), losses),
        "A distillation step at Llama-3.1-8B shape, K = 16, needs fewer operations than two "
        f"separate models for teacher and student: {saved}. The memory that this package plans for "
        f"{len(step['rows'])} steps differs from the compiler's peak by {errors[0]:+.1%} to "
        f"{errors[-1]:+.1%} (`python -m benchmarks.train_step`).",
        "One matrix product makes all upper keys and values of a chunk. A kernel that fuses it "
        "with the norm, the rotary embedding and the cache write could save at most "
        f"{kv_projection_figure()} of a chunk's time, by the bytes it would not move: it is left "
        "to XLA.",
        "`python -m benchmarks.predict` runs the engine's schedule with times from counts of "
        "bytes, products and launches. On an H100, serving took 0.88 to 1.11 of what it predicts "
        "there. For an H200 it predicted:",
        table(("", "SwiftKV", "teacher"), _predicted()),
    )


def _predicted() -> list[tuple[str, ...]]:
    parts = newest("predicted-for-h200")["parts"]
    lines = []
    for part, what in (
        ("prefill", "prefill of 8,192 tokens"),
        ("offline", "512 prompts of 2,000 tokens with answers of 250"),
    ):
        rows = parts[part]["rows"]
        if part == "prefill":
            rows = [row for row in rows if row["cell"]["input_len"] == 8192]
        lines.append((what, *(f"{row['tokens_per_s']:,.0f} tokens/s" for row in rows)))
    return lines


# Quality ----------------------------------------------------------------------


def eight_bits() -> str:
    cells = newest("kv-quantization-cpu")["cells"]
    found = {(one["model"], one["cache"], one["weights"]): one for one in cells}
    kinds = {
        "fp8 cache": ("float8_e4m3fn", "float32"),
        "int8 cache": ("int8", "float32"),
        "fp8 weights": ("float32", "fp8"),
        "int8 weights": ("float32", "int8"),
        "both fp8": ("float8_e4m3fn", "fp8"),
        "both int8": ("int8", "int8"),
    }
    changes = [
        f"{name} {100 * found['teacher', *kind]['change']:+.2f} and "
        f"{100 * found['student', *kind]['change']:+.2f} %"
        for name, kind in kinds.items()
    ]
    scored = found["teacher", "float32", "float32"]["scored_tokens"]
    return section(
        "Perplexity with 8 bits",
        f"The change against float32 on {scored:,} held-out tokens, for the demo model and the "
        f"shipped student: {'; '.join(changes)}.",
    )


def real_models() -> str:
    return real.section(real_documents())


def small_models() -> str:
    return students.cuts(quality_documents())


# The page ---------------------------------------------------------------------


def sources() -> str:
    return section(
        "Files",
        "Every figure comes from a file in `benchmarks/results/`, which has all cells with their "
        "raw times and intervals, its command, versions and commit. Some of these commands have "
        "answered their question and are no longer in the tree; the commit has them.",
    )


SECTIONS = (
    on_h100,
    on_cpu,
    beside_transformers,
    cost_of_http,
    real_models,
    small_models,
    eight_bits,
    shipped,
    demo,
    for_h200,
    asserted,
    sources,
)


def page() -> str:
    """The page of measurements."""
    parts = [make() for make in SECTIONS]
    titles = [part.splitlines()[0].removeprefix("## ") for part in parts]
    contents = " · ".join(f"[{title}](#{anchor(title)})" for title in titles)
    about = (
        "The first section was measured on an H100, as were students of the teachers t1 and t2; "
        "everything else on two CPU cores (x86-64, float32). **Nothing has run on a TPU yet.**"
    )
    return "\n\n".join(["# Measurements", contents, MARK, about, *parts]) + "\n"


def main(argv: list[str] | None = None) -> int:
    return write(PAGE, page, COMMAND, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
