"""How a device mesh is written: the number of devices along each axis. Importing this does not
import JAX."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import UsageError


class MeshShape(NamedTuple):
    """Number of devices along each axis; one number may be -1, which stands for the rest of the
    devices."""

    data: int = 1
    fsdp: int = 1
    model: int = 1

    @property
    def rows(self) -> int:
        """Devices that a batch is split over."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        return (
            f"{self.data}x{self.model}"
            if self.fsdp == 1
            else f"data={self.data},fsdp={self.fsdp},model={self.model}"
        )


def parse_mesh(spec: str) -> MeshShape:
    """`"4x1"` is data x model; `"data=2,fsdp=4,model=2"` names the axes, in any order, those left
    out being 1.

    One number may be -1, the rest of the devices. Raises `UsageError` for anything else.
    """
    pair = re.fullmatch(r"(-1|[1-9]\d{0,5})[xX](-1|[1-9]\d{0,5})", spec.strip())
    named = re.fullmatch(r"(\w+=(-1|[1-9]\d{0,5}))(,\w+=(-1|[1-9]\d{0,5}))*", spec.replace(" ", ""))
    if pair:
        shape = MeshShape(data=int(pair[1]), model=int(pair[2]))
    elif named:
        sizes = [part.split("=") for part in named[0].split(",")]
        names = [name for name, _ in sizes]
        if len(set(names)) < len(names) or not set(names) <= set(MeshShape._fields):
            raise UsageError(
                f"`mesh`={spec!r}: the axes are data, fsdp and model, each at most once"
            )
        shape = MeshShape(**{name: int(size) for name, size in sizes})
    else:
        raise UsageError(
            f"`mesh`={spec!r}: expected DATAxMODEL, for example 4x1, or named axes, for example "
            f"data=2,fsdp=4,model=2"
        )
    if shape.count(-1) > 1:
        raise UsageError(f"`mesh`={spec!r}: only one axis can take the rest of the devices, -1")
    return shape
