"""The ops on meshes: each device on its own rows and heads, the result that of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.pallas_kernels.decode_plan import make_plan
from tests.pallas_kernels.interpreted import under

B, T, N, S, H = 4, 6, 16, 24, 8


def operands(kv_heads: int):
    rng = np.random.default_rng(0)
    shapes = [(B, T, N, H), (B, kv_heads, S, H), (B, kv_heads, S, H)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


# 8 and 4 heads are split over any of these meshes or shared by several devices; of 2 each is always
# shared; 1 is on all devices.
@pytest.mark.parametrize(
    ("shape", "kv_heads"),
    [
        ((1, 1), 4),
        ((8, 1), 2),
        ((4, 2), 8),
        ((4, 2), 1),
        ((2, 4), 2),
        ((2, 4), 8),
        ((1, 8), 4),
        ((1, 8), 16),
    ],
)
def test_every_mesh_agrees(shape, kv_heads):
    q, k, v = operands(kv_heads)
    length = jnp.asarray([24, 6, 17, 9])
    offset = jnp.asarray([0, 18, 7, 1])
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 3, (B, T)).cumsum(axis=1))

    def calls(attention):
        return {
            "prefill": lambda q, k, v: attention.prefill(q, k[:, :, :T], v[:, :, :T]),
            "chunk": lambda q, k, v: attention.prefill(q, k, v, q_offset=jnp.int32(11)),
            "offsets": lambda q, k, v: attention.prefill(q, k, v, q_offset=offset),
            "segments": lambda q, k, v: attention.prefill(
                q, k[:, :, :T], v[:, :, :T], segment_ids=ids
            ),
            "decode": lambda q, k, v: attention.decode(q[:, :2], k, v, length),
            "part": lambda q, k, v: attention.prefill(
                *(q, k, v), q_offset=offset, kv_lengths=length - 6, return_lse=True
            ),
            "decode with log-sum-exps": lambda q, k, v: attention.decode(
                q[:, :2], k, v, length, return_lse=True
            ),
        }

    alone, spread = calls(Attention()), calls(Attention(make_mesh(shape)))
    for name in alone:
        found, expected = (jax.jit(call[name])(q, k, v) for call in (spread, alone))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=2e-6, err_msg=name), found, expected
        )


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 8)])
def test_gradients_agree(shape):
    q, k, v = operands(2)
    k, v = k[:, :, :T], v[:, :, :T]

    def gradient(attention):
        return jax.jit(
            jax.grad(
                lambda *operands: jnp.square(attention.prefill(*operands)).sum(), argnums=(0, 1, 2)
            )
        )(q, k, v)

    for found, expected in zip(
        gradient(Attention(make_mesh(shape))), gradient(Attention()), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_divide_are_replicated():
    q, k, v = (x[:3] for x in operands(4))
    length = jnp.asarray([9, 24, 7])
    found, expected = (
        jax.jit(attention.decode)(q, k, v, length)
        for attention in (Attention(make_mesh((2, 2))), Attention())
    )
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "kv_heads", "rows", "heads", "keys"),
    [((4, 2), 8, 1, 8, 4), ((2, 4), 2, 2, 4, 1), ((1, 8), 16, 4, 2, 2)],
)
def test_each_device_sees_its_part(shape, kv_heads, rows, heads, keys, monkeypatch):
    """The kernel gets `rows` of 4 rows, `heads` of 16 heads and `keys` of the key/value heads."""
    seen = []
    monkeypatch.setattr(
        "swiftkv_jax.pallas_kernels.decode_attention",
        lambda q, k, v, length, **_: seen.append((q.shape, k.shape, length.shape)) or q,
    )
    q, k, v = operands(kv_heads)
    Attention(make_mesh(shape)).decode(q, k, v, jnp.asarray([9, 24, 7, 1]))
    assert seen == [((rows, T, heads, H), (rows, keys, S, H), (rows,))]


def quantised(x):
    scale = jnp.abs(x).max(axis=-1) / 127
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale


@pytest.mark.parametrize(("shape", "kv_heads"), [((2, 4), 2), ((1, 8), 1)])
def test_the_other_options_agree(shape, kv_heads):
    """Ragged rows and scales."""
    q, k, v = operands(kv_heads)
    (k8, k_scale), (v8, v_scale) = quantised(k), quantised(v)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    lengths, length = jnp.asarray([6, 0, 3, 1]), jnp.asarray([24, 6, 0, 9])

    def calls(attention):  # operands are constants of the program
        return {
            "ragged": attention.prefill(q, k, v, lengths=lengths),
            "scales": attention.prefill(q, k8, v8, q_offset=7, **scales),
            "decode with scales": attention.decode(q[:, :2], k8, v8, length, **scales),
        }

    alone, spread = jax.jit(lambda: (calls(Attention()), calls(Attention(make_mesh(shape)))))()
    for name in alone:
        np.testing.assert_allclose(spread[name], alone[name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize(("shape", "kv_heads"), [((2, 4), 2), ((4, 2), 4), ((2, 1), 1)])
def test_a_pool_is_split_like_the_rows(shape, kv_heads):
    """A row uses the pages of its own data-parallel shard, counted from the shard's first."""
    q, k, v = operands(kv_heads)
    (k8, k_scale), (v8, v_scale) = quantised(k), quantised(v)
    lengths, length = jnp.asarray([6, 0, 3, 1]), jnp.asarray([24, 6, 0, 9])
    offset = jnp.asarray([18, 2, 0, 23])
    dp_size, per_row = shape[0], 4  # a row has 3 pages of 8, and the pool one more for each
    rows, pages = B // dp_size, B // dp_size * per_row  # of a shard
    shards = [np.random.default_rng(rank).permutation(pages)[: rows * 3] for rank in range(dp_size)]
    table = np.concatenate(shards).reshape(B, 3)
    first = np.arange(B)[:, None] // rows * pages  # the first page of each row's shard

    def pool(x):  # B K S ... -> X K page ...
        split = jnp.moveaxis(x.reshape(B, kv_heads, 3, 8, *x.shape[3:]), 2, 1)
        unused = jnp.full((B * per_row, *split.shape[2:]), 100, x.dtype)
        return unused.at[first + table].set(split)

    def calls(attention, table):
        scales = {"k_scale": pool(k_scale), "v_scale": pool(v_scale)}
        decode = functools.partial(attention.decode, q[:, :2], page_table=jnp.asarray(table))
        prefill = functools.partial(
            attention.prefill, q, lengths=lengths, page_table=jnp.asarray(table)
        )
        return {
            "decode": decode(pool(k), pool(v), length),
            "decode with scales": decode(pool(k8), pool(v8), length, **scales),
            "prefill": prefill(pool(k), pool(v), q_offset=offset),
            "prefill from 7": prefill(pool(k), pool(v), q_offset=7),
            "prefill with scales": prefill(pool(k8), pool(v8), q_offset=offset, **scales),
            "part": prefill(
                *(pool(k), pool(v)), q_offset=30, kv_lengths=length, window=20, return_lse=True
            ),
        }

    alone, spread = jax.jit(
        lambda: (calls(Attention(), first + table), calls(Attention(make_mesh(shape)), table))
    )()
    for name in alone:
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=2e-6, err_msg=name),
            *(spread[name], alone[name]),
        )


