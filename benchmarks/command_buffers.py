"""Command buffers (CUDA graphs) of the engine's programs: what XLA puts into them under several
sets of its options, whether the tokens stay the same, and how long a step takes.

    python -m benchmarks.command_buffers                 on a GPU: runs the programs there
    python -m benchmarks.command_buffers --shapes smoke  a tiny model, also on a CPU

Without a GPU it compiles the programs for an H200 and counts:

    PYTHONPATH=.venv/compilers JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \\
        python -m benchmarks.command_buffers

With a GPU an engine with random weights of Llama-3.1-8B is made for each set of options, and
continues the same prompts greedily and by sampling; tokens are compared with those under XLA's
defaults. All engines are made in one process, whose autotuner keeps its choices, so that they run
the same kernels. Without a GPU the programs of four layers are compiled, and the thunks counted
that are in command buffers and not. The table goes to stdout, JSON to `benchmarks/results/` (of a
smoke run only to `--output`), rewritten after every row. Exit code 1 if tokens differ, a set of
options fails, or nothing was measured.

A set that gains is given to an engine as `EngineOptions(compiler_options=...)`, or to a command as
`--compiler-option NAME=VALUE`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.infer.runner.lowering import (
    DecodeProgram,
    PrefillProgram,
    Program,
    lower_program,
)
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.model.cache import bytes_per_token
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.model import Model
from swiftkv_jax.plan.presets import LLAMA_8B
from swiftkv_jax.plan.topology import topology_mesh

from . import report, thunks
from .report import TOPOLOGY
from .serve import TINY

Options = Mapping[str, str | int | bool]

DEFAULT = "defaults"
# What XLA puts into command buffers unless told otherwise, with JAX 0.11.2. As an option of one
# program the list replaces XLA's; only in the environment variable XLA_FLAGS a `+` adds to it.
_KINDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
_LOOPS = {"xla_gpu_enable_command_buffer": f"{_KINDS},WHILE"}
SETS: dict[str, Options] = {
    DEFAULT: {},
    "none": {"xla_gpu_enable_command_buffer": ""},
    "from one kernel on": {"xla_gpu_graph_min_graph_size": 1},
    "with loops": _LOOPS,
    "full unrolling": {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_FULL_UNROLL"},
}
"""Sets of options of XLA by their names in the table; the first is what others are compared
with."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Rows that run together, and their lengths."""

    config: Config
    dtype: Any
    rows: int
    prompt: int
    new_tokens: int
    chunk: int
    page_size: int
    repetitions: int


