"""Kinds of layers, and their rotary embeddings, as a `Config` holds them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from ..errors import ConfigError

RopeType = Literal["linear", "llama3", "yarn", "longrope"]


def _check_positive(what: str, field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{what}: {field}={value!r} must be a positive number")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the pretraining length; `rope` has the formulas.

    `linear` divides every frequency by `factor`; `llama3` divides the low ones, keeps the high ones
    and blends between (Llama 3.1, "The Llama 3 Herd of Models", 2024). `yarn` does so by the turns
    that a pair makes within the pretraining length (arXiv:2309.00071), `longrope` divides each
    frequency by a number of its own (arXiv:2402.13753). The names are Hugging Face's `rope_type`.
    """

    rope_type: RopeType
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    """yarn and longrope: what cosines and sines are multiplied by."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the bounds of the blended pairs are rounded to whole ones."""
    short_factor: tuple[float, ...] = ()
    """longrope: the divisor of each pair's frequency in texts of at most
    `original_max_position_embeddings` tokens; `long_factor` that in longer ones."""
    long_factor: tuple[float, ...] = ()
    long: bool = False
    """longrope: whether `long_factor` holds: see `Config.at_length`."""

    def __post_init__(self):
        for field in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
        ):
            _check_positive("rope scaling", field, getattr(self, field))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope scaling: high_freq_factor={self.high_freq_factor} must exceed "
                f"low_freq_factor={self.low_freq_factor}"
            )
        for value in (*self.short_factor, *self.long_factor):
            _check_positive("rope scaling", "a factor of a frequency", value)


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer's queries and keys (arXiv:2104.09864)."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    fraction: float = 1.0
    """The share of `head_dim`, its first dimensions, that rotates."""

    def __post_init__(self):
        _check_positive("rope", "theta", self.theta)
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"rope: fraction={self.fraction!r} must be above 0 and at most 1")
        yarn = self.scaling is not None and self.scaling.rope_type == "yarn"
        if yarn and self.theta <= 1:
            raise ConfigError(f"rope: theta={self.theta!r} must be above 1 with yarn")

    def rotated(self, head_dim: int) -> int:
        """The number of a head's dimensions that rotate."""
        return int(head_dim * self.fraction)

    def check_factors(self, head_dim: int) -> None:
        """Raise `ConfigError` unless longrope has a factor for each pair."""
        pairs = self.rotated(head_dim) // 2
        scaling = self.scaling
        if scaling is None or scaling.rope_type != "longrope":
            return
        for name in ("short_factor", "long_factor"):
            if len(getattr(scaling, name)) != pairs:
                raise ConfigError(
                    f"rope scaling: {name} has {len(getattr(scaling, name))} entries, not one for "
                    f"each of the {pairs} pairs that rotate"
                )


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Properties of attention that may differ from layer to layer."""

    rope: Rope | None = Rope()
    """None: queries and keys are not rotated."""
    window: int | None = None
    """Number of positions that a token sees, including its own; None: all up to its own."""

    def __post_init__(self):
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ConfigError(f"window={self.window!r} must be a whole number from 1 up")
