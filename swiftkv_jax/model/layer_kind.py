"""Properties that may differ between the layers of a model, as a `Config` holds them."""

from __future__ import annotations

import dataclasses

from ..errors import ConfigError
from .rope_config import Rope


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
