"""Least squares for the delta's projections, in float64 on the host.

Letters as in `params`; g members of a group, E entries of the inputs (`moments.num_inputs`).

With s the normalised boundary state (for keys with taps followed by that of the token before, with
biases by a one), y the keys or values that a layer computes from its own input (keys before
rotation) and expectations over calibration tokens, the ridge regression of y on s is

    W = W0 + (S + l I)^-1 (C - S W0),    S = E[s s'],  C = E[s y'],  l = RIDGE * trace(S) / E

around the layer's own projection W0, which has zeros for the token before: the keys and values of
the layer that the state enters are W0's of s itself, which this returns unchanged.

A regression shrinks: E[W's . y] = R2 E|y|^2, so a key's score with a query that looks for it is too
low by the factor R2 ("attenuation", Spearman 1904). That is the same for all keys as long as all
are regressed. Where generated tokens keep the keys of the layer itself (`Config.generated_kv` own)
it takes attention away from the prompt, so `divide_keys_by_r2` divides the keys by it. Values enter
attention's output linearly, where least squares is right as it is.

The layers of a group share one basis c(s). For values, errors count as the output projection
passes them on: with B = sum over the query heads of a key/value head of O'O, the best c of rank H
are the leading eigenvectors of the members' stacked W B^1/2 under S (reduced-rank regression;
Izenman 1975), and each layer's values are `mix` times c. A rotary embedding multiplies each pair of
a key's entries (`rope.paired_dims`) by a complex phase, so a key may only be scaled and turned
within its pairs: per pair the best c is the leading eigenvector over the complex numbers, weighted
by the energy of the queries, and the factor of each layer is folded into its queries. Entries that
do not rotate are treated alike, in pairs.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.optimize
from jaxtyping import Complex, Float, Int

RIDGE = 1e-4
"""Ridge penalty relative to the mean eigenvalue of the inputs' second moments."""
MAP_RIDGE = 1e-3
"""The same for the maps in place of MLPs."""
MIN_R2 = 0.5
"""The smallest R2 that keys are divided by: below it most of a scaled key would be error."""
_SMALLEST_METRIC = 1e-8
"""Added to output metrics, in shares of the group's largest trace: a head that is not read at all,
or a direction of one, has no inverse."""
_SMALLEST_ENERGY = 1e-12
"""Added to the energy of queries, in shares of the group's largest."""

Array = np.ndarray


class Ridge(NamedTuple):
    """A layer's keys, or values, as a linear function of the hidden state that enters layer K."""

    weights: Float[Array, "K E H"]
    r2: Float[Array, " K"]
    """Share of the mean square that is explained, per key/value head."""


def ridge(
    inputs: Float[Array, "E E"],
    cross: Float[Array, "E K H"],
    energy: Float[Array, " K"],
    prior: Float[Array, "E K H"],
) -> Ridge:
    """The regression of the module's first formula. `energy` is E[|y|^2] per head.

    Overwrites `inputs`, the largest array, with its factor: 2.1 GB where E is 16,384.
    """
    size = len(inputs)
    heads, head_dim = cross.shape[1:]
    flat = prior.reshape(size, -1)
    target = cross.reshape(size, -1)
    residual = target - inputs @ flat
    penalty = RIDGE * np.trace(inputs) / size
    inputs.flat[:: size + 1] += penalty
    # LAPACK works in place on columns, which the rows of a symmetric matrix are
    factor = scipy.linalg.cho_factor(inputs.T, lower=True, overwrite_a=True, check_finite=False)
    change = scipy.linalg.cho_solve(factor, residual, overwrite_b=True, check_finite=False)
    flat = flat + change
    # 2 W'C - W'S W, of which S W is C less the penalty's part
    explained = flat * (target + penalty * change)
    explained = explained.reshape(size, heads, head_dim).sum((0, 2))
    weights = flat.reshape(size, heads, head_dim).transpose(1, 0, 2)
    # a head whose keys are all 0 has nothing to explain
    return Ridge(weights, np.divide(explained, energy, out=np.ones_like(energy), where=energy != 0))


