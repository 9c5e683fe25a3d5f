"""The work list of decode attention, and the kernel that combines the results of its entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, plan_decode
from swiftkv_jax.pallas_kernels.decode_plan import make_plan, max_entries, most_tiles
from swiftkv_jax.pallas_kernels.hopper import decode_combine, decode_tuning
from tests.pallas_kernels.interpreted import device_of, under

TILE = 64


def random_case(seed: int):
    """(lengths of rows, what `make_plan` takes): empty, full, short and long rows."""
    rng = np.random.default_rng(seed)
    rows, room = int(rng.integers(1, 40)), int(rng.integers(1, 60))
    longest = rng.choice([room, min(room, 3)]) * TILE
    lengths = rng.integers(0, longest, rows, endpoint=True)
    lengths[rng.random(rows) < 0.2] = rng.choice([0, room * TILE])
    options = {
        "room": room,
        "splits": int(rng.integers(1, 80)),
        "least": int(rng.integers(1, 5)),
    }
    if seed % 2:
        options |= {"window": int(rng.integers(1, 6 * TILE)), "queries": int(rng.integers(1, 4))}
    return lengths, options


@pytest.mark.parametrize("seed", range(8))
def test_every_tile_once(seed):
    lengths, options = random_case(seed)
    plan = make_plan(jnp.asarray(lengths, jnp.int32), tile=TILE, **options)
    entries, of_row = np.asarray(plan.entries), np.asarray(plan.row_entries)
    window, queries = options.pop("window", None), options.pop("queries", 1)
    ends, starts = -(-lengths // TILE), 0 * lengths
    if window is not None:  # the first position that the first query sees
        starts = np.maximum(lengths - queries - window + 1, 0) // TILE
        options["room"] = min(options["room"], most_tiles(window + queries - 1, TILE))
    tiles = ends - starts
    used = of_row[-1, 1]

    assert entries.shape == (max_entries(len(lengths), **options), 3)
    assert used <= len(entries)
    read = [(row, tile) for row, first, end in entries for tile in range(first, end)]
    assert read == [(row, tile) for row, end in enumerate(ends) for tile in range(starts[row], end)]
    assert (entries[used:, 1] == entries[used:, 2]).all()  # past the last split: empty
    assert of_row[0, 0] == 0 and (of_row[1:, 0] == of_row[:-1, 1]).all()
    chunk = max(options["least"], -(-tiles.sum() // options["splits"]))
    for row, (first, end) in enumerate(of_row):
        assert (entries[first:end, 0] == row).all()
        sizes = entries[first:end, 2] - entries[first:end, 1]
        assert end - first == -(-tiles[row] // chunk)
        assert (sizes[:-1] == sizes[:1]).all() and (0 < sizes).all()
        assert (sizes[-1:] <= sizes[:1]).all() and (sizes <= chunk).all()


def test_the_number_of_entries_does_not_grow_with_the_room():
    assert max_entries(64, room=2048, splits=66, least=4) == 130
    assert max_entries(64, room=10**6, splits=66, least=4) == 130
    assert max_entries(2, room=8, splits=66, least=4) == 4
    plan = make_plan(jnp.full(64, 10**5), tile=64, room=2048, splits=66, least=4, window=65)
    assert plan.entries.shape[0] == 64


def test_one_long_row_keeps_all_multiprocessors_busy():
    """And a batch of rows of the same length is one split a row."""
    splits = decode_tuning.splits(kv_heads=8)
    options = {"tile": TILE, "room": 2048, "splits": splits, "least": decode_tuning.LEAST_TILES}
    alone = make_plan(jnp.asarray([32768]), **options)
    assert alone.row_entries[0, 1] * 8 >= 2 * 132
    ragged = make_plan(jnp.asarray([131_072] + 63 * [64]), **options)
    assert 60 <= ragged.row_entries[0, 1] <= 66 and ragged.row_entries[-1, 1] <= 130
    equal = make_plan(jnp.full(64, 2048), **options)
    assert (equal.row_entries == np.arange(64)[:, None] + [0, 1]).all()


# Results of entries -----------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "columns", "queries"), [(128, 8, 4), (80, 8, 8), (256, 24, 20)]
)
def test_combine(head_dim, columns, queries):
    """Rows of many splits, none, one, and some of which a query sees nothing."""
    rng = np.random.default_rng(0)
    o = rng.normal(size=(16, 2, head_dim, columns)).astype(np.float32)
    lse = 5 * rng.normal(size=(16, 2, columns)).astype(np.float32)
    lse[11:, :, 1], o[11:, :, :, 1] = decode_combine.UNSEEN, 0
    lse[12, :, 0], o[12, :, :, 0] = decode_combine.UNSEEN, 0
    of_row = np.array([[0, 10], [10, 10], [10, 11], [11, 14]])
    o[14:], lse[14:] = np.nan, np.nan  # no row's
    expected = np.zeros((4, 2, queries, head_dim))
    expected_lse = np.full((4, 2, queries), -np.inf)
    for row, (first, end) in enumerate(of_row):
        weights = np.exp(np.float64(lse[first:end]) - lse[first:end].max(axis=0, initial=-1e30))
        total = np.einsum("wkc,wkhc->kch", weights, o[first:end])
        mean = total / np.maximum(weights.sum(axis=0), 1e-300)[:, :, None]
        expected[row] = mean[:, :queries]
        sums = np.exp(np.float64(lse[first:end])).sum(axis=0)[:, :queries]
        expected_lse[row] = np.log(sums, where=sums > 0, out=expected_lse[row])
    with device_of("hopper"):
        combine = functools.partial(
            decode_combine.combine, queries=queries, dtype=jnp.bfloat16, return_lse=True
        )
        found, found_lse = jax.block_until_ready(
            jax.jit(combine)(jnp.asarray(o), jnp.asarray(lse), jnp.asarray(of_row, jnp.int32))
        )
        found = np.float32(found)
    np.testing.assert_allclose(found, expected, atol=1e-2, rtol=5e-3)
    np.testing.assert_allclose(found_lse, expected_lse, atol=1e-4, rtol=1e-5)


# The op -----------------------------------------------------------------------


def operands(rows=2, dtype=jnp.bfloat16):
    q = jax.ShapeDtypeStruct((rows, 1, 8, 64), dtype)
    k = jax.ShapeDtypeStruct((rows, 2, 512, 64), dtype)
    return q, k, k, jax.ShapeDtypeStruct((rows,), jnp.int32)


def plan_of(q, k, length, **options):
    return jax.eval_shape(lambda length: plan_decode(q, k, length, **options), length)


@pytest.mark.parametrize(("device", "planned"), [("H200", True), ("A100", False), ("v5e", False)])
def test_only_hopper_plans(device, planned):
    q, k, _, length = operands()
    with under(device):
        plan = plan_of(q, k, length)
    assert (plan is not None) == planned
    assert plan_of(q, k, length, implementation="xla") is None


def test_a_plan_of_other_shapes_is_refused():
    q, k, v, length = operands()
    with under("H200"):
        plan = plan_of(q, k, length)
        other = operands(rows=3)
        jax.eval_shape(lambda *x: decode_attention(*x[:4], plan=x[4]), q, k, v, length, plan)
        with pytest.raises(ValueError, match="plan is for 2 rows .* this call has 3 rows"):
            jax.eval_shape(lambda *x: decode_attention(*x[:4], plan=x[4]), *other, plan)


def test_a_plan_is_for_one_window():
    q, k = jnp.zeros((2, 1, 8, 64), jnp.bfloat16), jnp.zeros((2, 2, 512, 64), jnp.bfloat16)
    length = jnp.asarray([512, 100])
    with under("H200"):
        plan = plan_decode(q, k, length, window=70)
        assert plan is not None and plan.window == 70
        ends = [[0, 442 // plan.tile, 512 // plan.tile], [1, 30 // plan.tile, -(-100 // plan.tile)]]
        np.testing.assert_array_equal(plan.entries[:2], ends)
        for window in (None, 71):
            call = functools.partial(decode_attention, q, k, k, length, window=window)
            with pytest.raises(ValueError, match=f"plan is for window=70, .* window={window}"):
                jax.eval_shape(lambda plan, call=call: call(plan=plan), plan)
        unhidden = plan_decode(q, k, length, window=512)
        assert unhidden is not None and unhidden.window is None
