"""Products of FP8 operands with scales against NumPy's in double precision."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels.choice import choose_product
from swiftkv_jax.pallas_kernels.fp8_product import fp8_product
from swiftkv_jax.pallas_kernels.hopper import fp8_product as hopper
from tests.pallas_kernels.interpreted import device_of


@pytest.mark.parametrize("implementation", ["xla", "hopper"])
def test_product(implementation, monkeypatch):
    """On Hopper a thread block has several tiles, as on a device with fewer than there are."""
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda: 2)
    rng = np.random.default_rng(0)
    x, weight = (
        (60 * rng.standard_normal(shape)).astype(ml_dtypes.float8_e4m3fn)
        for shape in ((256, 256), (512, 256))
    )
    x_scale, weight_scale = (
        np.exp(rng.standard_normal(count)).astype(np.float32) for count in (256, 512)
    )
    operands = [jnp.asarray(operand) for operand in (x, weight, x_scale, weight_scale)]
    with device_of(implementation):
        found = fp8_product(*operands, jnp.dtype(jnp.bfloat16), implementation)
    assert found.dtype == jnp.bfloat16
    expected = x.astype(np.float64) @ weight.astype(np.float64).T * x_scale[:, None] * weight_scale
    size = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)).T
    bound = 2**-8 * np.abs(expected) + 1e-5 * size * x_scale[:, None] * weight_scale
    assert (np.abs(np.asarray(found, np.float64) - expected) <= bound).all()


def test_the_kernel_runs_where_it_is_faster():
    def chosen(kernels, *call):
        return choose_product(kernels, "fp8_product", call, rows=call[0])

    assert chosen("hopper", 2048, 4096, 14336, "bfloat16").implementation == "hopper"
    assert chosen("hopper", 8192, 14336, 4096, "float16").implementation == "hopper"
    for kernels, sizes, reason in (
        ("hopper", (1024, 4096, 4096, "bfloat16"), "takes FP8 products from 2048 rows on"),
        (
            "hopper",
            (2048, 4096, 4000, "bfloat16"),
            "takes rows in multiples of 128, outputs",
        ),
        ("hopper", (2048, 4096, 4096, "float32"), "makes bfloat16 or float16, not float32"),
        ("cudnn", (2048, 4096, 4096, "bfloat16"), "has no kernel for FP8 products"),
    ):
        choice = chosen(kernels, *sizes)
        assert choice.implementation == "xla" and (choice.reason or "").startswith(reason)
