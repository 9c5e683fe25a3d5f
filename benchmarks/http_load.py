"""Latency under load, through HTTP: a server of Llama-3.1-8B with random weights, and requests that
arrive as a Poisson process at several rates.

    python -m benchmarks.http_load                      prompts of 2,048 tokens, answers of 128
    python -m benchmarks.http_load --shapes smoke       a tiny model, also on a CPU

The server is that of `swiftkv infer serve`, with the tokenizer of the demo model: no checkpoint of
this size is needed. `swiftkv infer bench serve` asks, in a process of its own. The first row asks
one request at a time. JSON goes to `benchmarks/results/` (of a smoke run only to `--output`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from swiftkv_jax import cli
from swiftkv_jax.cli.model_loading import read_model, setup_model_devices
from swiftkv_jax.cli.model_options import ModelOptions
from swiftkv_jax.errors import DataError
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.plan.presets import LLAMA_8B
from swiftkv_jax.serve import command, server
from swiftkv_jax.serve.options import ServerOptions

from . import report
from .serve import TINY

LENGTHS = {"full": (2048, 128), "smoke": (48, 8)}
"""Tokens of a prompt and of an answer."""
ROWS: dict[str, tuple[tuple[str, int], ...]] = {
    "full": (
        ("--max-concurrency 1", 8),
        ("--request-rate 4", 64),
        ("--request-rate 8", 128),
        ("--request-rate 12", 192),
    ),
    "smoke": (("--max-concurrency 1", 2), ("--request-rate 50", 4)),
}
"""(flags of the client, number of requests)."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.http_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_flags(parser, tables=tuple(ROWS), seconds=240, rows=False)
    parser.add_argument("--attention", metavar="NAME", help="as in `swiftkv infer serve`")
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    input_len, output_len = LENGTHS[args.shapes]
    smoke = args.shapes == "smoke"
    config = TINY if smoke else LLAMA_8B
    options = EngineOptions(
        max_model_len=input_len + output_len,
        max_num_seqs=4 if smoke else 64,
        single_step_rows=None,
    )
    model_options = ModelOptions(attention=args.attention)
    mesh = setup_model_devices(model_options)
    document, path = report.begin(args, "http_load", report.new_seed(args.seed))
    document |= {"input_len": input_len, "output_len": output_len, "rows": []}

    def load(report_state: server.Report) -> server.Loaded:
        return _load(config, options, model_options, mesh)

    listener = server.listen("127.0.0.1", 0)
    failures = list[Exception]()
    asking = threading.Thread(
        target=_ask_and_stop, args=(args, listener, config.vocab_size, document, failures)
    )
    asking.start()
    with asyncio.Runner(loop_factory=server.loop_factory()) as runner:
        runner.run(server.serve(ServerOptions(), "random", listener, load))
    asking.join()
    report.write_json(path, document)
    if failures:
        raise failures[0]
    return cli.OK


def _load(config, options: EngineOptions, model_options: ModelOptions, mesh: Mesh | None):
    """The engine of a model with random weights, warm, and the demo's tokenizer."""
    tokenizer = read_model(ModelOptions(), None).tokenizer
    model = dummy_model(config, jnp.bfloat16, mesh=mesh, teacher=False)
    engine = Engine.from_model(
        model, options, mesh=mesh, attention=model_options.attention, donate=True
    )
    return server.Loaded(engine, tokenizer, {}, command.warm(engine), None, {})


def _ask_and_stop(
    args: argparse.Namespace,
    listener: socket.socket,
    vocab_size: int,
    document: dict[str, Any],
    failures: list[Exception],
) -> None:
    """Measure every row once the server is ready, then end the server as Ctrl-C would."""
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    start = time.monotonic()
    try:
        while not _is_ready(url):
            if time.monotonic() - start > args.seconds:
                raise DataError(f"the server is not ready after {args.seconds:g} s")
            time.sleep(0.2)
        for flags, prompts in ROWS[args.shapes]:
            if time.monotonic() - start > args.seconds:
                cli.log(f"{flags}: left out, no time")
                continue
            row = _ask(url, flags, prompts, LENGTHS[args.shapes], vocab_size, document["seed"])
            document["rows"].append({"flags": flags, **row})
    except Exception as error:
        failures.append(error)
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
        return answer.status == 200
    return False


def _ask(
    url: str, flags: str, prompts: int, lengths: tuple[int, int], vocab_size: int, seed: int
) -> dict[str, Any]:
    """What `swiftkv infer bench serve` writes; its table goes to standard output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        words = [sys.executable, "-m", "swiftkv_jax.infer", "bench", "serve", "--base-url", url]
        words += ["--input-len", str(lengths[0]), "--output-len", str(lengths[1])]
        words += ["--num-prompts", str(prompts), "--vocab-size", str(vocab_size)]
        words += ["--seed", str(seed), *flags.split(), "-o", str(path)]
        print(f"\n## {flags}\n", flush=True)
        code = subprocess.run(words, cwd=report.ROOT).returncode
        if code:
            raise DataError(f"{flags}: the client ended with exit code {code}")
        return json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
