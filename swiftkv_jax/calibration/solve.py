"""Least squares for the delta's projections, in float64 on the host.

Letters as in `params`; g members of a group, E = D, or D + 1 with biases (a last input of one).

With s the normalised hidden state that enters layer K, y the keys or values that a layer computes
from its own input (keys before rotation) and expectations over calibration tokens, the ridge
regression of y on s is

    W = W0 + (S + l I)^-1 (C - S W0),    S = E[s s'],  C = E[s y'],  l = RIDGE * trace(S) / E

around the layer's own projection W0: layer K's keys and values are W0's of s itself, which this
returns unchanged.

The layers of a group share one basis c(s). For values, errors count as the output projection
passes them on: with B = sum over the query heads of a key/value head of O'O, the best c of rank H
are the leading eigenvectors of the members' stacked W B^1/2 under S (reduced-rank regression;
Izenman 1975), and each layer's values are `mix` times c. A rotary embedding multiplies the pair
(f, f + H/2) of a key by a complex phase, so a key may only be scaled and turned within its pairs:
per pair the best c is the leading eigenvector over the complex numbers, weighted by the energy of
the queries, and the factor of each layer is folded into its queries.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.optimize
from jaxtyping import Complex, Float

RIDGE = 1e-4
"""Ridge penalty relative to the mean eigenvalue of the inputs' second moments."""
_TINY = np.finfo(np.float64).tiny
_SMALLEST = 1e-8  # eigenvalues of an output metric below this share of the largest count as it

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
    """The regression of the module's first formula. `energy` is E[|y|^2] per head."""
    size = len(inputs)
    heads, head_dim = cross.shape[1:]
    matrix = inputs + RIDGE * np.trace(inputs) / size * np.eye(size)
    flat = prior.reshape(size, -1)
    factor = scipy.linalg.cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False)
    flat = flat + scipy.linalg.cho_solve(factor, cross.reshape(size, -1) - inputs @ flat)
    explained = 2 * flat * cross.reshape(size, -1) - flat * (inputs @ flat)
    explained = explained.reshape(size, heads, head_dim).sum((0, 2))
    weights = flat.reshape(size, heads, head_dim).transpose(1, 0, 2)
    return Ridge(weights, explained / np.maximum(energy, _TINY))


class Member(NamedTuple):
    """One layer of a group."""

    k: Float[Array, "K E H"]
    v: Float[Array, "K E H"]
    query_energy: Float[Array, "K H_half"]
    """E[|q|^2] of each rotary pair, summed over the query heads of a key/value head."""
    output_metric: Float[Array, "K H H"]
    """Sum over the query heads of a key/value head of O'O, with O [D, H] of the output
    projection."""

    def reordered(self, order: tuple[int, ...]) -> Member:
        return Member(*(field[list(order)] for field in self))


class Group(NamedTuple):
    """What a group shares, and what each of its members makes of it."""

    k: Float[Array, "K E H"]
    v: Float[Array, "K E H"]
    head_order: tuple[tuple[int, ...], ...]
    """[g][K]: the member's head that reads each shared one."""
    key_factors: Complex[Array, "g K H_half"]
    """A member's keys are these times the shared ones, per rotary pair, heads in shared order."""
    mix: Float[Array, "g K H H"]
    """A member's values are `mix` times the shared ones, heads in shared order."""
    kept_k: float
    """Share of the members' weighted energy that shared keys keep."""
    kept_v: float


def share(inputs: Float[Array, "E E"], members: list[Member], *, pair_heads: bool = True) -> Group:
    """The best shared keys and values of the members, which see the same `inputs` (their mean)."""
    root = _root(inputs)
    orders = (
        _pair(root, members) if pair_heads else [tuple(range(len(members[0].k)))] * len(members)
    )
    members = [member.reordered(order) for member, order in zip(members, orders, strict=True)]
    k, key_factors, kept_k = _share_keys(root, members)
    v, mix, kept_v = _share_values(root, members)
    return Group(k, v, tuple(orders), key_factors, mix, kept_k, kept_v)


def _root(inputs: Float[Array, "E E"]) -> Float[Array, "E E"]:
    """R with R'R = inputs, however close to singular they are."""
    values, vectors = np.linalg.eigh(inputs)
    return np.sqrt(np.maximum(values, 0))[:, None] * vectors.T


