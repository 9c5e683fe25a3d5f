"""The package's log, as tests of the library see it; and runs whose reports have no curves."""

import logging
from collections.abc import Iterator

import pytest

from swiftkv_jax.train.report import report
from swiftkv_jax.train.run import progress


@pytest.fixture
def log(caplog, monkeypatch) -> Iterator[pytest.LogCaptureFixture]:
    """`caplog` for this package alone, whether a command has installed its own handler or not."""
    logger = logging.getLogger("swiftkv_jax")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger.name)
    yield caplog


@pytest.fixture(scope="module", autouse=True)
def runs_measure_and_draw_nothing(request) -> Iterator[None]:
    """Reports without curves, which take a second of each run, but where they are looked at and
    in the tests of whole runs; and no measured rate of products."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in ("test_report.py", "test_run.py"):
            patch.setattr(report, "draw_run", lambda rows: "<svg/>")
        if request.path.name != "test_progress.py":
            patch.setattr(progress, "matmul_rate", lambda dtype: 1e12)
        yield


@pytest.fixture
def no_curves(monkeypatch) -> None:
    monkeypatch.setattr(report, "draw_run", lambda rows: "<svg/>")
