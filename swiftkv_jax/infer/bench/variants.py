"""The engines that are compared: one architecture, as SwiftKV and as its unmodified teacher, in the
same engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...checkpoints import auxiliary_files_of
from ...checkpoints.hub import local_path
from ...cli.devices import setup_devices
from ...cli.model_loading import load_model, read_model
from ...errors import OutOfMemoryError, UsageError
from ...model.cache import cache_dtype
from ...model.config import Config
from ...model.cut import choose_cut, choose_generated_kv
from ...model.mesh import MODEL, dp_size
from ...model.model import Model, add_swiftkv, default_dtype
from ...model.quantization import Format, Scheme, scheme_for
from ...pallas_kernels import Implementation
from ...plan.hardware import GIB
from ...plan.presets import PRESETS
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..runner.kv_heads import with_kv_head_copies
from ..runner.layout import Layout
from ..runner.memory import host_memory, memory_limit
from ..runner.model_runner import ModelRunner
from ..runner.serving_form import num_bytes, served_config, weight_shapes
from .cells import QUEUED, STUDENT, TEACHER, Cell, Mode, num_pages
from .dummy import dummy_model
from .options import BenchOptions

logger = logging.getLogger(__name__)

MAX_MEMORY_SHARE = 0.7
"""Share of the memory that two engines and the weights they are made of may take, to be in memory
at the same time."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Weights of the variants."""

    config: Config
    dtype: jnp.dtype
    quantization: Scheme | None
    mesh: Mesh | None
    description: str
    model: Callable[[Sequence[str]], Model]
    """Makes or reads a model that has the weights of the named variants. Called once for each
    engine that is alone in memory."""


def open_source(options: BenchOptions) -> Source:
    """Set up the devices and choose the weights. Raises `UsageError`, `CheckpointError` or
    `ConfigError`."""
    if options.load_format == "dummy":
        return _dummy_source(options)
    if options.config is not None:
        raise UsageError(
            f"`config`={options.config} is an architecture without weights: add `load_format`=dummy"
            f", or give `model`"
        )
    return _checkpoint_source(options)


def _dummy_source(options: BenchOptions) -> Source:
    model = options.model
    mesh = setup_devices(
        model.mesh,
        coordinator_address=model.coordinator_address,
        num_processes=model.num_processes,
        process_id=model.process_id,
        compile_cache=model.compile_cache,
    )
    config, name = _dummy_config(options)
    if STUDENT in options.swiftkv:
        config = choose_cut(
            config,
            options.num_key_value_layers,
            options.key_value_group_size,
            prompt_attention_layers=options.prompt_attention_layers,
            prompt_mlp_neurons=options.prompt_mlp_neurons,
            boundary_taps=options.boundary_taps,
        )
    config = _with_generated_kv(options, config)
    dtype = jnp.dtype(default_dtype() if model.dtype in (None, "auto") else model.dtype)
    scheme = None
    if model.quantization not in (None, "none"):
        scheme = scheme_for(cast(Format, model.quantization), jax.devices()[0].device_kind)

    def make(names: Sequence[str]) -> Model:
        return dummy_model(
            config,
            dtype,
            mesh=mesh,
            quantization=scheme,
            student=STUDENT in names,
            teacher=TEACHER in names,
        )

    return Source(config, dtype, scheme, mesh, f"{name}, random weights", make)


def _checkpoint_source(options: BenchOptions) -> Source:
    names = "prompt_attention_layers", "prompt_mlp_neurons", "boundary_taps"
    given = [f"`{name}`" for name in names if getattr(options, name) is not None]
    if options.num_key_value_layers is None and given:
        raise UsageError(
            f"{given[0]} is of a cut: add `num_key_value_layers`, or `load_format`=dummy"
        )
    model, mesh = load_model(options.model)
    model = _with_cut(options, model)
    if STUDENT in options.swiftkv and model.swiftkv is None:
        raise UsageError(
            f"`swiftkv`=on: {options.model.path} has no SwiftKV weights: give "
            f"`num_key_value_layers` to cut it for this measurement"
        )
    loaded = [model]  # until its first use: an engine that is alone in memory donates it

    def read(names: Sequence[str]) -> Model:
        result = loaded.pop() if loaded else _with_cut(options, read_model(options.model, mesh))
        return result if STUDENT in names else dataclasses.replace(result, swiftkv=None)

    description = str(options.model.model or "the demo model")
    return Source(model.config, model.dtype, model.quantization, mesh, description, read)


