"""The same weights in Hugging Face transformers on the same CPU, in turns with SwiftKV and its
teacher here.

    python3.11 -m venv .venv-torch
    .venv-torch/bin/pip install torch==2.13.0 transformers
    JAX_PLATFORMS=cpu python -m benchmarks.hf_baseline --python .venv-torch/bin/python

Random float32 weights, written by `save_hf` as a plain Llama and read by both. Every repetition
gives all three the same new prompt, one after the other, in an order that rotates, and times the
first token and every further one; the table shows medians, JSON goes to `benchmarks/results/`. The
teacher's greedy tokens must be those of transformers, which shows that weights and arithmetic are
the same. On a busy machine the processor times are the steadier figures. Exit code 1 if the tokens
differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import swiftkv_jax as skv
from swiftkv_jax import cli
from swiftkv_jax.checkpoints.hf_config import config_to_hf
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.model.config import Config, LayerKind, Rope
from swiftkv_jax.model.model import Model, add_swiftkv

from . import report

logger = logging.getLogger("swiftkv_jax.benchmarks")

CONFIG = Config(
    vocab_size=32000,
    embed_dim=1024,
    mlp_dim=3584,
    num_layers=16,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    num_key_value_layers=8,
    max_position_embeddings=4096,
    layer_kinds=(LayerKind(Rope(theta=500_000.0)),),
)
"""The config of `medium/`, with the proportions of Llama-3.1-8B."""
TINY = Config(
    vocab_size=128,
    embed_dim=32,
    mlp_dim=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_key_value_layers=2,
)
SIZES = {"full": (CONFIG, 2048, 32), "smoke": (TINY, 64, 4)}
TIMES = ("ttft", "tpot", "ttft_cpu", "tpot_cpu")
BASELINE, TEACHER, STUDENT = "transformers", "teacher", "swiftkv"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hf_baseline",
        description="transformers, teacher and SwiftKV on a CPU.",
    )
    parser.add_argument(
        "--python", type=Path, required=True, help="an interpreter with torch and transformers"
    )
    parser.add_argument(
        "--repetitions", "-r", type=int, default=5, metavar="N", help="of each (default: 5)"
    )
    report.add_flags(parser, tables=tuple(SIZES), seconds=1200, rows=False)
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    if jax.default_backend() != "cpu":
        raise UsageError("this comparison is for a CPU: set JAX_PLATFORMS=cpu")
    start, seed = time.monotonic(), report.new_seed(args.seed)
    config, input_len, output_len = SIZES[args.shapes]
    environment = report.environment(seed)
    path = report.output_path(args, "hf-baseline", "cpu", environment["date"])
    threads = os.cpu_count() or 1
    plain = dummy_model(config.cut(config.num_layers), jnp.float32)
    with tempfile.TemporaryDirectory() as folder:
        skv.save_hf(plain, Path(folder) / "model")
        baseline = _Baseline(args.python, Path(folder) / "model", output_len, threads)
    engines = _engines(add_swiftkv(plain, config.num_key_value_layers), input_len + output_len)
    del plain
    found: dict[str, list[dict[str, Any]]] = {BASELINE: [], TEACHER: [], STUDENT: []}
    generator = np.random.default_rng(seed)
    for repetition in range(-1, args.repetitions):  # the first one warms up
        if repetition > 0 and time.monotonic() - start > args.seconds:
            break
        prompt = generator.integers(0, config.vocab_size, input_len).tolist()
        names = [*found, *found][(shift := repetition % 3) : shift + 3]
        for name in names:
            if name == BASELINE:
                result = baseline.run(prompt)
            else:
                result = _run(engines[name], prompt, output_len)
            logger.info(
                f"{repetition + 1} {name}: "
                + ", ".join(f"{key} {result[key]:.4g} s" for key in TIMES)
            )
            if repetition >= 0:
                found[name].append(result)
    baseline.close()
    facts = {
        "config": config_to_hf(config),
        "input_len": input_len,
        "output_len": output_len,
        "transformers": baseline.versions,
        "threads": threads,
        "load": os.getloadavg(),
        "weights": "random, float32",
    }
    return _report(found, path, environment | facts)


class _Baseline:
    """transformers in a process of its own, which is idle while the engines are timed."""

    def __init__(self, python: Path, model: Path, output_len: int, threads: int):
        script = Path(__file__).with_name("hf_baseline_worker.py")
        # -P: the script's folder is not on its path, where transformers would find our `kernels`
        # for a library of that name.
        command = [
            str(python),
            "-P",
            str(script),
            "--model",
            str(model),
            "--output-len",
            str(output_len),
            "--threads",
            str(threads),
        ]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        except OSError as error:
            raise UsageError(f"`python`={python}: cannot be run ({error.strerror})") from error
        self.versions = self._answer()

    def run(self, prompt: list[int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(prompt), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UsageError(f"transformers ended with exit code {self._process.wait()}: see above")
        return json.loads(line)


def _engines(model: Model, length: int) -> dict[str, Engine]:
    """Engines that decode one token a call, as transformers does, with the defaults for a CPU."""
    options = EngineOptions(max_model_len=length, max_num_seqs=1, decode_steps=1)
    return {
        name: Engine.from_model(model, options, swiftkv=name == STUDENT)
        for name in (TEACHER, STUDENT)
    }


def _run(engine: Engine, prompt: list[int], output_len: int) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    tokens, first = [], (start, cpu)
    request = Request(prompt, SamplingParams(max_tokens=output_len, ignore_eos=True))
    for _, output in engine.run([request]):
        if not tokens:
            first = time.perf_counter(), time.process_time()
        tokens += output.token_ids
    end, end_cpu = time.perf_counter(), time.process_time()
    more = output_len - 1
    cpu_times = {"ttft_cpu": first[1] - cpu, "tpot_cpu": (end_cpu - first[1]) / more}
    return {"ttft": first[0] - start, "tpot": (end - first[0]) / more, "tokens": tokens} | cpu_times


def _report(
    found: dict[str, list[dict[str, Any]]], path: Path | None, document: dict[str, Any]
) -> int:
    medians = {
        name: {key: statistics.median(result[key] for result in results) for key in TIMES}
        for name, results in found.items()
    }
    ratios = {
        name: {key: medians[BASELINE][key] / medians[name][key] for key in TIMES}
        for name in (TEACHER, STUDENT)
    }
    same = sum(
        a["tokens"] == b["tokens"] for a, b in zip(found[BASELINE], found[TEACHER], strict=True)
    )
    print(
        "| | first token s | each further ms | processor s, first | processor ms, further "
        "|\n|---|---:|---:|---:|---:|"
    )
    for name, row in medians.items():
        print(
            f"| {name} | {row['ttft']:.3f} | {1e3 * row['tpot']:.2f} | {row['ttft_cpu']:.3f} | "
            f"{1e3 * row['tpot_cpu']:.2f} |"
        )
    for name, row in ratios.items():
        print(
            f"| {name}, times as fast as transformers |"
            + "".join(f" {row[key]:.2f} |" for key in TIMES)
        )
    count = len(found[BASELINE])
    print(
        f"\nthe teacher's tokens are those of transformers in {same} of {count} repetitions; "
        f"{json.dumps(document['transformers'])}"
    )
    rows = {"medians": medians, "times_as_fast": ratios, "same_tokens": same, "repetitions": found}
    report.write_json(path, document | rows)
    return cli.OK if same == count else cli.ERROR


if __name__ == "__main__":
    sys.exit(main())
