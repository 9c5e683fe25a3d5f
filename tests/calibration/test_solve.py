"""The formulas of the closed form against brute force."""

import itertools
import tracemalloc

import numpy as np
import pytest

from swiftkv_jax.calibration import solve

RNG = np.random.default_rng(0)


def halves(head_dim: int) -> np.ndarray:
    """Pairs of a head all of which rotates."""
    return np.arange(head_dim).reshape(2, -1)


def random_inputs(size: int, count: int = 400) -> np.ndarray:
    return RNG.normal(size=(count, size)) @ RNG.normal(size=(size, size))


def test_ridge_finds_a_linear_map_and_says_how_much_it_explains():
    s = RNG.normal(size=(400, 6))
    weights = RNG.normal(size=(2, 6, 4))  # K E H
    y = np.einsum("ne,keh->nkh", s, weights)
    noisy = y + RNG.normal(size=y.shape) * y.std()
    for target, explained in ((y, 1.0), (noisy, None)):
        moment = s.T @ s / len(s)
        cross = np.einsum("ne,nkh->ekh", s, target) / len(s)
        energy = np.square(target).sum(-1).mean(0)
        found = solve.ridge(moment, cross, energy, np.zeros((6, 2, 4)))
        fitted = np.einsum("ne,keh->nkh", s, found.weights)
        left = np.square(target - fitted).sum(-1).mean(0)
        np.testing.assert_allclose(found.r2, 1 - left / energy, atol=1e-9)
        if explained:
            np.testing.assert_allclose(found.r2, explained, atol=1e-5)
            np.testing.assert_allclose(found.weights, weights, rtol=0.01, atol=0.01)


def test_keys_are_scaled_to_be_the_layers_own_on_average():
    """A regression's slope on what it predicts is its R2: the control."""
    s = RNG.normal(size=(4000, 6))
    k = np.einsum("ne,keh->nkh", s, RNG.normal(size=(2, 6, 4)))
    k += RNG.normal(size=k.shape) * np.array([1.0, 2.0])[:, None]
    energy = np.square(k).sum(-1).mean(0)
    fitted = solve.ridge(
        s.T @ s / len(s), np.einsum("ne,nkh->ekh", s, k) / len(s), energy, np.zeros((6, 2, 4))
    )

    def slopes(weights):
        return np.einsum("ne,keh,nkh->k", s, weights, k) / len(s) / energy

    assert np.all(fitted.r2 < 0.9) and np.all(fitted.r2 > solve.MIN_R2)
    np.testing.assert_allclose(slopes(fitted.weights), fitted.r2, rtol=1e-3)
    np.testing.assert_allclose(slopes(solve.divide_keys_by_r2(*fitted)), 1, rtol=1e-3)
    poor = solve.divide_keys_by_r2(fitted.weights, np.array([1e-3, -1.0]))
    np.testing.assert_array_equal(poor, fitted.weights / solve.MIN_R2)


def test_ridge_keeps_its_prior_where_no_token_says_anything():
    s = random_inputs(6)
    s[:, 3:] = 0
    prior = RNG.normal(size=(6, 1, 4))
    y = s @ RNG.normal(size=(6, 4))
    found = solve.ridge(
        s.T @ s / len(s), (s.T @ y / len(s))[:, None], np.square(y).sum(1).mean()[None], prior
    )
    np.testing.assert_allclose(found.weights[0, 3:], prior[3:, 0], rtol=1e-6)


