"""The engines that are compared: one architecture, as SwiftKV and as its unmodified teacher, in the
same engine."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from ...cache import cache_dtype, cache_shapes, cache_sharding
from ...checkpoints.auxiliary import read_auxiliary_files
from ...config import Config
from ...errors import ConfigError, UsageError
from ...mesh import MODEL, dp_size
from ...model import Model, add_swiftkv, default_dtype
from ...presets import PRESETS
from ...quantization import Scheme, scheme_for
from ..commands.flags import load_model, log, settle_devices
from ..engine.engine import Engine, engine_for
from ..engine.options import EngineOptions
from ..runner.memory import bytes_per_device, host_memory, memory_limit
from ..runner.weights import num_bytes, served_config, weight_shapes
from .cells import Cell, Mode, num_pages
from .dummy import dummy_model
from .summary import SWIFTKV, TEACHER

ROOM = 0.7
"""Share of the memory that two engines and the weights they are made of may take, to be there at
the same time."""


@dataclasses.dataclass
class Source:
    """Where the weights come from. Made anew for every engine that is alone in memory."""

    config: Config
    dtype: jnp.dtype
    quantization: Scheme | None
    mesh: Mesh | None
    description: str
    _args: argparse.Namespace
    _loaded: Model | None = None

    def model(self, names: Sequence[str]) -> Model:
        """A model that has what these variants serve."""
        if self._args.load_format == "dummy":
            parts = {"student": SWIFTKV in names, "teacher": TEACHER in names}
            return dummy_model(
                self.config, self.dtype, mesh=self.mesh, quantization=self.quantization, **parts
            )
        model, self._loaded = self._loaded or _load(self._args)[0], None
        if SWIFTKV not in names:
            return dataclasses.replace(model, swiftkv=None)
        return model


def open_source(args: argparse.Namespace, names: Sequence[str]) -> Source:
    """Settles the devices. Raises `UsageError`, `CheckpointError` or `ConfigError`."""
    if args.load_format == "dummy":
        mesh = settle_devices(args)
        config, what = _dummy_config(args)
        config = _cut(args, config, names)
        dtype = jnp.dtype(args.dtype or default_dtype())
        kind = jax.devices()[0].device_kind
        scheme = (
            scheme_for(args.quantization, kind) if args.quantization not in (None, "none") else None
        )
        return Source(config, dtype, scheme, mesh, f"{what}, random weights", args)
    if args.config is not None:
        raise UsageError(
            f"--config {args.config} is an architecture without weights: add --load-format dummy, "
            f"or give --model"
        )
    model, mesh = _load(args)
    if SWIFTKV in names and model.swiftkv is None:
        raise UsageError(
            f"--swiftkv on: {args.model} has no SwiftKV weights: give --num-key-value-layers to "
            f"cut it for this measurement"
        )
    return Source(
        model.config,
        model.dtype,
        model.quantization,
        mesh,
        str(args.model or "the demo model"),
        args,
        model,
    )


def _load(args: argparse.Namespace) -> tuple[Model, Mesh | None]:
    """The checkpoint, cut anew if the flags say so: how fast it runs does not depend on what a
    delta has learnt."""
    model, mesh = load_model(argparse.Namespace(**vars(args) | {"swiftkv": "auto"}))
    if args.num_key_value_layers is not None:
        model = add_swiftkv(model, args.num_key_value_layers, args.key_value_group_size or 1)
    return model, mesh


def _dummy_config(args: argparse.Namespace) -> tuple[Config, str]:
    if (args.config is None) == (args.model is None):
        raise UsageError(
            "--load-format dummy takes the architecture from either --config or --model: give one "
            "of them"
        )
    name = args.config or str(args.model)
    if name in PRESETS:
        return PRESETS[name], name
    if not (Path(name) / "config.json").is_file():
        raise UsageError(
            f"--config {name}: neither a preset ({', '.join(PRESETS)}) nor a folder with a "
            f"config.json"
        )
    return read_auxiliary_files(Path(name))[0], name


def _cut(args: argparse.Namespace, config: Config, names: Sequence[str]) -> Config:
    """At the cut that is asked for, else at its own, else at half of its layers."""
    layers = args.num_key_value_layers or (
        config.num_key_value_layers if config.num_upper_layers else max(1, config.num_layers // 2)
    )
    group = args.key_value_group_size or (
        config.key_value_group_size if layers == config.num_key_value_layers else 1
    )
    try:
        return config.cut(layers, group) if SWIFTKV in names else config
    except ConfigError as error:
        raise UsageError(
            f"--num-key-value-layers {layers} with --key-value-group-size {group}: {error}"
        ) from None


# Engines ----------------------------------------------------------------------


def together(source: Source, cells: Sequence[Cell], options: EngineOptions) -> bool:
    """Whether both engines fit beside each other, and the weights they are made of."""
    each = [_needs(source, name, cells, options) for name in (SWIFTKV, TEACHER)]
    total = sum(weights + cache for weights, cache in each) + max(weights for weights, _ in each)
    device = jax.local_devices()[0]
    return total <= ROOM * (memory_limit(device, 1.0) or host_memory())


def _needs(
    source: Source, name: str, cells: Sequence[Cell], options: EngineOptions
) -> tuple[int, int]:
    """Bytes of weights and of cache on one device."""
    weights = num_bytes(
        weight_shapes(source.config, name == SWIFTKV, source.dtype, source.quantization)
    )
    split = 1 if source.mesh is None else source.mesh.shape[MODEL]
    return weights // split, _cache_bytes(source, name, cells, options)


def _cache_bytes(source: Source, name: str, cells: Sequence[Cell], options: EngineOptions) -> int:
    """Of the cache that the largest cell fills, on one device."""
    served, mesh = served_config(source.config, name == SWIFTKV), source.mesh
    place = (
        SingleDeviceSharding(jax.local_devices()[0])
        if mesh is None
        else cache_sharding(served, mesh)
    )
    dtype = cache_dtype(options.kv_cache_dtype, source.dtype)
    page = cache_shapes(served, dp_size(mesh), options.page_size, dtype)
    page = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), page
    )
    rows = -(-options.max_num_seqs // dp_size(mesh))
    return num_pages(cells, rows, options.page_size) * bytes_per_device(page)


def build(
    source: Source,
    model: Model,
    name: str,
    mode: Mode,
    cells: Sequence[Cell],
    options: EngineOptions,
    *,
    alone: bool,
    attention: Any,
) -> Engine:
    """One engine. Its cache is as large as the cells can use; with `alone`, requests that queue get
    what memory is left."""
    if options.kv_cache_memory is None and not (alone and mode in ("offline", "latency")):
        options = dataclasses.replace(
            options, kv_cache_memory=_cache_bytes(source, name, cells, options)
        )
    log(f"{name}:")
    return engine_for(
        model, options, swiftkv=name == SWIFTKV, mesh=source.mesh, attention=attention, log=log
    )
