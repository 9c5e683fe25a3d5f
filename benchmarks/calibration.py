"""How long `swiftkv_jax.calibration` takes at the shape of Llama-3.1-8B, with random weights.

    python -m benchmarks.calibration                     on a GPU or a TPU with room for the model
    python -m benchmarks.calibration --shapes smoke      a tiny model, also on a CPU

A student of half of the layers, without groups and in groups of two, from rows of random tokens:
the pass over the teacher, which adds up second moments on the device, and the solution on the host.
The pass's rate stands beside that of a large matrix product. JSON goes to `benchmarks/results/`
(from a smoke run only to `--output`), rewritten after every step. A delta that is not finite is an
error. No solution is begun after --seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax import cli
from swiftkv_jax.calibration.delta import fit_delta
from swiftkv_jax.calibration.moments import Moments, add_batch, zero_moments
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch, unpacked_batch
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.params import Llama
from swiftkv_jax.plan.cost import calibration_flops_by_part
from swiftkv_jax.plan.hardware import GIB
from swiftkv_jax.plan.presets import LLAMA_8B
from swiftkv_jax.train.recipe import TOKENS_PER_DIMENSION

from . import report
from .serve import TINY
from .train_variants import peak_bytes

GROUPS = 1, 2


class Size(NamedTuple):
    config: Config
    length: int
    """Tokens in a row."""
    dtype: Any


SIZES = {"full": Size(LLAMA_8B, 8192, jnp.bfloat16), "smoke": Size(TINY, 64, jnp.float32)}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration", description="Seconds and memory of calibration."
    )
    report.add_flags(parser, tables=tuple(SIZES), seconds=420, rows=False)
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    start, seed, size = time.monotonic(), report.new_seed(args.seed), SIZES[args.shapes]
    document, path = report.begin(args, "calibration", seed)
    report.add_roofline(document, report.roofline(args.shapes))
    config = dataclasses.replace(
        size.config, num_key_value_layers=size.config.num_layers // 2, key_value_group_size=1
    )
    llama = dummy_model(config, size.dtype, student=False).llama
    found, moments = time_pass(config, llama, size.length, seed)
    found["of_product"] = found["flops"] / found["seconds"] / document["roofline"]["flops"]
    document |= {"pass": found, "solutions": []}
    print(_pass_line(found), flush=True)
    report.write_json(path, document)
    for group_size in GROUPS:
        if time.monotonic() - start > args.seconds:
            print(f"groups of {group_size}: the budget of {args.seconds:g} s was spent")
            continue
        grouped = dataclasses.replace(config, key_value_group_size=group_size)
        began = time.perf_counter()
        jax.block_until_ready(fit_delta(grouped, llama, moments, None).delta)
        seconds = time.perf_counter() - began
        document["solutions"].append({"key_value_group_size": group_size, "seconds": seconds})
        print(f"solution in groups of {group_size}: {seconds:.1f} s", flush=True)
        report.write_json(path, document)
    return cli.OK


def time_pass(
    config: Config, llama: Llama, length: int, seed: int
) -> tuple[dict[str, Any], Moments]:
    """Figures of the pass over rows of `length` random tokens, after one row that compiles it, and
    the moments that it gives."""
    rows = -(-TOKENS_PER_DIMENSION * config.embed_dim // length)
    rng, attention = np.random.default_rng(seed), Attention()

    def batch() -> Batch:
        tokens = rng.integers(0, config.vocab_size, (1, length), dtype=np.int32)
        return unpacked_batch(jnp.asarray(tokens))

    began = time.perf_counter()
    jax.block_until_ready(add_batch(config, attention, zero_moments(config, None), llama, batch()))
    compiled = time.perf_counter()
    moments = zero_moments(config, None)
    for number in range(1, rows + 1):
        moments = add_batch(config, attention, moments, llama, batch())
        if number % 16 == 0 or number == rows:
            jax.block_until_ready(moments)
            cli.log(f"row {number} of {rows}, {time.perf_counter() - compiled:.1f} s")
    seconds = time.perf_counter() - compiled
    per_token = sum(calibration_flops_by_part(config, length).values())
    found = {
        "tokens": rows * length,
        "length": length,
        "flops": per_token * rows * length,
        "first_row_seconds": compiled - began,
        "seconds": seconds,
        "peak_bytes": peak_bytes(),
    }
    return found, moments


def _pass_line(found: dict[str, Any]) -> str:
    peak = found["peak_bytes"]
    return (
        f"pass over {found['tokens']:,} tokens: {found['seconds']:.1f} s, "
        f"{found['of_product']:.0%} of the matrix product; first row with compilation "
        f"{found['first_row_seconds']:.1f} s"
        + ("" if peak is None else f"; peak of memory {peak / GIB:.1f} GiB")
    )


if __name__ == "__main__":
    sys.exit(main())
