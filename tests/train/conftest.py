"""The package's log, as tests of the library see it; and runs whose reports have no curves."""

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import swiftkv_jax as skv
from swiftkv_jax.train.report import report
from swiftkv_jax.train.run import progress
from tests import tiny


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


@pytest.fixture(scope="session")
def teacher(tmp_path_factory, tokenizer) -> Path:
    """A small model without a delta, and its tokenizer."""
    hf = tiny.hf_config(vocab_size=320)
    model = dataclasses.replace(tiny.model_of(hf, tiny.tensors_for(hf)), swiftkv=None)
    skv.save_hf(model, folder := tmp_path_factory.mktemp("teacher") / "teacher")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def no_curves(monkeypatch) -> None:
    monkeypatch.setattr(report, "draw_run", lambda rows: "<svg/>")