def ridge_map(
    inputs: Float[Array, "E E"], cross: Float[Array, "E D"], energy: float
) -> tuple[Float[Array, "D E"], float]:
    """The regression A of y on s around zero, [outputs, inputs], with `MAP_RIDGE` for `RIDGE`, and
    its R2. `inputs` is E[s s'], `cross` E[s y'], `energy` E[|y|^2]. Overwrites `inputs`."""
    size = len(inputs)
    penalty = MAP_RIDGE * np.trace(inputs) / size
    inputs.flat[:: size + 1] += penalty
    factor = scipy.linalg.cho_factor(inputs.T, lower=True, overwrite_a=True, check_finite=False)
    found = scipy.linalg.cho_solve(factor, cross, check_finite=False)
    explained = float((found * (cross + penalty * found)).sum())
    return np.ascontiguousarray(found.T), explained / energy if energy else 1.0


def divide_keys_by_r2(keys: Float[Array, "K E H"], r2: Float[Array, " K"]) -> Float[Array, "K E H"]:
    """A regression's keys, scaled so that their projection onto the layer's own keys is right on
    average: E[k_hat . k] = E|k|^2 for each head. Values of `r2` below `MIN_R2` count as
    `MIN_R2`."""
    return keys / np.maximum(r2, MIN_R2)[:, None, None]


class Member(NamedTuple):
    """One layer of a group."""

    k: Float[Array, "K E H"]
    v: Float[Array, "K E H"]
    query_energy: Float[Array, "K H_half"]
    """E[|q|^2] of each pair, summed over the query heads of a key/value head."""
    output_metric: Float[Array, "K H H"]
    """Sum over the query heads of a key/value head of O'O, with O [D, H] of the output
    projection."""


class Group(NamedTuple):
    """Keys and values that a group shares, and how each of its members uses them."""

    k: Float[Array, "K E H"]
    v: Float[Array, "K E H"]
    head_order: tuple[tuple[int, ...], ...]
    """[g][K]: the member's head that reads each shared one."""
    key_factors: Complex[Array, "g K H_half"]
    """A member's keys are these times the shared ones, per pair, heads in shared order."""
    mix: Float[Array, "g K H H"]
    """A member's values are `mix` times the shared ones, heads in shared order."""
    kept_k: float
    """Share of the members' weighted energy that shared keys keep."""
    kept_v: float


def share(
    inputs: Float[Array, "E E"], members: list[Member], pairs: Int[Array, "2 H_half"]
) -> Group:
    """The best shared keys and values of the members. `inputs` are the second moments of their
    inputs, averaged over them; `pairs` are the entries of a key that rotate together, as from
    `rope.paired_dims`.

    Most time goes into products of E x E and E x K H, two for each member, and most memory into the
    second moments of all members' keys and values together, (g K H)^2 (1 + 1 / H) numbers. Arrays
    of E rows are those of one member at a time.
    """
    count = len(members[0].k)
    members = _invertible(members)
    k_moments, v_moments = _moments(inputs, members, pairs)
    orders = _pair(k_moments, v_moments, count)
    # [K][g]: the members' heads for each shared one, as the moments count them.
    heads = np.stack([number * count + np.array(order) for number, order in enumerate(orders)], 1)
    k_chosen = k_moments[:, heads[:, :, None], heads[:, None]].transpose(1, 0, 2, 3)  # K F g g
    size = len(members) * members[0].v.shape[-1]
    v_chosen = np.empty((count, size, size))  # K gH gH
    for group, chosen in zip(heads, v_chosen, strict=True):
        chosen[:] = _block(v_moments, group)
    del k_moments, v_moments
    k, key_factors, kept_k = _share_keys(k_chosen, members, orders, pairs)
    v, mix, kept_v = _share_values(v_chosen, members, orders)
    return Group(k, v, tuple(orders), key_factors, mix, kept_k, kept_v)


def _invertible(members: list[Member]) -> list[Member]:
    """The members with weights that can be divided by."""
    metric = max(np.trace(m.output_metric, axis1=1, axis2=2).max() for m in members)
    energy = max(m.query_energy.max() for m in members)
    identity = np.eye(members[0].v.shape[-1]) * (metric * _SMALLEST_METRIC or 1.0)
    return [
        m._replace(
            output_metric=(m.output_metric + m.output_metric.mT) / 2 + identity,
            query_energy=m.query_energy + (energy * _SMALLEST_ENERGY or 1.0),
        )
        for m in members
    ]


