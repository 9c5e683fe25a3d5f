"""The whole path on the demo model: convert, calibrate, distil, generate, compare. `make demo` runs
it, in three minutes on two cores.

    python examples/demo.py [FOLDER]

FOLDER must be new; the default, runs/make-demo, is emptied first.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import swiftkv_jax as skv
from swiftkv_jax import cli, demo
from swiftkv_jax.cli.devices import enable_compilation_cache
from swiftkv_jax.convert import main as convert
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.model.cache import bytes_per_token
from swiftkv_jax.model.mesh import emulate_cpu_devices
from swiftkv_jax.plan.cost import prefill_flops
from swiftkv_jax.train.__main__ import main as train
from swiftkv_jax.train.data.dataset import PackedDataset
from swiftkv_jax.train.data.packing import PackedRow
from swiftkv_jax.train.data.prepare import Preparation
from swiftkv_jax.train.data.sources import STDLIB, DataSource
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.output_folder import CALIBRATION, EXPORT
from swiftkv_jax.train.run.setup import open_tokenizer

DEFAULT_FOLDER = Path("runs/make-demo")
MESH = 4, 1  # emulated on a CPU, where it also happens to use two cores better than one device does
GROUPS = {1: "SwiftKV 50%", 2: "+ 2-way AcrossKV"}
"""By the number of layers that share a cache."""
STEPS = 16
EVAL_BATCHES = 8
"""Of held-out rows, for each measurement of quality."""
DEMO_FLAGS = (
    f"--max-length {DEMO.max_length} --learning-rate {DEMO.learning_rate} --remat none".split()
)
TAIL = 64
SPLIT_ROWS = 32
"""Held-out rows whose first half is taken as a prompt."""
PROMPT = "def read_lines(path):"
ROWS = 4
PROMPT_TOKENS = 897  # seven pages of 128, and the token that goes into the first decode step
NEW_TOKENS = 64


@dataclasses.dataclass
class Column:
    """One model of the final table."""

    title: str
    model: skv.Model
    swiftkv: bool
    quality: dict[str, float]
    """Held-out perplexities of the start copied from the teacher, of the closed form and of the
    distilled student, and the nats that the closed form loses on predictions that depend on the far
    prompt; of the teacher its perplexity alone."""


def run(name: str, main: Callable[[list[str]], int], *arguments: str) -> None:
    """Run a command as a user would type it."""
    print(f"\n$ python -m swiftkv_jax.{name} {' '.join(arguments)}", flush=True)
    if code := main(list(arguments)):
        sys.exit(code)


def prepared_text(folder: Path) -> tuple[PackedDataset, PackedDataset]:
    """The standard library in packed rows: to learn from, and held out."""
    tokenizer = open_tokenizer(DEMO)
    source = DataSource(STDLIB)
    training, held_out = (
        Preparation(source, tokenizer, DEMO.max_length, flag).prepare(folder)
        for flag in (False, True)
    )
    return training, held_out


def calibrate_and_distil(
    folder: Path, group: int, data: list[str]
) -> tuple[skv.Model, skv.Model, dict[str, float]]:
    """Half the layers, in `group`-way shared caches, with the flags `data`: the model in closed
    form, the one distilled from it, and their held-out quality."""
    mesh = "x".join(map(str, MESH))
    calibrated = folder / f"calibrated-{group}"
    distilled = folder / f"distilled-{group}"
    flags = ["--mesh", mesh, "--key-value-group-size", str(group)]
    run("train", train, "calibrate", *flags, "--output-dir", str(calibrated), *data)
    found = json.loads((calibrated / CALIBRATION).read_text())["held_out"]
    flags = ["--mesh", mesh, "--max-steps", str(STEPS), "--logging-steps", "4"]
    flags += ["--model", str(calibrated / EXPORT), "--output-dir", str(distilled)]
    run("train", train, *flags, *data, *DEMO_FLAGS)
    rows = [json.loads(line) for line in (distilled / "metrics.jsonl").read_text().splitlines()]
    after = [row for row in rows if "eval_agreement" in row][-1]
    quality = {
        "teacher": found["calibrated"]["teacher_perplexity"],
        "copied": found["copied"]["perplexity"],
        "closed form": found["calibrated"]["perplexity"],
        "distilled": after["eval_student_perplexity"],
        "far": found["calibrated"]["far_nats"],
    }
    return skv.load(calibrated / EXPORT), skv.load(distilled / EXPORT), quality


def calibrate_for_own(folder: Path, data: list[str]) -> tuple[skv.Model, float]:
    """(half the layers in closed form, fitted for generated tokens, and the last `TAIL` of a
    prompt, that keep their own upper keys and values; the nats that it loses on far tokens)"""
    output = folder / "calibrated-own"
    flags = ["--mesh", "x".join(map(str, MESH)), "--generated-kv", "own", "--exact-tail", str(TAIL)]
    run("train", train, "calibrate", *flags, "--output-dir", str(output), *data)
    found = json.loads((output / CALIBRATION).read_text())["held_out"]
    return skv.load(output / EXPORT), found["calibrated"]["far_nats"]


def after_prompt(
    closed_form: dict[int, skv.Model], own: skv.Model, held_out: PackedDataset
) -> dict[str, list[float]]:
    """Perplexities of the second half of held-out rows, the first being a prompt: of the teacher,
    and of the students whose row of the table it is."""
    rows = np.stack([row.tokens for row in rows_of_one_document(held_out)])

    def without_tail(model: skv.Model) -> skv.Model:
        return dataclasses.replace(model, config=dataclasses.replace(model.config, exact_tail=0))

    teacher = perplexity(own, rows, swiftkv=False)
    students = {
        "after a prompt of 256, closed form": closed_form.values(),
        "where these keep their own keys, values": [without_tail(own)],
        f"and the prompt's last {TAIL} do": [own],
    }
    return {
        name: [teacher, *(perplexity(model, rows) for model in models)]
        for name, models in students.items()
    }


def perplexity(model: skv.Model, rows: np.ndarray, *, swiftkv: bool = True) -> float:
    half = rows.shape[1] // 2
    prompts = np.full(len(rows), half)
    logits = np.asarray(skv.logits(model, rows, swiftkv=swiftkv, prompt_lengths=prompts))
    logits = logits[:, half - 1 : -1]
    targets = np.take_along_axis(logits, rows[:, half:, None], -1)[..., 0]
    top = logits.max(-1)
    totals = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    return math.exp((totals - targets).mean())


def rows_of_one_document(data: PackedDataset) -> list[PackedRow]:
    rows = (data[i] for i in range(len(data)))
    whole = (row for row in rows if list(row.lengths) == [DEMO.max_length])
    return list(itertools.islice(whole, SPLIT_ROWS))


def measure(column: Column) -> tuple[float, float, str]:
    """(prefill seconds of ROWS prompts, seconds per decode step of ROWS tokens, a greedy
    completion)."""
    options = EngineOptions(
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
        max_num_seqs=ROWS,
        chunks=(512,),
        decode_rows=(ROWS,),
        sampling=False,
    )
    engine = Engine.from_model(column.model, options, swiftkv=column.swiftkv)
    random = np.random.default_rng(0)
    prefill = []
    decode = []
    for _ in range(3):
        prompts = random.integers(2, column.model.config.vocab_size, (ROWS, PROMPT_TOKENS)).tolist()
        first = seconds(engine, prompts, 1)
        # Now the prompts are cached.
        decode.append(seconds(engine, prompts, NEW_TOKENS) / NEW_TOKENS)
        prefill.append(first - decode[-1])
    tokens = column.model.tokenizer(PROMPT)["input_ids"]
    new = [id for _, output in engine.run([request(tokens, NEW_TOKENS)]) for id in output.token_ids]
    return min(prefill), min(decode), column.model.tokenizer.decode(new)


def seconds(engine: Engine, prompts: list[list[int]], max_tokens: int) -> float:
    """Until every prompt has so many new tokens."""
    start = time.perf_counter()
    for _ in engine.run([request(prompt, max_tokens) for prompt in prompts]):
        pass
    return time.perf_counter() - start


def request(prompt: list[int], max_tokens: int) -> Request:
    return Request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def table(
    columns: list[Column],
    measured: list[tuple[float, float, str]],
    split: dict[str, list[float]],
    own_far: float,
) -> str:
    teacher = columns[0].model
    rows: list[tuple[str, ...]] = [("", *(column.title for column in columns))]
    flops = [prefill_flops(c.model.config, PROMPT_TOKENS - 1, swiftkv=c.swiftkv) for c in columns]
    bytes_ = [bytes_per_token(c.model.config, teacher.dtype, swiftkv=c.swiftkv) for c in columns]
    seconds = [m[0] for m in measured]
    decode = [m[1] for m in measured]

    def share(values, number):
        return [f"{number(value)}  ({value / values[0]:.0%})" for value in values]

    quality = [column.quality for column in columns]
    original = quality[1]["teacher"]

    def against_teacher(original: float, students: Iterable[float]) -> list[str]:
        return [
            f"{original:.3f}",
            *(f"{value:.3f}  ({value / original - 1:+.2%})" for value in students),
        ]

    def held_out(name: str) -> list[str]:
        return against_teacher(original, (q[name] for q in quality[1:]))

    rows += [
        (f"prefill FLOPs, {PROMPT_TOKENS - 1} tokens", *share(flops, lambda v: f"{v / 1e9:.2f} G")),
        (
            f"prefill time, {ROWS} x {PROMPT_TOKENS - 1} tokens",
            *share(seconds, lambda v: f"{v:.2f} s"),
        ),
        (f"time per output token, {ROWS} rows", *share(decode, lambda v: f"{v * 1e3:.1f} ms")),
        (f"KV cache bytes per token, {teacher.dtype}", *share(bytes_, lambda v: f"{v:,}")),
        ("held-out perplexity, projections copied", *held_out("copied")),
        ("the same in closed form, no training", *held_out("closed form")),
        (f"the same after {STEPS} steps from there", *held_out("distilled")),
        (
            "closed form, lost on far tokens",
            "",
            *(f"{q['far']:+.3f} nats" for q in quality[1:]),
        ),
        *((name, *against_teacher(values[0], values[1:])) for name, values in split.items()),
        ("then lost on far tokens", "", f"{own_far:+.3f} nats"),
    ]
    return aligned(rows)


def aligned(rows: list[tuple[str, ...]]) -> str:
    """The rows under the first of them, in columns."""
    rows = [row + ("",) * (len(rows[0]) - len(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def main() -> int:
    started = time.time()
    emulate_cpu_devices(math.prod(MESH))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help=f"where everything goes (default: {DEFAULT_FOLDER})"
    )
    folder = parser.parse_args().folder or DEFAULT_FOLDER
    if folder == DEFAULT_FOLDER:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        sys.exit(f"error: {folder} exists already")
    # Its commands run in this process, and share programs.
    enable_compilation_cache(folder / "compiled")

    run("convert", convert, "hf2orbax", str(demo.LLAMA), str(folder / "orbax"))
    run("convert", convert, "inspect", str(folder / "orbax"))
    columns = [Column("teacher", skv.load(folder / "orbax"), False, {})]
    training, held_out = prepared_text(folder / "data")
    data = ["--data", str(training.path), "--eval-data", str(held_out.path)]
    data += ["--eval-batches", str(EVAL_BATCHES)]
    closed_form = {}
    for group, title in GROUPS.items():
        closed_form[group], distilled, quality = calibrate_and_distil(folder, group, data)
        columns.append(Column(title, distilled, True, quality))
    own, own_far = calibrate_for_own(folder, data)
    split = after_prompt(closed_form, own, held_out)
    measured = [measure(column) for column in columns]
    for column, (_, _, text) in zip(columns, measured, strict=True):
        print(f"\n--- {column.title}, greedy " + "-" * (90 - len(column.title)))
        print(PROMPT + text)
    print(f"\n{table(columns, measured, split, own_far)}")
    print(f"\n{time.time() - started:.0f} s in all; everything is in {folder}")
    return cli.OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
