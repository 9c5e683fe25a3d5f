"""Plans as text: bytes, operations and times, and what a student costs when it is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ..model.cache import answer_bytes_per_token, bytes_per_token
from ..model.config import Config
from .cost import (
    attentions_of_a_step,
    decode_flops,
    decode_weights,
    prefill_flops,
    visible_positions,
)
from .hardware import GIB, HARDWARE, Hardware, hardware_of
from .memory import fits

ASSUMED_UTILISATION = 0.4
"""Share of the published peak, recomputation included, that large dense models reach in training.
An assumption, not a measurement."""


def machines_of(mesh: Mesh | AbstractMesh) -> Sequence[Hardware]:
    """The machine that the devices of `mesh` are; all known ones if they need not exist, or are of
    no known kind."""
    if isinstance(mesh, Mesh):
        machine = hardware_of(mesh.devices.flat[0].device_kind)
        if machine is not None:
            return (machine,)
    return HARDWARE


def table_of_bytes(title: str, memory: dict[str, float]) -> str:
    """Format a table in GiB, or in MiB where the total is less than a quarter of one GiB."""
    rows = [*memory.items(), ("total", total := sum(memory.values()))]
    unit, size = ("GiB", GIB) if total >= GIB / 4 else ("MiB", GIB / 1024)
    width = max(len(title), *(len(name) for name, _ in rows))
    lines = [f"{name:<{width}}  {b / size:7.2f}" for name, b in rows]
    return "\n".join([f"{title:<{width}}      {unit}", *lines])


def table_of_flops(parts: dict[str, float]) -> str:
    """Format a table in GFLOP, or in MFLOP where the total is less than one GFLOP."""
    total = sum(parts.values())
    width = max(map(len, parts))
    unit, size = ("GFLOP", 1e9) if total >= 1e9 else ("MFLOP", 1e6)
    lines = [
        f"{name:<{width}}  {flops / size:7.1f}  {flops / total:4.0%}"
        for name, flops in [*parts.items(), ("total", total)]
    ]
    return "\n".join([f"{'operations per token':<{width}}    {unit}", *lines])


def table_of_times(
    mesh: Mesh | AbstractMesh, memory: float, figures: Callable[[float], str]
) -> list[str]:
    """A line for each machine: the `figures` at so many FLOP/s of all devices, the assumed share
    of their peak, and whether `memory` bytes fit each device."""
    lines = [f"time at an assumed {ASSUMED_UTILISATION:.0%} of the published bfloat16 peak"]
    for machine in machines_of(mesh):
        verdict = "fits"
        if not fits(memory, machine):
            verdict = f"does not fit in {machine.memory_bytes / GIB:.0f} GiB"
        speed = ASSUMED_UTILISATION * machine.flops * mesh.size
        lines.append(f"  {mesh.size} x {machine.name:<19}{figures(speed)}   {verdict}")
    return lines


def count_devices(mesh: Mesh | AbstractMesh) -> str:
    return f"{mesh.size} device{'s' * (mesh.size > 1)}"


def serving_table(config: Config, dtype: jnp.dtype, length: int) -> str:
    """Operations and bytes of a prompt of `length` tokens and of a token generated after it, as the
    engine runs both models: counted from the shapes, with one row and a cache of `dtype`."""
    student, teacher = (
        (
            prefill_flops(config, length, swiftkv=swiftkv) / 1e12,
            decode_flops(config, length, swiftkv=swiftkv) / 1e9,
            decode_bytes(config, dtype, length, swiftkv=swiftkv) / 1e9,
            bytes_per_token(config, dtype, swiftkv=swiftkv) / 1024,
            answer_bytes_per_token(config, dtype, swiftkv=swiftkv) / 1024,
        )
        for swiftkv in (True, False)
    )
    names = (
        f"prefill of {length:,} tokens, TFLOP",
        "a token generated after them, GFLOP",
        "bytes read for it, GB",
        "KV cache of a prompt's token, KiB",
        "KV cache of a generated token, KiB",
    )
    width = max(map(len, names))
    served = config.generated_kv + (f", tail {config.exact_tail}" if config.exact_tail else "")
    served += ", exact head" * config.exact_head
    lines = [f"{f'served ({served})':<{width}}   student   teacher"]
    lines += [
        f"{name:<{width}}  {own:8.2f}  {theirs:8.2f}  {own / theirs:4.0%}"
        for name, own, theirs in zip(names, student, teacher, strict=True)
    ]
    return "\n".join(lines)


def decode_bytes(config: Config, dtype: jnp.dtype, context: int, *, swiftkv: bool) -> float:
    """Bytes of weights, keys and values that a decode step of one row reads with `context`
    positions in the cache: every layer reads its keys and values, shared or not, each time that
    it attends to them."""
    of_a_layer = bytes_per_token(config, dtype, swiftkv=False) / config.num_layers
    read = of_a_layer * attentions_of_a_step(config, swiftkv=swiftkv)
    weights = decode_weights(config, swiftkv=swiftkv) * dtype.itemsize
    return weights + read * visible_positions(config, context)
