"""How long `swiftkv_jax.calibration` takes at the shape of Llama-3.1-8B, with random weights.

    python -m benchmarks.calibration                     on a GPU or a TPU with room for the model
    python -m benchmarks.calibration --shapes smoke      a tiny model, also on a CPU

A student of half of the layers, without groups and in groups of two, from rows of random tokens:
the pass over the teacher, which adds up second moments on the device, and the solution on the host.
The pass's rate stands beside that of a large matrix product. The table goes to stdout, JSON to
`benchmarks/results/` (from a smoke run only to `--output`). Exit code 1 if a delta is not finite.
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
from swiftkv_jax.attention import Attention
from swiftkv_jax.batch import Batch
from swiftkv_jax.calibration.delta import fit_delta
from swiftkv_jax.calibration.moments import add_batch, zero_moments
from swiftkv_jax.config import Config
from swiftkv_jax.cost import calibration_flops_by_part
from swiftkv_jax.hardware import GIB
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.presets import LLAMA_8B
from swiftkv_jax.train.start import TOKENS_PER_DIMENSION

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
    seed, size = report.new_seed(args.seed), SIZES[args.shapes]
    document, path = report.begin(args, "calibration", seed)
    report.add_roofline(document, report.roofline(args.shapes))
    document |= measure(size, seed)
    document["of_product"] = (
        document["flops"] / document["pass_seconds"] / document["roofline"]["flops"]
    )
    print(_text(document), flush=True)
    report.write_json(path, document)
    return cli.OK if document["finite"] else cli.ERROR


def measure(size: Size, seed: int) -> dict[str, Any]:
    """Seconds of compilation, pass and solutions, and the peak of memory."""
    config = dataclasses.replace(
        size.config, num_key_value_layers=size.config.num_layers // 2, key_value_group_size=1
    )
    llama = dummy_model(config, size.dtype, student=False).llama
    rows = -(-TOKENS_PER_DIMENSION * config.embed_dim // size.length)
    rng, attention = np.random.default_rng(seed), Attention()

    def batch() -> Batch:
        tokens = rng.integers(0, config.vocab_size, (1, size.length), dtype=np.int32)
        positions = np.broadcast_to(np.arange(size.length, dtype=np.int32), tokens.shape)
        ids, mask = np.ones_like(tokens), np.ones(tokens.shape, np.float32)
        return jax.device_put(Batch(tokens, positions, ids, mask))

    began = time.perf_counter()
    jax.block_until_ready(add_batch(config, attention, zero_moments(config, None), llama, batch()))
    compiled = time.perf_counter()
    moments = zero_moments(config, None)
    for number in range(rows):
        moments = add_batch(config, attention, moments, llama, batch())
        if number % 16 == 15:
            jax.block_until_ready(moments)
            cli.log(f"row {number + 1} of {rows}, {time.perf_counter() - compiled:.1f} s")
    jax.block_until_ready(moments)
    passed = time.perf_counter()
    solutions = []
    for group_size in GROUPS:
        grouped = dataclasses.replace(config, key_value_group_size=group_size)
        start = time.perf_counter()
        delta = jax.block_until_ready(fit_delta(grouped, llama, moments, None).delta)
        solutions.append(
            {"key_value_group_size": group_size, "seconds": time.perf_counter() - start}
            | {"finite": all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(delta))}
        )
        del delta
    per_token = sum(calibration_flops_by_part(config, size.length).values())
    return {
        "tokens": rows * size.length,
        "length": size.length,
        "flops": per_token * rows * size.length,
        "first_batch_seconds": compiled - began,
        "pass_seconds": passed - compiled,
        "solutions": solutions,
        "finite": all(one["finite"] for one in solutions),
        "peak_bytes": peak_bytes(),
    }


def _text(document: dict[str, Any]) -> str:
    peak = document["peak_bytes"]
    solutions = ", ".join(
        f"in groups of {one['key_value_group_size']} {one['seconds']:.1f} s"
        for one in document["solutions"]
    )
    return (
        f"pass over {document['tokens']:,} tokens {document['pass_seconds']:.1f} s "
        f"({document['of_product']:.0%} of the matrix product), solution {solutions}; first batch "
        f"with compilation {document['first_batch_seconds']:.1f} s"
        + ("" if peak is None else f"; peak of memory {peak / GIB:.1f} GiB")
        + ("" if document["finite"] else "; NOT FINITE")
    )


if __name__ == "__main__":
    sys.exit(main())
