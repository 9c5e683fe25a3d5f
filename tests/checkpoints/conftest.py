"""Checkpoints that several test files read."""

from pathlib import Path

import pytest

from tests.checkpoints.fp8_files import fp8_tensors, hf_fields, write


@pytest.fixture(scope="module")
def fp8(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("fp8"), hf_fields(), fp8_tensors(hf_fields()))
