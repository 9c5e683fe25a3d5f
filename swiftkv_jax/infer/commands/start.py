"""The engine of a command."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jax.sharding import Mesh

from ...checkpoints.loss_notes import loss_warning
from ...cli.model_options import ModelOptions
from ...model.model import Model
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def start_engine(
    model: Model,
    mesh: Mesh | None,
    options: EngineOptions,
    model_options: ModelOptions,
    *,
    on_compile: Callable[[int, int], object] | None = None,
) -> Engine[ModelRunner]:
    """An engine for a model that a command has loaded, compiled and ready.

    The model's layers are donated: it cannot be used afterwards. `on_compile` and errors are those
    of `Engine.from_model`.
    """
    start = time.perf_counter()
    warning = loss_warning(model.auxiliary_files.hf_config)
    if warning and model.uses_swiftkv(model_options.uses_swiftkv):
        logger.warning("%s", warning)
    engine = Engine.from_model(
        model,
        options,
        swiftkv=model_options.uses_swiftkv,
        mesh=mesh,
        attention=model_options.attention,
        donate=True,
        on_compile=on_compile,
    )
    if engine.config.generated_kv == "own":
        tail = engine.config.exact_tail
        prompt = f", and so do the last {tail} of a prompt" if tail else ""
        logger.info(f"generated tokens keep their own keys and values{prompt}")
    if engine.config.exact_head:
        logger.info("the first token of a text keeps its own keys and values")
    logger.info(f"ready in {time.perf_counter() - start:.1f} s")
    return engine
