"""Rotary frequencies in Hugging Face's own, piecewise definition; the rotation as a product of
complex numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax import Config, LayerKind, Rope, RopeScaling
from swiftkv_jax.model.rope import apply_rope, rope_frequencies, rope_tables


def config(head_dim: int, theta: float) -> Config:
    return Config(10, 64, 64, 2, 4, 2, head_dim, layer_kinds=(LayerKind(Rope(theta)),))


def piecewise(
    head_dim: int, theta: float, factor: float, low: float, high: float, old: int
) -> tuple[list[float], list[str]]:
    """llama3 scaling by wavelength: short waves as they are, long ones stretched, a straight blend
    between."""
    frequencies, bands = [], []
    for pair in range(head_dim // 2):
        frequency = 1.0 / theta ** (2 * pair / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < old / high:
            band = "kept"
        elif wavelength > old / low:
            band, frequency = "stretched", frequency / factor
        else:
            band, smooth = "blended", (old / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
        bands.append(band)
    return frequencies, bands


@pytest.mark.parametrize(
    ("head_dim", "factor"), [(128, 8.0), (64, 32.0)], ids=["Llama-3.1-8B", "Llama-3.2-1B"]
)
def test_llama3(head_dim, factor):
    expected, bands = piecewise(head_dim, 500000.0, factor, 1.0, 4.0, 8192)
    assert {band: bands.count(band) for band in bands} == (
        {"kept": 29, "blended": 6, "stretched": 29}
        if head_dim == 128
        else {"kept": 15, "blended": 3, "stretched": 14}
    )
    scaling = RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    actual = rope_frequencies(Rope(500000.0, scaling), head_dim)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=3e-6)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_default_and_linear(factor):
    scaling = None if factor == 1 else RopeScaling("linear", factor)
    expected = [10000.0 ** (-2 * pair / 64) / factor for pair in range(32)]
    np.testing.assert_allclose(rope_frequencies(Rope(10000.0, scaling), 64), expected, rtol=3e-6)


@pytest.mark.parametrize("groups", [(), (3,)], ids=["", "an axis between"])
def test_rotation(groups):
    """Channels c and c + H/2 are the real and imaginary part of one number, turned by position *
    frequency."""
    c = config(8, 10000.0)
    positions = jnp.asarray([[0, 1, 2, 3, 0, 1], [7, 100, 0, 5, 6, 127]])
    x = np.random.default_rng(0).normal(size=(2, 6, *groups, 4, 8)).astype(np.float32)
    angle = np.asarray(positions)[..., None] * np.array(
        [10000.0 ** (-2 * pair / 8) for pair in range(4)]
    )
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle).reshape(
        2, 6, *(1 for _ in groups), 1, 4
    )
    (table,) = rope_tables(c, positions)
    actual = apply_rope(jnp.asarray(x), table)
    np.testing.assert_allclose(actual, np.concatenate([turned.real, turned.imag], -1), atol=1e-5)
    assert apply_rope(jnp.asarray(x, jnp.bfloat16), table).dtype == jnp.bfloat16