def test_each_device_has_its_part_of_the_pool(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "swiftkv_jax.pallas_kernels.prefill_attention",
        lambda q, k, v, *, page_table, **_: seen.append((q.shape, k.shape, page_table.shape)) or q,
    )
    q, kv = jnp.zeros((B, T, N, H)), jnp.zeros((12, 8, 16, H))
    Attention(make_mesh((2, 4))).prefill(q, kv, kv, page_table=jnp.zeros((B, 3), int))
    assert seen == [((2, T, 4, H), (6, 2, 16, H), (2, 3))]


@pytest.mark.short("shape0-8-1-8-4")
@pytest.mark.parametrize(
    ("shape", "kv_heads", "rows", "heads", "keys"),
    [
        ((4, 2), 8, 1, 8, 4),
        ((2, 4), 2, 2, 4, 1),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (((1, 8), 16, 4, 2, 2), ((8, 1), 4, 4, 16, 4))
        ),
    ],
)
def test_each_shard_plans_its_own_rows(shape, kv_heads, rows, heads, keys, monkeypatch):
    """From the shapes that its devices have; and each device decodes with its shard's plan."""
    lengths, planned, decoded = jnp.asarray([9, 24, 0, 1]), [], []

    def plan_of(length):
        return make_plan(length, tile=8, room=3, splits=4, least=1)

    def plan_decode(q, k, length, **_):
        planned.append((q.shape, k.shape, length.shape))
        return plan_of(length)

    def decode(q, k, v, length, *, plan, **_):
        decoded.append((plan.entries.shape, plan.row_entries.shape))
        return q

    monkeypatch.setattr("swiftkv_jax.pallas_kernels.plan_decode", plan_decode)
    monkeypatch.setattr("swiftkv_jax.pallas_kernels.decode_attention", decode)
    q, k, v = operands(kv_heads)
    attention = Attention(make_mesh(shape))
    plan = attention.plan_decode(q, k, lengths)
    assert planned == [((rows, T, heads, H), (rows, keys, S, H), (rows,))]

    of_shards = [plan_of(lengths[i : i + rows]) for i in range(0, B, rows)]
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *of_shards)
    jax.tree.map(np.testing.assert_array_equal, plan, whole)
    attention.decode(q, k, v, lengths, plan=plan)
    assert decoded == [(of_shards[0].entries.shape, (rows, 2))]


