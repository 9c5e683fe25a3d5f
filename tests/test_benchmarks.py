"""The benchmarks count right, time right, report right, and lose nothing when something breaks."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    boundary,
    candidates,
    grid,
    hlo,
    inputs,
    kernels,
    oracle,
    report,
    shapes,
    timing,
    tune,
)
from benchmarks.floors import Floors
from swiftkv_jax.pallas_kernels import tuning
from tests.pallas_kernels.interpreted import H100

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


@pytest.mark.parametrize("table", shapes.TABLES.values())
def test_table(table):
    assert len({shape.name for shape in table}) == len(table)
    assert all(shape.work > 0 for shape in table) and {target.row for target in shapes.TARGETS} <= {
        shape.name for shape in shapes.FULL
    }


@pytest.mark.parametrize("shape", [TRAIN, PAGED], ids=lambda shape: shape.name)
def test_the_check_passes_what_is_right_and_no_more(shape):
    arrays = inputs.draw(shape, jax.random.key(1), 1)[-1]
    wanted = oracle.expected(shape, arrays)
    got = jax.jit(candidates.op(shape, "xla"))(arrays)
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(wanted) == (4 if shape.gradient else 1)
    errors, wrong = oracle.check(shape, got, wanted)
    assert wrong is None and 0 < errors["out"].relative < 1e-2
    one_vector = got[0].at[0, -1, -1].multiply(-1)  # hardly seen in the norm of a large output
    assert "worst vector" in (oracle.check(shape, (one_vector, *got[1:]), wanted)[1] or "")
    assert "nan" in (oracle.check(shape, (got[0] * jnp.nan, *got[1:]), wanted)[1] or "")
    if len(got) == 4:
        assert "dk" in (
            oracle.check(shape, (got[0], got[1], got[2] * 1.1, got[3]), wanted)[1] or ""
        )


def test_time_per_call_is_that_of_the_calls():
    """Whatever a run costs once, and however often it runs: a program of three calls of 2 ms
    each."""

    def run(repeats):
        start = time.perf_counter()
        time.sleep(0.01 + repeats * 0.006)
        return timing.Run(time.perf_counter() - start, 0.0)

    program = timing.Program(run, 3, None)
    plan = timing.Plan(short_run=0.03, seconds=0.0, min_rounds=3, max_rounds=3, warm_up=0.0)
    broken = timing.Program(lambda repeats: 1 / 0, 1, None)  # pyright: ignore
    timings, failed = timing.measure({"sleep": program, "broken": broken}, plan)
    assert 0.0018 < timings["sleep"].seconds < 0.003 and list(failed) == ["broken"]


def test_a_smoke_run(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    flags = [
        "--shapes",
        "smoke",
        "--only",
        "^(chunk|decode int8)$",
        "--implementation",
        "xla",
        "--output",
        str(path),
    ]
    assert kernels.main([*flags, "--seed", "3"]) == 0
    document = json.loads(path.read_text())
    assert document.keys() >= {
        "date",
        "command",
        "seed",
        "device",
        "versions",
        "commit",
        "sources_sha256",
        "conventions",
        "floors",
        "rows",
    }
    assert (
        document["seed"] == 3
        and document["device"]["platform"] == "cpu"
        and document["versions"]["jax"] == jax.__version__
    )
    assert document["floors"]["matmul_tflops"] > 0 and document["floors"]["copy_gbps"] > 0
    assert [row["name"] for row in document["rows"]] == ["chunk", "decode int8"]
    for row in document["rows"]:
        (result,) = row["results"]
        assert (
            result["implementation"] == "xla"
            and result["status"] == "ok"
            and result["errors"]["out"].keys() == {"relative", "worst_vector", "max_abs"}
        )
        scale = {"TFLOP/s": 1e12, "GB/s": 1e9}[row["unit"]]
        assert result["seconds"] > 0 and result["rate"] == pytest.approx(
            row["work"] / result["seconds"] / scale
        )
        assert len(result["timing"]["short_runs"]) == len(result["timing"]["long_runs"]) >= 3
    assert "chunk" in capsys.readouterr().out
    assert kernels.main([*flags, "--seconds", "1e-9"]) == 1
    assert (
        '"skipped": "the budget' in path.read_text()
        and "nothing was measured" in capsys.readouterr().err
    )


def test_a_smoke_run_leaves_nothing_and_explains_its_marks(tmp_path, monkeypatch, capsys):
    result = {
        "implementation": "xla",
        "status": "ok",
        "seconds": 1e-3,
        "rate": 1.0,
        "share_of_floor": 0.5,
    }
    result |= {
        "errors": {"out": {"relative": 1e-3}},
        "timing": {"linear": False, "host_share": 0.1},
    }
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(kernels, "floors_for", lambda *_: Floors(1.0, 1.0, {}))
    monkeypatch.setattr(
        kernels, "measure_row", lambda shape, *_: kernels._described(shape) | {"results": [result]}
    )
    assert kernels.main(["--shapes", "smoke", "--only", "^chunk$"]) == 0
    assert not list(tmp_path.iterdir())
    row, footer = capsys.readouterr().out.splitlines()[-2:]
    assert row.endswith(" ~") and footer.startswith("~: ")


def test_what_breaks_loses_no_other(tmp_path, monkeypatch, capsys):
    def fail(argument):
        raise (
            NotImplementedError("not here")
            if isinstance(argument, shapes.Prefill)
            else RuntimeError("no such kernel\nand more")
        )

    available = {
        "hopper": lambda shape: candidates.Candidate("hopper", fail),
        "cudnn": fail,
        "wrong": lambda shape: candidates.Candidate(
            "wrong", lambda s: candidates.op(PREFILL, "xla")(s) * 1.1
        ),
        "xla": lambda shape: candidates.ours("xla", shape),
    }
    monkeypatch.setattr(kernels, "builders", lambda: available)
    monkeypatch.setitem(shapes.TABLES, "smoke", (PREFILL,))
    path = tmp_path / "kernels.json"
    assert kernels.main(["--shapes", "smoke", "--output", str(path)]) == 1
    results = {
        result["implementation"]: result
        for result in json.loads(path.read_text())["rows"][0]["results"]
    }
    assert [results[name]["status"] for name in available] == [
        "error",
        "unsupported",
        "wrong",
        "ok",
    ]
    assert (
        results["hopper"]["reason"] == "RuntimeError: no such kernel"
        and results["xla"]["seconds"] > 0
    )
    assert "wrong or broken: p/hopper, p/wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (kernels, ["--only", "nothing such"], "no such row"),
        (kernels, ["--only", "("], "not a regular expression"),
        (kernels, ["--implementation", "fast"], "--implementation fast: not here"),
        (
            kernels,
            ["--implementation", "hopper"],
            "--implementation hopper: needs a Hopper GPU, this is cpu",
        ),
        (kernels, ["--only", "chunk", "--output", "/dev/null/x"], "cannot be made"),
        (tune, [], "nothing to tune on a CPU"),
        (tune, ["--only", "nothing such"], "nothing has such a name"),
    ],
)
def test_usage_errors_are_one_line(command, flags, message, capsys):
    assert command.main([*flags, "--shapes", "smoke"]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_seconds_are_positive_and_finite(seconds, capsys):
    with pytest.raises(SystemExit) as exit:
        kernels.main(["--seconds", seconds])
    assert exit.value.code == 2
    assert (
        f"--seconds: must be a positive, finite number of seconds, got '{seconds}'"
        in capsys.readouterr().err
    )


def test_judging():
    def row(name, **result):
        return {
            "name": name,
            "results": [
                {
                    "implementation": "hopper",
                    "status": "ok",
                    "rate": 650.0,
                    "share_of_floor": 0.8,
                    **result,
                }
            ],
        }

    rows = [
        row("prefill 8B 8k", ratio_to_cudnn=1.01),
        row("decode 64x2k bf16"),
        row("prefill 8B 2k", status="wrong", ratio_to_cudnn=2.0),
    ]
    verdicts = {(v["row"], v["measure"]): v["verdict"] for v in kernels.judge(rows, "full")}
    assert verdicts["prefill 8B 8k", "ratio_to_cudnn"] == "met, 1.01"
    assert verdicts["decode 64x2k bf16", "share_of_floor"] == "MISSED, 0.8"
    assert (
        verdicts["prefill 8B 2k", "ratio_to_cudnn"]
        == verdicts["prefill 8B 32k", "rate"]
        == "not measured"
    )


def test_tune_without_a_device(capsys):
    assert tune.main(["--shapes", "smoke", "--dry-run"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [job.name for job in tune.jobs("cpu", None)]
    assert "Nothing can be timed" in last and " 0 of " not in "".join(lines)


def test_tune_fails_where_nothing_runs(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        tune, "tune", lambda *_, **__: {"tried": [{"reason": "broken"}], "best": None, "basis": ""}
    )
    assert tune.main(["--shapes", "smoke", "--dry-run"]) == 1


def test_grids(monkeypatch):
    every = tune.jobs("cpu", None)
    assert (
        grid.GRIDS.keys()
        == {job.kernel for job in every}
        == {entry["kernel"] for entry in tuning.read_table()}
    )
    for job in every:
        fields = {field.name for field in dataclasses.fields(job.tuning_class)}
        assert {name for group in grid.GRIDS[job.kernel] for name in group} <= fields
        for shape in grid.shapes(job.kernel, job.head_dim, job.dtype, "full"):
            assert getattr(shape, "packed", False) == job.kernel.endswith(".packed")
    monkeypatch.setitem(grid.GRIDS, "tpu.decode", ({"rows": (1,), "block_kv": (128,)},))
    with pytest.raises(ValueError, match="grid of tpu.decode has block_kv"):
        list(
            grid.combinations("tpu.decode", 0, tune.Job("tpu.decode", 128, "int8").tuning_class, {})
        )


@pytest.mark.parametrize("job", tune.jobs("gpu", "H128 bfloat16"), ids=lambda job: job.kernel)
def test_every_candidate_is_traced_anew(job):
    """A tuning that some cache kept out would make all candidates look alike."""
    (shape,) = grid.shapes(job.kernel, job.head_dim, job.dtype, "smoke")
    arrays = [jax.eval_shape(lambda: inputs.draw_one(shape, jax.random.key(0)))]
    call, traced = candidates.op(shape, "hopper"), []
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H100)):
        for values in list(grid.combinations(job.kernel, 0, job.tuning_class, {}))[:2]:
            with tune.using(job.kernel, job.tuning_class(**values)):
                traced.append(
                    str(jax.jit(lambda sets: [call(one) for one in sets]).trace(arrays).jaxpr)
                )
    assert traced[0] != traced[1]


def test_the_table(tmp_path):
    entry = {
        "kernel": "hopper.decode",
        "head_dim": 64,
        "dtype": "int8",
        "tuning": {},
        "basis": "draft",
    }
    old = [entry | {"device": device} for device in ("any", "X")]
    new = old[1] | {"tuning": {"block_kv": 64, "splits": None}, "basis": "measured"}
    table = tune.with_entry(old, new)
    text = tune.table_text(table)
    assert table == [new, old[0]] == json.loads(text) and len(text.splitlines()) == len(table) + 2
    assert (
        tune.table_text(json.loads(tuning.TABLE.read_text())) == tuning.TABLE.read_text()
    )  # a new entry changes one line
    (path := tmp_path / "table.json").write_text(text)
    assert list(tuning.read_table(path)) == table


def test_what_tune_writes_goes_before_any(monkeypatch):
    job, kinds = tune.Job("hopper.prefill.packed", 128, "bfloat16"), ["X", "X", "Y"]
    usual = {
        "kernel": job.kernel,
        "device": "any",
        "head_dim": "any",
        "dtype": "any",
        "tuning": {},
        "basis": "draft",
    }
    entry = usual | {
        "device": "X",
        "head_dim": 128,
        "dtype": "bfloat16",
        "tuning": {"block_kv": 64},
    }
    monkeypatch.setattr(tuning, "read_table", lambda: tune.with_entry([usual], entry))
    monkeypatch.setattr(tuning, "current_device", lambda: ("gpu", kinds.pop(0)))
    taken = [
        tuning.tuning_for(job.tuning_class, job.kernel, head_dim, job.dtype).block_kv
        for head_dim in (128, 64, 128)
    ]
    assert taken == [64, 128, 128]


def test_written_at_once(tmp_path):
    report.write_json(path := tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        report.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]


HLO = """HloModule m

