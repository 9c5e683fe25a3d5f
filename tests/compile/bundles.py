"""The instructions of TPU kernels, counted in the schedule that libtpu makes of them: no TPU runs.

A bundle is one instruction of several units, and takes a cycle at least: the time that it waits for
memory is not counted. libtpu reads its flags when it is loaded, hence the child process.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention
from swiftkv_jax.plan.topology import ENVIRONMENT
from tests.compile.compiled import lower_for

N, K, H = 32, 8, 128  # heads of Llama-3.1-8B and their dim
ROWS, POSITIONS, PAGE = 64, 131_072, 128  # rows of a decode step, the longest, and their pages
POOL = ROWS * 2048 // PAGE  # pages
PROMPT = 8192  # tokens of prefill
_LINE = re.compile(r" *0(?:x[0-9a-f]+)? +(?P<label>\w\w)?: +(?P<loops>>*) +\{(?P<code>.*)")


class Segment(NamedTuple):
    """Instructions without a branch between them."""

    loops: int
    """Loops around it."""
    enters: bool
    """True if a loop's body begins here."""
    bundles: int
    copies: int
    """Copies from HBM that it starts."""
    copied: int
    """What they copy, in granules of 32 bytes."""
    waited: int
    """Granules that it waits for."""
    products: int
    """Instructions of matrix units that multiply."""


class Block(NamedTuple):
    """Bundles of a whole block of keys and values."""

    copies: int
    """Copies that are started for a block."""
    copied: int
    """What they copy, in granules of 32 bytes."""
    waited: int
    """Granules that a block waits for: as many, or the kernel hangs or reads too early."""
    overhead: int
    """Bundles that start copies, wait, and walk the list of work."""
    attend: int
    """Bundles of products and softmax."""

    @property
    def bundles(self) -> int:
        return self.overhead + self.attend


def segments(schedule: str) -> list[Segment]:
    """The segments of a kernel, in order, of the text of its `final_bundles`."""
    found, loops, ended = [], 0, True
    for match in filter(None, map(_LINE.match, schedule.splitlines())):
        label, code = match["label"], match["code"]
        if code != "}":  # the depth of an empty bundle is not written
            loops = len(match["loops"])
        if label or ended:
            found.append(Segment(loops, label == "LB", 0, 0, 0, 0, 0))
        last = found[-1]
        found[-1] = last._replace(
            bundles=last.bundles + 1,
            copies=last.copies + code.count("= dma.hbm_to_vmem"),
            copied=last.copied + _sum(r"= dma.hbm_to_vmem [^;}]*size_in_granules=\*/(\d+)", code),
            waited=last.waited + _sum(r"= dma.done.wait [^;}]*, (\d+)", code),
            products=last.products + len(re.findall(r"= vmatmul", code)),
        )
        ended = "sbr.rel" in code
    return found


def _sum(pattern: str, code: str) -> int:
    return sum(map(int, re.findall(pattern, code)))


def largest(found: list[Segment]) -> Segment:
    """The segment that multiplies most."""
    return max(found, key=lambda segment: segment.products)


def innermost_loop(found: list[Segment]) -> list[Segment]:
    """The segments of the innermost loop that multiplies, without the loops inside it: the way of a
    whole block, and a few bundles of branches that it does not take."""
    depth = max(segment.loops for segment in found if segment.products)
    loops: list[list[Segment]] = []
    for segment in found:
        if segment.loops == depth and segment.enters:
            loops.append([])
        if segment.loops == depth and loops:
            loops[-1].append(segment)
    return max(loops, key=lambda loop: largest(loop).products)


def decode_block(found: list[Segment]) -> Block:
    loop = innermost_loop(found)
    attend = largest(loop).bundles
    copies, copied, waited, bundles = (
        sum(getattr(segment, field) for segment in loop)
        for field in ("copies", "copied", "waited", "bundles")
    )
    return Block(copies, copied, waited, bundles - attend, attend)


def schedule(topology: str, kernel: str, cache_format: str) -> str:
    """The `final_bundles` of one kernel, compiled in a child process: see `compile_kernel`."""
    call = f"compile_kernel({topology!r}, {kernel!r}, {cache_format!r})"
    command = [sys.executable, "-c", f"from tests.compile.bundles import *; {call}"]
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags}
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300
        )
        assert child.returncode == 0, child.stderr[-2000:]
        files = Path(folder).glob(f"*-tpu_{kernel}.*-final_bundles.txt")
        (file,) = (file for file in files if "schedule-analysis" not in file.name)
        return file.read_text()


def compile_kernel(topology: str, kernel: str, cache_format: str):
    """Compile `kernel`: "decode" of the engine's default shapes or "prefill" of a prompt."""

    def shape(*sizes, dtype: Any = jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    if kernel == "prefill":
        op = functools.partial(prefill_attention, implementation="tpu")
        kv = shape(1, K, PROMPT, H)
        lower_for(topology, op, shape(1, PROMPT, N, H), kv, kv).compile()
        return
    op = functools.partial(decode_attention, implementation="tpu")
    kv = shape(POOL, K, PAGE, H, dtype=jnp.dtype(cache_format))
    options = {"page_table": shape(ROWS, POSITIONS // PAGE, dtype=jnp.int32)}
    if cache_format != "bfloat16":
        scale = shape(POOL, K, PAGE, dtype=jnp.float32)
        options |= {"k_scale": scale, "v_scale": scale}
    lower_for(
        topology,
        lambda q, k, v, length, options: op(q, k, v, length, **options),
        *(shape(ROWS, 1, N, H), kv, kv, shape(ROWS, dtype=jnp.int32), options),
    ).compile()
