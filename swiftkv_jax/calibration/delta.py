"""A delta from the moments: read layer by layer, solved on the host, put back on the mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import Array, Complex, Float, Int

from ..errors import DivergenceError
from ..model.config import Config
from ..model.params import QKV, Llama, PromptMLP, SwiftKV, require_teacher, swiftkv_shapes
from ..model.rope import paired_dims
from ..model.sharding import from_host, swiftkv_shardings, to_host
from ..process.distributed import from_process_0
from . import solve
from .moments import Moments, first_fitted_norm, inputs_of_values, num_inputs


@dataclasses.dataclass(frozen=True)
class LayerFit:
    """Fit of an upper layer's keys and values from the boundary state: explained shares of
    their mean square on the calibration tokens, averaged over key/value heads."""

    layer: int
    r2_k: float
    r2_v: float
    kept_k: float
    """Share of its layers' energy that the group's shared basis keeps; 1 without groups."""
    kept_v: float


class Fit(NamedTuple):
    config: Config
    """The config of the delta: with `shared_kv_heads` where layers share caches."""
    delta: SwiftKV
    layers: tuple[LayerFit, ...]
    tokens: int
    """Calibration tokens that it was fitted to."""


def fit_delta(
    config: Config,
    llama: Llama,
    moments: Moments,
    mesh: Mesh | None,
    *,
    mlps: PromptMLP | None = None,
    track: Callable[[Iterator[FittedLayer]], Iterator[FittedLayer]] = iter,
) -> Fit:
    """The delta of the cut of `config`, in the dtype of `llama` and sharded like it.

    `config` has no `shared_kv_heads` yet. `Config.prompt_attention_layers` get `mlps` and keep the
    teacher's projections. Host memory holds the new keys and values in that dtype,
    in float64 those of one group's layers, and the second moments of one layer at a time. With
    several processes all of them call this; the result is that of process 0. Raises `ValueError` if
    the teacher's upper projections were dropped, `DivergenceError` if it is not finite.
    """
    upper = require_teacher(llama, "calibrate")
    dtype = llama.embed.dtype
    metrics = output_metrics(llama.upper.o, config.num_kv_heads)
    alone = config.prompt_attention_layers
    size = config.embed_dim
    layers = track(fit_layers(config, upper, metrics, moments, first=alone))
    stack = config.num_projected_groups, config.num_kv_heads, config.head_dim, num_inputs(config)
    k = np.empty(stack, dtype)
    v = np.empty(stack, dtype)
    groups = list[FittedGroup]()
    fits = list[list[LayerFit]]()
    pairs = paired_dims(config)
    for group, fit in share_layers(layers, config.key_value_group_size, moments, pairs):
        k[len(fits)], v[len(fits)] = group.k, group.v
        groups.append(group._replace(k=k[len(fits)], v=v[len(fits)]))
        fits.append(fit)
        del group
    groups[:0] = [_untouched(config, pairs)] * alone
    shared = config.key_value_group_size > 1
    heads = tuple(tuple(map(int, row)) for group in groups for row in group.shared_kv_heads)
    config = dataclasses.replace(config, shared_kv_heads=heads if shared else None)
    where = delta_shardings(config, mesh, llama)

    def behind(own: Array, fitted: np.ndarray) -> np.ndarray:
        """A stack of all groups: the teacher's `own` first."""
        first = [to_host(own, layer)[None] for layer in range(alone)]
        return np.concatenate([*first, fitted]) if first else fitted

    delta = SwiftKV(
        norm=_copy(first_fitted_norm(config, llama)),
        q=jnp.array(upper.q, copy=True),
        k=from_host(behind(upper.k, k[..., :size]), where.k),
        v=from_host(behind(upper.v, v[..., :size]), where.v),
        q_bias=_copy(upper.q_bias),
        q_norm=_copy(upper.q_norm),
        k_norm=_copy(upper.k_norm),
    ).with_prompt_mlp(mlps)
    if config.boundary_taps:
        delta = dataclasses.replace(delta, k_tap=from_host(k[..., size : 2 * size], where.k_tap))
    if config.qkv_bias:
        delta = dataclasses.replace(
            delta,
            k_bias=from_host(behind(upper.k_bias, k[..., -1]), where.k_bias),
            v_bias=from_host(behind(upper.v_bias, v[..., -1]), where.v_bias),
        )
    if shared:
        factors = np.concatenate([group.query_factors for group in groups]).astype(np.complex64)
        turn = functools.partial(_turn_queries, real=factors.real, imag=factors.imag, pairs=pairs)
        delta = dataclasses.replace(
            delta,
            q=turn(delta.q),
            q_bias=jax.tree.map(turn, delta.q_bias),
            mix=from_host(np.concatenate([group.mix for group in groups]).astype(dtype), where.mix),
        )
    if mesh is not None:
        delta = jax.device_put(delta, where)
    return Fit(config, delta, tuple(itertools.chain(*fits)), int(moments.tokens))


