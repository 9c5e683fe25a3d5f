"""The pairs of a head's entries that the closed form turns by complex factors, where all or a part
of a head rotates."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.calibration.delta import fit_delta, fit_layers, output_metrics, share_layers
from swiftkv_jax.calibration.moments import add_batch, pair_energy, zero_moments
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.initialization import init_swiftkv
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.rope import apply_rope, paired_dims, rope_tables
from swiftkv_jax.model.stacks import split_layers
from tests import tiny

RNG = np.random.default_rng(0)
HF = tiny.hf_config()
TEACHER = tiny.model_of(HF, tiny.tensors_for(HF))
TOKENS = RNG.integers(0, HF["vocab_size"], (12, 40))
PAIRS = {
    2: ([0, 2, 3, 4], [1, 5, 6, 7]),
    4: ([0, 1, 4, 5], [2, 3, 6, 7]),
    8: ([0, 1, 2, 3], [4, 5, 6, 7]),
}
"""The entries of a head of 8 in pairs, by how many of them rotate."""


@pytest.mark.parametrize("rotated", PAIRS)
def test_a_complex_factor_of_each_pair_commutes_with_the_rotation(rotated):
    config = tiny.rotating(TEACHER.config, rotated)
    first, second = pairs = paired_dims(config)
    np.testing.assert_array_equal(pairs, PAIRS[rotated])
    x, (real, imag) = RNG.normal(size=(1, 5, 2, 8)), RNG.normal(size=(2, 4))
    (table,) = rope_tables(config, jnp.array([[0, 1, 5, 20, 90]]))

    def turn(x):
        a, b = x[..., first], x[..., second]
        turned = np.empty_like(x)
        turned[..., first], turned[..., second] = real * a - imag * b, real * b + imag * a
        return turned

    def rotate(x):
        return np.array(apply_rope(jnp.array(x, jnp.float32), table))

    np.testing.assert_allclose(turn(rotate(x)), rotate(turn(x)), atol=1e-5)


@pytest.mark.parametrize("rotated", PAIRS)
def test_energy_of_pairs(rotated):
    """In pairs as `rope` rotates them, and then those of the entries that it leaves alone."""
    q = RNG.normal(size=(2, 5, 3, 8)).astype(np.float32)
    real = RNG.integers(0, 2, (2, 5)).astype(np.float32)
    first, second = PAIRS[rotated]
    squares = np.square(q) * real[..., None, None]
    expected = (squares[..., first] + squares[..., second]).sum((0, 1))
    found = pair_energy(jnp.array(q), jnp.array(real), rotated)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("rotated", [4, 8])
def test_shared_keys_and_values_are_those_written_out_for_each_layer(rotated):
    config = tiny.rotating(TEACHER.config, rotated).cut(2, 2)
    llama = split_layers(config, TEACHER.llama)
    batch = unpacked_batch(jnp.array(TOKENS))
    sums = add_batch(config, Attention(), zero_moments(config, None), llama, batch)
    assert llama.upper_qkv is not None
    fit = fit_delta(config, llama, sums, None)
    metrics = output_metrics(llama.upper.o, config.num_kv_heads)
    layers = fit_layers(config, llama.upper_qkv, metrics, sums)
    groups = share_layers(layers, 2, sums, paired_dims(config))
    k, v = zip(*(kv for group, _ in groups for kv in group.expanded()), strict=True)
    start = init_swiftkv(config.cut(2), llama)
    separate = dataclasses.replace(
        start, k=jnp.array(np.stack(k), jnp.float32), v=jnp.array(np.stack(v), jnp.float32)
    )
    shared = skv.logits(Model(llama, fit.delta, fit.config), TOKENS[:3])
    expected = skv.logits(Model(llama, separate, config.cut(2)), TOKENS[:3])
    np.testing.assert_allclose(shared, expected, atol=2e-5 * np.abs(expected).max())
