"""A model runner for a model: the weights in serving form, and shapes that fit the device."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from ...errors import UsageError
from ...kernel_check import KernelCheck, checked_implementation, serving_configs
from ...model.attention import Attention
from ...model.cache import cache_dtype
from ...model.config import Config
from ...model.mesh import check_mesh, dp_size, mesh_of
from ...model.model import Model, check_model
from ...model.speculator import Speculator
from ...model.stacks import cast
from ...pallas_kernels import Implementation
from ...plan.hardware import hardware_of
from ..engine.options import EngineOptions, SpeculativeConfig
from ..engine.shapes import Shapes
from .adapters import check_adapters, init_adapters
from .choose_shapes import RIDGE_TOKENS, choose_shapes, widest_step, with_contexts
from .conversion import Conversion
from .host_pages import HostPages, keeps_boundary, num_host_pages
from .layout import Layout
from .memory import bytes_kept, bytes_per_device, memory_limit
from .model_runner import ModelRunner
from .serving_form import served_config, shard_model

logger = logging.getLogger(__name__)


def build_model_runner(
    model: Model,
    options: EngineOptions,
    *,
    swiftkv: bool | None = None,
    mesh: Mesh | None = None,
    attention: Implementation | None = None,
    donate: bool = False,
    kernel_check: KernelCheck | None = None,
    on_compile: Callable[[int, int], object] | None = None,
) -> ModelRunner:
    """The runner of an engine (arguments and errors as `Engine.from_model`). Nothing is compiled
    before `ModelRunner.prepare`. `kernel_check` says how kernels are checked where `attention` is
    None."""
    check_model(model)
    callers = model.llama, model.swiftkv
    check_mesh(mesh)
    if not isinstance(options, EngineOptions):
        raise UsageError(f"`options` must be EngineOptions, got {type(options).__name__}")
    swiftkv = model.uses_swiftkv(swiftkv)
    if swiftkv:
        model = dataclasses.replace(model, swiftkv=cast(model.swiftkv, model.dtype))
    config = model.config.at_length(options.max_model_len or model.config.max_position_embeddings)
    mesh = mesh or mesh_of(model.llama.embed)
    served = served_config(config, swiftkv, options.generated_kv, options.exact_tail, mesh=mesh)
    if swiftkv and config.generated_kv == "own" and served.generated_kv == "boundary":
        logger.warning(
            "`generated_kv`=boundary: this model was made for own, with keys or queries scaled for "
            "it; measure it before you rely on its answers"
        )
    if swiftkv and config.generated_kv == "boundary" and served.generated_kv == "own":
        logger.warning(
            "`generated_kv`=own: this model was made for boundary; it may hardly attend to distant "
            "prompt tokens while its average perplexity is good, so measure it on those"
        )
    if swiftkv and served.keeps_own:
        _check_own_kv(model, served)
    if options.quantize_activations:
        _check_int8(model)
    if options.enable_lora:
        check_adapters(model.config, served, options, mesh)
    check_speculative(options.speculative, served)
    dtype = cache_dtype(options.kv_cache_dtype, model.dtype)
    # All arrays are committed to their devices from the start, because a program compiled for
    # uncommitted arrays is a different one.
    if mesh is None:
        device = min(model.llama.embed.devices(), key=lambda device: device.id)
    else:
        device = mesh.local_devices[0]
        model = shard_model(model, mesh)
    place = SingleDeviceSharding(device) if mesh is None else None
    layout = Layout(served, dtype, mesh, place, keeps_boundary(options, served, dtype))
    # A kernel in a program for several devices would get whole matrices.
    fp8_products = model.quantization is not None and model.quantization.arithmetic == "auto"
    fp8_products = fp8_products and (mesh is None or mesh.size == 1)
    configs = serving_configs(
        served, model.dtype, dtype, options.page_size, mesh, fp8_products=fp8_products
    )
    attention = checked_implementation(attention, configs, device, kernel_check)
    kernels = fp8_products and attention in (None, "hopper")
    convert = Conversion(
        Conversion.shapes_of(model),
        served,
        swiftkv,
        mesh,
        kernels_of=device if kernels else None,
        quantize_activations=options.quantize_activations,
    )
    limit = memory_limit(device, options.memory_utilization)
    hardware = hardware_of(device.device_kind)
    choose = functools.partial(
        choose_shapes,
        served,
        options,
        dp_size=dp_size(mesh),
        platform=device.platform,
        page_bytes=layout.page_bytes(options.page_size),
        memory_limit=limit,
        ridge_tokens=RIDGE_TOKENS if hardware is None else hardware.ridge_tokens,
    )
    # What is refused whatever the weights take, is refused before any of them is deleted.
    choose(weight_bytes=0)
    host_pages = num_host_pages(options, layout, device.platform)
    speculator = _read_speculator(options.speculative, model)
    weights = convert(model, donate=donate)
    if options.enable_lora:
        adapters = init_adapters(layout, options, model.dtype)
        weights = dataclasses.replace(weights, adapters=adapters)
    if speculator is not None:
        speculator = jax.device_put(speculator, layout.replicated)
        weights = dataclasses.replace(weights, speculator=speculator)
    # A caller that donates drops the model, also what was moved to a mesh and not deleted.
    kept_bytes = 0 if donate else bytes_kept(callers, weights)
    shapes = choose(weight_bytes=bytes_per_device(weights), kept_bytes=kept_bytes)
    shapes = dataclasses.replace(
        shapes,
        host_pages=host_pages,
        hidden_dim=0 if weights.speculator is None else served.embed_dim,
    )
    ops = Attention(mesh, attention)
    if _widens_pool(layout, shapes, model.dtype, ops):
        shapes = with_contexts(shapes)
    return ModelRunner(
        weights,
        shapes,
        layout,
        HostPages(layout, options, weights),
        convert=convert,
        eos_token_ids=model.eos_token_ids,
        attention=ops,
        device=device,
        memory_limit=limit,
        kept_bytes=kept_bytes,
        shrink_cache=options.kv_cache_memory is None,
        compiler_options=options.compiler_options,
        on_compile=on_compile,
    )


def check_speculative(speculative: SpeculativeConfig | None, config: Config) -> None:
    """Raise `UsageError`, `CheckpointError` or `ConfigError` for speculation, or a speculator, that
    a model cannot be served with as `config` (`served_config`). No weights are read."""
    from ...checkpoints.hub import local_path
    from ...checkpoints.speculators import check_tensors, read_speculator_config

    if speculative is None:
        return
    widest_step(config, speculative)
    if (path := speculative.model) is None:
        return
    found = read_speculator_config(local_path(path, weights=False))
    for name, value, wanted in (
        ("vocab_size", found.vocab_size, config.vocab_size),
        ("hidden_size", found.hidden_dim, config.embed_dim),
    ):
        if value != wanted:
            raise UsageError(
                f"`speculative_config.model`={path}: its {name} is {value}, the model's {wanted}",
                option="speculative_config",
            )
    check_tensors(local_path(path))


def _read_speculator(speculative: SpeculativeConfig | None, model: Model) -> Speculator | None:
    """The speculator of an engine, in NumPy and in the dtype of its model; None without one."""
    from ...checkpoints.hub import local_path
    from ...checkpoints.speculators import read_speculator

    if speculative is None or speculative.model is None:
        return None
    return read_speculator(local_path(speculative.model), model.dtype)


def _check_own_kv(model: Model, served: Config) -> None:
    """Raise `UsageError` for a student whose tokens cannot keep their own keys and values, as they
    do when `served`."""
    upper = model.llama.upper_qkv
    if upper is None or (served.has_two_caches and upper.q is None):
        needs = "`generated_kv`=own" if served.generated_kv == "own" else "`exact_head`=1"
        needed = "q, k and v" if served.has_two_caches else "k and v"
        raise UsageError(
            f"{needs} needs the teacher's upper {needed}, which this model was saved or loaded "
            f"without"
        )


def _check_int8(model: Model) -> None:
    """Raise `UsageError` for a model whose activations an option cannot quantise."""
    scheme = model.quantization
    if scheme is None or scheme.format != "int8":
        stored = "unquantised" if scheme is None else scheme.format
        raise UsageError(
            f"`quantize_activations` is for int8 weights, these are {stored}: load with "
            f"`quantization`=int8; with fp8 activations are quantised where the device has FP8 "
            f"products",
            option="quantize_activations",
        )
    logger.warning(
        "`quantize_activations`: activations of some models have outliers that 8 bits with one "
        "scale per token do not represent; measure this model before you rely on its answers"
    )


def _widens_pool(layout: Layout, shapes: Shapes, dtype: Any, attention: Attention) -> bool:
    """True if attention of a chunk to a cache of this layout would widen all of it.

    Tested with one tile on each shard. A kernel may refuse more tiles, if it has no room for their
    page tables; XLA then runs them, and can read gathered pages too.
    """
    config = layout.config
    shards = shapes.dp_size
    q = jax.ShapeDtypeStruct((shards, shapes.page_size, config.num_heads, config.head_dim), dtype)
    page_table = jax.ShapeDtypeStruct((shards, shapes.table_pages), jnp.int32)
    return attention.widens_pool(q, layout.cache(shapes).k[0].values, page_table)
