"""A model whose layers share caches, written without groups."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ..errors import UsageError
from .source import Source
from .tensor_map import MappedLeaf, leaves

logger = logging.getLogger(__name__)


def _read_of_layer(
    stored: Source, leaf: MappedLeaf, dtype: np.dtype, sharding: Sharding
) -> jax.Array:
    """Read the keys and values of a group once for each of its layers, as that layer uses them: its
    own order of heads, and its `mix` of the values."""
    config = stored.config
    by_name = {leaf.name: leaf for leaf in stored.leaves}
    array = stored.read(by_name[leaf.name], dtype, sharding)
    if not (leaf.is_delta and leaf.param.axes[0] in "JP"):
        return array
    # Those of prompt attention layers, which have no group, come first; taps have none of them.
    alone = config.prompt_attention_layers
    first, left_out = (0, alone) if leaf.param.axes[0] == "P" else (alone, 0)
    repeated = jnp.repeat(array[first:], config.key_value_group_size, axis=0)
    array = jnp.concatenate([array[:first], repeated])
    if config.shared_kv_heads is None:
        return array
    heads = jnp.asarray(config.shared_kv_heads)[left_out:]
    array = jax.vmap(lambda layer, order: layer[order])(array, heads)
    if leaf.name not in ("swiftkv.v", "swiftkv.v_bias"):
        return array
    mix = stored.read(by_name["swiftkv.mix"], np.dtype(np.float32), sharding)[left_out:]
    spec = "UKHD,UKGH->UKGD" if array.ndim == 4 else "UKH,UKGH->UKG"
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum(spec, array.astype(jnp.float32), mix, precision=exact).astype(dtype)


def with_expanded_groups(stored: Source) -> Source:
    """The same model without groups: every upper layer with keys and values of its own. Its
    queries fit those, and not the teacher's keys: it is for `generated_kv` boundary only. Where
    the model attends to two caches (`Config.has_two_caches`), its queries stay scaled for that.

    Raises `UsageError` if it has mixes and is quantised.
    """
    if stored.config.shared_kv_heads is not None and stored.quantization:
        raise UsageError(
            f"layers that mix shared values cannot be written apart in {stored.quantization}: "
            f"load them with `quantization`='none'"
        )
    config = stored.config
    if config.has_two_caches:
        logger.warning(
            "written without groups the model is for generated_kv=boundary: its queries fit the "
            "shared keys only, and stay scaled for own; better write the model as it was before "
            "it was scaled"
        )
        config = dataclasses.replace(config, generated_kv="boundary", exact_tail=0)
    config = config.cut(
        config.num_key_value_layers,
        prompt_attention_layers=config.prompt_attention_layers,
        prompt_mlp_neurons=config.prompt_mlp_neurons,
        boundary_taps=config.boundary_taps,
    )
    stored_names = {leaf.name for leaf in stored.leaves}
    present = leaves(config, quantization=stored.quantization)
    return dataclasses.replace(
        stored,
        config=config,
        leaves=tuple(leaf for leaf in present if leaf.name in stored_names),
        reader=functools.partial(_read_of_layer, stored),
    )
