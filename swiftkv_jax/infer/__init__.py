"""Serving: prompts in, tokens or text out, over a static key/value cache.

`Engine.from_model(model, options)` prepares an engine; `Engine.run` yields the outputs of
requests. For one call without an engine to keep see `generate`.
"""

from .engine.engine import Engine
from .engine.options import EngineOptions
from .engine.requests import Request, RequestOutput, ScoreRequest
from .engine.sampling_params import SamplingParams

__all__ = [
    "Engine",
    "EngineOptions",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ScoreRequest",
]