def _pairs(x: Float[Array, "*a H"]) -> Complex[Array, "*a H_half"]:
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def _key_parts(root: Array, member: Member) -> Complex[Array, "K E H_half"]:
    """Weighted keys of a member in coordinates in which inputs are white."""
    return _pairs(root @ member.k) * np.sqrt(member.query_energy)[:, None]


def _value_parts(root: Array, member: Member) -> Float[Array, "K E H"]:
    return root @ member.v @ _roots(member.output_metric)[0]


def _roots(metric: Float[Array, "K H H"]) -> tuple[Array, Array]:
    """Square roots of symmetric positive matrices, and their inverses."""
    values, vectors = np.linalg.eigh((metric + metric.mT) / 2)
    values = np.sqrt(np.maximum(values, np.maximum(values[..., -1:] * _SMALLEST, _TINY)))
    return (vectors * values[..., None, :]) @ vectors.mT, (
        vectors / values[..., None, :]
    ) @ vectors.mT


def _share_keys(root: Array, members: list[Member]) -> tuple[Array, Array, float]:
    parts = np.stack([_key_parts(root, member) for member in members])  # g K E F
    gram = np.einsum("jaef,laef->afjl", parts.conj(), parts)
    values, vectors = np.linalg.eigh(gram)
    top = vectors[..., -1]  # K F g
    weights = np.sqrt(np.stack([member.query_energy for member in members], -1))  # K F g
    maps = np.stack([_pairs(member.k) for member in members])  # g K E F
    shared = np.einsum("jaef,afj->aef", maps, top * weights)
    # Scaled to a mean square of one: the gradient's scale, and 8-bit caches.
    scale = np.sqrt(np.maximum(values[..., -1].mean(-1), _TINY) / 2)
    shared /= scale[:, None, None]
    factors = (top.conj() / np.maximum(weights, _TINY)) * scale[:, None, None]
    flat = np.concatenate([shared.real, shared.imag], -1)
    return flat, factors.transpose(2, 0, 1), float(values[..., -1].sum() / values.sum())


def _share_values(root: Array, members: list[Member]) -> tuple[Array, Array, float]:
    head_dim = members[0].v.shape[-1]
    parts = np.concatenate([_value_parts(root, member) for member in members], -1)  # K E gH
    values, vectors = np.linalg.eigh(parts.mT @ parts)
    top = vectors[..., -head_dim:]
    roots, inverses = zip(*(_roots(member.output_metric) for member in members), strict=True)
    stacked = np.concatenate([member.v @ r for member, r in zip(members, roots, strict=True)], -1)
    scale = np.sqrt(np.maximum(values[..., -head_dim:].mean(-1), _TINY))
    shared = stacked @ top / scale[:, None, None]
    blocks = np.split(top, len(members), axis=-2)
    mix = np.stack(
        [
            inverse @ block * scale[:, None, None]
            for inverse, block in zip(inverses, blocks, strict=True)
        ]
    )
    return shared, mix, float(values[..., -head_dim:].sum() / values.sum())


def _pair(root: Array, members: list[Member]) -> list[tuple[int, ...]]:
    """For each member the heads that go with the first one's: the assignment that keeps the largest
    share of the energy, one member after another (Hungarian method)."""
    count, head_dim = members[0].v.shape[0], members[0].v.shape[-1]
    parts = [(_key_parts(root, m), _value_parts(root, m)) for m in members]
    orders = [tuple(range(count))]
    # Per shared head what has been assigned to it: keys g E F, values E gH.
    k_sets, v_sets = [[k] for k in parts[0][0]], [[v] for v in parts[0][1]]
    for k_parts, v_parts in parts[1:]:
        gain = np.zeros((count, count))
        for a, b in itertools.product(range(count), range(count)):
            k = np.stack([*k_sets[a], k_parts[b]])
            gram = np.einsum("jef,lef->fjl", k.conj(), k)
            v = np.concatenate([*v_sets[a], v_parts[b]], -1)
            gain[a, b] = np.linalg.eigvalsh(gram)[:, -1].sum() / sum(
                np.square(np.abs(p)).sum() for p, _ in parts
            ) + np.linalg.eigvalsh(v.T @ v)[-head_dim:].sum() / sum(
                np.square(p).sum() for _, p in parts
            )
        _, order = scipy.optimize.linear_sum_assignment(gain, maximize=True)
        for a, b in enumerate(order):
            k_sets[a].append(k_parts[b])
            v_sets[a].append(v_parts[b])
        orders.append(tuple(int(b) for b in order))
    return orders
