"""The keys and values that the upper layers of every cut start from, for `sweep`.

For every cut this is a stack of projections with as many entries as the lowest cut has upper
layers. The upper layers of the cut come first, each with separate keys and values, which it makes
from its group's. With these it needs only the teacher's queries
(`calibration.delta.FittedGroup.expanded`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int

from ..attention import Attention
from ..batch import Batch
from ..calibration import LayerFit
from ..calibration.delta import fit_layers, output_metrics, share_layers
from ..calibration.moments import (
    Moments,
    add_layer,
    layer_moments,
    moment_shapes,
    moment_shardings,
    regressors,
    zero_moments,
)
from ..config import Config
from ..initialization import Start
from ..params import Llama, SwiftKV, swiftkv_shapes
from ..rope import paired_dims, rope_tables, scanned_kinds
from ..sharding import all_gather_fsdp, swiftkv_shardings

MOMENTS_BYTES = 2**33
"""Bytes of the second moments on one device, unless those of a single K are more."""

States = tuple[Batch, Float[Array, "L B T D"], Float[Array, "B T D"]]
"""A batch, the hidden state that enters each of its layers, and the output of the last one."""


class CutKV(NamedTuple):
    """The start of the upper layers of a cut."""

    kv: SwiftKV
    """k, v, their biases and the norms of k, of every upper layer."""
    layers: tuple[LayerFit, ...]
    """How well they are fitted; None for copies."""


def copied_kv(
    config: Config,
    llama: Llama,
    groups: Mapping[int, Sequence[int]],
    start: Start,
    mesh: Mesh | None,
) -> Iterator[tuple[int, list[CutKV]]]:
    """For each K of `groups` the start of each of its g, as `initialization.init_swiftkv` makes
    them."""
    size = config.num_layers - min(groups)
    where = _shardings(config, size, mesh)
    for k, sizes in groups.items():
        students = []
        for g in sizes:
            members = np.zeros((size, config.num_layers), bool)
            for layer in range(k, config.num_layers):
                leader = layer - (layer - k) % g
                members[layer - k, leader : leader + (g if start == "authors" else 1)] = True
            stacks = {name: getattr(llama.lower_qkv, name) for name in ("k", "v")}
            optional = ("k_bias", "v_bias", "k_norm")
            stacks |= {name: getattr(llama.lower_qkv, name) for name in optional}
            means = {
                name: _means(stack, members, getattr(where, name))
                for name, stack in stacks.items()
                if stack is not None
            }
            students.append(CutKV(SwiftKV(**{"norm": None, "q": None, **means}), ()))
        yield k, students


def calibrated_kv(
    config: Config,
    llama: Llama,
    groups: Mapping[int, Sequence[int]],
    states: Callable[[], Iterable[States]],
    attention: Attention,
) -> Iterator[tuple[int, list[CutKV]]]:
    """For each K of `groups` the start of each of its g in closed form, fitted to `states`.

    Those are run through once for as many K as `plan_passes` puts together. Host memory holds the
    float64 keys and values of one K's layers, and the second moments of one layer at a time. Raises
    `ValueError` if `states` hold no token.
    """
    size = config.num_layers - min(groups)
    metrics, pairs = output_metrics(llama.lower.o, config.num_kv_heads), paired_dims(config)
    for entries, chosen in plan_passes(config, list(groups), attention.mesh):
        moments = _gather(config, llama, entries, chosen, states(), attention)
        for k, entry in chosen.items():
            layers = list(
                fit_layers(config.cut(k), llama.lower_qkv, metrics, moments, first=k, entry=entry)
            )
            students = []
            for g in groups[k]:
                shared, fits = zip(*share_layers(layers, g, moments, pairs), strict=True)
                expanded = [kv for group in shared for kv in group.expanded()]
                kv = _put(config, expanded, size, llama.embed.dtype, attention.mesh)
                if llama.lower_qkv.k_norm is not None:  # then without groups
                    norms = np.zeros((size, config.num_layers), bool)
                    norms[: config.num_layers - k, k:] = np.eye(config.num_layers - k, dtype=bool)
                    where = _shardings(config, size, attention.mesh).k_norm
                    kv = dataclasses.replace(
                        kv, k_norm=_means(llama.lower_qkv.k_norm, norms, where)
                    )
                students.append(CutKV(kv, tuple(fit for group in fits for fit in group)))
            yield k, students


def plan_passes(
    config: Config, lower: Sequence[int], mesh: Mesh | None
) -> Iterator[tuple[int, dict[int, int]]]:
    """How the moments of every K in `lower` are gathered in stacks of at most `MOMENTS_BYTES` on
    each device, or of one K: for each pass over the data the entries of the stack, the same in
    all, and the first entry of each K."""
    one = moment_shapes(config, 1)
    if mesh is None:
        parts = [leaf.shape for leaf in jax.tree.leaves(one)]
    else:
        placed = jax.tree.map(
            lambda leaf, sharding: sharding.shard_shape(leaf.shape),
            one,
            moment_shardings(config, mesh),
        )
        parts = jax.tree.leaves(placed, is_leaf=lambda leaf: isinstance(leaf, tuple))
    layer_bytes = 4 * sum(map(math.prod, parts))
    upper = [config.num_layers - k for k in lower]
    entries = max(max(upper), min(sum(upper), MOMENTS_BYTES // layer_bytes))
    chosen, used = {}, 0
    for k, layers in zip(lower, upper, strict=True):
        if used + layers > entries:
            yield entries, chosen
            chosen, used = {}, 0
        chosen[k] = used
        used += layers
    yield entries, chosen


def _gather(
    config: Config,
    llama: Llama,
    entries: int,
    chosen: Mapping[int, int],
    states: Iterable[States],
    attention: Attention,
) -> Moments:
    moments, tokens = zero_moments(config, attention.mesh, entries), 0.0
    for batch, inputs, _ in states:
        for k, entry in chosen.items():
            moments = add_cut(
                config, attention, moments, llama, batch, inputs, jnp.int32(k), jnp.int32(entry)
            )
        tokens += float((batch.segment_ids > 0).sum())
    if not tokens:
        raise ValueError("there is no token to calibrate on")
    return dataclasses.replace(moments, tokens=jnp.float32(tokens))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def add_cut(
    config: Config,
    attention: Attention,
    moments: Moments,
    llama: Llama,
    batch: Batch,
    inputs: Float[Array, "L B T D"],
    first_upper: Int[Array, ""],
    entry: Int[Array, ""],
) -> Moments:
    """`moments` with those of one more batch for the upper layers of one cut, from `entry` on; not
    the number of tokens."""
    config = config.at_length(batch.tokens.shape[1])
    mesh, tables = attention.mesh, rope_tables(config, batch.positions)
    kinds, kind_of = scanned_kinds(config, tables, range(config.num_layers))
    norm = layer_of(llama.lower.attn_norm, first_upper)
    s = regressors(config, layer_of(inputs, first_upper), norm)

    def step(index, moments):
        block, qkv = (
            all_gather_fsdp(mesh, layer_of(stack, index), layer=True)
            for stack in (llama.lower, llama.lower_qkv)
        )
        x = layer_of(inputs, index)
        kind = kind_of(layer_of(kinds, index))
        added = layer_moments(config, block, qkv, x, s, kind, batch.segment_ids, mesh=mesh)
        return add_layer(config, mesh, moments, added, entry + index - first_upper)

    return jax.lax.fori_loop(first_upper, config.num_layers, step, moments)


def layer_of(stack: Any, index) -> Any:
    """One layer out of a tree of stacks."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack
    )


