"""A delta from the moments: read layer by layer, solved on the host, put back on the mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jaxtyping import Array, Complex, Float, Int

from ..config import Config
from ..distributed import from_process_0
from ..params import QKV, Llama, SwiftKV, require_teacher, swiftkv_shapes
from ..sharding import swiftkv_shardings, to_host
from . import solve
from .moments import Moments


@dataclasses.dataclass(frozen=True)
class LayerFit:
    """How well an upper layer's keys and values follow from the input of layer K, as shares of
    their mean square on the calibration tokens, averaged over key/value heads."""

    layer: int
    r2_k: float
    r2_v: float
    kept_k: float
    """Share that the layer's group keeps of what its layers have together; 1 without groups."""
    kept_v: float


class Fit(NamedTuple):
    config: Config
    """With `shared_kv_heads` where layers share caches."""
    delta: SwiftKV
    layers: tuple[LayerFit, ...]


def fit_delta(config: Config, llama: Llama, moments: Moments, mesh: Mesh | None) -> Fit:
    """The delta of the cut of `config`, in the dtype of `llama` and sharded like it.

    `config` has no `shared_kv_heads` yet. Host memory holds the new keys and values, and the second
    moments of one layer at a time in float64. With several processes all of them call this; the
    result is that of process 0. Raises `ValueError` if the teacher's
    upper projections were dropped.
    """
    upper, dtype = require_teacher(llama, "calibrate"), llama.embed.dtype
    groups, fits = zip(*_fit_groups(config, llama, upper, moments), strict=True)
    shared = config.key_value_group_size > 1
    heads = tuple(tuple(map(int, row)) for group in groups for row in group.shared_kv_heads)
    config = dataclasses.replace(config, shared_kv_heads=heads if shared else None)
    first = min(llama.embed.devices(), key=lambda device: device.id)
    where: Any = (
        jax.tree.map(lambda _: SingleDeviceSharding(first), swiftkv_shapes(config))
        if mesh is None
        else swiftkv_shardings(config, mesh)
    )

    def put(parts: list[np.ndarray], sharding: Sharding) -> jax.Array:
        stacked = np.stack(parts).astype(dtype)
        return jax.make_array_from_callback(stacked.shape, sharding, lambda part: stacked[part])

    k, v = ([getattr(group, name) for group in groups] for name in "kv")  # each K H E
    size = config.embed_dim
    delta = SwiftKV(
        norm=jnp.array(llama.upper.attn_norm[0], copy=True),
        q=jnp.array(upper.q, copy=True),
        k=put([x[..., :size] for x in k], where.k),
        v=put([x[..., :size] for x in v], where.v),
        q_bias=None if upper.q_bias is None else jnp.array(upper.q_bias, copy=True),
    )
    if config.attention_bias:
        delta = dataclasses.replace(
            delta,
            k_bias=put([x[..., size] for x in k], where.k_bias),
            v_bias=put([x[..., size] for x in v], where.v_bias),
        )
    if shared:
        factors = np.concatenate([group.query_factors for group in groups]).astype(np.complex64)
        turn = functools.partial(_turn_queries, real=factors.real, imag=factors.imag)
        delta = dataclasses.replace(
            delta,
            q=turn(delta.q),
            q_bias=None if delta.q_bias is None else turn(delta.q_bias),
            mix=put([mix for group in groups for mix in group.mix], where.mix),
        )
    if mesh is not None:
        delta = jax.device_put(delta, where)
    return Fit(config, delta, tuple(itertools.chain(*fits)))


class _FittedGroup(NamedTuple):
    k: Float[np.ndarray, "K H E"]
    v: Float[np.ndarray, "K H E"]
    shared_kv_heads: Int[np.ndarray, "g K"]
    query_factors: Complex[np.ndarray, "g K H_half"]
    """Heads in each layer's own order, as in `mix`."""
    mix: Float[np.ndarray, "g K H H"]
    kept_k: float
    kept_v: float