def share_bytes(members: int, kv_heads: int, size: int, head_dim: int) -> float:
    """Memory that `share` takes at its peak beside its arguments, with the eigenvectors' work
    arrays."""
    rows = kv_heads * head_dim
    group = members * head_dim
    own = 8.0 * size * rows
    square = 8.0 * group**2
    chosen = 8.0 * kv_heads * group**2
    moments = 8.0 * (members * rows) ** 2 * (1 + 1 / head_dim)
    while_gathered = moments + 3 * own + 8.0 * rows**2
    while_chosen = moments + chosen + square
    while_factored = 2 * chosen + own + max(3 * square, own + 2 * 8.0 * size * head_dim)
    metrics = 8.0 * members * rows * head_dim
    return metrics + max(while_gathered, while_chosen, while_factored)


def _weighted_keys(member: Member, pairs: Int[Array, "2 H_half"]) -> Float[Array, "K E H"]:
    weights = np.empty((len(member.k), member.k.shape[-1]))
    weights[:, pairs] = np.sqrt(member.query_energy)[:, None]
    return member.k * weights[:, None]


def _weighted_values(member: Member) -> Float[Array, "K E H"]:
    return member.v @ _roots(member.output_metric)[0]


def _moments(
    inputs: Float[Array, "E E"], members: list[Member], pairs: Int[Array, "2 H_half"]
) -> tuple[Complex[Array, "F M M"], Float[Array, "M H M H"]]:
    """x' S x over all members' heads, with x' the conjugate transpose: of the keys for each pair,
    of the values for all entries of two heads."""
    count, _, head_dim = members[0].k.shape
    size = len(members) * count
    half = head_dim // 2
    k_moments = np.empty((half, size, size), np.complex128)
    v_moments = np.empty((size, head_dim, size, head_dim))
    parts = [slice(first, first + count) for first in range(0, size, count)]
    for number, member in enumerate(members):
        here = parts[number]
        seen = _by_pair(inputs @ _weighted_keys(member, pairs), pairs).mT  # F E K
        for there, other in zip(parts, members[: number + 1], strict=False):
            block = _by_pair(_weighted_keys(other, pairs), pairs).conj() @ seen
            k_moments[:, there, here], k_moments[:, here, there] = block, block.conj().mT
        seen = inputs @ _flat(_weighted_values(member))
        for there, other in zip(parts, members[: number + 1], strict=False):
            block = (_flat(_weighted_values(other)).T @ seen).reshape(count, head_dim, count, -1)
            v_moments[there, :, here], v_moments[here, :, there] = (
                block,
                block.transpose(2, 3, 0, 1),
            )
        del seen
    return k_moments, v_moments


def _by_pair(keys: Float[Array, "K E H"], pairs: Int[Array, "2 H_half"]) -> Complex[Array, "F K E"]:
    """Contiguous, for matrix products, and without temporary arrays."""
    found = np.empty((pairs.shape[1], *keys.shape[:2]), np.complex128)
    for pair, (a, b) in zip(found, pairs.T, strict=True):
        pair.real = keys[..., a]
        pair.imag = keys[..., b]
    return found


def _flat(values: Float[Array, "K E H"]) -> Float[Array, "E K*H"]:
    return values.transpose(1, 0, 2).reshape(values.shape[1], -1)


def _roots(metric: Float[Array, "K H H"]) -> tuple[Array, Array]:
    """Square roots of symmetric positive definite matrices, and their inverses."""
    values, vectors = np.linalg.eigh(metric)
    values = np.sqrt(values)
    return (vectors * values[..., None, :]) @ vectors.mT, (
        vectors / values[..., None, :]
    ) @ vectors.mT


