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
    r"^\s*(ROOT )?%?([\w.\-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)$",
    re.MULTILINE,
)
_PARTS = {"slice", "dynamic-slice", "gather"}


class Pass(NamedTuple):
    name: str
    bytes: int
    """Read and written."""


def passes(text: str, kernel: str, pool: int) -> list[Pass]:
    """What optimised HLO for a GPU does to whole arrays between products and attention: its fusions
    without a custom call, and custom calls whose metadata have `kernel`.

    Of an operand that is only sliced or gathered from, those parts count. Arrays of `pool` bytes or
    more are updated in place: what is read from them counts, and as much is written as other
    operands have.
    """
    if not (entry := _ENTRY.search(text)):
        raise ValueError("no ENTRY computation: not an HLO module")
    sizes: dict[str, int] = {}
    found = []
    for _, name, shape, op, operands, rest in _DEFINED.findall(entry[1]):
        written = [_bytes(*array) for array in _ARRAY.findall(shape)]
        sizes[name] = sum(written)
        names = re.findall(r"%([\w.\-]+)", operands)
        read = [sizes.get(one, 0) for one in names]
        if op == "fusion":
            body = _body(text, rest)
            if "custom-call(" in body:
                continue
            read = [_read(body, at, size) for at, size in enumerate(read)]
        elif op in _FREE or (op == "custom-call" and kernel not in rest):
            continue
        read = [size for size in read if size < pool]
        written = [min(size, sum(read)) if size >= pool else size for size in written]
        found.append(Pass(name, sum(read) + sum(written)))
    return found


def _body(text: str, rest: str) -> str:
    """The computation that an instruction calls."""
    called = re.findall(r"calls=%([\w.\-]+)", rest)[0]
    start = text.index(f"\n%{called} (")
    return text[start : text.index("\n}", start)]


def _read(body: str, at: int, size: int) -> int:
    """Bytes that a fused computation reads of its operand number `at`."""
    lines = _DEFINED.findall(body)
    same = {name for _, name, _, op, number, _ in lines if op == "parameter" and number == str(at)}
    parts = 0
    for _, name, shape, op, operands, _ in lines:
        names = re.findall(r"%([\w.\-]+)", operands)
        if not same & set(names):
            continue
        if op == "bitcast":
            same.add(name)
        elif op in _PARTS and names[0] in same:
            parts += sum(_bytes(*array) for array in _ARRAY.findall(shape))
        else:
            return size
    return min(size, parts)


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
