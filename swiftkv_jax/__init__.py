"""SwiftKV for JAX: Llama-family models whose prompt tokens skip the upper layers, and whose KV
cache is smaller for it."""

from .api import distill_loss, generate, load, logits, save, save_hf
from .config import Config, RopeScaling
from .errors import CheckpointError, ConfigError, DataError, UsageError
from .model import Model, add_swiftkv

__version__ = "0.1.0"

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
