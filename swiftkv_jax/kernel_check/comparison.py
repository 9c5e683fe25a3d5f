"""One configuration of a kernel on small operands against the reference in float32."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas_kernels import fp8_product, fp8_rows, grouped_product, selfcheck
from ..pallas_kernels.selfcheck import RUNS, TOLERANCE, Comparison, difference
from .configurations import POSITIONS, KernelConfig, case_of
from .verdicts import Verdict


def compare(
    config: KernelConfig, implementation: str, *, positions: int = POSITIONS, **options: Any
) -> Comparison:
    """Run `implementation` on operands drawn for `config`, on the default device, and compare:
    `selfcheck.compare` with its `options`. Needs some hundred MB of device memory."""
    if config.op == "experts":
        return compare_experts(config, implementation, options.get("runs", RUNS))
    if config.op == "fp8_product":
        return compare_fp8_products(config, implementation, options.get("runs", RUNS))
    if config.op == "fp8_rows":
        return compare_fp8_rows(config, implementation, options.get("runs", RUNS))
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


def compare_fp8_products(config: KernelConfig, implementation: str, runs: int = RUNS) -> Comparison:
    """The same for products of 256 rows with FP8 matrices of the model's widths, up and down."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(config.dtype)
    operands = []
    expected = []
    for inputs, outputs in (
        (config.embed_dim, config.mlp_dim),
        (config.mlp_dim, config.embed_dim),
    ):
        x, weight = (
            (60 * rng.standard_normal((rows, inputs), np.float32)).astype(jnp.float8_e4m3fn)
            for rows in (256, outputs)
        )
        scales = rng.uniform(0.5, 2.0, 256), rng.uniform(0.5, 2.0, outputs) / (3600 * inputs**0.5)
        of_rows, of_outputs = (scale.astype(np.float32) for scale in scales)
        sums = x.astype(np.float32) @ weight.astype(np.float32).T
        expected.append(sums * of_rows[:, None] * of_outputs)
        operands.append((x, weight, of_rows, of_outputs))

    def call(*operands):
        return [fp8_product.fp8_product(*one, dtype, implementation) for one in operands]

    operands = jax.tree.map(jnp.asarray, operands)
    tolerance = TOLERANCE[config.dtype]
    tolerated = [tolerance + tolerance / 2 * np.abs(one) for one in expected]
    return difference((call(*operands) for _ in range(runs)), expected, tolerated)


def compare_fp8_rows(config: KernelConfig, implementation: str, runs: int = RUNS) -> Comparison:
    """The same for rows that are made and quantised at once, the last of them zeros: activations of
    the MLP, the norm of a sum, that sum, and the norm of rows alone. They are what values and
    scales stand for, within three quarters of a step of FP8."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(config.dtype)

    def drawn(width):
        rows = rng.standard_normal((16, width), np.float32)
        rows *= np.exp2(np.linspace(-8, 4, 16))[:, None]
        rows[-1] = 0
        return rows.astype(dtype)

    gate_up, x, added = map(drawn, (2 * config.mlp_dim, config.embed_dim, config.embed_dim))
    weight = rng.uniform(-0.5, 0.5, config.embed_dim).astype(dtype)
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=1)
    total = np.asarray(x + added, np.float64)

    def normed(rows):
        size = np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + 1e-5)
        return rows / size * (1 + np.float64(weight))

    made = [gate / (1 + np.exp(-gate)) * up, normed(total), normed(np.asarray(x, np.float64))]
    options = fp8_rows.NormOptions(1e-5, offset=True, wide=False)

    def call(*operands):
        gate_up, x, added, weight = operands
        total, *of_sum = fp8_rows.fp8_norm(x, added, weight, options, implementation)
        _, *alone = fp8_rows.fp8_norm(x, None, weight, options, implementation)
        pairs = fp8_rows.fp8_swiglu(gate_up, implementation), of_sum, alone
        return [values.astype(jnp.float32) * scale[:, None] for values, scale in pairs] + [total]

    operands = [jnp.asarray(one) for one in (gate_up, x, added, weight)]
    relative = TOLERANCE[config.dtype]
    tolerated = []
    for one in made:
        step = np.abs(one).max(axis=1, keepdims=True) / 448 * 2.0**-9
        step += np.finfo(np.float32).tiny  # of the row of zeros
        tolerated.append((0.75 * 2.0**-3 + relative) * np.abs(one) + step)
    tolerated.append(relative * np.abs(total) + np.finfo(np.float32).tiny)
    return difference((call(*operands) for _ in range(runs)), [*made, total], tolerated)
