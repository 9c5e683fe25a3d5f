"""The server beside `transformers serve` on the same CPU, with the same weights and clients.

    python3.11 -m venv .venv-torch
    .venv-torch/bin/pip install torch==2.13.0 "transformers[serving]"
    JAX_PLATFORMS=cpu python -m benchmarks.hf_serve --python .venv-torch/bin/python

Random float32 weights with the proportions of Llama-3.1-8B (those of `benchmarks.hf_baseline`) and
the demo model's tokenizer, written by `save_hf` as a plain Llama. Servers run one after
another: transformers' without and with continuous batching, this package's with the teacher, and
with SwiftKV at half of the layers.
Each answers streams of 512 prompt and 64 new tokens, then of 2,048 and 32, to 1, 4 and 16 clients;
greedy text of the teacher must be that of transformers. Then all are asked what a server should do
besides being fast: see `benchmarks.hf_serve.probes`. JSON goes to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from transformers import AutoTokenizer

import swiftkv_jax as skv
from swiftkv_jax import cli, demo
from swiftkv_jax.checkpoints.hf_config import config_to_hf
from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.model.model import Model, add_swiftkv
from swiftkv_jax.train.data.sources import STDLIB, DataSource, find_files

from .. import report
from ..hf_baseline import BASELINE, CONFIG, STUDENT, TEACHER, TINY
from .probes import probe
from .server import Server
from .table import tables

logger = logging.getLogger("swiftkv_jax.benchmarks")

SIZES = {
    "full": (CONFIG, ((512, 64), (2048, 32)), (1, 4, 16)),
    "smoke": (TINY, ((32, 8), (64, 4)), (1, 2)),
}
"""Model, (tokens of a prompt, of an answer) of each workload, clients."""
SINGLE = 3
READY_SECONDS = 600
BATCHING = "transformers, continuous batching"
THEIRS = BASELINE, BATCHING


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hf_serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--python", type=Path, required=True, help="an interpreter with transformers[serving]"
    )
    parser.add_argument(
        "--shapes", choices=SIZES, default="full", help="smoke: tiny ones (default: full)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file (default: a new one in benchmarks/results; none with smoke)",
    )
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    if jax.default_backend() != "cpu":
        raise UsageError("this comparison is for a CPU: set JAX_PLATFORMS=cpu")
    environment = report.environment(seed=0)  # of the weights; nothing else is drawn
    path = report.output_path(args, "hf-serve", "cpu", environment["date"])
    config, workloads, clients = SIZES[args.shapes]
    tokenizer = AutoTokenizer.from_pretrained(str(demo.LLAMA))
    config = dataclasses.replace(config, vocab_size=len(tokenizer))
    num_prompts = 1 + sum(SINGLE if count == 1 else count for count in clients)
    prompts = {length: source_prompts(tokenizer, length, num_prompts) for length, _ in workloads}
    document: dict[str, Any] = environment | {
        "config": config_to_hf(config),
        "versions_of_transformers": versions(args.python),
        "load": os.getloadavg(),
        "speed": [],
        "behaviour": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        plain, student = write_models(config, tokenizer, Path(folder))
        texts: dict[str, list[str]] = {}
        for name, command in commands(args.python, plain, student).items():
            with serving(name, command, plain) as server:
                texts[name] = []
                for input_len, output_len in workloads:
                    text, rows = speed(server, prompts[input_len], output_len, clients)
                    texts[name].append(text)
                    facts = {"server": name, "input_len": input_len, "output_len": output_len}
                    document["speed"] += [facts | row for row in rows]
                model = student if name == STUDENT else plain
                found = probe(server, model, prompts[workloads[0][0]][0])
                document["behaviour"][name] = found
        document["same_text"] = texts[TEACHER] == texts[BASELINE]
    report.write_json(path, document)
    print("\n\n".join(tables(document)))
    return cli.OK if document["same_text"] else cli.ERROR


def versions(python: Path) -> dict[str, str]:
    """Of the packages in the other environment. Raises `UsageError` if it lacks one."""
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({n: m.version(n) for n in ('transformers', 'torch', 'fastapi')}))"
    )
    try:
        found = subprocess.run(
            [str(python), "-c", code], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"`python`={python}: it needs torch and transformers[serving]") from error
    return json.loads(found.stdout)


def source_prompts(tokenizer: Any, length: int, count: int) -> list[str]:
    """Pieces of the standard library of about `length` tokens, no two alike."""
    ids: list[int] = []
    for file in find_files(DataSource(STDLIB), held_out=True):
        text = file.read_text(errors="replace")
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= length * count:
            break
    return [tokenizer.decode(ids[at * length : (at + 1) * length]) for at in range(count)]


def write_models(config: Any, tokenizer: Any, folder: Path) -> tuple[Path, Path]:
    """Folders of the plain Llama and of the same with a delta."""
    plain: Model = dummy_model(config.cut(config.num_layers), jnp.float32)
    models = {"plain": plain, "student": add_swiftkv(plain, config.num_key_value_layers)}
    for name, model in models.items():
        skv.save_hf(model, folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "plain", folder / "student"


def commands(python: Path, plain: Path, student: Path) -> dict[str, list[str]]:
    """The command line of each server; `PORT` stands for the port."""
    ours = [sys.executable, "-m", "swiftkv_jax.infer", "serve", "--port", "PORT"]
    ours += "--max-model-len 2560 --max-num-seqs 16 --max-num-queued-reqs 32".split()
    ours += ["--max-num-queued-tokens", "100000"]
    theirs = [str(python.parent / "transformers"), "serve", str(plain), "--port", "PORT"]
    return {
        BASELINE: [*theirs, "--device", "cpu", "--dtype", "float32"],
        BATCHING: [*theirs, "--device", "cpu", "--dtype", "float32", "--continuous-batching"],
        TEACHER: [*ours, "--model", str(plain), "--swiftkv", "off"],
        STUDENT: [*ours, "--model", str(student)],
    }


@contextlib.contextmanager
def serving(name: str, command: list[str], plain: Path) -> Iterator[Server]:
    """A server that is ready; killed at the end. Raises `DataError` if it does not
    start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or name not in THEIRS}
    process = subprocess.Popen(
        [part.replace("PORT", str(port)) for part in command],
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = Server(process, f"http://127.0.0.1:{port}", str(plain) if name in THEIRS else "")
    try:
        _wait(name, server)
        if name not in THEIRS:
            with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
                server.model = json.load(answer)["data"][0]["id"]
        yield server
    finally:
        process.kill()
        process.wait()


def _wait(name: str, server: Server) -> None:
    """Until the server says that it is ready. Raises `DataError`."""
    deadline = time.monotonic() + READY_SECONDS
    ready = "/health" if name in THEIRS else "/ready"
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(server.url + ready, timeout=5) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.5)
    raise DataError(f"{name}: the server does not start (exit code {server.process.poll()})")


