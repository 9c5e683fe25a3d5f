"""Reads what XLA's GPU compiler leaves of a program for the host to run: the sequence of thunks,
and which of them are in command buffers (CUDA graphs).

The text is that of `*.thunk_sequence*.txt` in the folder of XLA's option `xla_dump_to`. A thunk is
a line with a number and a kind; what it contains follows with more indentation.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

_THUNK = re.compile(r"^( *)\d+: k(\w+)", re.MULTILINE)
_COMMAND_BUFFER = "CommandBuffer"
_CONTAINERS = {"Sequential", "AsyncStart", "AsyncDone", "DynamicSliceFusion"}


@dataclasses.dataclass(frozen=True)
class Thunks:
    """Numbers of thunks in the text of a program, whatever the rounds of its loops."""

    command_buffers: int
    inside: int
    """Kernels, copies and calls of libraries that are in command buffers."""
    outside: int
    """The others, which the host launches one by one."""
    branches_outside: int
    """Branches that the host takes: it waits for the device to read the condition."""
    loops_outside: int
    """Loops that the host runs."""


def count(text: str) -> Thunks:
    """Counts of a sequence of thunks."""
    counts = dict.fromkeys((field.name for field in dataclasses.fields(Thunks)), 0)
    open_thunks: list[tuple[int, str]] = []  # (indentation, kind), the outermost first
    for found in _THUNK.finditer(text):
        indentation, kind = len(found[1]), found[2]
        while open_thunks and open_thunks[-1][0] >= indentation:
            open_thunks.pop()
        inside = any(outer == _COMMAND_BUFFER for _, outer in open_thunks)
        open_thunks.append((indentation, kind))
        if kind == _COMMAND_BUFFER:
            counts["command_buffers"] += 1
        elif kind == "Conditional":
            counts["branches_outside"] += not inside
        elif kind == "While":
            counts["loops_outside"] += not inside
        elif kind not in _CONTAINERS:
            counts["inside" if inside else "outside"] += 1
    return Thunks(**counts)


def count_dumped(folder: Path) -> Thunks:
    """Counts of the one program that was compiled with `xla_dump_to` this folder. Raises
    `ValueError` if it holds no sequence of thunks."""
    # The second is missing where the passes, which make command buffers, have changed nothing.
    sequences = sorted(folder.glob("*.thunk_sequence*.txt"), key=lambda path: len(path.name))
    if not sequences:
        raise ValueError(f"{folder}: XLA has left no sequence of thunks")
    return count(sequences[-1].read_text())
