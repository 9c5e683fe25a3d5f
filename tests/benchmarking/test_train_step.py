"""The benchmark of the distillation step: what it times and counts, and no failure loses a row."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax._src import xla_bridge

from benchmarks import report, train_step, train_variants
from benchmarks.timing import SMOKE_PLAN
from benchmarks.worker import WorkerError
from swiftkv_jax.plan.roofline import Roofline

ROOFLINE = Roofline(
    flops=100e12, bandwidth=1e12, devices=1, dtype="bfloat16", tried={}, published=None
)


@pytest.mark.long
def test_a_step_is_timed():
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        size = train_variants.SIZES["smoke"]
        plan = dataclasses.replace(SMOKE_PLAN, seconds=0.0, max_rounds=3)
        row = train_variants.run_step(size, size.variants[1], 0, plan)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert row["tokens_per_second"] == pytest.approx(2 * size.length / row["seconds"])
    assert row["model_tflops"] == row["computed_tflops"] > 0 and np.isfinite(row["loss"])
    assert row["planned_bytes"] > row["argument_bytes"] > 0


def test_a_variant_that_fails_loses_no_other(tmp_path, monkeypatch, capsys):
    right = {"seconds": 1.0, "tokens_per_second": 2.0, "model_tflops": 30.0}
    right |= {"computed_tflops": 40.0, "compiled_peak_bytes": 100, "planned_bytes": 95.0}
    results = [WorkerError("MemoryError: more than there is"), right]
    facts = report.environment(0)
    facts["device"] |= {"platform": "tpu", "kind": "TPU v5 lite"}

    def alone(function, *args, seconds=None):
        if function is not train_step.run_step:
            return ROOFLINE if function is report.roofline else facts
        if isinstance(result := results.pop(0), Exception):
            raise result
        return result

    def held(*_, **__):
        raise AssertionError("the device belongs to the processes of the variants")

    monkeypatch.setattr(train_step, "alone", alone)
    monkeypatch.setattr(xla_bridge, "backends", held)
    path = tmp_path / "step.json"
    assert train_step.main(["--shapes", "smoke", "--output", str(path)]) == 1
    broken, found = json.loads(path.read_text())["rows"]
    assert "more than there is" in broken["error"]
    assert found["mfu_of_product"] == 0.3 and found["busy_of_product"] == 0.4
    assert found["plan_error"] == pytest.approx(-0.05)
    assert found["mfu_of_peak"] == pytest.approx(30 / 197)
    capsys.readouterr()
    assert train_step.main(["--shapes", "smoke", "--only", "none such"]) == 2
    assert "no such variant; variants: 4 layers" in capsys.readouterr().err
