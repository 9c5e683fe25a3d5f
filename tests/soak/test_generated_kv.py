"""Many requests of all modes of `generated_kv` over one cache."""

import pytest

from tests.infer.conftest import compilations
from tests.infer.engine.test_mixed_generated_kv import soak

__all__ = ["compilations"]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("decode_steps", [1, 3])
def test_modes_in_one_cache(seed, decode_steps, compilations):
    soak(rounds=400, seed=seed, compilations=compilations, decode_steps=decode_steps)
