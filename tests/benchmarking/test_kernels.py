"""The kernel benchmarks count right, check right, report right, and lose no row when one fails."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import candidates, inputs, oracle, rows, shapes, tune
from benchmarks.timing import SMOKE_PLAN
from benchmarks.worker import WorkerError
from swiftkv_jax.plan.roofline import Roofline
from tests.in_process import InProcess

ROOFLINE = Roofline(
    flops=1e12, bandwidth=1e9, devices=1, dtype="bfloat16", tried={}, published=None
)
PREFILL = shapes.Prefill("p", 2, 24, 24, 4, 2, 8)
CHUNK = shapes.Prefill("c", 2, 8, 24, 4, 2, 8, offset=16)
PACKED = shapes.Prefill("d", 2, 100, 100, 4, 2, 8, packed=True)
TRAIN = shapes.Prefill("t", 2, 24, 24, 4, 2, 8, packed=True, gradient=True)
PAGED = shapes.Decode("g", 3, 32, "int8", page=16, ragged=True, heads=4, kv_heads=2, head_dim=8)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


DECODE = shapes.Decode("e", 2, 32, "bfloat16", heads=4, kv_heads=2, head_dim=8)


def mask(shape: shapes.Prefill) -> np.ndarray:
    """bool[T, S] of any row, one entry at a time."""
    ids = np.repeat(np.arange(len(shape.documents)), shape.documents)
    seen = np.zeros((shape.queries, shape.keys), bool)
    for t, s in np.ndindex(seen.shape):
        seen[t, s] = s <= t + shape.offset and (not shape.packed or ids[t] == ids[s])
    return seen


@pytest.mark.parametrize("shape", [PREFILL, CHUNK, PACKED, TRAIN], ids=lambda shape: shape.name)
def test_flops(shape):
    assert sum(shape.documents) == shape.queries
    pairs = shape.batch * int(mask(shape).sum())
    assert shape.pairs == pairs
    assert shape.work == pairs * 4 * shape.head_dim * shape.heads * (3.5 if shape.gradient else 1)


@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("ragged", [False, True])
def test_bytes(cache, ragged):
    shape = shapes.Decode("d", 3, 64, cache, ragged=ragged, heads=4, kv_heads=2, head_dim=16)
    arrays = jax.eval_shape(lambda: inputs.draw_one(shape, jax.random.key(0)))
    read = [
        np.zeros(arrays[name].shape, arrays[name].dtype)
        for name in ("k", "v", "k_scale", "v_scale")
        if name in arrays
    ]
    assert len(read) == (2 if cache == "bfloat16" else 4)
    total = sum(x[row, :, :length].nbytes for x in read for row, length in enumerate(shape.lengths))
    assert shape.work == total
    assert shapes.rate(shape, 2.0) == total / 2e9


@pytest.mark.parametrize("shape", [TRAIN, PAGED], ids=lambda shape: shape.name)
def test_the_check_passes_what_is_right_and_no_more(shape):
    arrays = inputs.draw(shape, jax.random.key(1), 1)[-1]
    wanted = oracle.expected(shape, arrays)
    got = jax.jit(candidates.op(shape, "xla"))(arrays)
    got: Any = got if isinstance(got, tuple) else (got,)
    assert len(wanted) == (2 if shape.gradient else 1)
    errors, wrong = oracle.check(shape, got, wanted)
    assert wrong is None and 0 < errors["out"].relative < 1e-2
    one_vector = got[0].at[-1, -1, -1].multiply(-1)  # hardly seen in the norm of a large output
    assert "worst vector" in (oracle.check(shape, (one_vector, *got[1:]), wanted)[1] or "")
    assert "nan" in (oracle.check(shape, (got[0] * jnp.nan, *got[1:]), wanted)[1] or "")
    if shape.gradient:
        assert "dq" in (oracle.check(shape, (got[0], got[1] * 1.2), wanted)[1] or "")


@pytest.mark.long
def test_a_smoke_run(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    flags = ["--shapes", "smoke", "--only", "^(chunk|decode int8)$", "--implementation", "xla"]
    flags += ["--output", str(path), "--seed", "3"]
    assert kernels.main(flags) == 0
    document = json.loads(path.read_text())
    assert document["seed"] == 3 and document["device"]["platform"] == "cpu"
    assert [row["name"] for row in document["rows"]] == ["chunk", "decode int8"]
    for row in document["rows"]:
        (result,) = row["results"]
        assert result["implementation"] == "xla" and result["status"] == "ok"
        scale, limit = {"TFLOP/s": (1e12, "flops"), "GB/s": (1e9, "bandwidth")}[row["unit"]]
        rate = scale * result["rate"]
        assert rate == pytest.approx(row["work"] / result["seconds"])
        assert result["share_of_roofline"] == pytest.approx(rate / document["roofline"][limit])
    assert "chunk" in capsys.readouterr().out
    assert kernels.main([*flags, "--seconds", "1e-9"]) == 1
    assert '"skipped": "the budget' in path.read_text()
    assert "nothing was measured" in capsys.readouterr().err


def test_what_breaks_loses_no_other(tmp_path, monkeypatch, capsys):
    def unsupported(shape):
        raise NotImplementedError("not here")

    def fail(arrays):
        raise RuntimeError("no such kernel\nand more")

    available = {
        "hopper": lambda shape: candidates.Candidate("hopper", fail),
        "cudnn": unsupported,
        "wrong": lambda shape: candidates.Candidate(
            "wrong", lambda s: candidates.op(PREFILL, "xla")(s) * 1.1
        ),
        "xla": lambda shape: candidates.ours("xla", shape),
    }
    monkeypatch.setattr(rows, "builders", lambda: available)
    monkeypatch.setattr(kernels, "Worker", InProcess)
    monkeypatch.setitem(shapes.TABLES, "smoke", (PREFILL,))
    path = tmp_path / "kernels.json"
    assert kernels.main(["--shapes", "smoke", "--output", str(path)]) == 1
    results = {
        result["implementation"]: result
        for result in json.loads(path.read_text())["rows"][0]["results"]
    }
    status = [results[name]["status"] for name in available]
    assert status == ["error", "unsupported", "wrong", "ok"]
    assert results["hopper"]["reason"] == "RuntimeError: no such kernel"
    assert results["xla"]["seconds"] > 0
    assert "wrong or broken: p/hopper, p/wrong" in capsys.readouterr().err


def test_implementations_are_measured_apart_after_a_crash():
    """An illegal access or a hang is told of the implementation that is to blame; the rest of the
    row and the next one are measured in new processes."""
    calls: list[list[str]] = []

    class Device(InProcess):
        broken = False

        def call(self, function, *args, seconds=None):
            shape, names, *_ = args
            calls.append(names)
            if shape is DECODE and "tpu" in names:
                raise WorkerError("no result after 180 s")
            results = []
            for name in names:
                self.broken |= name == "hopper" and shape is PREFILL
                status = {"status": "error", "reason": "illegal"} if self.broken else {}
                results.append({"implementation": name, "status": "ok"} | status)
            return {"name": shape.name, "results": results}

        def works(self):
            worked, self.broken = not self.broken, False
            return worked

    worker: Any = Device()
    measured = [
        kernels.measure_apart(worker, shape, ["xla", *names], (0, 0), ROOFLINE, SMOKE_PLAN)
        for shape, names in ((PREFILL, ["hopper", "cudnn"]), (DECODE, ["tpu"]), (CHUNK, ["tpu"]))
    ]
    assert [[one["status"] for one in row["results"]] for row in measured] == [
        ["ok", "error", "ok"],
        ["ok", "error"],
        ["ok", "ok"],
    ]
    assert measured[1]["results"][1]["reason"] == "no result after 180 s"
    assert calls == [
        *(["xla", "hopper", "cudnn"], ["hopper"], ["cudnn"]),
        *(["xla", "tpu"], ["xla"], ["tpu"]),
        ["xla", "tpu"],
    ]


# Commands ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (kernels, ["--only", "nothing such"], "no such row"),
        (kernels, ["--only", "("], "not a regular expression"),
        (kernels, ["--implementation", "fast"], "--implementation fast: not here"),
        (kernels, ["--implementation", "hopper"], "hopper: needs a Hopper GPU, this is cpu"),
        (kernels, ["--only", "chunk", "--output", "/dev/null/x"], "cannot be made"),
        (tune, [], "nothing to tune on a CPU"),
        (
            tune,
            ["--only", "nothing such"],
            "no such kernel; kernels: hopper.prefill H128",
        ),
    ],
)
def test_usage_errors_are_one_line(command, flags, message, monkeypatch, capsys):
    monkeypatch.setattr(command, "Worker", InProcess)
    assert command.main([*flags, "--shapes", "smoke"]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
