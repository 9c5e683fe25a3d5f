"""Compile a function for a described machine, and read what its compiler says of the kernels in
it."""

import hashlib
import os
import re
import types
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental.mosaic.gpu import core
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.plan.topology import topology_mesh


class Kernel(NamedTuple):
    """What ptxas and the PTX say of one Mosaic GPU kernel."""

    name: str
    target: str
    registers: int
    spilled: int  # bytes of spill stores and loads
    wgmma: int  # instructions in the PTX
    tma: int
    # ptxas lost what was asked for: WGMMAs in series (C7510), register counts ignored (C7508)
    warned: bool


_programs = 0  # compiled in this process


def _hash(code: bytes):
    return hashlib.sha256(code + str(_programs).encode())


# From JAX 0.12 on a process compiles kernels of one hash once, in whatever programs they are, and
# says nothing of them again. Here each program has its own.
core.hashlib = types.SimpleNamespace(sha256=_hash)  # pyright: ignore


def compile_for(topology: str, function, *shapes):
    """(compiled, [Kernel]) on one device of `topology`. Shapes are `ShapeDtypeStruct`s or trees of
    them."""
    return with_kernels(lower_for(topology, function, *shapes))


def lower_for(topology: str, function, *shapes):
    """`function`, lowered for one device of `topology`."""
    mesh = topology_mesh(topology, (1, 1))
    place = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*shapes)


def with_kernels(lowered):
    """(compiled, the Mosaic GPU kernels that were compiled for it)."""
    global _programs
    dump = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    for file in dump.iterdir():
        file.unlink()
    compiled = lowered.compile()
    _programs += 1
    return compiled, [_read(file) for file in sorted(dump.glob("*.ptxas"))]


def _read(log: Path) -> Kernel:
    report, ptx = log.read_text(), log.with_suffix(".ptx").read_text()
    return Kernel(
        name=log.stem,
        target=_found(r"\.target (\S+)", ptx),
        registers=int(_found(r"Used (\d+) registers", report)),
        spilled=sum(int(number) for number in re.findall(r"(\d+) bytes spill", report)),
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        tma=len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        warned=re.search(r"\bC75(?!19)\d\d\b", report)
        is not None,  # C7519 only says where it added a wait for registers
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"{pattern} is not in {text[:500]}"
    return match[1].rstrip(",")
