"""A compiled program of an engine, lowered without one."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.shapes import Shapes, has_own_start
from swiftkv_jax.infer.runner.adapters import adapter_places
from swiftkv_jax.infer.runner.host_pages import LEAST_PAGES, MoveProgram
from swiftkv_jax.infer.runner.kv_heads import with_kv_head_copies
from swiftkv_jax.infer.runner.layout import Layout
from swiftkv_jax.infer.runner.lowering import (
    DecodeProgram,
    PrefillProgram,
    Program,
    UpperProgram,
    lower_all,
)
from swiftkv_jax.infer.runner.serving_form import served_config, weight_shapes
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.mesh import dp_size
from swiftkv_jax.model.quantization import Scheme
from swiftkv_jax.pallas_kernels import Implementation


def lower_program(
    config: Config,
    program: Program,
    *,
    batch: int,
    max_model_len: int,
    page_size: int = 128,
    num_pages: int | None = None,
    steps: int = 1,
    swiftkv: bool = True,
    dtype=jnp.bfloat16,
    cache_dtype=None,
    quantization: Scheme | None = None,
    adapters: int = 0,
    boundary: bool = False,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> jax.stages.Lowered:
    """One program for `batch` sequences of at most `max_model_len` tokens, lowered without a
    checkpoint.

    `num_pages` are those of the KV cache, None as many as prompts of all sequences can fill. There
    are places for so many `adapters`, of the default rank. `boundary` is that of `Layout`. The
    devices of `mesh` need not exist (`topology.topology_mesh`).
    """
    shards = dp_size(mesh)
    served = served_config(config, swiftkv, mesh=mesh).at_length(max_model_len)
    config = with_kv_head_copies(config, mesh)
    table_pages = -(-max_model_len // page_size)
    shapes = Shapes(
        dp_size=shards,
        page_size=page_size,
        num_pages=(num_pages or batch * table_pages) // shards,
        table_pages=table_pages,
        slots=batch // shards,
        decode_rows=(batch // shards,),
        decode_steps=steps,
        decode_kinds=("sampling",),
        chunks=(page_size,),
        spare_tiles=(0,),
        contexts=(None,),
        scoring=False,
        has_own_start=has_own_start(served),
        pages_per_own_page=served.pages_per_own_page,
        num_adapters=adapters,
        adapts_prefill=adapters > 0,
    )
    shapes = dataclasses.replace(shapes, **_shapes_of(program, page_size))
    weights = weight_shapes(config, swiftkv, dtype, quantization, mesh)
    attention = Attention(mesh, implementation)
    layout = Layout(served, cache_dtype or dtype, mesh, boundary=boundary)
    if adapters:
        options = EngineOptions(enable_lora=True, max_loras=adapters)
        places = adapter_places(layout, options, dtype)
        weights = dataclasses.replace(weights, adapters=places)
    # The products, too, are those of the devices: outside of a mesh they would be this machine's.
    described = jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh else None
    with described or contextlib.nullcontext():
        return lower_all(layout, shapes, weights, attention)[program]()


def _shapes_of(program: Program, page_size: int) -> dict[str, Any]:
    """The fields of `Shapes` for which `lower_all` has `program`."""
    match program:
        case PrefillProgram(tokens, tiles, context):
            spare = tiles - -(-tokens // page_size)
            return {"chunks": (tokens,), "spare_tiles": (spare,), "contexts": (context,)}
        case UpperProgram(tokens, upper_tokens, context, scores):
            upper = {"scoring": True} if scores else {"tail": upper_tokens}
            return {"chunks": (tokens,), "contexts": (context,), **upper}
        case "first_token":
            return {"first_tokens": True}
        case MoveProgram():
            return {"host_pages": LEAST_PAGES}
        case DecodeProgram(rows, width=width):
            kinds = {"decode_rows": (rows,), "decode_kinds": ("sampling", "greedy")}
            return kinds if width == 1 else {**kinds, "widths": (width,)}
    return {}
