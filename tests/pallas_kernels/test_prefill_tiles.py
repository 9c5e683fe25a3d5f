"""Hopper prefill with `persistent` and `multicast`: the order of the tiles, what is refused, and
results where a thread block works on many tiles and where two share their loads."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import choice, prefill_attention
from swiftkv_jax.pallas_kernels.hopper import prefill_tiles
from swiftkv_jax.pallas_kernels.hopper.prefill import Tuning
from swiftkv_jax.pallas_kernels.selfcheck import Case, Row, compare
from tests.pallas_kernels.cases import CASES, case_of, runs
from tests.pallas_kernels.interpreted import device, device_of, under

# Blocks of 64 keys, so that most tiles have several.
TUNINGS = {
    "persistent": Tuning(block_kv=64, persistent=True),
    "multicast": Tuning(block_kv=64, multicast=True, ping_pong=False),
    "both": Tuning(block_kv=64, persistent=True, multicast=True),
}
SHORT = {
    ("both", "ragged rows at different offsets"),
    ("persistent", "documents across blocks"),
    ("multicast", "4 queries a head, odd"),
}


def cases() -> list:
    """(name of a tuning, name of a case) of each combination that the kernel takes; all but the
    most telling are `long`."""
    found = []
    for tuning, (name, case) in itertools.product(TUNINGS, CASES.items()):
        if not runs("hopper", "bfloat16", name) or case.op == "decode":
            continue
        if case.head_dim == 256 and TUNINGS[tuning].persistent:
            continue
        if case.heads // case.kv_heads % 2 and TUNINGS[tuning].multicast:
            continue
        marks = [] if (tuning, name) in SHORT else [pytest.mark.long]
        found.append(pytest.param(tuning, name, marks=marks))
    return found


@pytest.fixture(autouse=True)
def two_multiprocessors(request, monkeypatch):
    """Two thread blocks, or a cluster of two, work on all tiles, on a GPU too."""
    if "tuning" in request.fixturenames:
        monkeypatch.setattr(prefill_tiles, "num_multiprocessors", lambda: 2)


# The order of the tiles -------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3, 66, 132])
@pytest.mark.parametrize("count", [1, 2, 5, 132, 133, 263, 264, 1000, 2048])
def test_each_tile_belongs_to_one_block(count, blocks):
    blocks = min(blocks, count)
    block = jnp.arange(blocks)
    each = np.asarray(prefill_tiles.num_tiles(block, blocks, count))
    rounds = jnp.arange(each.max())
    order = np.asarray(prefill_tiles.nth_tile(rounds[:, None], block, blocks))
    found = [order[n, b] for b in range(blocks) for n in range(each[b])]
    assert sorted(found) == list(range(count))
    assert (
        order[:2].tolist()
        == [
            list(range(blocks)),
            list(range(2 * blocks - 1, blocks - 1, -1)),
        ][: len(order)]
    )


@pytest.mark.parametrize("queries", [2048, 4096, 8192, 16384])
def test_blocks_get_equal_work(queries):
    """32 heads on an H100: the block with the most steps of 128 keys has at most one tile's more
    than the average."""
    tiles = queries // 128
    steps = np.repeat(np.arange(tiles, 0, -1), 32)  # from the longest tile to the shortest
    block = jnp.arange(132)
    each = np.asarray(prefill_tiles.num_tiles(block, 132, len(steps)))
    order = np.asarray(prefill_tiles.nth_tile(jnp.arange(each.max())[:, None], block, 132))
    work = [steps[order[: each[b], b]].sum() for b in range(132)]
    assert max(work) <= np.mean(work) + tiles
    if queries >= 8192:
        assert max(work) < 1.02 * np.mean(work)


def test_as_many_blocks_as_multiprocessors():
    grid = (16, 2, 8)
    with under("H100"):
        assert prefill_tiles.launch(grid, Tuning())["grid"] == grid
        assert prefill_tiles.launch(grid, Tuning(persistent=True))["grid"] == (132,)
        both = prefill_tiles.launch(grid, Tuning(persistent=True, multicast=True))
        assert both["grid"] == (66,) and both["cluster"] == (2,)
        assert prefill_tiles.launch((1, 1, 8), Tuning(persistent=True))["grid"] == (8,)


# What is refused --------------------------------------------------------------


def like(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize(
    ("tuning", "heads", "head_dim", "message"),
    [
        (
            Tuning(block_kv=64, stages=2, persistent=True, ping_pong=False),
            8,
            256,
            "needs 263680 bytes of shared memory with .*persistent=True.* at most 232448 fit",
        ),
        (Tuning(stages=3, persistent=True), 8, 128, "needs 263680 bytes of shared memory"),
        (Tuning(stages=4), 8, 128, "needs 296448 bytes of shared memory"),
        (
            Tuning(multicast=True),
            6,
            128,
            "with multicast takes an even number of query heads to a key/value head, got 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tuning, heads, head_dim, message):
    q, k = like(1, 512, heads, head_dim), like(1, 2, 512, head_dim)
    call = functools.partial(prefill_attention, implementation="hopper", tuning=tuning)
    with under("H100"), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(call, q, k, k)


def test_the_table_is_for_any_heads(monkeypatch):
    """An entry with multicast, which the tuner measures with 4 queries a head."""
    monkeypatch.setattr(choice, "tuning_for", lambda *_: Tuning(multicast=True))
    for heads, multicast in ((8, True), (14, False), (2, False)):
        case = Case("prefill", (Row(),), 512, heads, 2, 512, 128)
        found = choice.choose(device("H100"), case.spec)
        assert found == ("hopper", Tuning(multicast=multicast), None)


# Results ----------------------------------------------------------------------


@pytest.mark.parametrize(("tuning", "name"), cases())
def test_results(tuning, name):
    """Also gradients, for which log-sum-exps are kept."""
    with device_of("hopper"):
        case = case_of(name, "bfloat16")
        found = compare(case, "hopper", runs=1, tuning=TUNINGS[tuning])
    assert found.right, found
