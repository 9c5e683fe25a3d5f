"""Least squares for the delta's projections, in float64 on the host.

Letters as in `params`; g members of a group, E = D, or D + 1 with biases (a last input of one).

With s the normalised hidden state that enters layer K, y the keys or values that a layer computes
from its own input (keys before rotation) and expectations over calibration tokens, the ridge
regression of y on s is

    W = W0 + (S + l I)^-1 (C - S W0),    S = E[s s'],  C = E[s y'],  l = RIDGE * trace(S) / E

around the layer's own projection W0: layer K's keys and values are W0's of s itself, which this
returns unchanged.

A regression shrinks: E[W's . y] = R2 E|y|^2, so a key's score with a query that looks for it is too
low by the factor R2 ("attenuation", Spearman 1904). That is the same for all keys as long as all
are regressed. Where generated tokens keep the keys of the layer itself (`Config.generated_kv` own)
it takes attention away from the prompt, so `divide_keys_by_r2` divides the keys by it. Values enter
attention's output linearly, where least squares is right as it is.

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
MIN_R2 = 0.5
"""The smallest R2 that keys are divided by: below it most of a scaled key would be error."""
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
    """The regression of the module's first formula. `energy` is E[|y|^2] per head.

    Overwrites `inputs`, the largest array, with its factor: 2.1 GB where E is 16,384.
    """
    size = len(inputs)
    heads, head_dim = cross.shape[1:]
    flat, target = prior.reshape(size, -1), cross.reshape(size, -1)
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
    return Ridge(weights, explained / np.maximum(energy, _TINY))


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


def share(inputs: Float[Array, "E E"], members: list[Member]) -> Group:
    """The best shared keys and values of the members. `inputs` are the second moments of their
    inputs, averaged over them.

    Most time and memory goes into the second moments of all members' keys and values together: a
    product of E x E and E x 2 g K H, and (g K H)^2 numbers.
    """
    count = len(members[0].k)
    keys = np.concatenate([_weighted_keys(member) for member in members])  # gK E F, complex
    values = np.concatenate([_weighted_values(member) for member in members])  # gK E H
    k_moments, v_moments = _key_moments(inputs, keys), _value_moments(inputs, values)
    orders = _pair(k_moments, v_moments, count)
    # [K][g]: the members' heads for each shared one, as `keys` and `values` count them.
    heads = np.stack([number * count + np.array(order) for number, order in enumerate(orders)], 1)
    members = [member.reordered(order) for member, order in zip(members, orders, strict=True)]
    k, key_factors, kept_k = _share_keys(keys, k_moments, heads, members)
    v, mix, kept_v = _share_values(values, v_moments, heads, members)
    return Group(k, v, tuple(orders), key_factors, mix, kept_k, kept_v)


def _pairs(x: Float[Array, "*a H"]) -> Complex[Array, "*a H_half"]:
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def _weighted_keys(member: Member) -> Complex[Array, "K E H_half"]:
    return _pairs(member.k) * np.sqrt(member.query_energy)[:, None]


def _weighted_values(member: Member) -> Float[Array, "K E H"]:
    return member.v @ _roots(member.output_metric)[0]


def _key_moments(
    inputs: Float[Array, "E E"], keys: Complex[Array, "M E F"]
) -> Complex[Array, "F M M"]:
    """x' S x over heads, for each rotary pair, with x' the conjugate transpose."""
    seen = inputs @ np.real(keys) + 1j * (inputs @ np.imag(keys))
    return keys.transpose(2, 0, 1).conj() @ seen.transpose(2, 1, 0)


def _value_moments(
    inputs: Float[Array, "E E"], values: Float[Array, "M E H"]
) -> Float[Array, "M H M H"]:
    heads, size, head_dim = values.shape
    flat = values.transpose(1, 0, 2).reshape(size, -1)
    return (flat.T @ (inputs @ flat)).reshape(heads, head_dim, heads, head_dim)


def _roots(metric: Float[Array, "K H H"]) -> tuple[Array, Array]:
    """Square roots of symmetric positive matrices, and their inverses."""
    values, vectors = np.linalg.eigh((metric + metric.mT) / 2)
    values = np.sqrt(np.maximum(values, np.maximum(values[..., -1:] * _SMALLEST, _TINY)))
    return (vectors * values[..., None, :]) @ vectors.mT, (
        vectors / values[..., None, :]
    ) @ vectors.mT


def _share_keys(
    keys: Array, moments: Array, heads: Array, members: list[Member]
) -> tuple[Array, Array, float]:
    chosen = moments[:, heads[:, :, None], heads[:, None]].transpose(1, 0, 2, 3)  # K F g g
    values, vectors = np.linalg.eigh(chosen)
    top = vectors[..., -1]  # K F g
    weights = np.sqrt(np.stack([member.query_energy for member in members], -1))  # K F g
    shared = np.einsum("ajef,afj->aef", keys[heads], top)
    # Scaled to a mean square of one: the gradient's scale, and 8-bit caches.
    scale = np.sqrt(np.maximum(values[..., -1].mean(-1), _TINY) / 2)
    shared /= scale[:, None, None]
    factors = (top.conj() / np.maximum(weights, _TINY)) * scale[:, None, None]
    flat = np.concatenate([shared.real, shared.imag], -1)
    return flat, factors.transpose(2, 0, 1), float(values[..., -1].sum() / values.sum())


def _share_values(
    values: Array, moments: Array, heads: Array, members: list[Member]
) -> tuple[Array, Array, float]:
    head_dim = moments.shape[-1]
    chosen = np.stack([_block(moments, group) for group in heads])  # K gH gH
    stacked = np.stack([np.concatenate(values[group], -1) for group in heads])  # K E gH
    energies, vectors = np.linalg.eigh(chosen)
    top = vectors[..., -head_dim:]
    inverses = [_roots(member.output_metric)[1] for member in members]
    scale = np.sqrt(np.maximum(energies[..., -head_dim:].mean(-1), _TINY))
    shared = stacked @ top / scale[:, None, None]
    blocks = np.split(top, len(members), axis=-2)
    mix = np.stack(
        [
            inverse @ block * scale[:, None, None]
            for inverse, block in zip(inverses, blocks, strict=True)
        ]
    )
    return shared, mix, float(energies[..., -head_dim:].sum() / energies.sum())


def _block(moments: Float[Array, "M H M H"], heads: Array) -> Float[Array, "nH nH"]:
    """The second moments of some heads."""
    size = len(heads) * moments.shape[-1]
    return moments[heads][:, :, heads].reshape(size, size)


def _pair(k_moments: Array, v_moments: Array, count: int) -> list[tuple[int, ...]]:
    """For each member, its heads in the order of the first member's heads that they are paired
    with. Members are assigned one after another, each so that the largest share of the energy is
    kept (Hungarian method)."""
    head_dim = v_moments.shape[-1]
    k_energy = np.trace(k_moments, axis1=1, axis2=2).real.sum()
    v_energy = np.trace(_block(v_moments, np.arange(len(v_moments))))
    orders = [tuple(range(count))]
    sets = [[a] for a in range(count)]  # what has been assigned to each shared head
    for first in range(count, len(v_moments), count):
        gain = np.zeros((count, count))
        for a, b in itertools.product(range(count), range(count)):
            heads = np.array([*sets[a], first + b])
            k, v = k_moments[:, heads[:, None], heads], _block(v_moments, heads)
            gain[a, b] = np.linalg.eigvalsh(k)[:, -1].sum() / k_energy
            gain[a, b] += np.linalg.eigvalsh(v)[-head_dim:].sum() / v_energy
        order = scipy.optimize.linear_sum_assignment(gain, maximize=True)[1].tolist()
        for a, b in enumerate(order):
            sets[a].append(first + b)
        orders.append(tuple(order))
    return orders
