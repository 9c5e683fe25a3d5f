"""Formats of the matrices by a `quantization_config`: which matrices are quantised, and how."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from ...errors import ConfigError
from ...model.quantization import Format
from ..families.fields import shown, unknown_field

Layout = Literal["scaled", "packed", "mxfp4", "gptq", "awq"]
"""Function of `decode` that decodes a matrix."""
Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How a matrix is stored."""

    layout: Layout
    bits: int
    block: tuple[int, int]
    """(outputs, inputs) that share a scale; 0 is all of them."""
    number: Literal["float", "int"] = "int"
    symmetric: bool = True
    """True if each zero is 2^(bits - 1), so that `packed` stores none and `awq` stores only that;
    not of `gptq`."""
    stored_zero: int = 0
    """Number that is added to the zeros as stored; of `gptq` only."""
    act_order: bool = False
    """True if groups may be out of order, so that `g_idx` must say that they are not; of `gptq`
    only."""
    activation_scales: bool = False
    """Scales of the activations are stored too. Nothing reads them."""

    @property
    def packing(self) -> int:
        """Integers in a word of 32 bits; of all layouts but `scaled` and `mxfp4`."""
        return 32 // self.bits

    @property
    def alignment(self) -> tuple[int, int]:
        """(outputs, inputs): a part of the matrix that begins at multiples of these is a part of
        each of its tensors."""
        outputs, inputs = (max(1, size) for size in self.block)
        if self.layout in ("scaled", "mxfp4"):  # a group of `mxfp4` is whole bytes
            return outputs, inputs
        return math.lcm(outputs, self.packing), math.lcm(inputs, self.packing)

    def __str__(self) -> str:
        scales = {
            (1, self.block[1]): f"groups of {self.block[1]}",
            (1, 0): "a scale for each output",
            (0, 0): "one scale",
        }
        blocks = f"blocks of {self.block[0]}x{self.block[1]}"
        return f"{self.bits}-bit {self.number}, {scales.get(self.block, blocks)}"


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """A `quantization_config`, read."""

    method: str
    """vLLM's name of it: `quant_method`."""
    groups: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    """(names of modules, the format of their weights); see `_matches`."""
    wide: tuple[str, ...] = ()
    """Names of modules that are not quantised."""
    kept: Format | None = None
    """The format in which matrices stay in memory; None for those that are decoded when read."""

    def format_of(self, *module: str) -> WeightFormat | None:
        """The format of a Linear's weight; None if it is not quantised. `module` is its name, or
        several by which lists may mean it."""
        if any(_matches(name, one) for name in self.wide for one in module):
            return None
        # A name is more particular than the class of all.
        found = [
            (name == "Linear", format)
            for names, format in self.groups
            for name in names
            if any(_matches(name, one) for one in module)
        ]
        return min(found, key=lambda match: match[0])[1] if found else None

    def __str__(self) -> str:
        formats = dict.fromkeys(str(format) for _, format in self.groups)
        how = "decoded when read" if self.kept is None else f"kept as {self.kept}"
        return f"{self.method}: {'; '.join(formats)} ({how})"


def _matches(name: str, module: str) -> bool:
    """True if a name in a list is for this module: `Linear`, the class of all matrices here; a
    regular expression that its name begins with (`re:`); or its name or whole parts of it."""
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return name == "Linear" or f".{name}." in f".{module}."


# Fields -----------------------------------------------------------------------


def check_fields(
    where: str, fields: Any, allowed: Mapping[str, tuple[Any, ...]], others: frozenset[str]
) -> Fields:
    """The object at `where`, of whose fields those in `allowed` have one of these values (None is
    for absent ones too), and that has none besides them and `others`. Raises `ConfigError`."""
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{where}={shown(fields)} must be an object")
    for name, values in allowed.items():
        if (value := fields.get(name)) not in values:
            raise ConfigError(
                f"{where}.{name}={shown(value)} is not supported; supported: "
                f"{', '.join(repr(value) for value in values if value is not None) or None}"
            )
    for name, value in fields.items():
        if name not in allowed and name not in others:
            raise ConfigError(f"{where}: {unknown_field(name, value)}")
    return fields


def read_names(where: str, value: Any) -> tuple[str, ...]:
    """A list of names of modules, or of lists of them; None is none. Raises `ConfigError`."""
    if not isinstance(value, list | None):
        raise ConfigError(f"{where}={shown(value)} must be a list of names")
    names = [name for part in value or [] for name in (part if isinstance(part, list) else [part])]
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"{where}: {shown(name)} must be a name")
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(
                f"{where}: {shown(name)} is not a regular expression ({error})"
            ) from None
    return tuple(names)


def read_group_size(where: str, value: Any) -> int:
    """Inputs that share a scale; 0, written as -1, is all of them. Raises `ConfigError`."""
    if type(value) is not int or value == 0 or value < -1:
        raise ConfigError(
            f"{where}={shown(value)} must be a number of inputs, or -1 for all of them"
        )
    return max(0, value)
