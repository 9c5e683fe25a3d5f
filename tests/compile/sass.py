"""Machine code of the kernels: PTX assembled by ptxas and disassembled by nvdisasm; loops in it."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    opcode: str  # without its modifiers, as in `HGMMA`
    text: str  # without predicate
    predicated: bool
    target: str | None  # label that a branch goes to


class Code(NamedTuple):
    instructions: list[Instruction]
    labels: dict[str, int]  # index of the instruction that follows


def disassemble(ptx: Path) -> Code:
    """The only kernel of a file of PTX, as instructions of an H100 or H200."""
    cubin = ptx.with_suffix(".cubin")
    subprocess.run([tool("ptxas"), "-arch=sm_90a", "-o", cubin, ptx], check=True)
    listing = subprocess.run([tool("nvdisasm"), "-c", cubin], check=True, capture_output=True)
    return parse(listing.stdout.decode())


def tool(name: str) -> str:
    """The path of a program from NVIDIA's wheels."""
    found = (Path(folder, f"nvidia/cu13/bin/{name}") for folder in sys.path)
    return str(next(path for path in found if path.exists()))


LINE = re.compile(r"^ +/\*[0-9a-f]+\*/ +(@!?\w+ +)?(([A-Z0-9]+)[^;]*?) ;$")


def parse(listing: str) -> Code:
    code = Code([], {})
    for line in listing.splitlines():
        if label := re.match(r"^(\.L\w+):$", line):
            code.labels[label[1]] = len(code.instructions)
        elif found := LINE.match(line):
            target = re.search(r"`\((\.L\w+)\)", found[2])
            code.instructions.append(
                Instruction(found[3], found[2], found[1] is not None, target and target[1])
            )
    return code


def main_loop(code: Code) -> range:
    """Indices of the smallest loop that multiplies matrices."""
    loops = [
        range(code.labels[branch.target], index + 1)
        for index, branch in enumerate(code.instructions)
        if branch.predicated  # the slow paths of waits, after the end, return without a predicate
        and branch.opcode == "BRA"
        and branch.target
        and code.labels[branch.target] <= index
    ]
    return min((loop for loop in loops if indices(code, "HGMMA", within=loop)), key=len)


def unmasked(code: Code, loop: range) -> list[int]:
    """`loop` without what a branch passes over where no score of a block is masked: the longest
    stretch with a selection of each."""
    skipped = [
        range(index + 1, code.labels[branch.target])
        for index in loop
        if (branch := code.instructions[index]).opcode == "BRA"
        and branch.target
        and index < code.labels[branch.target] <= loop.stop
    ]
    masked = max(skipped, key=lambda stretch: len(indices(code, "FSEL", within=stretch)))
    return [index for index in loop if index not in masked]


def indices(code: Code, *opcodes: str, within: Iterable[int] | None = None) -> list[int]:
    """Where these instructions stand."""
    within = range(len(code.instructions)) if within is None else within
    return [index for index in within if code.instructions[index].opcode in opcodes]
