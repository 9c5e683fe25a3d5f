"""Many requests of all modes of `generated_kv` over one cache, some of them preempted."""

import pytest

from tests.infer.conftest import compilations
from tests.infer.engine.test_mixed_generated_kv import soak

__all__ = ["compilations"]


@pytest.mark.parametrize(
    ("decode_steps", "kv_cache_dtype", "seed"),
    [(1, "auto", 1), (1, "auto", 2), (3, "auto", 3), (3, "fp8", 4), (1, "int8", 5)],
)
def test_modes_in_one_cache(decode_steps, kv_cache_dtype, seed, compilations):
    fields = {"decode_steps": decode_steps, "kv_cache_dtype": kv_cache_dtype}
    soak(rounds=400, seed=seed, compilations=compilations, **fields)
