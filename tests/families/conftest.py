"""Models of the cases, loaded once for all tests of a file."""

import functools

import pytest

import swiftkv_jax as skv
from swiftkv_jax import Model

from . import models


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def load(case: str) -> Model:
        return skv.load(models.write(case, folder / case), dtype="float32")

    return load
