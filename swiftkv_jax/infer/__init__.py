"""Serving: prompts in, tokens or text out, over a static key/value cache.

`Engine.from_model(model, options)` prepares an engine; `Engine.run` yields the outputs of
requests. For one call without an engine to keep there is
`swiftkv_jax.generate`.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .engine.engine import Engine
    from .engine.options import EngineOptions, SpeculativeConfig
    from .engine.requests import Request, RequestOutput, ScoreRequest
    from .engine.sampling_params import SamplingParams
    from .structured.structured_outputs import GrammarCompiler, StructuredOutputs

# Imported when they are used: `python -m swiftkv_jax.infer` imports this package before it can
# handle an interrupt.
_MODULES = {
    "Engine": "engine.engine",
    "EngineOptions": "engine.options",
    "GrammarCompiler": "structured.structured_outputs",
    "Request": "engine.requests",
    "RequestOutput": "engine.requests",
    "SamplingParams": "engine.sampling_params",
    "ScoreRequest": "engine.requests",
    "SpeculativeConfig": "engine.options",
    "StructuredOutputs": "structured.structured_outputs",
}

__all__ = [
    "Engine",
    "EngineOptions",
    "GrammarCompiler",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ScoreRequest",
    "SpeculativeConfig",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
