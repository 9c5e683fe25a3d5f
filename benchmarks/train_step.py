"""The distillation step: what its shared prefix saves, how fast it is, and what memory it takes.

    python -m benchmarks.train_step                     on a GPU or a TPU: times it there
    python -m benchmarks.train_step --shapes smoke      tiny shapes, also on a CPU

    PYTHONPATH=.venv/compilers JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m benchmarks.train_step
                                                        without a GPU: counts, and compiles the steps for an H200

Without a device the FLOPs of the step are counted at the shape of Llama-3.1-8B against those of two whole models (see
`two_models`), and every variant of the step is compiled for an H200: its compiler's memory against the plan's
(`python -m swiftkv_jax.train --dry-run`). With a device every variant runs in a process of its own, so that its peak of
memory is its own and one that fails leaves the others alone: the step of `python -m swiftkv_jax.train` with random bfloat16
weights on packed rows of 8,192 tokens. MFU counts the model's FLOPs, what is recomputed left out; `busy` counts it in; both
of the published peak, and of what a large product reaches here. The table goes to stdout, JSON to `benchmarks/results/`
(of a smoke run only to `--output`), rewritten after every row.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from swiftkv_jax import cli
from swiftkv_jax.config import Config
from swiftkv_jax.cost import train_flops_per_token
from swiftkv_jax.hardware import GIB, hardware_of
from swiftkv_jax.model import Batch, Remat
from swiftkv_jax.pallas_kernels import Implementation
from swiftkv_jax.params import init_llama, init_swiftkv, llama_shapes
from swiftkv_jax.sharding import llama_shardings, make_mesh, swiftkv_shardings
from swiftkv_jax.topology import topology_mesh
from swiftkv_jax.train.recipe import Recipe
from swiftkv_jax.train.step import init_state, make_optimizer, make_train_step, micro_batch_sharding, state_shapes

from . import report, two_models
from .boundary import LLAMA_8B, TINY, TOPOLOGY
from .floors import Floors, floors_for
from .timing import SMOKE_PLAN, Plan, Program, Run, measure

STEPS = 1000
"""Of the learning rate's schedule; any number, the program is the same."""
DOCUMENTS = (6, 4, 3, 2, 1)
"""Sixteenths of a packed row."""
LEAST_SAVED, MEMORY_ERROR = 0.16, 0.10
"""Targets: share of the FLOPs that the shared prefix saves with remat, and distance of the planned memory from the real one."""


@dataclasses.dataclass(frozen=True)
class Variant:
    layers: int
    rows: int = 1
    remat: Remat = "layer"
    attention: Implementation | None = None
    """None chooses for the device."""

    @property
    def name(self) -> str:
        return f"{self.layers} layers, {self.rows} rows, remat {self.remat}, attention {self.attention or 'default'}"


class Size(NamedTuple):
    config: Config
    length: int
    counted_documents: tuple[int, ...]
    variants: tuple[Variant, ...]
    """The most important first."""

    def config_of(self, variant: Variant) -> Config:
        """Half of the layers keep their own keys and values."""
        return dataclasses.replace(self.config, num_layers=variant.layers, num_key_value_layers=variant.layers // 2)


SIZES = {
    "full": Size(
        LLAMA_8B,
        8192,
        (8192, 1024),
        (
            Variant(8),
            Variant(8, remat="none"),
            Variant(32),
            Variant(8, attention="xla"),
            Variant(8, rows=2),
            Variant(8, rows=4),
            Variant(8, rows=2, remat="none"),
            Variant(8, remat="none", attention="xla"),
            Variant(32, remat="none"),
        ),
    ),
    "smoke": Size(TINY, 64, (64,), (Variant(4), Variant(4, rows=2, remat="none", attention="xla"))),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli`; 1 also if a variant failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description="FLOPs, speed and memory of the training step.")
    report.add_flags(parser, tables=tuple(SIZES), seconds=420, rows=False)
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process leaves the device to those it starts
    start, seed, size = time.monotonic(), report.new_seed(args.seed), SIZES[args.shapes]
    device = jax.default_backend() != "cpu"
    here = device or args.shapes == "smoke"  # else the device is described, not there
    document = {"benchmark": "train_step", **report.environment(seed), "compiled_for": "this device" if here else TOPOLOGY}
    path = report.output_path(args, "train-step", document["device"]["kind"] if here else TOPOLOGY.split(":")[0], document["date"])
    document |= {"length": size.length, "documents": document_lengths(size.length), "savings": [], "rows": []}
    if not device:
        for row in count_savings(size):
            document["savings"].append(row)
            print(_saving_line(row), flush=True)
            report.write_json(path, document)
    floors = alone(floors_for, args.shapes, jax.random.key_data(jax.random.key(seed)), _plan(args.shapes)) if False else None
    del floors
    return cli.OK