def test_shared_keys_of_one_pair_are_the_best_there_are():
    """Two layers, one head, one rotary pair: no complex direction c = t_1 y_1 + t_2 y_2 leaves less
    of the keys unexplained, weighted by the queries' energy."""
    s = random_inputs(5)
    inputs = s.T @ s / len(s)
    energies = (0.7, 2.1)
    members = [
        solve.Member(
            k=RNG.normal(size=(1, 5, 2)),
            v=RNG.normal(size=(1, 5, 2)),
            query_energy=np.array([[energy]]),
            output_metric=np.eye(2)[None],
        )
        for energy in energies
    ]
    group = solve.share(inputs, members, halves(2))
    y = np.stack([s @ (m.k[0, :, 0] + 1j * m.k[0, :, 1]) for m in members], 1)

    def loss(c, factors):
        left = np.square(np.abs(y - np.outer(c, factors))).mean(0)
        return left @ np.array(energies)

    shared = s @ (group.k[0, :, 0] + 1j * group.k[0, :, 1])
    ours = loss(shared, group.key_factors[:, 0, 0])
    assert np.isclose(np.square(np.abs(shared)).mean(), 2.0)  # one per real number
    total = np.square(np.abs(y)).mean(0) @ np.array(energies)
    assert np.isclose(group.kept_k, 1 - ours / total)
    angles = np.linspace(0, np.pi / 2, 40)
    for angle in angles:
        for phase in np.linspace(0, 2 * np.pi, 40):
            c = y @ np.array([np.cos(angle), np.exp(1j * phase) * np.sin(angle)])
            best = c.conj() @ y / (c.conj() @ c)
            assert ours <= loss(c, best) + 1e-9


@pytest.mark.parametrize("pairs", [[[0, 1, 2], [3, 4, 5]], [[0, 2, 3], [1, 4, 5]]], ids=str)
def test_keys_that_differ_by_a_factor_of_each_pair_share_all(pairs):
    """Also where a part of a head rotates, here 2 of 6 entries. The control: other pairs."""
    pairs, other = np.array(pairs), np.array([[0, 1, 2], [4, 5, 3]])
    rng = np.random.default_rng(0)
    s, (k, v) = rng.normal(size=(400, 7)), rng.normal(size=(2, 2, 7, 6))
    turned, factors = np.empty_like(k), rng.normal(size=(2, 3, 2)) @ [1, 1j]
    product = (k[..., pairs[0]] + 1j * k[..., pairs[1]]) * factors[:, None]
    turned[..., pairs[0]], turned[..., pairs[1]] = product.real, product.imag
    metric = np.stack([np.eye(6)] * 2)
    members = [solve.Member(keys, v, rng.uniform(0.5, 2, (2, 3)), metric) for keys in (k, turned)]
    group = solve.share(s.T @ s / len(s), members, pairs)
    assert group.kept_k == pytest.approx(1, abs=1e-12)
    for member, order, of_layer in zip(members, group.head_order, group.key_factors, strict=True):
        product = (group.k[..., pairs[0]] + 1j * group.k[..., pairs[1]]) * of_layer[:, None]
        own = member.k[list(order)]
        np.testing.assert_allclose(product.real, own[..., pairs[0]], atol=1e-10)
        np.testing.assert_allclose(product.imag, own[..., pairs[1]], atol=1e-10)
    assert solve.share(s.T @ s / len(s), members, other).kept_k < 0.99


def test_shared_values_reach_the_bound_of_their_rank():
    """The outputs' error is that of the best approximation of rank H (Eckart and Young)."""
    s = random_inputs(7)
    o = [RNG.normal(size=(9, 2)) for _ in range(3)]
    members = [
        solve.Member(
            k=RNG.normal(size=(1, 7, 2)),
            v=RNG.normal(size=(1, 7, 2)),
            query_energy=np.ones((1, 1)),
            output_metric=(matrix.T @ matrix)[None],
        )
        for matrix in o
    ]
    group = solve.share(s.T @ s / len(s), members, halves(2))
    outputs = np.concatenate(
        [s @ m.v[0] @ matrix.T for m, matrix in zip(members, o, strict=True)], 1
    )
    fitted = np.concatenate(
        [s @ group.v[0] @ mix[0].T @ matrix.T for mix, matrix in zip(group.mix, o, strict=True)], 1
    )
    smallest = np.linalg.svd(outputs, compute_uv=False)[2:]
    np.testing.assert_allclose(np.square(outputs - fitted).sum(), np.square(smallest).sum())
    np.testing.assert_allclose(
        group.kept_v, 1 - np.square(smallest).sum() / np.square(outputs).sum()
    )