%fused (p0: bf16[1,8,64,16], p1: bf16[4,8,8,16], p2: s32[]) -> bf16[1,8,64,16] {
  %p0 = bf16[1,8,64,16]{3,2,1,0} parameter(0)
  %p1 = bf16[4,8,8,16]{3,2,1,0} parameter(1)
  %wide = f32[4,8,8,16]{3,2,1,0} convert(%p1), metadata={op_name="x"}
  %left = f32[4,8,8,8]{3,2,1,0} slice(%wide), slice={[0:4], [0:8], [0:8], [0:8]}
  %right = f32[4,8,8,8]{3,2,1,0} slice(%wide), slice={[0:4], [0:8], [0:8], [8:16]}
  %turned = f32[4,8,8,16]{3,2,1,0} concatenate(%right, %left), dimensions={3}
  %group = f32[1,8,8,16]{3,2,1,0} slice(%turned), slice={[2:3], [0:8], [0:8], [0:16]}
  %narrow = bf16[1,8,8,16]{3,2,1,0} convert(%group)
  %zero = s32[] constant(0)
  %p2 = s32[] parameter(2)
  ROOT %update = bf16[1,8,64,16]{3,2,1,0} dynamic-update-slice(%p0, %narrow, %zero, %zero, %p2, /*index=5*/%zero)
}

