"""Stacks of layers: split elsewhere, taken apart, cast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .config import Config
from .params import Llama, require_teacher
from .quantization import is_quantized


def split_layers(config: Config, llama: Llama) -> Llama:
    """The same layers in two stacks split at layer `config.num_key_value_layers`. Copies the stacks
    that change.

    Raises `ValueError` if the teacher's upper projections were dropped.
    """
    require_teacher(llama, "split its layers elsewhere")
    if jax.tree.leaves(llama.lower)[0].shape[0] == config.num_lower_layers:
        return llama
    cut = config.num_lower_layers

    def join(lower, upper):
        return jnp.concatenate([lower, upper])

    block = jax.tree.map(join, llama.lower, llama.upper)
    qkv = jax.tree.map(join, llama.lower_qkv, llama.upper_qkv)
    return dataclasses.replace(
        llama,
        lower=jax.tree.map(lambda leaf: leaf[:cut], block),
        lower_qkv=jax.tree.map(lambda leaf: leaf[:cut], qkv),
        upper=jax.tree.map(lambda leaf: leaf[cut:], block),
        upper_qkv=jax.tree.map(lambda leaf: leaf[cut:], qkv),
    )


def unstack[Tree](
    stack: Tree | None, apart: Callable[[Any], Sequence[Any]] = jnp.unstack
) -> tuple[Tree, ...]:
    """A stack of layers as a tuple of layers, for serving (a scan would copy each layer's weights
    at every step); of None, none. `apart` takes one leaf of the stack apart."""
    leaves, tree = jax.tree.flatten(stack)
    layers = zip(*map(apart, leaves), strict=True)
    return tuple(jax.tree.unflatten(tree, layer) for layer in layers)


def cast[Tree](tree: Tree, dtype) -> Tree:
    """Every array in `dtype`, except 8-bit matrices and their scales; arrays that already are stay
    the same buffers."""

    def leaf(array):
        if is_quantized(array) or array.dtype == dtype:
            return array
        return array.astype(dtype)

    return jax.tree.map(leaf, tree, is_leaf=is_quantized)