@pytest.mark.short("4-4-512-32")
@pytest.mark.parametrize(
    ("count", "kv_heads", "size", "head_dim"),
    [(2, 8, 512, 64), (4, 4, 512, 32), (8, 4, 256, 32), (4, 1, 512, 128)],
)
def test_memory_of_sharing_is_what_is_planned(count, kv_heads, size, head_dim):
    """Where products of inputs, second moments or eigenvectors take most. Arrays are those of one
    member at a time, except for one of all second moments."""
    members = []
    for _ in range(count):
        k, v = RNG.normal(size=(2, kv_heads, size, head_dim))
        metric = np.stack([np.eye(head_dim)] * kv_heads)
        members.append(solve.Member(k, v, np.ones((kv_heads, head_dim // 2)), metric))
    inputs = np.eye(size)
    tracemalloc.start()
    solve.share(inputs, members, halves(head_dim))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    planned = solve.share_bytes(count, kv_heads, size, head_dim)
    print(f"peak {peak:,}, planned {planned:,.0f}")
    assert peak == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("field", solve.Member._fields)
@pytest.mark.parametrize("heads", [slice(0, 1), slice(None)], ids=["one head", "all heads"])
@pytest.mark.parametrize("both", [False, True], ids=["of one layer", "of both"])
def test_heads_that_are_0_share_finite_weights(field, heads, both):
    """Pruned models have them."""
    s = random_inputs(12)
    inputs = s.T @ s / len(s)
    o = RNG.normal(size=(2, 3, 9, 4))
    k, v = RNG.normal(size=(2, 2, 3, 12, 4))
    energies = RNG.uniform(0.5, 2, (2, 3, 2))
    members = list(itertools.starmap(solve.Member, zip(k, v, energies, o.mT @ o, strict=True)))
    for member in members[: 1 + both]:
        getattr(member, field)[heads] = 0
    group = solve.share(inputs, members, halves(4))
    assert all(np.isfinite(leaf).all() for leaf in group), field
    assert 0 < group.kept_k < 1 + 1e-12 and 0 < group.kept_v < 1 + 1e-12
    for leaf in (group.k, group.v, group.key_factors, group.mix):
        assert np.abs(leaf).max() < 1e3
    for member, order, factors, mix in zip(
        members, group.head_order, group.key_factors, group.mix, strict=True
    ):
        for shared, own in enumerate(order):
            if not member.k[own].any():
                np.testing.assert_allclose(group.k[shared] * np.tile(abs(factors[shared]), 2), 0)
            if not member.v[own].any():
                np.testing.assert_allclose(group.v[shared] @ mix[shared].T, 0, atol=1e-6)


def test_ridge_of_keys_that_are_0():
    s = random_inputs(6)
    found = solve.ridge(
        s.T @ s / len(s), np.zeros((6, 2, 4)), np.array([0.0, 0.0]), np.zeros((6, 2, 4))
    )
    np.testing.assert_array_equal(found.weights, 0)
    np.testing.assert_array_equal(found.r2, 1)


def reordered(member: solve.Member) -> solve.Member:
    """With the heads in another order."""
    return solve.Member(*(field[[2, 0, 1]] for field in member))


def test_heads_are_paired_whatever_their_order(monkeypatch):
    """A member's heads in another order: the same shared heads, and the order says which is
    which."""
    s = random_inputs(12)
    base = RNG.normal(size=(2, 3, 12, 4))
    first = solve.Member(base[0], base[1], RNG.uniform(0.5, 2, (3, 2)), np.stack([np.eye(4)] * 3))
    near = solve.Member(
        first.k + 0.1 * RNG.normal(size=first.k.shape),
        first.v + 0.1 * RNG.normal(size=first.v.shape),
        first.query_energy,
        first.output_metric,
    )
    inputs = s.T @ s / len(s)
    straight = solve.share(inputs, [first, near], halves(4))
    turned = solve.share(inputs, [first, reordered(near)], halves(4))
    assert straight.head_order == ((0, 1, 2), (0, 1, 2))
    assert turned.head_order == ((0, 1, 2), (1, 2, 0))
    np.testing.assert_allclose(turned.kept_k, straight.kept_k)
    monkeypatch.setattr(solve, "_pair", lambda *moments: [(0, 1, 2)] * 2)
    unpaired = solve.share(inputs, [first, reordered(near)], halves(4))
    assert unpaired.kept_k < straight.kept_k - 0.05