def _means(stack: jax.Array, members: np.ndarray, sharding: Sharding) -> jax.Array:
    """[size, ...]: for each row of `members` the mean of its layers, zeros where it has none."""
    mean = jax.jit(_row_means, out_shardings=sharding)
    return mean(stack, jnp.asarray(members, stack.dtype))


def _row_means(stack: Float[Array, "L *A"], members: Float[Array, "U L"]) -> Float[Array, "U *A"]:
    sums = jnp.einsum(
        "UL,L...->U...",
        members,
        stack,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    counts = jnp.maximum(members.astype(jnp.float32).sum(1), 1)
    return (sums / counts.reshape(-1, *(1,) * (sums.ndim - 1))).astype(stack.dtype)


def _shardings(config: Config, size: int, mesh: Mesh | None) -> SwiftKV:
    cut = config.cut(config.num_layers - size)
    if mesh is not None:
        return swiftkv_shardings(cut, mesh)
    first = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda _: first, swiftkv_shapes(cut))


def _put(
    config: Config,
    layers: Sequence[tuple[np.ndarray, np.ndarray]],
    size: int,
    dtype,
    mesh: Mesh | None,
) -> SwiftKV:
    """Stacks of `size` entries from each layer's k and v (K H E), zeros behind them."""
    where, width = _shardings(config, size, mesh), config.embed_dim
    parts = {"k": [k for k, _ in layers], "v": [v for _, v in layers]}

    def put(arrays: list[np.ndarray], sharding: Sharding) -> jax.Array:
        stack = np.zeros((size, *arrays[0].shape), dtype)
        for entry, array in enumerate(arrays):
            stack[entry] = array
        return jax.make_array_from_callback(stack.shape, sharding, lambda part: stack[part])

    stacks = {
        name: put([x[..., :width] for x in arrays], getattr(where, name))
        for name, arrays in parts.items()
    }
    if config.qkv_bias:
        stacks |= {
            f"{name}_bias": put([x[..., width] for x in arrays], getattr(where, f"{name}_bias"))
            for name, arrays in parts.items()
        }
    return SwiftKV(**{"norm": None, "q": None, **stacks})