ENTRY %main (a: bf16[32,64], b: bf16[64,64], cache: bf16[1,8,64,16], at: s32[]) -> bf16[1,8,64,16] {
  %a = bf16[32,64]{1,0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  %cache = bf16[1,8,64,16]{3,2,1,0} parameter(2)
  %at = s32[] parameter(3)
  %gemm = (bf16[64,64]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"
  %out = bf16[64,64]{1,0} get-tuple-element(%gemm), index=0
  %heads = bf16[4,8,8,16]{3,2,1,0} bitcast(%out)
  ROOT %new = bf16[1,8,64,16]{3,2,1,0} fusion(%cache, %heads, %at), kind=kLoop, calls=%fused
}
"""


def test_bytes_of_a_program():
    """A fusion that rotates one of four groups and writes it in place touches that group, not the
    others nor the cache."""
    gemm, update = hlo.kernels(HLO)
    assert (gemm.op, gemm.is_product, gemm.read_bytes, gemm.written_bytes) == (
        "custom-call",
        True,
        2 * (32 * 64 + 64 * 64),
        2 * 64 * 64,
    )
    group = 8 * 8 * 16 * 2
    assert (update.op, update.is_product, update.read_bytes, update.written_bytes) == (
        "fusion",
        False,
        group + 4,
        group,
    )


def test_boundary_smoke(tmp_path, capsys):
    path = tmp_path / "boundary.json"
    assert boundary.main(["--shapes", "smoke", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    (row,) = document["rows"]
    assert row["timings"]["boundary"]["seconds"] > 0 and any(
        kernel["is_product"] for kernel in row["kernels"]
    )
    assert row["kernel_seconds"] >= row["floor_seconds"] > 0
    assert "A fused kernel could save at most" in capsys.readouterr().out
