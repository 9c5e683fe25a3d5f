"""The package's log, as tests of the library see it."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def log(caplog, monkeypatch) -> Iterator[pytest.LogCaptureFixture]:
    """`caplog` for this package alone, whether a command has installed its own handler or not."""
    logger = logging.getLogger("swiftkv_jax")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger.name)
    yield caplog
