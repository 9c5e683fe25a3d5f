"""The package's log, as tests of the library see it; and runs whose reports have no curves."""

import logging
from collections.abc import Iterator

import pytest

from swiftkv_jax.train.report import report


@pytest.fixture
def log(caplog, monkeypatch) -> Iterator[pytest.LogCaptureFixture]:
    """`caplog` for this package alone, whether a command has installed its own handler or not."""
    logger = logging.getLogger("swiftkv_jax")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger.name)
    yield caplog


@pytest.fixture(scope="module", autouse=True)
def curves_are_not_drawn(request) -> Iterator[None]:
    """Reports without curves, which take a second of each run, but where they are looked at and
    in the tests of whole runs."""
    if request.path.name in ("test_report.py", "test_run.py"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_run", lambda rows: "<svg/>")
        yield
