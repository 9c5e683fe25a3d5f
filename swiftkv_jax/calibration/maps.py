"""The maps in place of the MLPs of `Config.prompt_attention_layers`, one layer after the other.

With u the hidden state of a prompt after the attention of layer j, m what the MLP of that layer
reads of it and h the teacher's state after the layer, the map is the ridge regression of h - u on m
(`solve.ridge_map`). Every token counts once. u comes from the maps of the layers before, so a map
takes over what they leave.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ..attention import Attention
from ..batch import Batch
from ..boundary import run_prompt_layer
from ..config import Config
from ..distributed import from_process_0
from ..errors import DivergenceError
from ..layers import norm
from ..mesh import FSDP, MODEL
from ..params import Leaf, Llama, require_teacher
from ..sharding import swiftkv_shardings, to_host
from ..transformer import run_lower_layers
from . import solve
from .moments import fitted_tokens, products, prompt_delta, run_teacher_layers, split_rows

logger = logging.getLogger(__name__)


@struct.dataclass
class MapSums:
    """Sums over tokens, float32."""

    inputs: Leaf  # f32[D, D]: m m'
    cross: Leaf  # f32[D, D]: m (h - u)'
    energy: Leaf  # f32[]: |h - u|^2
    tokens: Leaf  # f32[]


def fit_maps(
    config: Config, llama: Llama, batches: Iterable[Batch], *, attention: Attention
) -> tuple[Float[Array, "M D D"], list[Batch]]:
    """The maps of the cut of `config`, in the dtype of `llama`, and the batches, which are asked
    for once.

    Costs for each map a pass over the batches, through the lower layers and those up to the map's.
    Raises `ValueError` if the batches hold no token or the teacher's upper projections were
    dropped, `DivergenceError` for a teacher that is not finite.
    """
    require_teacher(llama, "calibrate")
    mesh, dtype = attention.mesh, llama.embed.dtype
    shape = config.prompt_attention_layers, config.embed_dim, config.embed_dim
    where = None if mesh is None else swiftkv_shardings(config, mesh).mlp_map
    fitted, kept = np.zeros(shape, dtype), list[Batch]()

    def put() -> Float[Array, "M D D"]:
        if where is None:
            return jnp.asarray(fitted)
        return jax.make_array_from_callback(shape, where, lambda part: fitted[part])

    maps = put()
    for index in range(len(fitted)):
        sums = zero_sums(config, mesh)
        for batch in batches if index == 0 else kept:
            jax.block_until_ready(sums)
            sums = add_map_batch(config, attention, index, sums, llama, maps, batch)
            if index == 0:
                kept.append(batch)
        layer = config.num_lower_layers + index
        fitted[index], r2 = solve_sums(layer, sums)
        logger.info("layer %d: a map in place of its MLP, R2 %.3f", layer, r2)
        maps = put()
    return maps, kept


def solve_sums(layer: int, sums: MapSums) -> tuple[Float[np.ndarray, "D D"], float]:
    """The map of a layer, and its R2. Raises `ValueError` for sums of no token, `DivergenceError`
    for some that are not finite."""
    tokens = float(to_host(sums.tokens))
    if not tokens > 0:
        raise ValueError("there is no token to calibrate on")
    inputs, cross = (to_host(x).astype(np.float64) / tokens for x in (sums.inputs, sums.cross))
    energy = float(to_host(sums.energy)) / tokens
    if not (np.isfinite(inputs).all() and np.isfinite(cross).all()):
        raise DivergenceError(
            f"layer {layer}: weights of the teacher, or its hidden states on the calibration text, "
            f"are not finite"
        )
    found, r2 = from_process_0(solve.ridge_map(inputs, cross, energy))
    return found, float(r2)


def sum_shapes(config: Config) -> MapSums:
    """Shapes of the sums for one map."""
    square = jax.ShapeDtypeStruct((config.embed_dim, config.embed_dim), jnp.float32)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return MapSums(square, square, scalar, scalar)


def sum_shardings(config: Config, mesh: Mesh) -> MapSums:
    """Shard the sums as `moments.moment_shardings` does."""
    rows = NamedSharding(mesh, P(split_rows(mesh, config.embed_dim, FSDP, MODEL)))
    everywhere = NamedSharding(mesh, P())
    return MapSums(rows, rows, everywhere, everywhere)


def zero_sums(config: Config, mesh: Mesh | None) -> MapSums:
    """The sums of no tokens."""

    def zeros():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sum_shapes(config))

    return jax.jit(zeros, out_shardings=None if mesh is None else sum_shardings(config, mesh))()


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def add_map_batch(
    config: Config,
    attention: Attention,
    index: int,
    sums: MapSums,
    llama: Llama,
    maps: Float[Array, "M D D"],
    batch: Batch,
) -> MapSums:
    """Add one more batch of packed rows to the sums of map `index`; of `maps` those before it are
    used."""
    config = config.at_length(batch.tokens.shape[1])
    segment_ids = batch.segment_ids
    x, tables = run_lower_layers(config, llama, batch, attention=attention)
    u, prompt = x, prompt_delta(llama, maps)
    for layer in range(index + 1):
        u, _ = run_prompt_layer(
            config,
            llama,
            prompt,
            layer,
            u,
            tables,
            segment_ids,
            attention=attention,
            mapped=layer < index,
        )
    h = run_teacher_layers(config, llama, index + 1, x, tables, segment_ids, attention=attention)
    scales = llama.upper.mlp_norm
    m, left = norm(config, u, None if scales is None else scales[index]), h - u
    return add_sums(config, attention.mesh, sums, m, left, segment_ids)


def add_sums(
    config: Config,
    mesh: Mesh | None,
    sums: MapSums,
    m: Float[Array, "B T D"],
    left: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
) -> MapSums:
    """`sums` with those of more tokens, from what the MLP reads and what it is to add."""
    real = fitted_tokens(config, segment_ids).astype(jnp.float32)[..., None]
    counted = m.astype(jnp.float32) * real
    added = MapSums(
        inputs=products("BTD,BTE->DE", counted, m),
        cross=products("BTD,BTE->DE", counted, left),
        energy=(jnp.square(left.astype(jnp.float32)) * real).sum(),
        tokens=real.sum(),
    )
    sums = jax.tree.map(jnp.add, sums, added)
    if mesh is None:
        return sums
    return jax.lax.with_sharding_constraint(sums, sum_shardings(config, mesh))