def delta_shardings(config: Config, mesh: Mesh | None, llama: Llama) -> SwiftKV:
    """`swiftkv_shardings`; without a mesh, on the device of `llama`."""
    if mesh is not None:
        return swiftkv_shardings(config, mesh)
    first = SingleDeviceSharding(min(llama.embed.devices(), key=lambda device: device.id))
    return jax.tree.map(lambda _: first, swiftkv_shapes(config))


def _copy(leaf: jax.Array | None) -> jax.Array | None:
    return jax.tree.map(lambda array: jnp.array(array, copy=True), leaf)


class FittedLayer(NamedTuple):
    """An upper layer's own keys and values, before the layers of a group share them."""

    layer: int
    entry: int
    """Index of the layer's entry in the moments."""
    member: solve.Member
    r2_k: float
    r2_v: float


class FittedGroup(NamedTuple):
    """Keys and values that the layers of a group share, and how each layer uses them."""

    k: Float[np.ndarray, "K H E"]
    v: Float[np.ndarray, "K H E"]
    shared_kv_heads: Int[np.ndarray, "g K"]
    query_factors: Complex[np.ndarray, "g K H_half"]
    """Heads in each layer's own order, as in `mix`."""
    mix: Float[np.ndarray, "g K H H"]
    pairs: Int[np.ndarray, "2 H_half"]
    """The entries of a key that each factor turns."""
    kept_k: float
    kept_v: float

    def expanded(self) -> list[tuple[Float[np.ndarray, "K H E"], Float[np.ndarray, "K H E"]]]:
        """Each layer's keys and values as separate projections, for the teacher's queries."""
        layers = []
        for heads, factors, mix in zip(
            self.shared_kv_heads, self.query_factors, self.mix, strict=True
        ):
            k, (first, second) = self.k[heads], self.pairs
            turned = (k[:, first] + 1j * k[:, second]) * factors[..., None]
            k[:, first], k[:, second] = turned.real, turned.imag
            layers.append((k, mix @ self.v[heads]))
        return layers


def fit_layers(
    config: Config,
    qkv: QKV,
    metrics: Float[np.ndarray, "L K H H"],
    moments: Moments,
    *,
    first: int = 0,
    entry: int = 0,
) -> Iterator[FittedLayer]:
    """The upper layers of `config` from `Config.first_projected_layer` on, one after another. They
    begin at layer `first` of the stacks `qkv` and `metrics` (of `output_metrics`), and at `entry`
    of the moments. Raises `DivergenceError` for a teacher that is not finite."""
    tokens = float(to_host(moments.tokens))

    def fit_layer(index: int) -> FittedLayer:
        number = config.first_projected_layer + index
        moment = _layer_moments(moments, entry + index, tokens)
        _check_finite(number, *jax.tree.leaves(moment), metrics[first + index])
        fitted = _regress(config, qkv, first + index, moment)
        _check_finite(number, fitted.weights)
        k, v = np.split(fitted.weights, 2)
        r2_k, r2_v = np.split(fitted.r2, 2)
        if config.generated_kv == "own" and config.key_value_group_size == 1:
            k = solve.divide_keys_by_r2(k, r2_k)
        energy = moment.query_energy.reshape(len(k), -1, moment.query_energy.shape[-1]).sum(1)
        member = solve.Member(k, v, energy, metrics[first + index])
        return FittedLayer(number, entry + index, member, float(r2_k.mean()), float(r2_v.mean()))

    return map(fit_layer, range(config.num_layers - config.first_projected_layer))


def share_layers(
    layers: Iterable[FittedLayer],
    group_size: int,
    moments: Moments,
    pairs: Int[np.ndarray, "2 H_half"],
) -> Iterator[tuple[FittedGroup, list[LayerFit]]]:
    """Fits of groups of `group_size` successive layers, with `pairs` as in `solve.share`; with
    several processes, the fits of process 0."""
    for layers_of_group in itertools.batched(layers, group_size):
        members = [layer.member for layer in layers_of_group]
        entries = [layer.entry for layer in layers_of_group]
        group = from_process_0(
            _alone(members[0], pairs)
            if group_size == 1
            else _shared(_inputs(moments, entries), members, pairs)
        )
        yield (
            group,
            [
                # Moments are sums in float32: by their rounding, a share may be above 1.
                LayerFit(
                    layer.layer,
                    min(layer.r2_k, 1.0),
                    min(layer.r2_v, 1.0),
                    min(group.kept_k, 1.0),
                    min(group.kept_v, 1.0),
                )
                for layer in layers_of_group
            ],
        )
        del layers_of_group, members, group  # before the next group's layers are fitted


def _layer_moments(moments: Moments, entry: int, tokens: float) -> Moments:
    """Expectations of one upper layer, in float64."""

    def expectation(stack):
        if not stack.ndim:
            return tokens
        found = to_host(stack, entry).astype(np.float64)
        found /= tokens
        return found

    return jax.tree.map(expectation, moments)


def _check_finite(layer: int, *arrays: Any) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise DivergenceError(
            f"layer {layer}: weights of the teacher, or its hidden states on the calibration text, "
            f"are not finite"
        )