def test_a_plan_of_a_pool_on_a_mesh(monkeypatch):
    """Pages are divided too; and where no kernel wants one, there is no plan."""
    seen, attention = [], Attention(make_mesh((2, 4)))
    q, kv = jnp.zeros((B, T, N, H)), jnp.zeros((12, 8, 16, H))
    call = functools.partial(
        attention.plan_decode, q, kv, jnp.full(B, 9), page_table=jnp.zeros((B, 3), int)
    )
    assert call() is None
    monkeypatch.setattr(
        "swiftkv_jax.pallas_kernels.plan_decode",
        lambda q, k, length, *, page_table, **_: seen.append((k.shape, page_table.shape)),
    )
    assert call() is None
    assert seen == [((6, 2, 16, H), (2, 3))]


def test_whether_a_pool_is_widened_is_asked_of_the_devices_of_the_mesh(monkeypatch):
    """With the shapes that one of them has; a name is obeyed."""
    q, kv = jnp.zeros((B, 128, N, 64)), jnp.zeros((12, 8, 128, 64), jnp.int8)
    q, table, mesh = q.astype(jnp.bfloat16), jnp.zeros((B, 3), int), make_mesh((2, 4))
    with under("H100"):
        assert Attention().widens_pool(q, kv, table)
        assert not Attention(mesh).widens_pool(q, kv, table)
        assert Attention(mesh, "hopper").widens_pool(q, kv, table)
        assert not Attention(mesh, "hopper").widens_pool(q, kv.astype(q.dtype), table)
    seen = []
    monkeypatch.setattr(
        "swiftkv_jax.pallas_kernels.widens_pool",
        lambda *arrays, **_: bool(seen.append([array.shape for array in arrays])),
    )
    Attention(mesh).widens_pool(q, kv, table)
    assert seen == [[(2, 128, 4, 64), (6, 2, 128, 64), (2, 3)]]


@pytest.mark.parametrize(("rows", "pages"), [(3, 12), (4, 11)])
def test_rows_and_pages_must_divide_over_the_shards(rows, pages):
    """Or it would be unclear which page an entry means."""
    q, kv, length = jnp.zeros((rows, T, N, H)), jnp.zeros((pages, 8, 16, H)), jnp.full(rows, 9)
    with pytest.raises(
        ValueError, match=f"multiples of the mesh's 2 data-parallel shards, got {rows} and {pages}"
    ):
        Attention(make_mesh((2, 4))).decode(q, kv, kv, length, page_table=jnp.zeros((rows, 3), int))


def test_errors_name_the_whole_arrays():
    """Shapes are those that the caller passed, not a device's; and values are checked on a mesh
    too."""
    q, k, v = operands(8)
    attention = Attention(make_mesh((2, 4)))
    with pytest.raises(
        ValueError, match=r"query heads.*q\.shape=\(4, 6, 15, 8\) and k\.shape=\(4, 8, 24, 8\)"
    ):
        attention.prefill(q[:, :, :15], k, v)
    with pytest.raises(ValueError, match="length must be from 0 to 24"):
        attention.decode(q, k, v, jnp.asarray([1, 2, 3, 25]))
    with pytest.raises(ValueError, match="q_offset must be from 0 to 18"):
        attention.prefill(q, k, v, q_offset=19)
