"""Run one kernel in the interpreter with one statement of it left out or changed, or with a wrong
work list or order of tiles: what the race detector and the oracle are worth.

    python -m tests.pallas_kernels.planted hopper.prefill 'plgpu.commit_smem()'
    python -m tests.pallas_kernels.planted hopper.prefill.persistent 'a tile is left out'
    python -m tests.pallas_kernels.planted hopper.decode 'an entry starts a tile late'
    python -m tests.pallas_kernels.planted tpu.decode 'a query sees one position too many'
    python -m tests.pallas_kernels.planted tpu.prefill.part 'a query that sees nothing counts'

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
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from swiftkv_jax.pallas_kernels.selfcheck import (
    Case,
    Row,
    compare,
    difference,
    draw,
    expected_of,
)
from tests.pallas_kernels.cases import decoding
from tests.pallas_kernels.interpreted import device_of

STATEMENTS = (
    "plgpu.barrier_wait(",
    "plgpu.commit_smem(",
    "plgpu.wait_smem_to_gmem(",
    ".wait()",
)
"""Waits for data or for room, and fences. Leaving one out lets a kernel read too early or write too
soon."""

PLANS = {
    "an entry starts a tile late": ("entries", (1, 1), 1),
    "an entry ends a tile early": ("entries", (0, 2), -1),
    "an entry reads another row": ("entries", (2, 0), -1),
    "the last split of a row is forgotten": ("row_entries", (0, 1), -1),
}
"""Mistakes in a plan of decode attention: an array of it, an index, and what is added there."""

# Mistake -> the module, its function, and what that is replaced by: a function of the original.
TILES: dict[str, tuple[str, str, Any]] = {
    "a tile is left out": (
        "prefill_tiles",
        "num_tiles",
        lambda original: lambda *args: original(*args) - 1,
    ),
    "a tile is computed twice in place of another": (
        "prefill_tiles",
        "nth_tile",
        lambda original: lambda n, *args: original(jnp.where(n == 1, 0, n), *args),
    ),
    "a slot is filled before the other thread block has read it": (
        "prefill",
        "_free_slots",
        lambda original: lambda tuning: original(dataclasses.replace(tuning, multicast=False)),
    ),
}
"""Mistakes in the order of the tiles of prefill, and in what the thread blocks of a cluster wait
for."""

SIZES = (200, 2, 1, 640, 64)
VARIANTS = {
    "persistent": {"block_kv": 64, "persistent": True},
    "multicast": {"block_kv": 64, "multicast": True},
    "both": {"block_kv": 64, "persistent": True, "multicast": True},
}
"""Tunings of hopper.prefill that a third part of a kernel's name stands for. They run on two
multiprocessors."""

PARTS = [
    Case("prefill", (Row(1100, None, 600), Row(90, None, 450)), *SIZES, page_size=128),
    Case("prefill", (Row(420, 200, 300), Row(0, 130, 120)), *SIZES, page_size=128, window=200),
]
"""Cases that the third part "part" stands for: in the second some queries of a block see
nothing."""

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
        "else begin) + first + part",
        "else begin) + first",
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
    "a log-sum-exp is a maximum": (
        "tpu.decode",
        "(running_max + jnp.log2(total))",
        "running_max",
    ),
    "a log-sum-exp is that of a split": (
        "hopper.decode_combine",
        "m + jnp.log(total), -jnp.inf",
        "m, -jnp.inf",
    ),
    "a query sees one key too many of a part": (
        "hopper.prefill.part",
        "key < kv_lengths_gmem[batch]",
        "key <= kv_lengths_gmem[batch]",
    ),
    "a query that sees none of a part counts": (
        "hopper.prefill.part",
        "if kv_lengths_gmem is not None and window is not None:",
        "if False:",
    ),
    "a block that the part cuts is not masked": (
        "tpu.prefill.part",
        "full &= key0 + bkv <= kv_length",
        "pass",
    ),
    "a query that sees nothing counts": (
        "tpu.prefill.part",
        "exists &= max_ref[...] > MASKED",
        "pass",
    ),
    "pages past the part are multiplied": (
        "tpu.prefill.part",
        "+ p * size < key_end, page, 0)",
        "+ p * size < 2**30, page, 0)",
    ),
}
"""Mistakes in a kernel: its name, what stands in its source once, and what stands there then."""

SHORT = {
    "hopper": {"block_kv": 64, "stages": 2},
    "tpu": {"block_bytes": 2**17, "buffers": 2},
}
DECODE = {
    "hopper": decoding(1, (500, 300), 8, 2, 500, 64, return_lse=True),
    "tpu": decoding(1, (1000, 860), 8, 2, 1024, 64, page_size=128, return_lse=True),
}
"""Rows of several blocks, the last of which is cut; on TPUs blocks of four pages."""


def statements(kernel: str) -> dict[str, int]:
    """Source text -> line number of every such statement of `hopper.prefill`, say. Repeated texts
    are told apart by a count."""
    found, lines = {}, inspect.getsource(kernel_module(*kernel.split(".")[:2])).splitlines()
    for number, line in enumerate(lines, start=1):
        code = line.split("#")[0].strip()
        if any(statement in code for statement in STATEMENTS):
            twin = sum(text.split(" #")[0] == code for text in found)
            found[f"{code} #{twin + 1}" if twin else code] = number
    return found


def kernel_module(implementation: str, name: str) -> Any:
    return importlib.import_module(f"swiftkv_jax.pallas_kernels.{implementation}.{name}")


def wrong_tiles(mistake: str):
    """Make one of the mistakes of `TILES`."""
    module, name, replacement = TILES[mistake]
    module = kernel_module("hopper", module)
    setattr(module, name, replacement(getattr(module, name)))


def leave_out(kernel: str, statement: str):
    """Make one of the `statements` of `kernel` do nothing."""
    module = kernel_module(*kernel.split(".")[:2])
    place = module.__file__, statements(kernel)[statement]

    def unless_there(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            frame = sys._getframe(1)
            if (frame.f_code.co_filename, frame.f_lineno) != place:
                return function(*args, **kwargs)

        return call

    for name in ("barrier_wait", "commit_smem", "wait_smem_to_gmem"):
        setattr(plgpu, name, unless_there(getattr(plgpu, name)))
    make_copy = pltpu.make_async_copy

    def copy_without_wait(*args, **kwargs):
        copy = make_copy(*args, **kwargs)
        object.__setattr__(copy, "wait", unless_there(copy.wait))
        return copy

    pltpu.make_async_copy = copy_without_wait


def edited(mistake: str) -> str:
    """The source of a kernel with one of `EDITS`. Raises `ValueError` if it does not fit."""
    kernel, old, new = EDITS[mistake]
    source = inspect.getsource(kernel_module(*kernel.split(".")[:2]))
    if source.count(old) != 1:
        raise ValueError(f"{old!r} stands {source.count(old)} times in {kernel}")
    return source.replace(old, new)


def run(kernel: str, mistake: str = ""):
    """The kernel on a shape with several blocks of everything, against the oracle. `mistake` is one
    of `PLANS`."""
    implementation: Any
    implementation, op, *variant = kernel.split(".")
    op = op.split("_")[0]  # a kernel has several modules, the backward one for each of its two
    if op == "decode":
        _decode(implementation, mistake)
        return
    cases = [Case("prefill" if op == "prefill" else "gradient", (Row(),), 512, 2, 1, 512, 64)]
    tunings = {}
    if variant == ["part"]:
        cases = [dataclasses.replace(case, return_lse=True) for case in PARTS]
    elif variant:
        kernel_module("hopper", "prefill_tiles").num_multiprocessors = lambda: 2
        tunings["tuning"] = kernel_module("hopper", "prefill").Tuning(**VARIANTS[variant[0]])
    for case in cases:
        with device_of(implementation):
            found = compare(case, implementation, runs=1, **tunings)
        assert found.right, found


def _decode(implementation: str, mistake: str):
    """Called as the op would, but with rings that are shorter than the row."""
    module, case = kernel_module(implementation, "decode"), DECODE[implementation]
    tuning, drawn = module.Tuning(**SHORT[implementation]), draw(case)
    with device_of(implementation):
        arguments = [jax.tree.map(jnp.asarray, drawn.operands)]
        if mistake:
            name, index, added = PLANS[mistake]
            plan = module.plan(*arguments, tuning=tuning)
            wrong = getattr(plan, name).at[index].add(added)
            arguments.append(dataclasses.replace(plan, **{name: wrong}))
        attend = functools.partial(module.attention, tuning=tuning, return_lse=True)
        found = jax.block_until_ready(jax.jit(attend)(*arguments))
    assert difference([found], *expected_of(case, drawn)).right


if __name__ == "__main__":
    kernel, mistake = sys.argv[1:]
    if mistake in EDITS:
        module = kernel_module(*kernel.split(".")[:2])
        exec(compile(edited(mistake), str(module.__file__), "exec"), module.__dict__)
    elif mistake in TILES:
        wrong_tiles(mistake)
    elif mistake and mistake not in PLANS:
        leave_out(kernel, mistake)
    run(kernel, mistake if mistake in PLANS else "")