def _share_keys(
    moments: Complex[Array, "K F g g"],
    members: list[Member],
    orders: list[tuple[int, ...]],
    pairs: Int[Array, "2 H_half"],
) -> tuple[Array, Array, float]:
    values, vectors = np.linalg.eigh(moments)
    top = vectors[..., -1]  # K F g
    shared = np.zeros((len(moments), members[0].k.shape[1], moments.shape[1]), np.complex128)
    for number, (member, order) in enumerate(zip(members, orders, strict=True)):
        for head, own in enumerate(order):
            keys = _by_pair(member.k[own][None], pairs)[:, 0].T * np.sqrt(member.query_energy[own])
            shared[head] += keys * top[head, :, number]
    # Scaled to a mean square of one: the gradient's scale, and 8-bit caches.
    scale = _root_or_one(values[..., -1].mean(-1) / 2)
    shared /= scale[:, None, None]
    energies = [m.query_energy[list(order)] for m, order in zip(members, orders, strict=True)]
    weights = np.sqrt(np.stack(energies, -1))  # K F g
    factors = (top.conj() / weights) * scale[:, None, None]
    flat = np.empty((*shared.shape[:2], pairs.size))
    flat[..., pairs[0]], flat[..., pairs[1]] = shared.real, shared.imag
    return flat, factors.transpose(2, 0, 1), _kept(values[..., -1:], values)


def _share_values(
    moments: Float[Array, "K gH gH"], members: list[Member], orders: list[tuple[int, ...]]
) -> tuple[Array, Array, float]:
    head_dim = members[0].v.shape[-1]
    energies, vectors = np.linalg.eigh(moments)
    top = vectors[..., -head_dim:]
    scale = _root_or_one(energies[..., -head_dim:].mean(-1))[:, None, None]
    shared = np.zeros((len(moments), *members[0].v.shape[1:]))
    mix = []
    for member, order, block in zip(
        members, orders, np.split(top, len(members), axis=-2), strict=True
    ):
        roots, inverses = _roots(member.output_metric[list(order)])
        for head, own in enumerate(order):
            shared[head] += member.v[own] @ (roots[head] @ block[head])
        mix.append(inverses @ block * scale)
    shared /= scale
    return shared, np.stack(mix), _kept(energies[..., -head_dim:], energies)


def _root_or_one(mean_square: Float[Array, " K"]) -> Float[Array, " K"]:
    """Return the divisor of shared keys or values: their root mean square, or 1 for a head where
    all are 0."""
    return np.where(mean_square > 0, np.sqrt(np.maximum(mean_square, 0)), 1.0)


def _kept(part: Array, whole: Array) -> float:
    total = whole.sum()
    return float(part.sum() / total) if total > 0 else 1.0


def _block(moments: Float[Array, "M H M H"], heads: Array) -> Float[Array, "nH nH"]:
    """The second moments of some heads."""
    count = len(heads)
    head_dim = moments.shape[-1]
    block = np.empty((count, head_dim, count, head_dim))
    for (i, a), (j, b) in itertools.product(enumerate(heads), repeat=2):
        block[i, :, j] = moments[a, :, b]
    return block.reshape(count * head_dim, -1)


def _pair(k_moments: Array, v_moments: Array, count: int) -> list[tuple[int, ...]]:
    """For each member, its heads in the order of the first member's heads that they are paired
    with. Members are assigned one after another, each so that the largest share of the energy is
    kept (Hungarian method)."""
    head_dim = v_moments.shape[-1]
    k_energy = np.trace(k_moments, axis1=1, axis2=2).real.sum() or 1.0
    v_energy = np.einsum("ahah->", v_moments) or 1.0
    orders = [tuple(range(count))]
    sets = [[a] for a in range(count)]  # what has been assigned to each shared head
    for first in range(count, len(v_moments), count):
        gain = np.zeros((count, count))
        for a, b in itertools.product(range(count), range(count)):
            heads = np.array([*sets[a], first + b])
            k = k_moments[:, heads[:, None], heads]
            v = _block(v_moments, heads)
            gain[a, b] = np.linalg.eigvalsh(k)[:, -1].sum() / k_energy
            gain[a, b] += np.linalg.eigvalsh(v)[-head_dim:].sum() / v_energy
        order = scipy.optimize.linear_sum_assignment(gain, maximize=True)[1].tolist()
        for a, b in enumerate(order):
            sets[a].append(first + b)
        orders.append(tuple(order))
    return orders
