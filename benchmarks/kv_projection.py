"""The key/value projection of the SwiftKV layer: what a fused kernel for it could save.

    python -m benchmarks.kv_projection                   on a GPU or a TPU: times it there
    python -m benchmarks.kv_projection --shapes smoke    tiny shapes, also on a CPU

Without a GPU it compiles the program for an H200 and counts:

    PYTHONPATH=.venv/compilers JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \\
        python -m benchmarks.kv_projection

A prompt token ends with one product `[T, D] x [D, 2 J K H]`, rotary embedding of the keys, and the
write into J layers of cache. A kernel that did all of it at once would read activations and weights
and write the cache, once each. For chunks of several lengths this command lists what XLA's
optimised program reads and writes instead, and says how much of a prefill chunk's time such a
kernel could save at most. With a device it also times the program and the bare product. The table
goes to stdout, JSON to `benchmarks/results/` (from a smoke run only to `--output`).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax import cli
from swiftkv_jax.model import layers
from swiftkv_jax.model.boundary import project_fused_kv
from swiftkv_jax.model.cache import Pool, write_pages
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.rope import rope_tables
from swiftkv_jax.plan.cost import prefill_flops
from swiftkv_jax.plan.presets import LLAMA_8B
from swiftkv_jax.plan.roofline import Roofline
from swiftkv_jax.plan.topology import topology_mesh

from . import hlo, report
from .predict.devices import H200
from .report import TOPOLOGY
from .timing import SMOKE_PLAN, Plan, Program, Run, Timing, jax_program, measure

MATMUL, COPY = H200.matmul, H200.copy
"""FLOP/s and bytes/s that an H200 reaches on large products and copies: the roofline of the counted
shares, where nothing is measured."""
KERNEL = 3e-6
"""Seconds that a kernel takes at least, launch included: an assumption, for the more pessimistic of
the two estimates."""
PAGE_SIZE = 16
"""Positions of a page of the cache: the chunk of the smallest case."""

TINY = Config(
    vocab_size=64,
    embed_dim=64,
    mlp_dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_key_value_layers=2,
)
CASES = {
    "full": (LLAMA_8B, (512, 2048, 8192), 8192),
    "smoke": (TINY, (16,), 32),
}
"""(architecture, lengths of chunks, positions of the cache) by `--shapes`."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_projection",
        description="What a fused key/value projection could save.",
    )
    report.add_flags(parser, tables=tuple(CASES), seconds=300, rows=False)
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    start, seed = time.monotonic(), report.new_seed(args.seed)
    config, chunks, length = CASES[args.shapes]
    # Without a device the program is compiled for a described one.
    here = jax.default_backend() != "cpu" or args.shapes == "smoke"
    sharding = None if here else NamedSharding(topology_mesh(TOPOLOGY, (1, 1)), PartitionSpec())
    document, path = report.begin(args, "kv_projection", seed, None if here else TOPOLOGY)
    document["assumed"] = {"matmul_flops": MATMUL, "copy_bytes": COPY, "kernel_seconds": KERNEL}
    plan, key = SMOKE_PLAN if args.shapes == "smoke" else Plan(), jax.random.key(seed)
    roofline = report.roofline(args.shapes) if here else None
    if roofline is not None:
        report.add_roofline(document, roofline)
    rows: list[dict[str, Any]] = []
    document["rows"] = rows
    for chunk in chunks:
        if time.monotonic() - start > args.seconds:
            rows.append({"chunk": chunk, "skipped": f"the budget of {args.seconds:g} s was spent"})
            continue
        cli.log(f"chunk of {chunk}")
        rows.append(count(config, chunk, length, sharding))
        _print_counts(rows[-1])
        if roofline is not None:
            timings = timed(config, chunk, length, key, plan)
            rows[-1] |= _measured(rows[-1], timings, roofline)
        report.write_json(path, document)
    counted = [row for row in rows if "largest_saving" in row]
    if counted:
        document["largest_saving"] = max(row["largest_saving"]["by_bytes"] for row in counted)
        document["largest_saving_with_launches"] = max(
            row["largest_saving"]["with_launches"] for row in counted
        )
        print(
            f"A fused kernel could save at most {document['largest_saving']:.2%} of a prefill "
            f"chunk's time by bytes, "
            f"{document['largest_saving_with_launches']:.2%} if every kernel also took "
            f"{KERNEL * 1e6:g} us at least."
        )
    report.write_json(path, document)
    if path is not None:
        cli.log(f"wrote {path}")
    if not counted:
        cli.log("error: nothing was counted")
    return cli.OK if counted else cli.ERROR


