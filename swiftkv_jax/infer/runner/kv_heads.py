"""A model with fewer key/value heads than devices along `model`, in the form in which it is served.

Several devices then need the same head. Each gets a copy: of the head's projections, and so of its
keys and values in the cache. Without copies every device would project, store and keep all heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ...model.attention import split_heads
from ...model.config import Config
from ...model.mesh import MODEL
from ...model.params import Llama, Param, SwiftKV, map_params
from ...model.quantization import Quantized, is_quantized
from ...model.sharding import param_sharding, scale_sharding


def kv_head_copies(config: Config, mesh: Mesh | None) -> int:
    """How many devices along `model` share each key/value head; 1 where each has whole heads, or
    where the query heads cannot be split (every device then has all heads)."""
    if mesh is None:
        return 1
    _, shared = split_heads(mesh, config.num_heads, config.num_kv_heads)
    return mesh.shape[MODEL] // config.num_kv_heads if shared else 1


def with_kv_head_copies(config: Config, mesh: Mesh | None) -> Config:
    """The architecture with the copies of each key/value head one after the other."""
    copies = kv_head_copies(config, mesh)
    orders = config.shared_kv_heads
    if orders is not None:
        orders = tuple(
            tuple(head * copies + copy for head in order for copy in range(copies))
            for order in orders
        )
    return dataclasses.replace(
        config, num_kv_heads=config.num_kv_heads * copies, shared_kv_heads=orders
    )


def copy_kv_heads(
    config: Config,
    llama: Llama,
    delta: SwiftKV | None,
    mesh: Mesh,
    *,
    upper_kv: bool = True,
    donate: bool = False,
) -> tuple[Llama, SwiftKV | None]:
    """The same student and teacher, on `mesh`, in the architecture of `with_kv_head_copies`. The
    teacher's upper projections stay as they are without `upper_kv`. With `donate` what has been
    copied is deleted."""
    copies = kv_head_copies(config, mesh)
    if copies == 1:
        return llama, delta

    def repeat(row: Param, sharding_of: Callable[..., NamedSharding], array: jax.Array):
        if "K" not in row.axes:  # the norm of all heads together
            of_heads = np.arange(config.k_norm_dim).reshape(config.num_kv_heads, -1)
            entries = np.repeat(of_heads, copies, axis=0).ravel()
            return jax.jit(lambda scale: scale[:, entries])(array)
        axis = row.axes.index("K")
        shape = (*array.shape[:axis], array.shape[axis] * copies, *array.shape[axis + 1 :])
        wide = functools.partial(jnp.repeat, repeats=copies, axis=axis)
        return jax.jit(wide, out_shardings=sharding_of(mesh, row, shape))(array)

    def copied(row: Param, leaf: Any) -> Any:
        norms_all = "Kq" in row.axes and config.qk_norm == "all"
        if "K" not in row.axes and not norms_all:
            return leaf
        if isinstance(leaf, Quantized):
            values = repeat(row, param_sharding, leaf.values)
            found = Quantized(values, repeat(row, scale_sharding, leaf.scale), leaf.scheme)
        else:
            found = repeat(row, param_sharding, leaf)
        if donate:
            jax.tree.map(lambda array: array.delete(), leaf)
        return found

    def copied_tree(tree: Any) -> Any:
        return map_params(copied, tree, is_leaf=is_quantized)

    if upper_kv:
        wide = copied_tree(llama)
    else:
        wide = copied_tree(dataclasses.replace(llama, upper_qkv=None))
        wide = dataclasses.replace(wide, upper_qkv=llama.upper_qkv)
    if delta is not None:
        delta = copied_tree(delta)
    return wide, delta
