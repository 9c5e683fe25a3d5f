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
from ...model.cut import choose_cut, choose_generated_kv, drop_own
from ...model.mesh import dp_size, num_devices
from ...model.model import Model, add_swiftkv, default_dtype
from ...model.quantization import Format, Scheme, scheme_for
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
    """Weights of the variants, and the engines that are made of them."""

    config: Config
    dtype: jnp.dtype
    quantization: Scheme | None
    mesh: Mesh | None
    description: str
    model: Callable[[Sequence[str]], Model]
    """Makes or reads a model that has the weights of the named variants. Called once for each
    engine that is alone in memory."""

    @property
    def devices(self) -> int:
        return num_devices(self.mesh)

    def check_memory(
        self, names: Sequence[str], mode: Mode, cells: Sequence[Cell], options: EngineOptions
    ) -> None:
        """Raise `OutOfMemoryError` if weights and cache of a variant alone do not fit a device. In
        a mode with a queue the cache has to hold one sequence."""
        lower = "`input_len` or `batch`"
        if mode in QUEUED:
            lower = "`input_len` or `output_len`"
            options = dataclasses.replace(options, max_num_seqs=1)
        available = _available_memory()
        for name in names:
            weights, cache = self._needed_memory(name, cells, options)
            if weights + cache > available:
                raise OutOfMemoryError(
                    f"{name} does not fit: {self.description} needs {weights / GIB:.2f} GiB of "
                    f"weights and {cache / GIB:.2f} GiB of KV cache on each device, which has "
                    f"{available / GIB:.2f} GiB: lower {lower}, store weights in 8 bits with "
                    f"`quantization`, or split them over more devices with `mesh`"
                )

    def fit_together(self, cells: Sequence[Cell], options: EngineOptions) -> bool:
        """True if both engines fit beside each other and the weights they are made of."""
        each = [self._needed_memory(name, cells, options) for name in (STUDENT, TEACHER)]
        total = sum(map(sum, each)) + max(weights for weights, _ in each)
        return total <= MAX_MEMORY_SHARE * _available_memory()

    def _needed_memory(
        self, name: str, cells: Sequence[Cell], options: EngineOptions
    ) -> tuple[int, int]:
        """Bytes on one device of the weights, and of the cache that the largest cell fills."""
        config = with_kv_head_copies(self.config, self.mesh)
        shapes = weight_shapes(config, name == STUDENT, self.dtype, self.quantization)
        served = served_config(self.config, name == STUDENT, mesh=self.mesh)
        layout = Layout(served, cache_dtype(options.kv_cache_dtype, self.dtype), self.mesh)
        shards = dp_size(self.mesh)
        split = self.devices // shards
        rows = -(-options.max_num_seqs // shards)
        pages = num_pages(cells, rows, options.page_size)
        return num_bytes(shapes) // split, pages * layout.page_bytes(options.page_size)

    def engine(
        self,
        model: Model,
        name: str,
        bench: BenchOptions,
        cells: Sequence[Cell],
        options: EngineOptions,
        *,
        alone: bool,
    ) -> Engine[ModelRunner]:
        """An engine for one variant. Its cache is as large as the cells can use; `alone`, in a mode
        with a queue, it gets all memory that is left."""
        if options.kv_cache_memory is None and not (alone and bench.mode in QUEUED):
            _, cache = self._needed_memory(name, cells, options)
            options = dataclasses.replace(options, kv_cache_memory=cache)
        logger.info(f"{name}:")
        return Engine.from_model(
            model,
            options,
            swiftkv=name == STUDENT,
            mesh=self.mesh,
            attention=bench.model.attention,
            donate=alone,
        )


def _available_memory() -> int:
    """Bytes of one device; on a CPU, of the machine."""
    return memory_limit(jax.local_devices()[0], 1.0) or host_memory()


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
        config = choose_cut(_without_own(options, config), **options.cut)
    config = _with_generated_kv(options, config)
    dtype = default_dtype()
    if model.dtype not in (None, "auto"):
        dtype = jnp.dtype(model.dtype)
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


def _checkpoint_source(options: BenchOptions) -> Source:
    of_a_cut = [name for name in options.cut if name != "key_value_group_size"]
    if of_a_cut and options.num_key_value_layers is None:
        raise UsageError(
            f"`{of_a_cut[0]}` is of a cut: add `num_key_value_layers`, or `load_format`=dummy"
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
    if options.num_key_value_layers is not None:
        model = dataclasses.replace(model, config=_without_own(options, model.config))
        model = add_swiftkv(model, **options.cut)
    return dataclasses.replace(model, config=_with_generated_kv(options, model.config))


def _without_own(options: BenchOptions, config: Config) -> Config:
    return drop_own(config, options.engine.get("generated_kv"), options.exact_head)


def _with_generated_kv(options: BenchOptions, config: Config) -> Config:
    """The config that the student is served with."""
    if STUDENT not in options.swiftkv:
        return config
    given = (options.engine.get(name) for name in ("generated_kv", "exact_tail"))
    return choose_generated_kv(config, *given, exact_head=options.exact_head)
