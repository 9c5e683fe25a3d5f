"""SwiftKV for JAX: Llama-family models whose prompt tokens skip the upper layers, and whose KV
cache is smaller for it.

Importing this imports neither JAX nor anything else until a name of `__all__` is used: a command
sees its first interrupt at once.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .api import distill_loss, generate, load, logits, save, save_hf
    from .config import Config, RopeScaling
    from .errors import CheckpointError, ConfigError, DataError, UsageError
    from .model import Model, add_swiftkv

__version__ = "0.1.0"

_MODULES = {
    "CheckpointError": "errors",
    "Config": "config",
    "ConfigError": "errors",
    "DataError": "errors",
    "Model": "model",
    "RopeScaling": "config",
    "UsageError": "errors",
    "add_swiftkv": "model",
    "distill_loss": "api",
    "generate": "api",
    "load": "api",
    "logits": "api",
    "save": "api",
    "save_hf": "api",
}
"""The public names, and the modules that hold them."""

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "Model",
    "RopeScaling",
    "UsageError",
    "add_swiftkv",
    "distill_loss",
    "generate",
    "load",
    "logits",
    "save",
    "save_hf",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
