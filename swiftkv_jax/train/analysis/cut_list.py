"""The cuts that `--cuts` and `--groups` name: layers that keep their own keys and values, and those
of the others that share a cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from ...calibration import check_groups
from ...errors import ConfigError, UsageError
from ...model.config import Config
from ..recipe import Init

EXPECTED = "percentages of the layers (50%), numbers of layers (K=3), or all"


class NamedCut(NamedTuple):
    name: str
    """Name of the cut, as it was asked for: `37.5%` or `K=3`."""
    k: int
    """Number of layers."""

    def __str__(self) -> str:
        return self.name if self.name.startswith("K=") else f"{self.name} is K={self.k}"


def parse_cuts(text: str, num_layers: int) -> list[NamedCut]:
    """`"25%,K=3"` -> K at these percentages of the layers, rounded, and at these numbers of layers;
    `"all"` -> 1 to L-1.

    Numbers alone are percentages if at least one of them can be nothing else: it has a fraction or
    is not below L. Raises `UsageError` if they may be either, and for what is out of range.
    """
    if text.strip() == "all":
        return [NamedCut(f"K={k}", k) for k in range(1, num_layers)]
    parts = [part.strip() for part in text.split(",")]
    plain = [part for part in parts if not (part.endswith("%") or part.upper().startswith("K="))]
    numbers = [_number(part, text) for part in plain]
    if not all(0 < number < 100 for number in numbers):
        raise UsageError(f"`cuts`={text!r}: every percentage must be between 0 and 100")
    if numbers and all(number.is_integer() and number < num_layers for number in numbers):
        one = plain[0]
        either = f"{one} layers, or {one} % of the {num_layers}"
        raise UsageError(f"`cuts`={text!r}: {either}? Write K={one} or {one}%")
    return [_cut(f"{part}%" if part in plain else part, text, num_layers) for part in parts]


def possible_cuts(
    config: Config, lower: Iterable[int], groups: Iterable[int], init: Init
) -> tuple[list[tuple[int, int]], dict[int, str]]:
    """(K, g) for every K and each g at which the model can be cut and a student started, sorted;
    and g -> why it cannot, of those that fit at no K."""
    cuts = []
    reasons = {}
    for k, g in itertools.product(sorted(set(lower)), sorted(set(groups))):
        try:
            cut = config.cut(k, g)
            if init == "closed-form":
                check_groups(cut)
            cuts.append((k, g))
        except ConfigError as error:
            reasons[g] = str(error)
    fitting = {g for _, g in cuts}
    return cuts, {g: reason for g, reason in reasons.items() if g not in fitting}


def _cut(part: str, text: str, num_layers: int) -> NamedCut:
    if part.endswith("%"):
        share = _number(part[:-1], text)
        if not 0 < share < 100:
            raise UsageError(f"`cuts`={text!r}: every percentage must be between 0 and 100")
        return NamedCut(part, min(max(1, round(num_layers * share / 100)), num_layers - 1))
    number = part[2:].strip()
    if not number.isdecimal() or not 1 <= int(number) < num_layers:
        raise UsageError(f"`cuts`={text!r}: K must be from 1 to {num_layers - 1}, of {num_layers}")
    return NamedCut(f"K={int(number)}", int(number))


def _number(part: str, text: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise UsageError(f"`cuts`={text!r}: expected {EXPECTED}, separated by commas") from None
