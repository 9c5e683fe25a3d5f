"""The maps in place of the MLPs of `Config.prompt_attention_layers`, one layer after the other.

With u the hidden state of a prompt after the attention of layer j, m what the MLP of that layer
reads of it and h the teacher's state after the layer, the map is the ridge regression of h - u on m
(`solve.ridge_map`). Every token counts once. u comes from the maps of the layers before, so a map
takes over what they leave.

With `Config.prompt_mlp_neurons` the regression is on [m; a] with a the activations of those neurons
of the MLP that add most: with the largest E[a_i^2] |down_i|^2 on the same m. A pass before finds
them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ..errors import DivergenceError
from ..model.attention import Attention
from ..model.batch import Batch
from ..model.boundary import run_prompt_layer
from ..model.config import Config
from ..model.layers import norm, run_neurons
from ..model.mesh import FSDP, MODEL
from ..model.params import Block, Leaf, Llama, PromptMLP, require_teacher
from ..model.sharding import (
    all_gather_fsdp,
    from_host,
    replicated,
    to_host,
)
from ..model.transformer import run_lower_layers, run_upper_layers_teacher
from ..process.distributed import from_process_0
from . import solve
from .delta import delta_shardings
from .moments import fitted_tokens, float32_shapes, products, prompt_delta, split_rows, zeros

logger = logging.getLogger(__name__)


@struct.dataclass
class MapSums:
    """Sums over tokens, float32, with z = [m; a] of E entries."""

    inputs: Leaf  # f32[E, E]: z z'
    cross: Leaf  # f32[E, D]: z (h - u)'
    energy: Leaf  # f32[]: |h - u|^2
    tokens: Leaf  # f32[]


def fit_maps(
    config: Config, llama: Llama, batches: Iterable[Batch], *, attention: Attention
) -> tuple[PromptMLP, list[Batch]]:
    """The maps of the cut of `config` and the neurons beside them, in the dtype of `llama`, and the
    batches, which are asked for once.

    Costs for each map a pass over the batches, through the lower layers and those up to the map's,
    and with neurons another one. Raises `ValueError` if the batches hold no token or the teacher's
    upper projections were dropped, `DivergenceError` for a teacher that is not finite.
    """
    require_teacher(llama, "calibrate")
    mesh = attention.mesh
    kept = list[Batch]()
    count = config.prompt_attention_layers
    neurons = config.prompt_mlp_neurons
    fitted = zero_mlps(config, count, neurons, llama.embed.dtype)
    where = delta_shardings(config, mesh, llama).prompt_mlp

    def put() -> PromptMLP:  # copies, for the host's arrays are filled further
        return jax.tree.map(lambda leaf, at: from_host(leaf.copy(), at), fitted, where)

    for index in range(count):
        every = kept or _keep(batches, kept)
        if neurons:
            energy = zero_energy(config, mesh)
            mlps = put()
            for batch in every:
                jax.block_until_ready(energy)
                energy = add_energy_batch(config, attention, index, energy, llama, mlps, batch)
            choose_neurons(llama.upper, index, energy, fitted, index)
        sums = zero_sums(config, neurons, mesh)
        mlps = put()
        for batch in kept or every:
            jax.block_until_ready(sums)
            sums = add_map_batch(config, attention, index, sums, llama, mlps, batch)
        layer = config.num_lower_layers + index
        r2 = solve_sums(layer, sums, fitted, index)
        logger.info("layer %d: a map in place of its MLP, R2 %.3f", layer, r2)
    return put(), kept


def _keep(batches: Iterable[Batch], kept: list[Batch]) -> Iterator[Batch]:
    for batch in batches:
        kept.append(batch)
        yield batch


def zero_mlps(config: Config, layers: int, neurons: int, dtype: Any) -> PromptMLP:
    """Stacks of so many maps and the neurons beside each, on the host."""
    size = config.embed_dim
    shapes = ((size, size), (neurons, size), (neurons, size), (size, neurons))
    return PromptMLP(
        *(np.zeros((layers, *shape), dtype) if min(shape) else None for shape in shapes)
    )


def choose_neurons(
    blocks: Block, layer: int, energy: Float[Array, " F"], fitted: PromptMLP, index: int
) -> None:
    """Set gate and up of entry `index` of `fitted` to those of the neurons of `layer` of `blocks`
    that add most, in the order of the MLP. `energy` are sums of their squared activations."""
    down = to_host(_squared_lengths(blocks.down), layer)
    worth = from_process_0(np.asarray(to_host(energy), np.float64) * down)
    chosen = np.sort(np.argsort(-worth, kind="stable")[: fitted.gate.shape[1]])
    fitted.gate[index] = to_host(blocks.gate, layer)[chosen]
    fitted.up[index] = to_host(blocks.up, layer)[chosen]


@jax.jit
def _squared_lengths(down: Float[Array, "L D F"]) -> Float[Array, "L F"]:
    return jnp.square(down.astype(jnp.float32)).sum(1)


def solve_sums(layer: int, sums: MapSums, fitted: PromptMLP, index: int) -> float:
    """Set map and down of entry `index` of `fitted`; returns the R2 of the regression. Raises
    `ValueError` for sums of no token, `DivergenceError` for some that are not finite."""
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
    fitted.map[index] = found[:, : len(found)]
    if fitted.down is not None:
        fitted.down[index] = found[:, len(found) :]
    return float(r2)


def sum_shapes(config: Config, neurons: int) -> MapSums:
    """Shapes of the sums for one map with so many neurons."""
    size = config.embed_dim + neurons
    return float32_shapes(MapSums((size, size), (size, config.embed_dim), (), ()))


def sum_shardings(config: Config, neurons: int, mesh: Mesh) -> MapSums:
    """Shard the sums as `moments.moment_shardings` does."""
    size = config.embed_dim + neurons
    rows = NamedSharding(mesh, P(split_rows(mesh, size, FSDP, MODEL)))
    everywhere = NamedSharding(mesh, P())
    return MapSums(rows, rows, everywhere, everywhere)


def zero_sums(config: Config, neurons: int, mesh: Mesh | None) -> MapSums:
    """The sums of no tokens."""
    where = None if mesh is None else sum_shardings(config, neurons, mesh)
    return zeros(sum_shapes(config, neurons), where)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def add_map_batch(
    config: Config,
    attention: Attention,
    index: int,
    sums: MapSums,
    llama: Llama,
    mlps: PromptMLP,
    batch: Batch,
) -> MapSums:
    """Add one more batch of packed rows to the sums of map `index`; of `mlps` the maps before it
    are used, and its neurons."""
    config = config.at_length(batch.tokens.shape[1])
    x, tables, u, m = _mlp_input(config, attention, index, llama, mlps, batch)
    segment_ids = batch.segment_ids
    mesh = attention.mesh
    h, _ = run_upper_layers_teacher(
        config, llama, x, tables, segment_ids, attention=attention, count=index + 1
    )
    own = all_gather_fsdp(mesh, jax.tree.map(lambda leaf: leaf[index], mlps), layer=True)
    return add_sums(config, mesh, sums, map_inputs(config, m, own), h - u, segment_ids)


def map_inputs(config: Config, m: Float[Array, "B T D"], mlp: PromptMLP) -> Float[Array, "B T E"]:
    """Join what the map and the neurons of a layer read, from what its MLP reads."""
    if mlp.gate is None:
        return m
    return jnp.concatenate([m, run_neurons(config, m, mlp.gate, mlp.up)], -1)


def zero_energy(config: Config, mesh: Mesh | None) -> Float[Array, " F"]:
    """The sums of `add_energy` of no tokens."""
    shape = jax.ShapeDtypeStruct((config.mlp_dim,), jnp.float32)
    return zeros(shape, None if mesh is None else replicated(mesh))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def add_energy_batch(
    config: Config,
    attention: Attention,
    index: int,
    energy: Float[Array, " F"],
    llama: Llama,
    mlps: PromptMLP,
    batch: Batch,
) -> Float[Array, " F"]:
    """`add_energy` for one more batch of packed rows and the layer of map `index`."""
    config = config.at_length(batch.tokens.shape[1])
    *_, m = _mlp_input(config, attention, index, llama, mlps, batch)
    block = jax.tree.map(lambda leaf: leaf[index], llama.upper)
    block = all_gather_fsdp(attention.mesh, block, layer=True)
    return add_energy(config, energy, block, m, batch.segment_ids)


def add_energy(
    config: Config,
    energy: Float[Array, " F"],
    block: Block,
    m: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, " F"]:
    """Add the squared activations of all neurons of an MLP that reads `m`, summed over tokens."""
    real = fitted_tokens(config, segment_ids).astype(jnp.float32)
    squares = jnp.square(run_neurons(config, m, block.gate, block.up).astype(jnp.float32))
    return energy + jnp.einsum("BTF,BT->F", squares, real)


def _mlp_input(config: Config, attention: Attention, index: int, llama, mlps, batch: Batch):
    """(state at the SwiftKV layer, rotary tables, state of a prompt after the attention of the
    layer of map `index`, what the MLP reads of that)."""
    segment_ids = batch.segment_ids
    x, tables = run_lower_layers(config, llama, batch, attention=attention)
    u = x
    prompt = prompt_delta(llama, mlps)
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
    scale = jax.tree.map(lambda scales: scales[index], llama.upper.mlp_norm)
    return x, tables, u, norm(config, u, scale)


def add_sums(
    config: Config,
    mesh: Mesh | None,
    sums: MapSums,
    z: Float[Array, "B T E"],
    left: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
) -> MapSums:
    """`sums` with those of more tokens, from `map_inputs` and what the layer is to add."""
    real = fitted_tokens(config, segment_ids).astype(jnp.float32)[..., None]
    counted = z.astype(jnp.float32) * real
    added = MapSums(
        inputs=products("BTD,BTE->DE", counted, z),
        cross=products("BTD,BTE->DE", counted, left),
        energy=(jnp.square(left.astype(jnp.float32)) * real).sum(),
        tokens=real.sum(),
    )
    sums = jax.tree.map(jnp.add, sums, added)
    if mesh is None:
        return sums
    where = sum_shardings(config, z.shape[-1] - config.embed_dim, mesh)
    return jax.lax.with_sharding_constraint(sums, where)
