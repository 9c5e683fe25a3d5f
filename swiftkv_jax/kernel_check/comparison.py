"""One configuration of a kernel on small operands against the reference in float32."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas_kernels import choose, grouped_product, selfcheck
from ..pallas_kernels.choice import kernels_of
from ..pallas_kernels.device import Device
from ..pallas_kernels.selfcheck import RUNS, TOLERANCE, Case, Comparison, Row, difference
from .configurations import KernelConfig
from .verdicts import Verdict

POSITIONS = 1100
"""Positions of a row: several blocks of every kernel, the last of them cut."""
KV_HEADS = 2


def case_of(config: KernelConfig, positions: int = POSITIONS) -> Case:
    """The call of attention that `config` is checked with, on rows of about so many positions.

    A row of whole positions has, packed, three documents and padding. From pages, prefill is a
    chunk as the engine packs it: each row the tokens of a page, here of two prompts, and an idle
    row; in parts the visible positions end inside the page of a row's queries, right before it, one
    before the end of an earlier page, and before the first; and in a row of a third prompt they are
    all that there are. Decoding is a step of the engine, with an idle row.
    """
    window = None
    if config.windowed:  # a part of a row: blocks before it are passed over, others are cut by it
        window = max(1, positions // 3)
    if config.op == "gradient" or config.page_size is None:
        if config.op == "decode":
            raise ValueError(f"{config}: only a cache of pages is checked")
        third = positions // 3
        padding = positions // 16
        documents = (1, third, positions - padding - third - 1)
        rows = (Row(documents=documents if config.packed else ()),)
        queries = keys = positions
    elif config.op == "decode":
        # On TPUs blocks of two heads have up to 32 pages.
        page = config.page_size
        queries = 1
        keys = page * max(3, -(-4 * positions // page))
        lengths = (keys, 0, 1, page + 5, page, keys // 2 + 1, page + 1, keys - 1)
        rows = tuple(Row(length - 1) for length in lengths)
    else:
        queries = page = config.page_size
        pages = max(3, -(-positions // page))
        keys = pages * page
        rows = (
            Row(0, page, page // 2 + 1, 0),
            Row((pages - 2) * page, page, (pages - 2) * page, 0),
            Row((pages - 1) * page, page // 2 + 3, 2 * page - 1, 0),
            Row(0, 1, 0, 1),
            Row(0, 0, page, 1),
            Row(page, page, keys, 2),
        )
        if not config.parts:
            rows = tuple(row._replace(kv_length=None) for row in rows[:-1])
    return Case(
        config.op,  # pyright: ignore[reportArgumentType]
        rows,
        queries,
        KV_HEADS * config.queries_per_kv_head,
        KV_HEADS,
        keys,
        config.head_dim,
        config.dtype,
        config.cache_dtype,
        None if config.op == "gradient" else config.page_size,
        window,
        return_lse=config.parts,
    )


def unsupported_reason(device: Any, kernels: str, config: KernelConfig) -> str | None:
    """Why `config` runs through XLA in any case, and not through the device's `kernels`; None if
    they take it. `device` is a `jax.Device` or a `DeviceVersion`."""
    if config.op != "experts":
        kind = Device(device.platform, device.device_kind)
        return choose(kind, case_of(config).spec).reason
    if kernels != "hopper":
        return "has no kernel for experts"
    widths = config.embed_dim, config.mlp_dim
    refused = kernels_of("hopper").grouped.unsupported_reason
    return refused(*widths, config.dtype) or refused(*widths[::-1], config.dtype)


def compare(
    config: KernelConfig, implementation: str, *, positions: int = POSITIONS, **options: Any
) -> Comparison:
    """Run `implementation` on operands drawn for `config`, on the default device, and compare:
    `selfcheck.compare` with its `options`. Needs some hundred MB of device memory."""
    if config.op == "experts":
        return compare_experts(config, implementation, options.get("runs", RUNS))
    return selfcheck.compare(case_of(config, positions), implementation, **options)


def verdict_on(config: KernelConfig, implementation: str, **options: Any) -> Verdict:
    """The verdict of `compare`, with `options` for it. Errors become verdicts too."""
    start = time.monotonic()
    try:
        found = compare(config, implementation, **options)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")[:300]
        no_memory = "RESOURCE_EXHAUSTED" in reason or "Out of memory" in reason
        detail = f"{type(error).__name__}: {reason}"
        seconds = time.monotonic() - start
        return Verdict("unchecked" if no_memory else "failed", detail, seconds)
    seconds = time.monotonic() - start
    if not math.isfinite(found.difference):
        detail = "results are not finite"
        if config.parts:
            detail += ", or a log-sum-exp is where a query sees nothing"
        return Verdict("wrong", detail, seconds)
    if found.right:
        return Verdict("right", "", seconds, found.difference)
    detail = f"by up to {found.difference:.3g}, {found.error:.3g} times what is tolerated"
    return Verdict("wrong", detail, seconds, found.difference)


def compare_experts(config: KernelConfig, implementation: Any, runs: int = RUNS) -> Comparison:
    """The same for products of blocks with the matrices of experts, up and down, stored both ways,
    in blocks of both sizes, of which the last has no rows."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(config.dtype)
    group = np.array([2, 0, 2, 3, 1], np.int32)
    operands = []
    expected = []
    for size, widths in itertools.product(
        (64, 128), ((config.embed_dim, config.mlp_dim), (config.mlp_dim, config.embed_dim))
    ):
        x = rng.normal(size=(len(group), size, widths[0])).astype(dtype)
        weight = (rng.normal(size=(4, *widths)) / widths[0] ** 0.5).astype(dtype)
        products = np.einsum("NMI,NIO->NMO", np.float32(x), np.asarray(weight, np.float32)[group])
        operands.append((x, weight, np.ascontiguousarray(weight.swapaxes(1, 2))))
        expected += [products[:-1]] * 2
    none = jnp.zeros((len(group), 0), jnp.int32)
    used = jnp.asarray([len(group) - 1], jnp.int32)
    blocks = grouped_product.Blocks(jnp.asarray(group), used, row=none, place=none[0])

    @jax.jit
    def call(*operands):
        found = []
        for x, *stored in operands:
            for weight, inputs in zip(stored, ("first", "last"), strict=True):
                out = grouped_product.block_product(
                    x, weight, blocks, inputs, implementation, dtype
                )
                found.append(out[:-1])
        return found

    tolerance = TOLERANCE[config.dtype]
    tolerated = [tolerance + tolerance / 2 * np.abs(one) for one in expected]
    return difference((call(*operands) for _ in range(runs)), expected, tolerated)
