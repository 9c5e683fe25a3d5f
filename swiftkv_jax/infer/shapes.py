"""The two programs without weights: lowered from shapes alone, to count operations and memory before paying for either."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..attention import Attention
from ..cache import KVCache, cache_shapes, cache_sharding, row_sharding
from ..config import Config
from ..pallas_kernels import Implementation
from .programs import DecodeState, decode, prefill_chunk
from .sampling import Sampling
from .weights import Weights, served_config, weight_shapes, weight_shardings


def lower_prefill(
    config: Config,
    *,
    batch: int,
    chunk: int,
    max_model_len: int,
    swiftkv: bool = True,
    dtype=jnp.bfloat16,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> jax.stages.Lowered:
    """`prefill_chunk` for these shapes, not yet compiled. The devices of `mesh` need not exist (`topology.topology_mesh`)."""
    served, weights, cache = _operands(config, batch, max_model_len, swiftkv, dtype, mesh)
    tokens = _shape((batch, chunk), jnp.int32, mesh and row_sharding(mesh))
    offset = _shape((), jnp.int32, mesh and NamedSharding(mesh, P()))
    return prefill_chunk.lower(served, weights, tokens, offset, cache, attention=Attention(mesh, implementation))


def lower_decode(
    config: Config,
    *,
    batch: int,
    max_model_len: int,
    steps: int = 1,
    swiftkv: bool = True,
    dtype=jnp.bfloat16,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> jax.stages.Lowered:
    """`decode` for these shapes, not yet compiled."""
    served, weights, cache = _operands(config, batch, max_model_len, swiftkv, dtype, mesh)
    rows = mesh and row_sharding(mesh)
    ints, floats = _shape((batch,), jnp.int32, rows), _shape((batch,), jnp.float32, rows)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    sampling = Sampling(floats, ints, floats, _shape(keys.shape, keys.dtype, rows), _shape((batch, 1), jnp.int32, rows))
    state = DecodeState(cache, ints, ints, ints)
    return decode.lower(served, weights, sampling, state, steps=steps, attention=Attention(mesh, implementation))


def _operands(config: Config, batch: int, length: int, swiftkv: bool, dtype, mesh: Mesh | None) -> tuple[Config, Weights, KVCache]:
    served = served_config(config, swiftkv)
    weights, cache = weight_shapes(config, swiftkv, dtype), cache_shapes(served, batch, length, dtype)
    if mesh is not None:
        weights = jax.tree.map(_placed, weights, weight_shardings(config, swiftkv, mesh))
        cache = jax.tree.map(lambda leaf: _placed(leaf, cache_sharding(served, mesh)), cache)
    return served, weights, cache


def _shape(shape, dtype, sharding):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _placed(leaf, sharding):
    return _shape(leaf.shape, leaf.dtype, sharding)
