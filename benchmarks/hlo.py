"""Reads optimised HLO: the kernels of a program, and how many bytes each must at least read and
write.

Every instruction of the entry computation that is not bookkeeping is a kernel. Only those elements
of a fusion's operands count that its result needs: a fusion that updates a slice in place reads and
writes the slice, not the buffer.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import NamedTuple

# The names of other types contain their bits: f8e4m3fn, bf16, s32.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "c64": 64, "c128": 128}
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
_WHOLE = {
    "dot",
    "fusion",
    "call",
    "custom-call",
    "while",
    "gather",
    "scatter",
    "sort",
    "convolution",
}

_INSTRUCTION = re.compile(
    r"^\s*(ROOT )?%?([\w.\-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w\-]+)\((.*)$"
)


class Instruction(NamedTuple):
    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    attributes: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    op: str
    read_bytes: int
    written_bytes: int
    is_product: bool
    """Contains a matrix product."""


def elements(shape: str) -> int:
    return sum(count for count, _ in _arrays(shape))


def bytes_of(shape: str, *, workspaces: bool = True) -> int:
    """Bytes of an array or of all arrays of a tuple; `workspaces=False` leaves out s8 vectors, a
    library's scratch."""
    return sum(count * bits // 8 for count, bits in _arrays(shape, workspaces))


def _arrays(shape: str, workspaces: bool = True) -> list[tuple[int, int]]:
    found = []
    for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape):
        if not workspaces and dtype == "s8" and "," not in dims and shape.startswith("("):
            continue
        bits = _BITS.get(dtype) or int(re.findall(r"\d+", dtype)[0])
        found.append((math.prod(int(dim) for dim in dims.split(",") if dim), bits))
    return found


def computations(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every computation by its name; the entry is also under ""."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line):
            current = found[header[2]] = []
            if header[1]:
                found[""] = current
        elif match := _INSTRUCTION.match(line):
            arguments, attributes = _split(match[5])
            operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
            current.append(
                Instruction(match[2], match[3], match[4], operands, attributes, bool(match[1]))
            )
    if "" not in found:
        raise ValueError("no ENTRY computation: not an HLO module")
    return found


def _split(rest: str) -> tuple[str, str]:
    """(the text up to the parenthesis that closes the operation's arguments, the text after it)."""
    depth = 1
    for position, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:position], rest[position + 1 :]
    return rest, ""


def kernels(text: str) -> list[Kernel]:
    """The kernels that run on the device, in order."""
    modules = computations(text)
    shapes = {instruction.name: instruction.shape for instruction in modules[""]}
    found = []
    for instruction in modules[""]:
        if instruction.op in _FREE:
            continue
        called = re.search(r"calls=%?([\w.\-]+)", instruction.attributes)
        body = modules.get(called[1]) if called and instruction.op == "fusion" else None
        if body is None:
            read = sum(bytes_of(shapes[operand]) for operand in instruction.operands)
            written = bytes_of(instruction.shape, workspaces=False)
        else:
            read, written = _fusion_bytes(body)
        found.append(
            Kernel(
                instruction.name, instruction.op, read, written, _is_product(instruction, modules)
            )
        )
    return found


def _is_product(instruction: Instruction, modules: dict[str, list[Instruction]]) -> bool:
    if instruction.op in ("dot", "convolution"):
        return True
    if instruction.op == "custom-call":
        return "gemm" in instruction.attributes or "matmul" in instruction.attributes
    called = re.search(r"calls=%?([\w.\-]+)", instruction.attributes)
    return bool(called) and any(_is_product(inner, modules) for inner in modules.get(called[1], ()))


def _fusion_bytes(body: list[Instruction]) -> tuple[int, int]:
    """(read, written): how many elements of each parameter the result needs, found from the root
    upwards."""
    by_name = {instruction.name: instruction for instruction in body}
    # Distinct slices of a value add up; any other two uses may need the same elements.
    sliced: dict[str, dict[str, float]] = {name: {} for name in by_name}
    needed = dict.fromkeys(by_name, 0.0)
    written = 0

    def use(operand: str, count: float, region: str | None = None):
        if region is not None:
            sliced[operand][region] = max(count, sliced[operand].get(region, 0.0))
        else:
            needed[operand] = max(needed[operand], count)

    def demand(instruction: Instruction) -> float:
        return min(
            elements(instruction.shape),
            needed[instruction.name] + sum(sliced[instruction.name].values()),
        )

    root = next(instruction for instruction in body if instruction.root)
    results = [by_name[name] for name in root.operands] if root.op == "tuple" else [root]
    for result in results:
        source = result
        while source.op in ("bitcast", "copy", "reshape") and source.operands:
            source = by_name[source.operands[0]]
        # In place: the rest of the buffer is neither read nor written.
        if source.op == "dynamic-update-slice":
            written += bytes_of(by_name[source.operands[1]].shape)
            needed[source.name] = 0.0
            use(source.operands[1], elements(by_name[source.operands[1]].shape))
            for index in source.operands[2:]:
                use(index, 1)
        else:
            written += bytes_of(result.shape)
            use(result.name, elements(result.shape))
    for instruction in reversed(body):
        count = demand(instruction)
        if not count:
            continue
        sizes = [elements(by_name[operand].shape) for operand in instruction.operands]
        for operand, size in zip(instruction.operands, sizes, strict=True):
            if instruction.op in _WHOLE:
                use(operand, size)
            elif instruction.op in ("reduce", "reduce-window"):
                use(operand, min(size, count * max(1.0, size / elements(instruction.shape))))
            elif instruction.op == "concatenate":
                use(operand, min(size, count * size / sum(sizes)))
            elif instruction.op == "slice":
                use(operand, min(size, count), instruction.attributes.split("metadata=")[0])
            else:  # elementwise, or as many elements in another place
                use(operand, min(size, count))
    parameters = [instruction for instruction in body if instruction.op == "parameter"]
    return round(
        sum(demand(one) * bytes_of(one.shape) / max(1, elements(one.shape)) for one in parameters)
    ), written
