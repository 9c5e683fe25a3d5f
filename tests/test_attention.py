"""The ops on meshes: each device on its own rows and heads, the result that of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.attention import Attention
from swiftkv_jax.sharding import make_mesh

B, T, N, S, H = 4, 6, 16, 24, 8
MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]


def operands(kv_heads: int):
    rng = np.random.default_rng(0)
    shapes = [(B, T, N, H), (B, kv_heads, S, H), (B, kv_heads, S, H)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


# 8 and 4 heads split over any of these meshes or are shared by several devices; of 2, devices always share one; 1 is everyone's.
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shape", MESHES)
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
            "segments": lambda q, k, v: attention.prefill(q, k[:, :, :T], v[:, :, :T], segment_ids=ids),
            "decode": lambda q, k, v: attention.decode(q[:, :2], k, v, length),
        }

    alone, spread = calls(Attention()), calls(Attention(make_mesh(shape)))
    for name in alone:
        np.testing.assert_allclose(jax.jit(spread[name])(q, k, v), jax.jit(alone[name])(q, k, v), atol=2e-6, err_msg=name)


@pytest.mark.parametrize("shape", MESHES)
def test_gradients_agree(shape):
    q, k, v = operands(2)
    k, v = k[:, :, :T], v[:, :, :T]

    def gradient(attention):
        return jax.jit(jax.grad(lambda *operands: jnp.square(attention.prefill(*operands)).sum(), argnums=(0, 1, 2)))(q, k, v)

    for found, expected in zip(gradient(Attention(make_mesh(shape))), gradient(Attention()), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_divide_are_everyones():
    q, k, v = (x[:3] for x in operands(4))
    found = Attention(make_mesh((2, 2))).decode(q, k, v, jnp.asarray([9, 24, 7]))
    np.testing.assert_allclose(found, Attention().decode(q, k, v, jnp.asarray([9, 24, 7])), atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "kv_heads", "rows", "heads", "keys"), [((4, 2), 8, 1, 8, 4), ((2, 4), 2, 2, 4, 1), ((1, 8), 16, 4, 2, 2)]
)
def test_each_device_sees_its_part(shape, kv_heads, rows, heads, keys, monkeypatch):
    """What reaches the kernel: `rows` of 4, `heads` of 16 and `keys` of the key/value heads."""
    seen = []
    monkeypatch.setattr(
        "swiftkv_jax.pallas_kernels.decode_attention", lambda q, k, v, length, **_: seen.append((q.shape, k.shape, length.shape)) or q
    )
    q, k, v = operands(kv_heads)
    Attention(make_mesh(shape)).decode(q, k, v, jnp.asarray([9, 24, 7, 1]))
    assert seen == [((rows, T, heads, H), (rows, keys, S, H), (rows,))]
