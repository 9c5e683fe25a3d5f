"""Products with adapted matrices: each row has its own adapter, and a row without one is the
base's."""

import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.model.low_rank import Adapted, Terms
from swiftkv_jax.model.quantization import Scheme, dequantize, product, quantize

COUNT, RANK, INPUTS, OUTPUTS, TOKENS = 3, 4, 32, 24, 5


def random(*shape: int):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("adapter", [[[0], [3], [1], [2]], [[0, 1, 2, 3, 0]], [[2]], [[0]]])
def test_rows(format, adapter):
    """Of one adapter for all of a row's tokens, and of one for each token; outputs in two parts, as
    those of gate and up."""
    wide = random(2 * OUTPUTS, INPUTS)
    matrix = wide if format is None else quantize(wide, 1, Scheme(format))
    terms = Terms(random(COUNT, RANK, INPUTS), random(OUTPUTS, COUNT, RANK))
    other = Terms(2 * terms.a[::-1], terms.b)
    chosen = jnp.asarray(adapter, jnp.int32)
    x = random(len(adapter), TOKENS, INPUTS)
    found = np.asarray(product("BTI,OI->BTO", x, Adapted(matrix, (terms, other), chosen)))
    plain = np.asarray(product("BTI,OI->BTO", x, matrix))
    base = wide if format is None else dequantize(matrix, jnp.float32)  # type: ignore[arg-type]
    numbers = np.broadcast_to(np.asarray(adapter), x.shape[:2])
    for place in np.ndindex(*numbers.shape):
        number, row = numbers[place], np.asarray(x[place], np.float64)
        if not number:
            np.testing.assert_array_equal(found[place], plain[place])
            continue
        a, b = np.asarray(terms.a[number - 1]), np.asarray(terms.b[:, number - 1])
        a_other = 2 * np.asarray(terms.a[COUNT - number])
        expected = np.asarray(base, np.float64) @ row
        expected += np.concatenate([b @ (a @ row), b @ (a_other @ row)])
        np.testing.assert_allclose(found[place], expected, atol=1e-3, rtol=1e-4)
