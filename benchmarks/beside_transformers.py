"""This package's server beside `transformers serve` on the same CPU: weights, clients, prompts.

    python3.11 -m venv .venv-torch
    .venv-torch/bin/pip install torch==2.13.0 "transformers[serving]"
    JAX_PLATFORMS=cpu python -m benchmarks.beside_transformers --python .venv-torch/bin/python

    python -m benchmarks.beside_transformers --model SWIFTKV_MODEL     on any device

Without --python SwiftKV is served beside its teacher alone, and with --model that model instead of
random weights: its teacher is what `--swiftkv off` serves.

Random float32 weights have the proportions of Llama-3.1-8B and the demo model's tokenizer, and
are written by `save_hf` as a plain Llama and as one with a delta. On a CPU all servers run and
answer in turns, in an order that rotates; on another device one runs after the other. `swiftkv
infer bench serve` asks each for streams of 512 prompt and 64 new tokens, then of 2,048 and 32, with
`--clients` at a time, each of which sends `--rounds` requests; continuous batching, which takes
10 GB, is left out for one. Greedy text of the teacher must be
that of transformers, which shows that weights and arithmetic are the same: exit code 1 if not.
Times of a single client are those of the model, with HTTP; beside them stand the least that the
machine could take, by its rates of products and of reading memory. JSON goes to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from transformers import AutoTokenizer

import swiftkv_jax as skv
from swiftkv_jax import cli, demo
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf
from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.model import add_swiftkv
from swiftkv_jax.plan.cost import decode_weights, prefill_flops
from swiftkv_jax.plan.roofline import matmul_rate
from swiftkv_jax.train.data.sources import STDLIB, DataSource, find_files
from swiftkv_jax.train.recipe import Recipe
from swiftkv_jax.train.run.setup import open_tokenizer

from . import report
from .markdown import table
from .serve import TINY
from .worker import alone

MEDIUM = Path(__file__).parent / "medium" / "config.json"
TRANSFORMERS = "transformers"
TEACHER = "teacher"
STUDENT = "swiftkv"
BATCHING = "transformers, continuous batching"
WORKLOADS = {"full": ((512, 64), (2048, 32)), "smoke": ((64, 16),)}
"""(tokens of a prompt, of an answer) of each workload."""
READY_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Server:
    name: str
    command: tuple[str, ...]
    url: str
    model: str
    """What requests call the model."""

    @property
    def is_theirs(self) -> bool:
        return self.name in (TRANSFORMERS, BATCHING)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.beside_transformers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("--python", type=Path, help="an interpreter with transformers[serving]")
    flag("--model", help="a SwiftKV model to serve (default: random weights)")
    flag("--clients", type=int, nargs="+", default=[1, 4, 16], help="(default: 1 4 16)")
    flag("--rounds", type=int, default=3, help="requests of each client (default: %(default)s)")
    report.add_flags(parser, tables=tuple(WORKLOADS), seconds=3600, rows=False)
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    if args.model is not None and args.python is not None:
        raise UsageError("--model: transformers serves random weights only; leave --python out")
    start = time.monotonic()
    seed = report.new_seed(args.seed)
    # From another process: one that has started JAX's backend would keep a device from servers.
    facts = alone(report.environment, seed)
    on_cpu = facts["device"]["platform"] == "cpu"
    if args.model is None and not on_cpu:
        raise UsageError("random weights are for a CPU: set JAX_PLATFORMS=cpu, or give --model")
    document, path = report.begin(args, "beside_transformers", seed, facts=facts)
    document |= {"load": os.getloadavg(), "cores": len(os.sched_getaffinity(0)), "speed": []}
    if args.model is None:
        document["floors"] = alone(floors, args.shapes)
    if args.python is not None:
        document["versions_of_transformers"] = versions(args.python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer, student = prepare(args, folder, document)
        length = 5 * max(map(sum, WORKLOADS[args.shapes])) // 4  # text may become more tokens
        servers = commands(args.python, student, str(folder / "plain"), length)
        if max(args.clients) == 1:
            servers = [server for server in servers if server.name != BATCHING]
        texts = {}
        for group in [servers] if on_cpu else [[server] for server in servers]:
            with contextlib.ExitStack() as stack:
                up = [stack.enter_context(running(server)) for server in group]
                first = source_prompts(tokenizer, 32, 1)[0]
                texts |= {server.name: greedy(server, first) for server in up}
                for workload, count in itertools.product(WORKLOADS[args.shapes], args.clients):
                    if time.monotonic() - start > args.seconds:
                        break
                    prompts = source_prompts(tokenizer, workload[0], count * args.rounds)
                    document["speed"] += ask_in_turns(up, prompts, workload, count, folder)
                    report.write_json(path, document)
    document["same_text"] = texts.get(TRANSFORMERS, texts[TEACHER]) == texts[TEACHER]
    report.write_json(path, document)
    print(speed_table(document["speed"]))
    return cli.OK if document["same_text"] else cli.ERROR


def prepare(args: argparse.Namespace, folder: Path, document: dict[str, Any]) -> tuple[Any, str]:
    """The tokenizer, and the SwiftKV model to serve: that of `--model`, or one of random weights
    that is written into `folder`. Raises `UsageError` for a model without a tokenizer."""
    if args.model is not None:
        document["model"] = args.model
        recipe = Recipe(model=args.model, data=(), output_dir=folder)
        return open_tokenizer(recipe), args.model
    tokenizer = demo_tokenizer()
    config = model_config(args.shapes)
    document["config"] = config_to_hf(config)
    write_models(config, tokenizer, folder)
    return tokenizer, str(folder / "student")


def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(demo.LLAMA))


def model_config(shapes: str) -> Config:
    """The architecture of the random weights, with as many tokens as the demo's tokenizer has."""
    config = TINY
    if shapes != "smoke":
        config = config_from_hf(json.loads(MEDIUM.read_text(encoding="utf-8")))
        config = config.cut(config.num_layers // 2)
    return dataclasses.replace(config, vocab_size=len(demo_tokenizer()))


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


def write_models(config: Config, tokenizer: Any, folder: Path) -> None:
    """Write the folders `plain`, a Llama, and `student`, the same with a delta."""
    plain = dummy_model(config.cut(config.num_layers), jnp.float32)
    models = {"plain": plain, "student": add_swiftkv(plain, config.num_key_value_layers)}
    for name, model in models.items():
        skv.save_hf(model, folder / name)
        tokenizer.save_pretrained(folder / name)


def source_prompts(tokenizer: Any, length: int, count: int) -> list[str]:
    """Pieces of the standard library of about `length` tokens, no two alike."""
    ids: list[int] = []
    for file in find_files(DataSource(STDLIB), held_out=True):
        text = file.read_text(errors="replace")
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= length * count:
            break
    return [tokenizer.decode(ids[at * length : (at + 1) * length]) for at in range(count)]


# Floors -----------------------------------------------------------------------


def floors(shapes: str) -> dict[str, Any]:
    """Rates of this machine, and the least seconds in which the teacher and SwiftKV could answer
    one stream at them: a token takes a pass over the weights, the first one the products of the
    prompt before it."""
    config = model_config(shapes)
    flops = matmul_rate(jnp.float32)
    bandwidth = read_bandwidth(2**20 if shapes == "smoke" else 2**30)
    found: dict[str, Any] = {"flops_per_s": flops, "bytes_per_s": bandwidth}
    for name in (TEACHER, STUDENT):
        swiftkv = name == STUDENT
        step = 4 * decode_weights(config, swiftkv=swiftkv) / bandwidth
        ttft = {
            length: prefill_flops(config, length, swiftkv=swiftkv) / flops + step
            for length, _ in WORKLOADS[shapes]
        }
        found[name] = {"tpot": step, "ttft": ttft}
    return found


def read_bandwidth(size: int) -> float:
    """Bytes a second at which all cores together read `size` bytes of memory, the best of ten."""
    cores = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(size // 4, np.float32), cores)
    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for _ in range(10):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return size / best


# Servers ----------------------------------------------------------------------


def commands(python: Path | None, student: str, plain: str, length: int) -> list[Server]:
    """The servers of a SwiftKV model for `length` tokens, and with `python` those of its `plain`
    form, each with a port that is free now."""
    ours = [sys.executable, "-m", "swiftkv_jax.infer", "serve", "--max-model-len", str(length)]
    ours += ["--max-num-seqs", "16"]
    found = {
        TEACHER: ([*ours, "--model", student, "--swiftkv", "off"], ""),
        STUDENT: ([*ours, "--model", student], ""),
    }
    if python is not None:
        theirs = [str(python.parent / "transformers"), "serve", plain]
        theirs += ["--device", "cpu", "--dtype", "float32"]
        found |= {
            TRANSFORMERS: (theirs, plain),
            BATCHING: ([*theirs, "--continuous-batching"], plain),
        }
    servers = []
    for name, (command, model) in found.items():
        port = free_port()
        words = (*command, "--port", str(port))
        servers.append(Server(name, words, f"http://127.0.0.1:{port}", model))
    return servers


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """A server that is ready, with the name of its model; killed at the end. Raises `DataError` if
    it does not start."""
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    if server.is_theirs:  # our `kernels` would be found for a library of that name
        environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        server.command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        ready = "/health" if server.is_theirs else "/ready"
        deadline = time.monotonic() + READY_SECONDS
        while not _answers(server.url + ready):
            if time.monotonic() > deadline or process.poll() is not None:
                raise DataError(f"{server.name}: does not start (exit code {process.poll()})")
            time.sleep(0.5)
        if not server.model:
            with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
                name = json.load(answer)["data"][0]["id"]
            server = dataclasses.replace(server, model=name)
        yield server
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def greedy(server: Server, prompt: str) -> str:
    """The text that a server continues a prompt with; the first request warms it up."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["choices"][0]["text"]


# Speed ------------------------------------------------------------------------


def ask_in_turns(
    servers: Sequence[Server],
    prompts: Sequence[str],
    workload: tuple[int, int],
    clients: int,
    folder: Path,
) -> list[dict[str, Any]]:
    """A row for each server: `clients` requests at a time, a round to each server before the next
    round of any."""
    rounds = len(prompts) // clients
    measured: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    for number in range(rounds):
        chosen = prompts[number * clients : (number + 1) * clients]
        first = number % len(servers)
        for server in [*servers[first:], *servers[:first]]:
            found = ask(server, chosen, workload[1], folder)
            cli.log(f"{server.name}, {workload}, {clients} clients: {found['seconds']:.2f} s")
            measured[server.name].append(found)
    facts = {"input_len": workload[0], "output_len": workload[1], "clients": clients}
    return [{"server": name} | facts | {"rounds": found} for name, found in measured.items()]


def ask(server: Server, prompts: Sequence[str], output_len: int, folder: Path) -> dict[str, Any]:
    """What `swiftkv infer bench serve` finds when it sends all prompts at once. Raises `DataError`
    if the server refuses one."""
    file = folder / "prompts.jsonl"
    result = folder / "result.json"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    command = [sys.executable, "-m", "swiftkv_jax.infer", "bench", "serve"]
    command += ["--base-url", server.url, "--model", server.model, "--dataset", str(file)]
    command += ["--num-prompts", str(len(prompts)), "--output-len", str(output_len)]
    command += ["--num-warmups", "0", "--no-ignore-eos", "-o", str(result)]
    run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        raise DataError(f"{server.name}: {run.stderr.strip().splitlines()[-1]}")
    found = json.loads(result.read_text(encoding="utf-8"))
    return {name: found[name] for name in ("seconds", "tokens_per_s", "output_tokens", "ttft")} | {
        "tpot": found.get("tpot")
    }


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    """The best round of each row: other processes make rounds slower, never faster."""
    lines = []
    for row in rows:
        rounds = row["rounds"]
        tpot = [found["tpot"]["p50"] for found in rounds if found["tpot"]]
        lines.append(
            (
                row["server"],
                f"{row['input_len']:,} / {row['output_len']}",
                str(row["clients"]),
                f"{max(found['tokens_per_s'] for found in rounds):,.0f}",
                f"{min(found['ttft']['p50'] for found in rounds):.2f} s",
                f"{1e3 * min(tpot):.1f} ms" if tpot else "",
            )
        )
    header = ("server", "tokens in / out", "clients", "tokens/s", "first token", "further token")
    return table(header, lines)


if __name__ == "__main__":
    sys.exit(main())
