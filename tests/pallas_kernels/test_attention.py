"""Both attention ops, every implementation, against the reference formula over one table of
calls."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention, reference, selfcheck
from swiftkv_jax.pallas_kernels.selfcheck import Case, Row, compare
from tests.pallas_kernels.cases import CASES, FORMATS, ON_DEVICES, case_of, table, tunings
from tests.pallas_kernels.interpreted import device_of

parametrize, LONG = pytest.mark.parametrize, pytest.mark.long
TABLE = [pytest.param(*case[:3], marks=[] if case[3] else LONG) for case in table()]
"""What is not in the short selection is interpreted by `make test-kernels`."""
DEVICES = ["xla", "hopper", "tpu"]


@parametrize(("implementation", "cache_format", "name"), TABLE)
def test_attention(implementation, cache_format, name):
    case = case_of(name, cache_format)
    with device_of(implementation):
        found = compare(case, implementation, runs=1, **tunings(implementation, name))
    assert found.right, found


def test_reference():
    """The formula itself, one query, head and key at a time; a query that sees nothing yields
    zeros."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((2, 3, 4, 6), (2, 2, 5, 6), (2, 2, 5, 6)))
    mask = rng.random((2, 3, 5)) < 0.6
    mask[0, 1] = False
    expected, sums = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, t, n in np.ndindex(2, 3, 4):
        seen = [s for s in range(5) if mask[b, t, s]]
        scores = [4 * np.tanh(q[b, t, n] @ k[b, n // 2, s] / np.sqrt(6) / 4) for s in seen]
        total = np.sum(np.exp(scores))
        for score, s in zip(scores, seen, strict=True):
            expected[b, t, n] += np.exp(score) / total * v[b, n // 2, s]
        if seen:
            sums[b, t, n] = np.log(total)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    out, lse = reference.attention(q, k, v, jnp.asarray(mask), score_cap=4.0, return_lse=True)
    assert (expected[0, 1] == 0).all()
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(lse, sums, atol=1e-6)


def test_masks():
    """What each query of a case sees, one position at a time."""
    for case in CASES.values():
        mask = case.mask()
        ids = case.segment_ids
        for b, row in enumerate(case.rows):
            for t in {0, case.queries // 2, case.queries - 1}:
                at = row.position + t
                first = 0 if case.window is None else at - case.window + 1
                real = row.queries is None or t < row.queries
                visible = case.keys if row.kv_length is None else row.kv_length
                seen = [
                    real
                    and first <= s <= at
                    and s < visible
                    and (not row.documents or ids[b, s] == ids[b, t])
                    for s in range(case.keys)
                ]
                np.testing.assert_array_equal(mask[b, t], seen)


@parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ON_DEVICES else LONG)
        for name, case in CASES.items()
        if case.window or case.spec.kv_lengths
    ],
)
def test_a_wrong_edge_shows(name):
    """In these operands one position more or less is another result."""
    case = case_of(name, "bfloat16")
    drawn = selfcheck.draw(case)
    expected, tolerated = selfcheck.expected_of(case, drawn)
    for wrong in _with_wrong_edges(case):
        if (wrong.mask() == drawn.mask).all():
            continue
        found, _ = selfcheck.expected_of(case, drawn._replace(mask=wrong.mask()))
        assert selfcheck.difference([found], expected, tolerated).error > 2, wrong


def _with_wrong_edges(case: Case) -> list[Case]:
    """The same case with another window, or with other visible keys."""
    changed = []
    for step in (-1, 1):
        if case.window is not None and case.window + step > 0:
            changed.append(dataclasses.replace(case, window=case.window + step))
        if case.spec.kv_lengths:
            moved = tuple(
                row._replace(kv_length=min(max((row.kv_length or 0) + step, 0), case.keys))
                for row in case.rows
            )
            changed.append(dataclasses.replace(case, rows=moved))
    return changed


# Six positions: documents of three and two tokens, one of padding. Rows are queries, columns keys.
PACKED = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
    [0, 0, 0, 1, 1, 0],
    [0, 0, 0, 0, 0, 1],
]


@parametrize("implementation", DEVICES)
def test_packed_picture(implementation):
    """The second row's ids fall and return: any ids will do."""
    case = Case("prefill", (Row(), Row()), 6, 2, 1, 6, 64)
    ids = np.array([[1, 1, 1, 2, 2, 0], [4, 9, 4, 4, 9, 1]])
    again = np.tri(6, dtype=bool) & (ids[1][:, None] == ids[1])
    drawn = selfcheck.draw(case)._replace(mask=np.stack([np.array(PACKED, bool), again]))
    op = functools.partial(
        prefill_attention, segment_ids=jnp.asarray(ids), implementation=implementation
    )
    with device_of(implementation):
        out = jax.jit(op)(drawn.operands.q, drawn.operands.k, drawn.operands.v)
    assert selfcheck.difference([out], *selfcheck.expected_of(case, drawn)).right


@parametrize("implementation", DEVICES)
def test_decode_where_float16_ends(implementation):
    """The value of FP8 keys does not depend on magnitudes that bfloat16 holds and float16 does
    not: queries beyond 65504, next to small ones; values far below and above 1, by turns too."""
    rng, lengths = np.random.default_rng(0), jnp.asarray([150, 131, 97])
    q = 4 * rng.normal(size=(3, 1, 4, 64)) * np.array([1e6, 1e-3, 1e8, 1.0])[:, None]
    q = jnp.asarray(q, jnp.bfloat16)
    k, v = (rng.normal(size=(3, 2, 150, 64)) for _ in "kv")
    k *= np.array([1e-6, 1e-8])[:, None, None]
    unit = np.array([1e-8, 1e8, 1e4])[:, None, None, None]
    v *= unit
    v[2, :, np.arange(150) % 3 != 0] *= 1e-8
    mask = jnp.arange(150) < lengths[:, None, None]
    (k, k_scale, k_values), (v, v_scale, v_values) = (
        selfcheck.as_format(x.astype(np.float32), "float8_e4m3fn", rng) for x in (k, v)
    )
    op = functools.partial(decode_attention, implementation=implementation)
    with device_of(implementation):
        out = jax.jit(op)(q, k, v, lengths, k_scale=k_scale, v_scale=v_scale)
    expected = reference.attention(q, jnp.asarray(k_values), jnp.asarray(v_values), mask)
    np.testing.assert_allclose(np.float32(out) / unit, expected / unit, atol=1.5e-2)


@parametrize("implementation", ["hopper", "tpu"])
def test_the_same_twice(implementation):
    """No result depends on the order in which blocks or threads finish."""
    case = CASES["decode idle rows"]
    with device_of(implementation):
        operands = selfcheck.draw(case).operands
        op = jax.jit(functools.partial(decode_attention, implementation=implementation))
        first, second = (
            np.float32(op(operands.q, operands.k, operands.v, operands.length)) for _ in range(2)
        )
    np.testing.assert_array_equal(first, second)


@parametrize("implementation", ["hopper", "tpu"])
def test_pages_as_long_as_the_queries(implementation):
    """A pool with the shape of whole rows is a pool nevertheless."""
    case = Case("prefill", (Row(prompt=1), Row(prompt=0)), 128, 1, 1, 128, 64, page_size=128)
    with device_of(implementation):
        assert compare(case, implementation, runs=1).right


# Attention to two sets of keys ------------------------------------------------


def rest_of(x, starts):
    """x[B, K, S, H] from `starts[b]` on, as long as it was: what no query sees is at the end."""
    rows = zip(x, starts.tolist(), strict=True)
    return jnp.stack([jnp.roll(row, -start, axis=1) for row, start in rows])


@parametrize("op", ["prefill", "decode"])
@parametrize(
    "implementation", ["xla", pytest.param("hopper", marks=LONG), pytest.param("tpu", marks=LONG)]
)
def test_parts_join_to_the_whole(implementation, op):
    """The first keys of each row in one call, and the rest in another, as if they lay in two
    caches."""
    starts = jnp.asarray([130, 64, 0, 0])
    rows = (Row(200), Row(64, 33), Row(0), Row(250, 0))
    case = Case("prefill", rows, 40, 4, 2, 300, 64)
    if op == "decode":
        rows = tuple(Row(length - 1) for length in (290, 65, 40, 0))
        case = Case("decode", rows, 1, 4, 2, 300, 64)
    form = FORMATS[implementation][0]
    case = dataclasses.replace(case, dtype=form, return_lse=True)
    drawn = selfcheck.draw(case)
    operands = jax.tree.map(jnp.asarray, drawn.operands)
    shared: dict[str, Any] = {"return_lse": True, "implementation": implementation}

    def attend(q, k, v, rest_k, rest_v):
        if op == "decode":
            offset, lengths = jnp.maximum(operands.length - 1, 0), None
            second = decode_attention(q, rest_k, rest_v, operands.length - starts, **shared)
        else:
            offset, lengths = operands.q_offset, operands.lengths
            options = {"q_offset": offset - starts, "lengths": lengths}
            second = prefill_attention(q, rest_k, rest_v, **options, **shared)
        options = {"q_offset": offset, "lengths": lengths, "kv_lengths": starts}
        first = prefill_attention(q, k, v, **options, **shared)
        lse = jnp.logaddexp(first[1], second[1])
        shares = [jnp.exp(part[1] - lse)[..., None] for part in (first, second)]
        out = first[0] * shares[0] + second[0] * shares[1]
        return jnp.where(jnp.isneginf(lse)[..., None], 0, out), lse

    q, k, v = operands.q, operands.k, operands.v
    with device_of(implementation):
        found = jax.jit(attend)(q, k, v, rest_of(k, starts), rest_of(v, starts))
    assert selfcheck.difference([found], *selfcheck.expected_of(case, drawn)).right


def test_a_gradient_of_a_part():
    """XLA has it: in one block and in several."""
    case = Case("prefill", (Row(100, None, 200), Row(0, None, 0)), 300, 2, 1, 290, 16)
    for queries in (300, 40):
        part = dataclasses.replace(case, queries=queries, dtype="float32")
        drawn = selfcheck.draw(part)
        operands = jax.tree.map(jnp.asarray, drawn.operands)

        def attend(q, k, v, operands=operands):
            limits = {"q_offset": operands.q_offset, "kv_lengths": operands.kv_lengths}
            return prefill_attention(q, k, v, **limits, implementation="xla")

        as_gradient = dataclasses.replace(part, op="gradient")
        q = operands.q / 4
        found = jax.vjp(attend, q, operands.k, operands.v)[1](selfcheck.d_out(q))
        drawn = drawn._replace(operands=dataclasses.replace(operands, q=q))
        expected, tolerated = selfcheck.expected_of(as_gradient, drawn)
        assert selfcheck.difference([found], expected, tolerated).right
