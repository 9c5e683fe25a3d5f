"""The whole path on the demo model: convert, distil, generate, compare. `make demo` runs it, in
under three minutes on two cores.

    python examples/demo.py [FOLDER]

FOLDER must be new; the default, runs/make-demo, is emptied first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import swiftkv_jax as skv
from swiftkv_jax import cli, demo
from swiftkv_jax.cache import bytes_per_token
from swiftkv_jax.convert import main as convert
from swiftkv_jax.cost import prefill_flops
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.mesh import emulate_cpu_devices
from swiftkv_jax.train.__main__ import main as train

DEFAULT_FOLDER = Path("runs/make-demo")
MESH = 4, 1  # emulated on a CPU, where it also happens to use two cores better than one device does
STEPS = {1: 16, 2: 32}  # by group size: sharing a cache is the larger change
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
    """The last held-out evaluation of its distillation run."""


def run(name: str, main: Callable[[list[str]], int], *arguments: str) -> None:
    """Run a command as a user would type it."""
    print(f"\n$ python -m swiftkv_jax.{name} {' '.join(arguments)}", flush=True)
    if code := main(list(arguments)):
        sys.exit(code)


def distil(folder: Path, group: int) -> tuple[skv.Model, dict[str, float]]:
    """A fresh delta for half the layers: the exported model, and its held-out quality before and
    after."""
    output = folder / f"group-{group}"
    mesh = "x".join(map(str, MESH))
    flags = f"--mesh {mesh} --key-value-group-size {group} --max-steps {STEPS[group]}".split()
    run("train", train, *flags, "--logging-steps", "4", "--output-dir", str(output))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    before, after = (row for row in rows if "eval_agreement" in row)
    initial = {"initial_perplexity": before["eval_student_perplexity"]}
    return skv.load(output / "model"), after | initial


def measure(column: Column) -> tuple[float, float, str]:
    """(prefill seconds of ROWS prompts, seconds per decode step of ROWS tokens, a greedy
    completion)."""
    options = EngineOptions(
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
        max_num_seqs=ROWS,
        chunks=(512,),
        decode_rows=(ROWS,),
    )
    engine = Engine.from_model(column.model, options, swiftkv=column.swiftkv)
    random = np.random.default_rng(0)
    prefill, decode = [], []
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


def table(columns: list[Column], measured: list[tuple[float, float, str]]) -> str:
    teacher = columns[0].model
    rows: list[tuple[str, ...]] = [("", *(column.title for column in columns))]
    flops = [prefill_flops(c.model.config, PROMPT_TOKENS - 1, swiftkv=c.swiftkv) for c in columns]
    bytes_ = [bytes_per_token(c.model.config, teacher.dtype, swiftkv=c.swiftkv) for c in columns]
    seconds, decode = [m[0] for m in measured], [m[1] for m in measured]

    def share(values, number):
        return [f"{number(value)}  ({value / values[0]:.0%})" for value in values]

    quality = [column.quality for column in columns[1:]]
    original = quality[0]["eval_teacher_perplexity"]
    perplexity = [original, *(q["eval_student_perplexity"] for q in quality)]
    steps = " and ".join(map(str, STEPS.values()))
    rows += [
        (f"prefill FLOPs, {PROMPT_TOKENS - 1} tokens", *share(flops, lambda v: f"{v / 1e9:.2f} G")),
        (
            f"prefill time, {ROWS} x {PROMPT_TOKENS - 1} tokens",
            *share(seconds, lambda v: f"{v:.2f} s"),
        ),
        (f"time per output token, {ROWS} rows", *share(decode, lambda v: f"{v * 1e3:.1f} ms")),
        (f"KV cache bytes per token, {teacher.dtype}", *share(bytes_, lambda v: f"{v:,}")),
        (
            "held-out perplexity before distilling",
            f"{original:.3f}",
            *(f"{q['initial_perplexity']:.3f}" for q in quality),
        ),
        (
            f"held-out perplexity after {steps} steps",
            *(f"{value:.3f}  ({value / original - 1:+.2%})" for value in perplexity),
        ),
        (
            "next token agrees with the teacher",
            "100.0%",
            *(f"{q['eval_agreement']:.1%}" for q in quality),
        ),
    ]
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

    run("convert", convert, "hf2orbax", str(demo.LLAMA), str(folder / "orbax"))
    run("convert", convert, "inspect", str(folder / "orbax"))
    alone, alone_quality = distil(folder, 1)
    across, across_quality = distil(folder, 2)
    columns = [
        Column("teacher", skv.load(folder / "orbax"), False, {}),
        Column("SwiftKV 50%", alone, True, alone_quality),
        Column("SwiftKV 50% + 2-way AcrossKV", across, True, across_quality),
    ]
    measured = [measure(column) for column in columns]
    for column, (_, _, text) in zip(columns, measured, strict=True):
        print(f"\n--- {column.title}, greedy " + "-" * (90 - len(column.title)))
        print(PROMPT + text)
    print(
        f"\n{table(columns, measured)}\n\n{time.time() - started:.0f} s in all; everything is in "
        f"{folder}"
    )
    return cli.OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