def _measured(
    row: dict[str, Any], timings: dict[str, Timing], roofline: Roofline
) -> dict[str, Any]:
    """The timings of a row, and the share of a chunk's time above that of the bare product."""
    whole, product = timings["projection"].seconds, timings["product"].seconds
    floor = max(row["flops"] / roofline.flops, row["least_bytes"] / roofline.bandwidth)
    share = max(0.0, whole - product) / (row["chunk_seconds"] + whole - row["floor_seconds"])
    print(
        f"  measured {report.duration(whole)}; the bare product {report.duration(product)}; "
        f"floor {report.duration(floor)}; what is above the product is {share:.2%} of the chunk"
    )
    return {
        "timings": {name: dataclasses.asdict(timing) for name, timing in timings.items()},
        "measured": {"floor_seconds": floor, "above_product": share},
    }


# The program ------------------------------------------------------------------


def projection(config: Config):
    """(norm, weights, hidden states, rotary table, pages, caches) -> caches, as
    `infer.runner.cached_layers` does it."""

    def run(norm, kv, x, rope, pages, caches):
        k, v = project_fused_kv(config, kv, None, None, layers.norm(config, x, norm), rope)
        written = jnp.ones((pages.size, PAGE_SIZE), bool)

        def write(pool, new):  # 1 K T H
            new = new[0].reshape(new.shape[1], pages.size, PAGE_SIZE, new.shape[3]).swapaxes(0, 1)
            return write_pages(Pool(pool), new, pages, written).values

        return [(write(a, k[j]), write(b, v[j])) for j, (a, b) in enumerate(caches)]

    return run


