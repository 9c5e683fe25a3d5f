"""Tuning: every candidate is another program, none loses the others, and the best is written."""

import dataclasses
import json
from typing import Any

import jax
import pytest

from benchmarks.kernels import candidates, inputs, sweep, tune
from benchmarks.timing import SMOKE_PLAN
from benchmarks.worker import WorkerError
from swiftkv_jax.pallas_kernels import tuning
from tests.in_process import InProcess
from tests.pallas_kernels.interpreted import H100


def test_tune_without_a_device(monkeypatch, capsys):
    monkeypatch.setattr(tune, "Worker", InProcess)
    assert tune.main(["--shapes", "smoke", "--dry-run"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [job.name for job in tune.jobs("cpu", None)]
    assert "Nothing can be timed" in last and " 0 of " not in "".join(lines)


def test_sweeps(monkeypatch):
    every = tune.jobs("cpu", None)
    assert (
        sweep.SWEEPS.keys()
        == {job.kernel for job in every}
        == {entry["kernel"] for entry in tuning.read_table()}
    )
    for job in every:
        fields = {field.name for field in dataclasses.fields(job.tuning_class)}
        assert {name for group in sweep.SWEEPS[job.kernel] for name in group} <= fields
        for shape in sweep.shapes(job.kernel, job.head_dim, job.dtype, "full"):
            assert getattr(shape, "packed", False) == job.kernel.endswith(".packed")
    monkeypatch.setitem(sweep.SWEEPS, "tpu.decode", ({"rows": (1,), "block_kv": (128,)},))
    with pytest.raises(ValueError, match="sweep of tpu.decode has block_kv"):
        list(
            sweep.combinations(
                "tpu.decode", 0, tune.Job("tpu.decode", 128, "int8").tuning_class, {}
            )
        )


@pytest.mark.parametrize("job", tune.jobs("gpu", "H128 bfloat16"), ids=lambda job: job.kernel)
def test_every_candidate_is_traced_anew(job):
    """A cache that ignored the tuning would give all candidates the same program."""
    (shape,) = sweep.shapes(job.kernel, job.head_dim, job.dtype, "smoke")
    arrays = [jax.eval_shape(lambda: inputs.draw_one(shape, jax.random.key(0)))]
    traced = []
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H100)):
        for values in list(sweep.combinations(job.kernel, 0, job.tuning_class, {}))[:2]:
            argument = {job.argument: job.tuning_class(**values)}
            call = candidates.op(shape, "hopper", **argument)
            program = jax.jit(lambda sets, call=call: [call(one) for one in sets])
            traced.append(str(program.trace(arrays).jaxpr))
    assert traced[0] != traced[1]


def test_the_table(tmp_path):
    entry = {"kernel": "hopper.decode", "head_dim": 64, "dtype": "int8", "tuning": {}}
    entry |= {"basis": "draft"}
    old = [entry | {"device": device} for device in ("any", "X")]
    new = old[1] | {"tuning": {"block_kv": 64, "stages": 3}, "basis": "measured"}
    table = tune.with_entry(old, new)
    text = tune.table_text(table)
    assert table == [new, old[0]] == json.loads(text) and len(text.splitlines()) == len(table) + 2
    assert (
        tune.table_text(json.loads(tuning.TABLE.read_text())) == tuning.TABLE.read_text()
    )  # a new entry changes one line
    (path := tmp_path / "table.json").write_text(text)
    assert list(tuning.read_table(path)) == table


def test_a_candidate_that_hangs_loses_no_other(monkeypatch):
    job, worked = tune.Job("hopper.decode", 128, "int8"), []

    class Device(InProcess):
        def call(self, function, *args, seconds=None):
            candidate = args[1]
            if candidate.stages == 3:
                raise WorkerError(f"no result after {seconds} s")
            if candidate.stages == 4:
                return None, "the result is wrong"
            return {"64x2k": 1.0 / candidate.stages}, ""

        def works(self) -> bool:
            worked.append(False)
            return False

    worker: Any = Device()
    result = tune.tune(worker, job, "NVIDIA H200", "smoke", (0, 0), SMOKE_PLAN)
    reasons = {
        one["tuning"]["stages"]: one.get("reason")
        for one in result["tried"]
        if one["tuning"]["block_kv"] == 64
    }
    lost = {3: "no result after 120 s", 4: "the result is wrong"}
    assert reasons == dict.fromkeys((2, 5, 6)) | lost
    assert result["best"]["stages"] == 6 and len(worked) == 3


def test_times_of_a_candidate(monkeypatch):
    """On a device: right, and timed on every shape; a wrong result is not timed."""
    job = tune.Job("hopper.decode", 128, "bfloat16")
    op = candidates.op
    monkeypatch.setattr(tune, "planned", lambda *_, **__: lambda s: s)
    monkeypatch.setattr(tune, "op", lambda shape, *_, **__: op(shape, "xla"))
    arguments = job, job.tuning_class(), "smoke", (0, 0), SMOKE_PLAN, None
    seconds, reason = tune._times(*arguments)
    assert seconds is not None and seconds["decode"] > 0 and not reason
    monkeypatch.setattr(tune, "op", lambda shape, *_, **__: lambda s: 1.1 * op(shape, "xla")(s))
    seconds, reason = tune._times(*arguments)
    assert seconds is None and "worst vector" in reason
