"""A model runner for a model: the weights in serving form, and shapes that fit the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
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
from .mix import fold_mix
from .model_runner import ModelRunner
from .shapes import Shapes, choose_shapes, kv_programs, with_contexts
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
    served = served_config(model.config, swiftkv, options.generated_kv, options.exact_tail)
    served = served.at_length(options.max_model_len or served.max_position_embeddings)
    own_kv = kv_programs(served, mixed=options.mixed_generated_kv) != "boundary"
    if own_kv:
        _check_own_kv(model)
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
    llama, delta = model.llama, model.swiftkv if swiftkv else None
    with allocating("the copy of the layers in serving form (`donate` keeps them once)"):
        if delta is not None:
            llama, delta = fold_mix(model.config, llama, delta)
        weights = serving_weights(llama, delta, own_kv=own_kv, donate=donate)
    limit = memory_limit(device, options.memory_utilization)
    shapes = choose_shapes(
        served,
        options,
        dp_size=dp_size(mesh),
        platform=device.platform,
        page_bytes=layout.page_bytes(options.page_size),
        weight_bytes=bytes_per_device(weights),
        memory_limit=limit,
    )
    ops = Attention(mesh, attention)
    if _widens_pool(layout, shapes, model.dtype, ops):
        shapes = with_contexts(shapes)
    return ModelRunner(
        weights,
        shapes,
        layout,
        eos_token_ids=model.eos_token_ids,
        attention=ops,
        device=device,
        memory_limit=limit,
        shrink_cache=options.kv_cache_memory is None,
        compiler_options=options.compiler_options,
    )


def _check_own_kv(model: Model) -> None:
    """Raise `UsageError` for a student whose tokens cannot keep their own keys and values."""
    if model.config.key_value_group_size > 1:
        raise UsageError(
            f"`mixed_generated_kv` needs key_value_group_size=1, not "
            f"{model.config.key_value_group_size}: layers that share one cache have no room for "
            f"keys and values of their own"
        )
    if model.llama.upper_qkv is None:
        raise UsageError(
            "`generated_kv`=own needs the teacher's upper k and v, which this model was saved or "
            "loaded without"
        )


def _widens_pool(layout: Layout, shapes: Shapes, dtype: Any, attention: Attention) -> bool:
    """Whether attention of a chunk to a cache of this layout would widen all of it.

    Asked for one tile on each shard. A kernel may refuse more of them, whose page tables it has no
    room for, and leave them to XLA, which reads gathered pages too.
    """
    config, shards = layout.config, shapes.dp_size
    q = jax.ShapeDtypeStruct((shards, shapes.page_size, config.num_heads, config.head_dim), dtype)
    page_table = jax.ShapeDtypeStruct((shards, shapes.table_pages), jnp.int32)
    return attention.widens_pool(q, layout.cache(shapes).k[0].values, page_table)
