"""The sampling parameters of a command: those of its flags, over those of the checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...checkpoints.auxiliary import GENERATION_CONFIG
from ...errors import CheckpointError, UsageError, spelled
from ...model.model import Model
from ...process.json_files import parse_json
from ..engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that are read from `GENERATION_CONFIG`."""


def sampling_params(given: dict[str, Any], model: Model) -> SamplingParams:
    """The `given` parameters, over those of the model's generation_config.json if it sets
    `do_sample`, over greedy ones.

    Raises `UsageError` that names the parameter, and `CheckpointError` for values in the file that
    are out of range.
    """
    return SamplingParams(**checkpoint_params(model) | given)


def checkpoint_params(model: Model) -> dict[str, Any]:
    """Fields of `SamplingParams` that the model's generation_config.json sets, if it draws. Raises
    `CheckpointError`."""
    content = model.auxiliary_files.contents.get(GENERATION_CONFIG, b"{}")
    config = parse_json(Path(GENERATION_CONFIG), content)
    if not config.get("do_sample"):
        return {}
    found: dict[str, Any] = {"temperature": 1.0} | {
        name: config[name] for name in GENERATION_CONFIG_FIELDS if config.get(name) is not None
    }
    try:
        SamplingParams(**found)
    except UsageError as error:
        text = spelled(str(error), str)  # a field of the file, not a flag
        raise CheckpointError(f"{GENERATION_CONFIG}: {text}") from None
    logger.info(
        f"sampling as {GENERATION_CONFIG} says, where flags do not: "
        + ", ".join(f"{name} {value}" for name, value in found.items())
    )
    return found
