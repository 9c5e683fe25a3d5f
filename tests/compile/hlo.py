"""What XLA's compilers make of a program: its kernels, in the optimised HLO, and on a GPU the
sequence of thunks that the host runs, of which some are in command buffers (CUDA graphs)."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax

_FREE = {
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "after-all",
    "copy-done",
    "partition-id",
    "replica-id",
}
_ENTRY = re.compile(r"^ENTRY [^\n]*\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (?:\((?:[^()]|\([^()]*\))*\)|\S+) ([\w\-]+)\(", re.MULTILINE
)


class Kernel(NamedTuple):
    name: str
    op: str


def kernels(text: str) -> list[Kernel]:
    """The instructions of the entry computation of optimised HLO that are not bookkeeping, in
    order. Raises `ValueError` for a text without an entry computation."""
    if not (entry := _ENTRY.search(text)):
        raise ValueError("no ENTRY computation: not an HLO module")
    found = (Kernel(*match.groups()) for match in _INSTRUCTION.finditer(entry[1]))
    return [kernel for kernel in found if kernel.op not in _FREE]


# Passes over memory ------------------------------------------------------------

_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+\w*)\[([\d,]*)\]")
_DEFINED = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)$",
    re.MULTILINE,
)
_PRODUCT = re.compile(r"__triton_gemm|__cublas|calls=%\S*gemm")


class Pass(NamedTuple):
    name: str
    bytes: int
    """Read and written."""


def passes(text: str, kernel: str, largest: int) -> list[Pass]:
    """What optimised HLO for a GPU does to whole arrays between products and attention: its
    fusions, and custom calls whose metadata have `kernel`. Arrays of more than `largest` bytes, of
    which only rows are touched, do not count."""
    if not (entry := _ENTRY.search(text)):
        raise ValueError("no ENTRY computation: not an HLO module")
    sizes: dict[str, list[int]] = {}
    found = []
    for name, shape, op, operands, rest in (
        match.groups() for match in _DEFINED.finditer(entry[1])
    ):
        sizes[name] = [_bytes(*array) for array in _ARRAY.findall(shape)]
        counted = kernel in rest if op == "custom-call" else op not in _FREE
        if counted and not _PRODUCT.search(rest):
            read = {operand for operand in re.findall(r"%([\w.\-]+)", operands)}
            moved = [*sizes[name], *(size for one in read for size in sizes.get(one, []))]
            found.append(Pass(name, sum(size for size in moved if size <= largest)))
    return found


def _bytes(dtype: str, dimensions: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8


# Thunks -----------------------------------------------------------------------

# What XLA puts into command buffers unless told otherwise, with JAX 0.11.2. As an option of one
# program the list replaces XLA's; only in the environment variable XLA_FLAGS a `+` adds to it.
_KINDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
WITH_LOOPS = {"xla_gpu_enable_command_buffer": f"{_KINDS},WHILE"}
"""XLA's options that put loops into command buffers too."""
_THUNK = re.compile(r"^( *)\d+: k(\w+)", re.MULTILINE)
_COMMAND_BUFFER = "CommandBuffer"
_CONTAINERS = {"Sequential", "AsyncStart", "AsyncDone", "DynamicSliceFusion"}


@dataclasses.dataclass
class Thunks:
    """Numbers of thunks in the text of a program, whatever the rounds of its loops."""

    command_buffers: int = 0
    inside: int = 0
    """Kernels, copies and calls of libraries that are in command buffers."""
    outside: int = 0
    """The others, which the host launches one by one."""
    branches_outside: int = 0
    """Branches that the host takes: it waits for the device to read the condition."""
    loops_outside: int = 0
    """Loops that the host runs."""


def thunks(lowered: jax.stages.Lowered, options: Mapping[str, str | int | bool]) -> Thunks:
    """The thunks of a program that is compiled for a GPU under these options. Raises `ValueError`
    if the compiler tells none."""
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options={**options, "xla_dump_to": folder})
        # The second is missing where the passes, which make command buffers, have changed nothing.
        sequences = sorted(
            Path(folder).glob("*.thunk_sequence*.txt"), key=lambda path: len(path.name)
        )
        if not sequences:
            raise ValueError("XLA has left no sequence of thunks")
        return count_thunks(sequences[-1].read_text())


def count_thunks(text: str) -> Thunks:
    """Counts of a `*.thunk_sequence*.txt`. A thunk is a line with a number and a kind; what it
    contains follows with more indentation."""
    counts = Thunks()
    open_thunks: list[tuple[int, str]] = []  # (indentation, kind), the outermost first
    for found in _THUNK.finditer(text):
        indentation, kind = len(found[1]), found[2]
        while open_thunks and open_thunks[-1][0] >= indentation:
            open_thunks.pop()
        inside = any(outer == _COMMAND_BUFFER for _, outer in open_thunks)
        open_thunks.append((indentation, kind))
        if kind == _COMMAND_BUFFER:
            counts.command_buffers += 1
        elif kind == "Conditional":
            counts.branches_outside += not inside
        elif kind == "While":
            counts.loops_outside += not inside
        elif kind in _CONTAINERS:
            continue
        elif inside:
            counts.inside += 1
        else:
            counts.outside += 1
    return counts
