"""The adapters that a server has from its start: `--lora-modules`, as vLLM takes it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:  # the flags of the command are parsed without NumPy
    from ..infer.engine.options import EngineOptions
    from ..model.config import Config

_KEYS = {"name", "path", "base_model_name"}


def parse_lora_module(text: str) -> tuple[str, str]:
    """(name, path) of NAME=PATH, or of a JSON object with `name` and `path`. Raises
    `UsageError`."""
    name, equals, path = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{text!r} is not JSON: {error}") from None
        name, path, equals = fields.get("name"), fields.get("path"), fields.keys() <= _KEYS
    if not (equals and name and path and isinstance(name, str) and isinstance(path, str)):
        raise UsageError(f'{text!r} is not NAME=PATH, or {{"name": "NAME", "path": "PATH"}}')
    return name, path


def check_adapter_name(name: str, taken: Collection[str]) -> None:
    """Raise `UsageError` for a name that no adapter can have. `taken` are the names of the
    model."""
    if not name or len(name) > 256 or not name.isprintable() or "," in name:
        message = f"{name!r} is no name: 1 to 256 printable characters without commas are"
        raise UsageError(message, option="adapter")
    if name in taken:
        raise UsageError(f"{name!r} is the name of the model", option="adapter")


def engine_name(name: str, number: int) -> str:
    """The engine's name for an adapter that clients call `name`: no other has the `number`."""
    return f"{name},{number}"


def public_name(engine_name: str) -> str:
    """The name that clients call an adapter of the engine."""
    return engine_name.partition(",")[0]


def check_lora_modules(
    modules: Mapping[str, Path], options: EngineOptions, config: Config, taken: Collection[str]
) -> None:
    """Raise `UsageError` and `CheckpointError` for adapters that a model of this architecture,
    which has no upper layers as a teacher, could not be served with, before it is loaded. `taken`
    are the names of the model."""
    from ..checkpoints.adapter_factors import placed_factors

    if modules and not options.enable_lora:
        raise UsageError("`lora_modules` needs `enable_lora`")
    if len(modules) > options.max_loras:
        message = f"{len(modules)} `lora_modules` are more than `max_loras`={options.max_loras}"
        raise UsageError(message)
    for name, path in modules.items():
        check_adapter_name(name, taken)
        placed_factors(
            config, path, max_rank=options.max_lora_rank, upper_only=options.lora_upper_only
        )