def _fit_groups(
    config: Config, llama: Llama, upper: QKV, moments: Moments
) -> Iterator[tuple[_FittedGroup, list[LayerFit]]]:
    metrics = np.asarray(_output_metrics(llama.upper.o, config.num_kv_heads), np.float64)
    tokens = float(to_host(moments.tokens, None))
    for first in range(0, config.num_upper_layers, config.key_value_group_size):
        layers = range(first, first + config.key_value_group_size)
        members, inputs, r2 = [], np.zeros(()), []
        for layer in layers:
            moment = _layer_moments(moments, layer, tokens)
            k, v = _regress(upper, layer, moment)
            energy = moment.query_energy.reshape(
                config.num_kv_heads, -1, moment.query_energy.shape[-1]
            )
            members.append(solve.Member(k.weights, v.weights, energy.sum(1), metrics[layer]))
            inputs = inputs + moment.inputs / len(layers)
            r2.append((float(k.r2.mean()), float(v.r2.mean())))
        group = from_process_0(_join(inputs, members))
        yield (
            group,
            [
                LayerFit(config.num_lower_layers + layer, k, v, group.kept_k, group.kept_v)
                for layer, (k, v) in zip(layers, r2, strict=True)
            ],
        )


def _layer_moments(moments: Moments, layer: int, tokens: float) -> Moments:
    """Expectations of one upper layer, in float64."""

    def expectation(stack):
        return to_host(stack, layer).astype(np.float64) / tokens if stack.ndim else tokens

    return jax.tree.map(expectation, moments)


def _regress(upper: QKV, layer: int, moment: Moments) -> list[solve.Ridge]:
    """Keys and values of a layer, from the input of layer K."""
    results = []
    for part, (weight, bias) in enumerate(((upper.k, upper.k_bias), (upper.v, upper.v_bias))):
        own = to_host(weight, layer).astype(np.float64)  # K H D
        if bias is not None:
            own = np.concatenate([own, to_host(bias, layer)[..., None].astype(np.float64)], -1)
        prior, cross = own.transpose(2, 0, 1), moment.cross[:, part]
        results.append(solve.ridge(moment.inputs, cross, moment.energy[part], prior))
    return results


def _join(inputs: np.ndarray, members: list[solve.Member]) -> _FittedGroup:
    if len(members) == 1:
        kv_heads, _, head_dim = members[0].k.shape
        return _FittedGroup(
            members[0].k.mT,
            members[0].v.mT,
            np.arange(kv_heads)[None],
            np.ones((1, kv_heads, head_dim // 2), np.complex128),
            np.broadcast_to(np.eye(head_dim), (1, kv_heads, head_dim, head_dim)),
            1.0,
            1.0,
        )
    group = solve.share(inputs, members)
    reads = np.argsort(np.asarray(group.head_order), axis=1)
    factors, mix = (
        np.stack([part[heads] for part, heads in zip(parts, reads, strict=True)])
        for parts in (group.key_factors, group.mix)
    )
    return _FittedGroup(group.k.mT, group.v.mT, reads, factors, mix, group.kept_k, group.kept_v)


@functools.partial(jax.jit, static_argnums=1)
def _output_metrics(o: Float[Array, "U D N H"], kv_heads: int) -> Float[Array, "U K H H"]:
    """Sum of O'O over the query heads of each key/value head."""
    heads = o.reshape(*o.shape[:2], kv_heads, -1, o.shape[-1]).astype(jnp.float32)
    return jnp.einsum("UDKRH,UDKRG->UKHG", heads, heads, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def _turn_queries(
    q: Float[Array, "U N H D"] | Float[Array, "U N H"],
    real: Float[Array, "U K H_half"],
    imag: Float[Array, "U K H_half"],
) -> Float[Array, "U N H D"] | Float[Array, "U N H"]:
    """Queries for shared keys: each rotary pair times the conjugate of its head's factor."""
    layers, _, head_dim = q.shape[:3]
    wide = q.astype(jnp.float32)
    pairs = wide.reshape(layers, real.shape[1], -1, 2, head_dim // 2, *q.shape[3:])
    a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]
    real, imag = (jnp.expand_dims(x, (2, *range(4, a.ndim))) for x in (real, imag))
    turned = jnp.stack([real * a + imag * b, real * b - imag * a], axis=3)
    return turned.reshape(q.shape).astype(q.dtype)
