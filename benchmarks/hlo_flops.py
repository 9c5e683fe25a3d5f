"""Counts the FLOPs of an optimised program's matrix products, each as often as it runs.

XLA's own cost analysis counts the body of a loop once, however long the loop, and says nothing for
a GPU that is only described. A loop whose length is known says so in its program, so its products
can be counted as often as they run.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from . import hlo

_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), "
    r"false_computation=%?([\w.\-]+))"
)
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")


class MatmulFlops(NamedTuple):
    """FLOPs of matrix products; a multiply-add is two."""

    plain: int
    """FLOPs of a matrix times a matrix: weights and activations."""
    batched: int
    """FLOPs of products with batch dimensions: in a transformer, the heads of attention."""

    @property
    def all(self) -> int:
        return self.plain + self.batched


def matmul_flops(text: str) -> MatmulFlops:
    """FLOPs of all matrix products of an optimised module. Raises `ValueError` for a loop of
    unknown length that contains some."""
    modules = hlo.computations(text)

    @functools.cache
    def total(name: str) -> MatmulFlops:
        shapes = {instruction.name: instruction.shape for instruction in modules[name]}
        return _sum(of(instruction, shapes) for instruction in modules[name])

    def of(instruction: hlo.Instruction, shapes: dict[str, str]) -> MatmulFlops:
        if instruction.op == "dot":
            return _dot(instruction, shapes)
        if instruction.op == "conditional":
            found = _BRANCHES.search(instruction.attributes)
            assert found, instruction.name
            return max(
                map(total, re.findall(r"[\w.\-]+", " ".join(filter(None, found.groups())))),
                key=lambda branch: branch.all,
            )
        inside = _sum(total(name) for name in _CALLED.findall(instruction.attributes))
        if instruction.op != "while" or not inside.all:
            return inside
        if not (trips := _TRIPS.search(instruction.attributes)):
            raise ValueError(f"{instruction.name}: a loop of unknown length contains products")
        return MatmulFlops(int(trips[1]) * inside.plain, int(trips[1]) * inside.batched)

    return total("")


def _sum(parts: Iterable[MatmulFlops]) -> MatmulFlops:
    found = list(parts)
    return MatmulFlops(sum(part.plain for part in found), sum(part.batched for part in found))


def _dot(instruction: hlo.Instruction, shapes: dict[str, str]) -> MatmulFlops:
    """Twice the entries of the result times the length of the sums."""
    left = [
        int(size)
        for size in re.findall(r"\[([\d,]*)\]", shapes[instruction.operands[0]])[0].split(",")
    ]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    assert contracted, instruction.name
    flops = (
        2
        * hlo.elements(instruction.shape)
        * math.prod(left[int(axis)] for axis in contracted[1].split(",") if axis)
    )
    batched = "lhs_batch_dims" in instruction.attributes
    return MatmulFlops(0, flops) if batched else MatmulFlops(flops, 0)
