"""Loads the model of a command onto its devices."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from ..errors import CheckpointError, UsageError
from ..model.model import Model
from .devices import setup_devices
from .model_options import ModelOptions

if TYPE_CHECKING:
    from ..checkpoints.source import Source

logger = logging.getLogger(__name__)


def load_model(options: ModelOptions) -> tuple[Model, Mesh | None]:
    """The model on its devices, which are set up first, and their mesh if there are several.

    Raises `UsageError` and `CheckpointError`.
    """
    mesh = setup_model_devices(options)
    return read_model(options, mesh), mesh


def open_model(options: ModelOptions) -> Source:
    """Open the checkpoint without its weights, before the devices are set up. Most user errors are
    found here. Raises `UsageError` and `CheckpointError`."""
    from ..checkpoints import open_any, with_adapter

    _check_demo(options)
    source = open_any(options.path)
    if options.adapter_path is not None:
        source = with_adapter(source, options.adapter_path)
    _check_parts(options, source.has_delta, source.has_teacher)
    return source


def setup_model_devices(options: ModelOptions) -> Mesh | None:
    """The devices of `load_model`, as `setup_devices` returns them. Raises `UsageError`, and
    `CheckpointError` if there is no demo model."""
    _check_demo(options)
    return setup_devices(
        options.mesh,
        coordinator_address=options.coordinator_address,
        num_processes=options.num_processes,
        process_id=options.process_id,
        compile_cache=options.compile_cache,
    )


def read_model(options: ModelOptions, mesh: Mesh | None) -> Model:
    """The model on devices that are set up. Raises `UsageError` if it cannot run as `swiftkv` says,
    and `CheckpointError`."""
    from ..checkpoints import load  # after the devices are set up

    path = options.path
    model = load(
        path,
        dtype=_dtype(options),
        mesh=mesh,
        quantization=options.quantization,
        adapter=options.adapter_path,
    )
    _check_parts(options, model.swiftkv is not None, model.llama.upper_qkv is not None)
    name = "demo" if options.model is None else options.model
    logger.info("%s: %s", name, describe(model, model.uses_swiftkv(options.uses_swiftkv)))
    _check_tokenizer(model, path)
    return model


def _dtype(options: ModelOptions) -> str | None:
    """The dtype to load in; None is chosen for the device, also for a checkpoint in float16, or in
    blocks that are decoded."""
    from ..checkpoints import kind_of
    from ..checkpoints.gguf.read import has_coded_embedding

    if options.dtype != "auto":
        return options.dtype
    opened = open_model(options)
    assert opened.path is not None
    if kind_of(opened.path) == "GGUF" and has_coded_embedding(opened.path):
        return None
    stored = opened.dtypes["embed"].name
    return stored if stored in ("float32", "bfloat16") else None


def _check_demo(options: ModelOptions) -> None:
    if options.model is None and not (options.path / "config.json").exists():
        raise CheckpointError(
            f"the demo model is not in this installation ({options.path}): name one with `model`"
        )


def _check_parts(options: ModelOptions, has_delta: bool, has_teacher: bool) -> None:
    """Raise `UsageError` if a model cannot run as `swiftkv` says."""
    if options.uses_swiftkv is True and not has_delta:
        raise UsageError(f"`swiftkv`=on: {options.path} has no SwiftKV weights")
    if options.uses_swiftkv is False and not has_teacher:
        raise UsageError(
            f"`swiftkv`=off: {options.path} has no teacher: its upper q, k, v were dropped"
        )


def describe(model: Model, swiftkv: bool) -> str:
    """One line for people: how many layers run for prompts, the weights' type, and the devices."""
    config = model.config
    if swiftkv:
        mode = (
            f"SwiftKV, prompts run {config.num_lower_layers} of {config.num_layers} layers, "
            f"{config.num_cache_layers} layers of KV"
        )
    else:
        kind = config.family if model.swiftkv is None else "teacher"
        mode = f"{kind}, {config.num_layers} layers"
    weights = "" if model.quantization is None else f", {model.quantization}"
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return f"{mode}; {model.dtype}{weights} on {device}"


def _check_tokenizer(model: Model, path: Path) -> None:
    """Raise `CheckpointError` for a vocabulary larger than the model's: it is another model's.

    Tokens added to it, such as one for padding that no prompt ever holds, are common, and work: a
    prompt that does hold one is refused by name.
    """
    if model.tokenizer is None:
        return
    base = model.tokenizer.vocab_size
    known = model.config.vocab_size
    if base > known:
        raise CheckpointError(
            f"{path}: the tokenizer has {base} tokens, the model {known}: these are files of "
            f"different models"
        )
    if (added := len(model.tokenizer) - known) > 0:
        logger.warning(
            "%s: the tokenizer adds %d tokens that the model does not have; prompts with "
            "them are refused",
            path,
            added,
        )
