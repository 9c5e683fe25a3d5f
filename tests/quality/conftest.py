"""The demo model's tokenizer, and two files of source."""

from pathlib import Path

import pytest

from benchmarks.quality import held_out
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.setup import open_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return open_tokenizer(DEMO)


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """A long file and a short one."""
    return [("long", Path(held_out.__file__).read_text()), ("short", "value = 1\n")]
