"""Run one kernel in the interpreter with one statement of it left out or changed, or with a wrong
work list: what the race detector and the oracle are worth.

    python -m tests.pallas_kernels.planted hopper.prefill 'plgpu.barrier_wait(k_ready.at[0])'
    python -m tests.pallas_kernels.planted hopper.decode 'an entry starts a tile late'
    python -m tests.pallas_kernels.planted tpu.decode 'a query sees one position too many'

Exits with 0 if nothing was noticed. A process of its own for each: a broken kernel can hang, and
leaves the interpreter unusable.
"""

import dataclasses
import functools
import importlib
import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from swiftkv_jax.pallas_kernels import prefill_attention
from tests.pallas_kernels.interpreted import device_of
from tests.pallas_kernels.operands import check, decode_inputs, inputs, prefill_mask
from tests.pallas_kernels.shapes import Decode, Prefill

STATEMENTS = ("plgpu.barrier_wait(", "plgpu.commit_smem(", ".wait()")
"""Waits for data or for room, and fences. Leaving one out lets a kernel read too early or write too
soon."""

PLANS = {
    "an entry starts a tile late": ("entries", (1, 1), 1),
    "an entry ends a tile early": ("entries", (0, 2), -1),
    "an entry reads another row": ("entries", (2, 0), -1),
    "the last split of a row is forgotten": ("row_entries", (0, 1), -1),
}
"""Mistakes in a plan of decode attention: an array of it, an index, and what is added there."""

EDITS = {
    "a query sees one position too few": (
        "tpu.decode",
        "end = length - queries + 1 ",
        "end = length - queries",
    ),
    "a query sees one position too many": (
        "tpu.decode",
        "end = length - queries + 1 ",
        "end = length - queries + 2",
    ),
    "all pages of a block are its first": (
        "tpu.decode",
        "block * block_chunks + first + part",
        "block * block_chunks + first",
    ),
    "a part of the rest is attended twice": (
        "tpu.decode",
        "first = rest & ~(2 * part - 1)",
        "first = rest & ~(4 * part - 1)",
    ),
    "no wait for a whole block": ("tpu.decode", "wait_for(slot, block_kv)", "pass"),
    "no wait for the rest of a row": (
        "tpu.decode",
        "functools.partial(wait_for, slot, part * CHUNK)",
        "lambda: None",
    ),
}
"""Mistakes in a kernel: its name, what stands in its source once, and what stands there then."""

SHORT = {
    "hopper": {"block_kv": 64, "stages": 2},
    "tpu": {"block_bytes": 2**17, "buffers": 2},
}
DECODE = {
    "hopper": Decode(2, 1, 8, 2, 500, 64, (500, 300)),
    "tpu": Decode(2, 1, 8, 2, 1024, 64, (1000, 860), page=128),
}
"""Rows of several blocks, the last of which is cut; on TPUs blocks of four pages."""


def statements(kernel: str) -> dict[str, int]:
    """Source text -> line number of every such statement of `hopper.prefill`, say. Repeated texts
    are told apart by a count."""
    found, lines = {}, inspect.getsource(_module(kernel)).splitlines()
    for number, line in enumerate(lines, start=1):
        code = line.split("#")[0].strip()
        if any(statement in code for statement in STATEMENTS):
            twin = sum(text.split(" #")[0] == code for text in found)
            found[f"{code} #{twin + 1}" if twin else code] = number
    return found


def leave_out(line: int):
    """Make the waits and fences called from `line` do nothing."""

    def unless_there(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if sys._getframe(1).f_lineno != line:
                return function(*args, **kwargs)

        return call

    plgpu.barrier_wait, plgpu.commit_smem = (
        unless_there(plgpu.barrier_wait),
        unless_there(plgpu.commit_smem),
    )
    make_copy = pltpu.make_async_copy

    def copy_without_wait(*args, **kwargs):
        copy = make_copy(*args, **kwargs)
        object.__setattr__(copy, "wait", unless_there(copy.wait))
        return copy

    pltpu.make_async_copy = copy_without_wait


def edited(mistake: str) -> str:
    """The source of a kernel with one of `EDITS`. Raises `ValueError` if it does not fit."""
    kernel, old, new = EDITS[mistake]
    source = inspect.getsource(_module(kernel))
    if source.count(old) != 1:
        raise ValueError(f"{old!r} stands {source.count(old)} times in {kernel}")
    return source.replace(old, new)


def run(kernel: str, mistake: str = ""):
    """The kernel on a shape with several blocks of everything, against the oracle. `mistake` is one
    of `PLANS`."""
    implementation: Any
    implementation, op = kernel.split(".")
    op = op.split("_")[0]  # the backward has a module for each of its kernels
    with device_of(implementation):
        if op == "decode":
            # Called as the op would, but with rings that are shorter than the row.
            kernel_module = _module(f"{implementation}.{op}")
            tuning = kernel_module.Tuning(**SHORT[implementation])
            operands, options, expected = decode_inputs(DECODE[implementation], "bfloat16")
            if mistake:
                name, index, added = PLANS[mistake]
                q, k, _, length = operands
                plan = kernel_module.plan(q, k, length, tuning=tuning)
                wrong = getattr(plan, name).at[index].add(added)
                options["work"] = dataclasses.replace(plan, **{name: wrong})
            check(
                jax.jit(functools.partial(kernel_module.attention, **options, tuning=tuning))(
                    *operands
                ),
                *expected,
            )
            return
        shape = Prefill(1, 512, 2, 1, 512, 64)
        q, k, v = inputs(shape, "bfloat16")
        attend = functools.partial(prefill_attention, implementation=implementation)
        if op == "prefill":
            check(jax.jit(attend)(q, k, v), q, k, v, prefill_mask(shape))
            return
        q /= 4
        ones = jnp.ones_like(q)
        found = jax.jit(lambda *operands: jax.vjp(attend, *operands)[1](ones))(q, k, v)
    expected = jax.vjp(functools.partial(prefill_attention, implementation="xla"), q, k, v)[1](ones)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.float32(got), np.float32(wanted), atol=3e-2 * float(jnp.abs(wanted).max())
        )


def _module(kernel: str) -> Any:
    return importlib.import_module(f"swiftkv_jax.pallas_kernels.{kernel}")


if __name__ == "__main__":
    kernel, mistake = sys.argv[1:]
    if mistake in EDITS:
        exec(compile(edited(mistake), _module(kernel).__file__, "exec"), _module(kernel).__dict__)
    elif mistake and mistake not in PLANS:
        leave_out(statements(kernel)[mistake])
    run(kernel, mistake if mistake in PLANS else "")