def _with_cut(options: BenchOptions, model: Model) -> Model:
    """The model with a new delta if the options name a cut: speed does not depend on what a delta
    has learnt."""
    layers = options.num_key_value_layers
    group = options.key_value_group_size
    if layers is not None:
        model = add_swiftkv(
            model,
            layers,
            group or 1,
            prompt_attention_layers=options.prompt_attention_layers or 0,
            prompt_mlp_neurons=options.prompt_mlp_neurons or 0,
            boundary_taps=options.boundary_taps or 0,
        )
    return dataclasses.replace(model, config=_with_generated_kv(options, model.config))


def _with_generated_kv(options: BenchOptions, config: Config) -> Config:
    """The config that the student is served with."""
    if STUDENT not in options.swiftkv:
        return config
    given = (options.engine.get(name) for name in ("generated_kv", "exact_tail"))
    return choose_generated_kv(config, *given, exact_head=options.exact_head)


def _dummy_config(options: BenchOptions) -> tuple[Config, str]:
    if (options.config is None) == (options.model.model is None):
        raise UsageError(
            "`load_format`=dummy takes the architecture from either `config` or `model`: give one "
            "of them"
        )
    name = options.config or str(options.model.model)
    if name in PRESETS:
        return PRESETS[name], name
    folder = local_path(name, options.model.revision, weights=False)
    if not folder.is_file() and not (folder / "config.json").is_file():
        raise UsageError(
            f"`config`={name}: neither a preset ({', '.join(PRESETS)}) nor a folder with a "
            f"config.json"
        )
    return auxiliary_files_of(folder)[0], name


# Memory -----------------------------------------------------------------------


def check_memory(
    source: Source, names: Sequence[str], mode: Mode, cells: Sequence[Cell], options: EngineOptions
) -> None:
    """Raise `OutOfMemoryError` if weights and cache of a variant alone do not fit a device. In a
    mode with a queue the cache has to hold one sequence."""
    lower = "`input_len` or `batch`"
    if mode in QUEUED:
        lower = "`input_len` or `output_len`"
        options = dataclasses.replace(options, max_num_seqs=1)
    available = _available_memory()
    for name in names:
        weights, cache = _needed_memory(source, name, cells, options)
        if weights + cache > available:
            raise OutOfMemoryError(
                f"{name} does not fit: {source.description} needs {weights / GIB:.2f} GiB of "
                f"weights and {cache / GIB:.2f} GiB of KV cache on each device, which has "
                f"{available / GIB:.2f} GiB: lower {lower}, store weights in 8 bits with "
                f"`quantization`, or split them over more devices with `mesh`"
            )


def fit_together(source: Source, cells: Sequence[Cell], options: EngineOptions) -> bool:
    """Whether both engines fit beside each other and the weights they are made of."""
    each = [_needed_memory(source, name, cells, options) for name in (STUDENT, TEACHER)]
    total = sum(weights + cache for weights, cache in each) + max(weights for weights, _ in each)
    return total <= MAX_MEMORY_SHARE * _available_memory()


def _available_memory() -> int:
    """Bytes of one device; on a CPU, of the machine."""
    return memory_limit(jax.local_devices()[0], 1.0) or host_memory()


def _needed_memory(
    source: Source, name: str, cells: Sequence[Cell], options: EngineOptions
) -> tuple[int, int]:
    """Bytes of weights and of cache on one device."""
    config = with_kv_head_copies(source.config, source.mesh)
    weights = num_bytes(weight_shapes(config, name == STUDENT, source.dtype, source.quantization))
    split = 1 if source.mesh is None else source.mesh.shape[MODEL]
    return weights // split, _cache_bytes(source, name, cells, options)


def _cache_bytes(source: Source, name: str, cells: Sequence[Cell], options: EngineOptions) -> int:
    """Bytes on one device of the cache that the largest cell fills."""
    served = served_config(source.config, name == STUDENT, mesh=source.mesh)
    rows = -(-options.max_num_seqs // dp_size(source.mesh))
    layout = Layout(served, cache_dtype(options.kv_cache_dtype, source.dtype), source.mesh)
    return num_pages(cells, rows, options.page_size) * layout.page_bytes(options.page_size)


# Engines ----------------------------------------------------------------------


def build(
    source: Source,
    model: Model,
    name: str,
    mode: Mode,
    cells: Sequence[Cell],
    options: EngineOptions,
    *,
    alone: bool,
    attention: Implementation | None,
) -> Engine[ModelRunner]:
    """An engine for one variant. Its cache is as large as the cells can use; `alone`, in a mode
    with a queue, it gets all memory that is left."""
    if options.kv_cache_memory is None and not (alone and mode in QUEUED):
        cache = _cache_bytes(source, name, cells, options)
        options = dataclasses.replace(options, kv_cache_memory=cache)
    logger.info(f"{name}:")
    return Engine.from_model(
        model,
        options,
        swiftkv=name == STUDENT,
        mesh=source.mesh,
        attention=attention,
        donate=alone,
    )