def _regress(config: Config, qkv: QKV, layer: int, moment: Moments) -> solve.Ridge:
    """Keys and then values of a layer, from the boundary state: 2 K heads, of one factorisation
    unless keys have taps. Values get zeros for those."""
    cross = moment.cross.reshape(len(moment.cross), -1, moment.cross.shape[-1])
    prior = own_projections(config, qkv, layer)
    energy = moment.energy.ravel()
    if not config.boundary_taps:
        return solve.ridge(moment.inputs, cross, energy, prior)
    read, (k, v) = inputs_of_values(config), np.split(np.arange(len(energy)), 2)
    at = np.ix_(read, v)
    values = solve.ridge(moment.inputs[np.ix_(read, read)], cross[at], energy[v], prior[at])
    keys = solve.ridge(moment.inputs, cross[:, k], energy[k], prior[:, k])
    weights = np.zeros((len(energy), *keys.weights.shape[1:]))
    weights[k], weights[np.ix_(v, read)] = keys.weights, values.weights
    return solve.Ridge(weights, np.concatenate([keys.r2, values.r2]))


def own_projections(config: Config, qkv: QKV, layer: int) -> Float[np.ndarray, "E 2K H"]:
    """Keys and then values: zeros for taps, biases for the last input."""
    found = []
    for weight, bias in ((qkv.k, qkv.k_bias), (qkv.v, qkv.v_bias)):
        own = to_host(weight, layer).astype(np.float64)  # K H D
        if config.boundary_taps:
            own = np.concatenate([own, np.zeros_like(own)], -1)
        if bias is not None:
            own = np.concatenate([own, to_host(bias, layer)[..., None].astype(np.float64)], -1)
        found.append(own.transpose(2, 0, 1))
    return np.concatenate(found, 1)


def _inputs(moments: Moments, entries: list[int]) -> Float[np.ndarray, "E E"]:
    """Expectation of the inputs' second moments, averaged over layers."""
    total = np.zeros(moments.inputs.shape[1:])
    for entry in entries:
        total += to_host(moments.inputs, entry)
    total /= float(to_host(moments.tokens)) * len(entries)
    return total


def _alone(member: solve.Member, pairs: Int[np.ndarray, "2 H_half"]) -> FittedGroup:
    kv_heads, _, head_dim = member.k.shape
    return FittedGroup(
        member.k.mT,
        member.v.mT,
        np.arange(kv_heads)[None],
        np.ones((1, kv_heads, head_dim // 2), np.complex128),
        np.broadcast_to(np.eye(head_dim), (1, kv_heads, head_dim, head_dim)),
        pairs,
        1.0,
        1.0,
    )


def _untouched(config: Config, pairs: Int[np.ndarray, "2 H_half"]) -> FittedGroup:
    """The part of a `FittedGroup` besides keys and values for a layer that keeps its own."""
    heads = config.num_kv_heads
    size = config.head_dim
    nothing = np.empty((heads, size, 0))
    return _alone(solve.Member(nothing.mT, nothing.mT, nothing, nothing), pairs)


def _shared(
    inputs: Float[np.ndarray, "E E"],
    members: list[solve.Member],
    pairs: Int[np.ndarray, "2 H_half"],
) -> FittedGroup:
    group = solve.share(inputs, members, pairs)
    reads = np.argsort(np.asarray(group.head_order), axis=1)
    factors, mix = (
        np.stack([part[heads] for part, heads in zip(parts, reads, strict=True)])
        for parts in (group.key_factors, group.mix)
    )
    k = group.k.mT
    v = group.v.mT
    return FittedGroup(k, v, reads, factors, mix, pairs, group.kept_k, group.kept_v)


def output_metrics(o: Float[Array, "U D N H"], kv_heads: int) -> Float[np.ndarray, "U K H H"]:
    """Sum of O'O over the query heads of each key/value head, on the host."""
    return to_host(_output_metrics(o, kv_heads)).astype(np.float64)


@functools.partial(jax.jit, static_argnums=1)
def _output_metrics(o: Float[Array, "U D N H"], kv_heads: int) -> Float[Array, "U K H H"]:
    heads = o.reshape(*o.shape[:2], kv_heads, -1, o.shape[-1]).astype(jnp.float32)
    return jnp.einsum("UDKRH,UDKRG->UKHG", heads, heads, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def _turn_queries(
    q: Float[Array, "U N H D"] | Float[Array, "U N H"],
    real: Float[Array, "U K H_half"],
    imag: Float[Array, "U K H_half"],
    pairs: Int[Array, "2 H_half"],
) -> Float[Array, "U N H D"] | Float[Array, "U N H"]:
    """Queries for shared keys: each pair times the conjugate of its head's factor."""
    heads = q.reshape(len(q), real.shape[1], -1, *q.shape[2:])  # U K R H ...
    a, b = (heads[:, :, :, dims].astype(jnp.float32) for dims in pairs)
    real, imag = (jnp.expand_dims(x, (2, *range(4, a.ndim))) for x in (real, imag))
    turned = jnp.concatenate([real * a + imag * b, real * b - imag * a], axis=3).astype(q.dtype)
    return turned[:, :, :, jnp.argsort(pairs.ravel())].reshape(q.shape)