SIZES = {
    "full": Size(LLAMA_8B, jnp.bfloat16, 64, 512, 64, 2048, 128, 3),
    "smoke": Size(TINY, jnp.float32, 2, 12, 17, 16, 4, 1),
}
COUNTED_LAYERS = 4
"""Layers of a program that is compiled to be counted: every further one is like these."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.command_buffers",
        description="Command buffers of the engine's programs: tokens and times.",
    )
    report.add_flags(parser, tables=tuple(SIZES), seconds=540, rows=False)
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    start, seed, size = time.monotonic(), report.new_seed(args.seed), SIZES[args.shapes]
    platform = jax.default_backend()
    if platform not in ("cpu", "gpu"):
        raise UsageError(f"command buffers are of GPUs, and this is a {platform.upper()}")
    here = platform == "gpu" or args.shapes == "smoke"
    document, path = report.begin(args, "command_buffers", seed, None if here else TOPOLOGY)
    document |= {"size": _as_json(size), "counted_layers": None if here else COUNTED_LAYERS}
    rows: list[dict[str, Any]] = []
    document["rows"] = rows
    device = document["device"]["kind"]
    print(f"on this device, {device}" if here else f"compiled for {TOPOLOGY}, not run", flush=True)
    for row in (measured if here else counted)(size, seed):
        rows.append(row)
        print(_line(row), flush=True)
        report.write_json(path, document)
        if time.monotonic() - start > args.seconds:
            document["skipped"] = f"the rest: the budget of {args.seconds:g} s was spent"
            print(document["skipped"])
            break
    report.write_json(path, document)
    if path is not None:
        cli.log(f"wrote {path}")
    failed = [row["set"] for row in rows if "error" in row or row.get("equal_tokens") is False]
    if failed:
        cli.log(f"error: other tokens, or a failure: {', '.join(dict.fromkeys(failed))}")
    return cli.ERROR if failed or not rows else cli.OK


# On the device ----------------------------------------------------------------


def measured(size: Size, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each set of options, XLA's defaults first."""
    config = dataclasses.replace(size.config, num_key_value_layers=size.config.num_layers // 2)
    model, expected = dummy_model(config, size.dtype, teacher=False), None
    for name, options in SETS.items():
        row = {"set": name, "options": options}
        try:
            found, tokens = run(model, size, options, seed)
        except Exception as error:
            yield row | {"error": report.reason(error)}
        else:
            if name == DEFAULT:
                expected = tokens
            equal = None if expected is None else tokens == expected
            yield row | {"equal_tokens": equal} | found
        gc.collect()  # engines hold their programs in cycles, and the programs hold memory


def run(
    model: Model, size: Size, options: Options, seed: int
) -> tuple[dict[str, float], list[list[int]]]:
    """(seconds of an engine with these compiler options, all tokens that it has generated)."""
    length = -(-(size.prompt + size.new_tokens) // size.page_size) * size.page_size
    cache_bytes = size.rows * length * bytes_per_token(model.config, model.dtype)
    began = time.perf_counter()
    engine = Engine.from_model(
        model,
        EngineOptions(
            max_model_len=length,
            max_num_seqs=size.rows,
            page_size=size.page_size,
            decode_rows=(size.rows,),
            chunks=(size.chunk,),
            kv_cache_memory=cache_bytes,
            enable_prefix_caching=False,
            compiler_options=options,
        ),
    )
    seconds = {"ready": time.perf_counter() - began}
    prompts = np.random.default_rng(seed).integers(
        0, model.config.vocab_size, (size.rows, size.prompt)
    )
    kinds = {
        "greedy": SamplingParams(max_tokens=size.new_tokens, ignore_eos=True),
        "sampled": SamplingParams(
            max_tokens=size.new_tokens,
            ignore_eos=True,
            temperature=1.0,
            top_k=50,
            top_p=0.9,
            seed=seed,
        ),
    }
    tokens: list[list[int]] = []
    for kind, params in kinds.items():
        requests = [Request(prompt, params, rng_stream=i) for i, prompt in enumerate(prompts)]
        found = [_repetition(engine, requests) for _ in range(1 + size.repetitions)]
        tokens += [row for rows, _, _ in found for row in rows]
        seconds["prefill chunk"] = min(chunk for _, chunk, _ in found[1:])
        seconds[f"{kind} step"] = min(step for _, _, step in found[1:])
    return seconds, tokens


def _repetition(
    engine: Engine[ModelRunner], requests: Sequence[Request]
) -> tuple[list[list[int]], float, float]:
    """(new tokens of each request, seconds of a chunk of prefill, seconds of a decode step)."""
    rows = {engine.add_request(request): list[int]() for request in requests}
    before, start = dataclasses.replace(engine.stats), time.perf_counter()
    chunks = None
    while engine.stats.chunks != chunks:
        chunks = engine.stats.chunks
        engine.step(decode=False)
    prefilled = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            rows[output.request_id] += output.token_ids
    ended, chunks = time.perf_counter(), engine.stats.chunks - before.chunks
    calls = engine.stats.decode_calls - before.decode_calls
    steps = calls * engine.model_runner.shapes.decode_steps
    return list(rows.values()), (prefilled - start) / chunks, (ended - prefilled) / steps


# Without one ------------------------------------------------------------------


def counted(size: Size, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each program and set of options: thunks in command buffers and not."""
    config = dataclasses.replace(
        size.config, num_layers=COUNTED_LAYERS, num_key_value_layers=COUNTED_LAYERS // 2
    )
    tiles = -(-size.chunk // size.page_size) + 4
    programs: dict[str, tuple[Program, int]] = {
        "prefill": (PrefillProgram(size.chunk, tiles, None), 1),
        "decode, greedy": (DecodeProgram(size.rows, "greedy"), EngineOptions.decode_steps),
        "decode": (DecodeProgram(size.rows), EngineOptions.decode_steps),
    }
    for name, (program, steps) in programs.items():
        lowered = lower_program(
            config,
            program,
            batch=size.rows,
            max_model_len=size.prompt + size.new_tokens,
            steps=steps,
            mesh=topology_mesh(TOPOLOGY, (1, 1)),
        )
        for set_name, options in SETS.items():
            row = {"program": name, "set": set_name, "options": options}
            try:
                yield row | count(lowered, options)
            except Exception as error:
                yield row | {"error": report.reason(error)}


def count(lowered: jax.stages.Lowered, options: Options) -> dict[str, int]:
    """Thunks of a program under these options, and the bytes of its temporaries."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={**options, "xla_dump_to": folder})
        found = thunks.count_dumped(Path(folder))
    memory: Any = compiled.memory_analysis()
    return dataclasses.asdict(found) | {"temporary_bytes": memory.temp_size_in_bytes}


# Lines ------------------------------------------------------------------------


def _as_json(size: Size) -> dict[str, Any]:
    fields = dataclasses.asdict(size)
    return {name: value for name, value in fields.items() if name not in ("config", "dtype")} | {
        "dtype": jnp.dtype(size.dtype).name
    }


def _line(row: dict[str, Any]) -> str:
    head = f"{row.get('program', ''):16}{row['set']:22}"
    if "error" in row:
        return head + row["error"]
    if "equal_tokens" in row:
        equal = {True: "yes", False: "NO", None: "nothing to compare with"}[row["equal_tokens"]]
        times = (f"{name} {report.duration(row[name])}" for name in row if name.endswith(_TIMES))
        return f"{head}equal tokens: {equal}; {', '.join(times)}"
    return (
        f"{head}{row['command_buffers']} command buffers with {row['inside']} thunks; outside "
        f"{row['outside']}, {row['branches_outside']} branches, {row['loops_outside']} loops"
    )


_TIMES = ("chunk", "step")

if __name__ == "__main__":
    sys.exit(main())
