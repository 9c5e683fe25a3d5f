"""Variants of the training step, and one of them run on the device."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.initialization import init_llama, init_swiftkv
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.params import Llama
from swiftkv_jax.model.sharding import llama_shardings, swiftkv_shardings
from swiftkv_jax.model.transformer import Remat
from swiftkv_jax.pallas_kernels import Implementation
from swiftkv_jax.plan.cost import train_flops_per_token
from swiftkv_jax.plan.presets import LLAMA_8B
from swiftkv_jax.train.dry_run import memory_of_a_step
from swiftkv_jax.train.recipe import Recipe
from swiftkv_jax.train.run.step import (
    TrainState,
    init_state,
    make_optimizer,
    make_train_step,
    micro_batch_sharding,
)

from .serve import TINY
from .timing import Plan, Program, Run, measure

STEPS = 1000
"""Steps of the learning rate's schedule; any number, the program is the same."""
SIXTEENTHS = (6, 4, 3, 2, 1)
"""Sixteenths of a packed row that each of its documents takes."""


@dataclasses.dataclass(frozen=True)
class Variant:
    layers: int
    """Number of layers. Half of them keep their own keys and values."""
    rows: int = 1
    remat: Remat = "layer"
    attention: Implementation | None = None
    """Implementation of attention; None chooses for the device."""

    @property
    def name(self) -> str:
        return (
            f"{self.layers} layers, {self.rows} x row, remat {self.remat}, attention "
            f"{self.attention or 'default'}"
        )


class Size(NamedTuple):
    config: Config
    length: int
    """Tokens in a row."""
    variants: tuple[Variant, ...]
    """The most important first."""


SIZES = {
    "full": Size(
        LLAMA_8B,
        8192,
        (
            Variant(8),
            Variant(8, remat="mlp"),
            Variant(8, remat="none"),
            Variant(32),
            Variant(8, attention="xla"),
            Variant(8, rows=2),
            Variant(8, rows=4),
            Variant(8, rows=2, remat="none"),
            Variant(8, remat="none", attention="xla"),
            Variant(32, remat="mlp"),
            Variant(32, remat="none"),
        ),
    ),
    "smoke": Size(TINY, 64, (Variant(4), Variant(4, rows=2, remat="none", attention="xla"))),
}


def documents(length: int) -> list[int]:
    """Tokens of each document of a packed row."""
    return [length * part // sum(SIXTEENTHS) for part in SIXTEENTHS]


def described(size: Size, variant: Variant) -> dict[str, Any]:
    return (
        {"name": variant.name}
        | dataclasses.asdict(variant)
        | {"tokens": variant.rows * size.length}
    )


def run_step(size: Size, variant: Variant, seed: int, plan: Plan) -> dict[str, Any]:
    """Time a step that is not logged and read the device's peak of memory, which counts from the
    start of this process."""
    mesh = make_mesh((1, 1))
    config = dataclasses.replace(
        size.config, num_layers=variant.layers, num_key_value_layers=variant.layers // 2
    )
    recipe = Recipe(
        model="random weights",
        data=(),
        output_dir=Path(),
        max_length=size.length,
        batch_size=variant.rows,
        remat=variant.remat,
        attention=variant.attention,
    )
    optimizer = make_optimizer(recipe, STEPS)
    step = make_train_step(config, recipe, optimizer, mesh)
    llama, state = random_weights(config, optimizer, mesh, jax.random.key(seed))
    batches = [
        packed_batch(config, size.length, variant.rows, mesh, seed + number) for number in range(2)
    ]
    before = peak_bytes()
    start = time.perf_counter()
    compiled = step.lower(state, llama, batches[0], False).compile()
    memory: Any = compiled.memory_analysis()
    planned = memory_of_a_step(recipe, config, mesh, jnp.dtype(jnp.bfloat16))
    found = {
        "compile_seconds": time.perf_counter() - start,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compiled_peak_bytes": memory.peak_memory_in_bytes,
        "planned_bytes": sum(planned.values()),
    }
    program, losses = chained(compiled, state, llama, batches)
    del state
    program.run(1)
    peak = peak_bytes()  # of making the weights rather than of the step, if it has not risen
    found["peak_bytes"] = (
        peak if peak is not None and before is not None and peak > before else None
    )
    timings, failed = measure({"step": program}, plan)
    for error in failed.values():
        raise error
    timing = timings["step"]
    loss = float(losses[-1])
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    flops = {
        remat: step_flops(config, size.length, variant.rows, remat)
        for remat in ("none", variant.remat)
    }
    return found | {
        "seconds": timing.seconds,
        "tokens_per_second": variant.rows * size.length / timing.seconds,
        "model_tflops": flops["none"] / timing.seconds / 1e12,
        "computed_tflops": flops[variant.remat] / timing.seconds / 1e12,
        "loss": loss,
        "timing": dataclasses.asdict(timing),
    }


def chained(
    compiled: jax.stages.Compiled, state: TrainState, llama: Llama, batches: list[Batch]
) -> tuple[Program, list[jax.Array]]:
    """(steps one after another, each on the state that the last one left; a list whose last entry
    is the newest loss)."""
    states = [state]
    losses = [jnp.zeros(())]

    def run(repeats: int) -> Run:
        start = time.perf_counter()
        for number in range(repeats):
            states[0], metrics = compiled(states[0], llama, batches[number % len(batches)], False)
            losses[0] = metrics["loss"]
        queued = time.perf_counter()
        jax.block_until_ready((states[0], losses[0]))
        return Run(time.perf_counter() - start, queued - start)

    return Program(run, 1, None), losses


def random_weights(
    config: Config, optimizer: Any, mesh: Mesh, key: jax.Array
) -> tuple[Llama, TrainState]:
    """Frozen weights in bfloat16 and a fresh delta, made on the device."""
    make = functools.partial(init_llama, config, dtype=jnp.bfloat16)
    llama = jax.jit(make, out_shardings=llama_shardings(config, mesh))(key)
    delta = jax.jit(init_swiftkv, static_argnums=0, out_shardings=swiftkv_shardings(config, mesh))(
        config, llama
    )
    return llama, jax.block_until_ready(init_state(config, optimizer, mesh, delta))


def packed_batch(config: Config, length: int, rows: int, mesh: Mesh, seed: int) -> Batch:
    """Random tokens in rows of several documents; every token but a document's last predicts the
    next one."""
    lengths = documents(length)
    ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    mask = np.append(ids[1:] == ids[:-1], False).astype(np.float32)
    tokens = np.random.default_rng(seed).integers(
        0, config.vocab_size, (1, rows, length), dtype=np.int32
    )
    fields = (tokens, *(np.broadcast_to(field, tokens.shape) for field in (positions, ids, mask)))
    return jax.device_put(Batch(*fields), micro_batch_sharding(mesh))


def step_flops(config: Config, length: int, rows: int, remat: Remat) -> float:
    """FLOPs of the tokens of all documents; attention does not cross from one to the next."""
    return rows * sum(n * train_flops_per_token(config, n, remat=remat) for n in documents(length))


def peak_bytes() -> int | None:
    """Most memory that was in use on the device since this process began; None where the device
    does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
