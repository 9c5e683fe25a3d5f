"""A model runner for a model: the weights in serving form, and shapes that fit the device."""

from __future__ import annotations

from jax.sharding import Mesh, SingleDeviceSharding

from ...attention import Attention
from ...cache import cache_dtype
from ...errors import UsageError
from ...kernel_check import KernelCheck, checked_implementation, serving_configs
from ...mesh import check_mesh, dp_size, mesh_of
from ...model import Model, check_model
from ...pallas_kernels import Implementation
from ..engine.options import EngineOptions
from .layout import Layout
from .memory import allocating, bytes_per_device, memory_limit
from .model_runner import ModelRunner
from .shapes import choose_shapes
from .weights import served_config, serving_weights, shard_model


def build_model_runner(
    model: Model,
    options: EngineOptions,
    *,
    swiftkv: bool | None = None,
    mesh: Mesh | None = None,
    attention: Implementation | None = None,
    donate: bool = False,
    kernel_check: KernelCheck | None = None,
) -> ModelRunner:
    """The runner of an engine (arguments and errors as `Engine.from_model`). Nothing is compiled
    before `ModelRunner.prepare`. `kernel_check` says how kernels are checked where `attention` is
    None."""
    check_model(model)
    check_mesh(mesh)
    if not isinstance(options, EngineOptions):
        raise UsageError(f"`options` must be EngineOptions, got {type(options).__name__}")
    swiftkv = model.uses_swiftkv(swiftkv)
    served = served_config(model.config, swiftkv)
    dtype = cache_dtype(options.kv_cache_dtype, model.dtype)
    mesh = mesh or mesh_of(model.llama.embed)
    # All arrays are committed to their devices from the start: a program compiled for uncommitted
    # arrays would be another one.
    if mesh is None:
        device = min(model.llama.embed.devices(), key=lambda device: device.id)
    else:
        device = mesh.local_devices[0]
        model = shard_model(model, mesh)
    layout = Layout(served, dtype, mesh, SingleDeviceSharding(device) if mesh is None else None)
    configs = serving_configs(served, model.dtype, dtype, options.page_size, mesh)
    attention = checked_implementation(attention, configs, device, kernel_check)
    delta = model.swiftkv if swiftkv else None
    with allocating("the copy of the layers in serving form (`donate` keeps them once)"):
        weights = serving_weights(model.llama, delta, donate=donate)
    limit = memory_limit(device, options.memory_utilization)
    shapes = choose_shapes(
        served,
        options,
        dp_size=dp_size(mesh),
        platform=device.platform,
        page_bytes=layout.page_bytes(options.page_size),
        weight_bytes=bytes_per_device(weights),
        memory_limit=limit,
        quantized=dtype != model.dtype,
    )
    return ModelRunner(
        weights,
        shapes,
        layout,
        eos_token_ids=model.eos_token_ids,
        attention=Attention(mesh, attention),
        device=device,
        memory_limit=limit,
        shrink_cache=options.kv_cache_memory is None,
        compiler_options=options.compiler_options,
    )
