"""The cache's size is its formula, and writes land where they should and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax import Config
from swiftkv_jax.cache import bytes_per_token, init_cache, write_chunk, write_token
from swiftkv_jax.infer.weights import served_config
from tests import tiny


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("lower", "group", "buffers"), [(2, 1, 6), (2, 2, 4), (2, 4, 3), (6, 1, 6), (1, 5, 2)])
def test_bytes_are_the_formula(dtype, lower, group, buffers):
    config = Config.from_hf(tiny.hf_config()).cut(lower, group)
    for swiftkv in (True, False):
        cache = init_cache(served_config(config, swiftkv), batch=3, length=16, dtype=dtype)
        assert len(cache.k) == len(cache.v) == (buffers if swiftkv else 6)
        assert sum(buffer.nbytes for buffer in jax.tree.leaves(cache)) == 3 * 16 * bytes_per_token(config, dtype, swiftkv=swiftkv)


def test_llama_8b_takes_the_published_bytes():
    config = Config(
        vocab_size=128256, embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128
    )
    assert bytes_per_token(config, jnp.bfloat16) == 128 * 1024
    assert bytes_per_token(config.cut(16, 4), jnp.bfloat16) == 80 * 1024
    assert bytes_per_token(config.cut(16, 4), jnp.bfloat16, swiftkv=False) == 128 * 1024


def test_write_chunk():
    buffer, new = jnp.zeros((2, 3, 8, 4)), jnp.ones((2, 3, 2, 4))
    written = np.zeros(8, bool)
    written[4:6] = True
    np.testing.assert_array_equal(write_chunk(buffer, new, jnp.int32(4)), np.broadcast_to(written[:, None], (2, 3, 8, 4)))


def test_write_token_drops_what_is_outside():
    buffer, new = jnp.zeros((4, 3, 8, 2)), jnp.ones((4, 3, 1, 2))
    expected = np.zeros((4, 3, 8, 2))
    expected[0, :, 0] = expected[1, :, 7] = expected[2, :, 3] = 1  # row 3 writes at 8: past the end
    np.testing.assert_array_equal(write_token(buffer, new, jnp.array([0, 7, 3, 8])), expected)
