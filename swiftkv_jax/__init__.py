"""SwiftKV for JAX: Llama-family models whose prompt tokens skip the upper layers.

Importing this imports neither JAX nor anything else until a name of `__all__` is used: a command
sees its first interrupt at once.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .api import calibrate, distill_loss, load, logits, save, save_hf
    from .errors import CheckpointError, ConfigError, DataError, UsageError
    from .infer.generate import chat, generate
    from .model.config import Config, LayerKind
    from .model.mesh import make_mesh

    __version__: str
    from .model.model import Model, add_swiftkv
    from .model.rope_config import Rope, RopeScaling

_MODULES = {
    "CheckpointError": "errors",
    "Config": "model.config",
    "ConfigError": "errors",
    "DataError": "errors",
    "LayerKind": "model.config",
    "Model": "model.model",
    "Rope": "model.rope_config",
    "RopeScaling": "model.rope_config",
    "UsageError": "errors",
    "add_swiftkv": "model.model",
    "calibrate": "api",
    "chat": "infer.generate",
    "distill_loss": "api",
    "generate": "infer.generate",
    "load": "api",
    "logits": "api",
    "make_mesh": "model.mesh",
    "save": "api",
    "save_hf": "api",
}
"""The public names, and the modules that hold them."""

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "LayerKind",
    "Model",
    "Rope",
    "RopeScaling",
    "UsageError",
    "add_swiftkv",
    "calibrate",
    "chat",
    "distill_loss",
    "generate",
    "load",
    "logits",
    "make_mesh",
    "save",
    "save_hf",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _MODULES:
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    """The version of the installed package; a checkout that is not installed has none."""
    from importlib import metadata

    try:
        return metadata.version("swiftkv-jax")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