def speed(
    server: Server, prompts: Sequence[str], output_len: int, clients: Sequence[int]
) -> tuple[str, list[dict[str, Any]]]:
    """(greedy text of the first prompt; a row for each number of clients). Each client asks with a
    prompt of its own; a single one asks `SINGLE` times."""
    body = {"max_tokens": output_len, "temperature": 0}
    server.stream(body | {"prompt": prompts[0][: len(prompts[0]) // 2]})  # warms up
    text = server.stream(body | {"prompt": prompts[0]}).text
    rows, at = [], 1
    for count in clients:
        requests = SINGLE if count == 1 else count
        bodies = [body | {"prompt": prompt} for prompt in prompts[at : at + requests]]
        at, start = at + requests, time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            found = list(pool.map(server.stream, bodies))
        seconds = time.perf_counter() - start
        rows.append(
            {
                "clients": count,
                "answered": len(found),
                "seconds": seconds,
                "tokens_per_s": sum(a.prompt_tokens + a.tokens for a in found) / seconds,
                "output_tokens_per_s": sum(a.tokens for a in found) / seconds,
                "ttft_median": statistics.median(a.first for a in found),
                "ttft_worst": max(a.first for a in found),
            }
        )
        logger.info("%d clients: %s", count, rows[-1])
    return text, rows


if __name__ == "__main__":
    sys.exit(main())