def operands(config: Config, chunk: int, length: int) -> tuple[Any, ...]:
    """Shapes of the operands of `projection` for one row."""

    def shape(*size, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(size, dtype)

    heads, groups = (config.num_kv_heads, config.head_dim), config.num_kv_groups
    cache = shape(length // PAGE_SIZE, config.num_kv_heads, PAGE_SIZE, config.head_dim)
    rope = shape(2, 1, chunk, config.head_dim // 2, dtype=jnp.float32)
    weights = shape(2, groups, *heads, config.embed_dim)
    x, pages = shape(1, chunk, config.embed_dim), shape(chunk // PAGE_SIZE, dtype=jnp.int32)
    return shape(config.embed_dim), weights, x, rope, pages, [(cache, cache)] * groups


# Counting ---------------------------------------------------------------------


def count(
    config: Config, chunk: int, length: int, sharding: NamedSharding | None
) -> dict[str, Any]:
    """Bytes that the optimised program reads and writes, those that it would have to, and the
    difference as a share of a chunk's time."""
    shapes = operands(config, chunk, length)
    if sharding is not None:
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
        )
    text = jax.jit(projection(config), donate_argnums=5).lower(*shapes).compile().as_text()
    kernels = hlo.kernels(text or "")
    norm, weights, x, rope, _, _ = shapes
    outputs = 2 * config.num_kv_groups * config.num_kv_heads * config.head_dim
    flops = 2 * chunk * config.embed_dim * outputs
    least = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in (norm, weights, x, rope))
        + chunk * outputs * 2
    )
    seconds = [
        max(
            (kernel.read_bytes + kernel.written_bytes) / COPY,
            flops / MATMUL if kernel.is_product else 0.0,
        )
        for kernel in kernels
    ]
    floor = max(flops / MATMUL, least / COPY)
    # The whole chunk at the rate of a large product.
    ideal_chunk = prefill_flops(config, chunk, swiftkv=True) / MATMUL

    def saving(program: float) -> float:
        above = max(0.0, program - floor)
        return above / (ideal_chunk + above)

    return {
        "chunk": chunk,
        "flops": flops,
        "least_bytes": least,
        "chunk_seconds": ideal_chunk,
        "floor_seconds": floor,
        "kernel_seconds": sum(seconds),
        "kernels": [
            dataclasses.asdict(kernel) | {"seconds": time}
            for kernel, time in zip(kernels, seconds, strict=True)
        ],
        "largest_saving": {
            "by_bytes": saving(sum(seconds)),
            "with_launches": saving(sum(max(KERNEL, time) for time in seconds)),
        },
    }


def _print_counts(row: dict[str, Any]) -> None:
    """One line per kind of kernel: their names differ only in their numbers."""
    print(
        f"chunk of {row['chunk']}: {row['flops'] / 1e9:.4g} GFLOP, at least "
        f"{row['least_bytes'] / 1e6:.4g} MB"
    )
    kinds: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for kernel in row["kernels"]:
        kinds.setdefault(
            (kernel["name"].rstrip("0123456789."), kernel["read_bytes"], kernel["written_bytes"]),
            [],
        ).append(kernel)
    for (name, read, written), group in kinds.items():
        each, mark = (
            report.duration(group[0]["seconds"]),
            " (the product)" if group[0]["is_product"] else "",
        )
        print(
            f"  {name:40} {len(group):3} x reads {read / 1e6:8.4g} MB, writes "
            f"{written / 1e6:8.4g} MB, at least {each}{mark}"
        )
    saving = row["largest_saving"]
    print(
        f"  at least {report.duration(row['kernel_seconds'])} as it is, "
        f"{report.duration(row['floor_seconds'])} fused, of a chunk's "
        f"{report.duration(row['chunk_seconds'])}: {saving['by_bytes']:.2%} to save, "
        f"{saving['with_launches']:.2%} with launches",
        flush=True,
    )


# Timing -----------------------------------------------------------------------


def timed(config: Config, chunk: int, length: int, key: jax.Array, plan: Plan) -> dict[str, Timing]:
    """The program and the bare product, each over four different chunks in turn."""
    norm, weights, x, _, _, caches = operands(config, chunk, length)
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    kv = draw(jax.random.fold_in(key, 1), weights.shape) * jnp.bfloat16(0.02)
    chunks = [draw(jax.random.fold_in(key, 2 + i), x.shape) for i in range(4)]
    scale, rope, pages = (
        jnp.ones(norm.shape, norm.dtype),
        rope_tables(config, jnp.arange(chunk)[None])[0],
        jnp.arange(chunk // PAGE_SIZE),
    )
    state = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), caches)]
    step = jax.jit(projection(config), donate_argnums=5)

    def run(repeats: int) -> Run:
        start = time.perf_counter()
        for i in range(repeats):
            state[0] = step(scale, kv, chunks[i % 4], rope, pages, state[0])
        queued = time.perf_counter()
        jax.block_until_ready(state[0])
        return Run(time.perf_counter() - start, queued - start)

    run(1)  # compiles
    flat = kv.reshape(-1, config.embed_dim)
    product = jax_program(
        lambda pair: jnp.einsum("TD,FD->TF", pair[0][0], pair[1]), [(x, flat) for x in chunks]
    )
    timings, failed = measure({"projection": Program(run, 1, None), "product": product}, plan)
    for error in failed.values():
        raise error
    return timings


if __name__ == "__main__":
    sys.exit(main())
