"""Many requests of all modes of `generated_kv` over one cache, some of them preempted."""

import pytest

from tests.infer.conftest import compilations
from tests.infer.engine.test_mixed_generated_kv import soak

__all__ = ["compilations"]


@pytest.mark.parametrize(
    ("shape", "decode_steps", "kv_cache_dtype", "seed"),
    [
        ("g=1", 1, "auto", 1),
        ("g=1", 1, "auto", 2),
        ("g=1", 3, "auto", 3),
        ("g=1", 3, "fp8", 4),
        ("g=1", 1, "int8", 5),
        ("g=2", 3, "auto", 6),
        ("g=2", 1, "int8", 7),
        ("g=4", 1, "auto", 8),
    ],
)
def test_modes_in_one_cache(shape, decode_steps, kv_cache_dtype, seed, compilations):
    fields = {"shape": shape, "decode_steps": decode_steps, "kv_cache_dtype": kv_cache_dtype}
    soak(rounds=400, seed=seed, compilations=compilations, **fields)
