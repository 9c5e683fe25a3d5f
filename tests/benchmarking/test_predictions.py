"""The model of times: it stays near what is published of other kernels, and every measured row has
a prediction.

Figures that kernels and programs were predicted to take when they were read as machine code are
repeated here. They are no measurements.
"""

import dataclasses
import json
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import report, serve
from benchmarks.kernels import __main__ as measured
from benchmarks.kernels import candidates, rows, shapes
from benchmarks.predict import __main__ as command
from benchmarks.predict import attention, serving
from benchmarks.predict.devices import DEVICES, H100, H200, device_model
from benchmarks.predict.steps import StepModel
from benchmarks.timing import SMOKE_PLAN
from swiftkv_jax.infer.bench.summary import STUDENT
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.pallas_kernels.decode_plan import DecodePlan
from swiftkv_jax.pallas_kernels.hopper import prefill
from swiftkv_jax.plan.presets import LLAMA_8B

POSITION = 2 * 8 * 128 * 2  # bytes of a position of Llama-3.1-8B in one layer, bfloat16


def causal(keys: int, batch: int = 1, heads: int = 32, **options) -> shapes.Prefill:
    return shapes.Prefill("", batch, keys, keys, heads=heads, **options)


# Schedules --------------------------------------------------------------------


def test_blocks_start_when_a_multiprocessor_is_free():
    assert attention.makespan([3, 3, 2, 2, 2], 2) == 7
    assert attention.makespan([1, 1, 5], 2) == 6  # the longest last
    assert attention.makespan([5, 1, 1], 2) == 5


def test_blocks_share_the_bandwidth():
    def seconds(sizes, slots=4, latency=0.0):
        options = {"slots": slots, "latency": latency, "block_rate": 3.0, "bandwidth": 6.0}
        return attention.reading_seconds(sizes, **options)

    assert seconds([6]) == 2  # at the rate of one block
    assert seconds([6, 6, 6]) == 3  # at the bandwidth
    assert seconds([6, 6, 12]) == 3 + 2  # the longest alone in the end
    assert seconds([6, 6, 6], slots=1) == 6
    assert seconds([6, 0, 0], slots=1, latency=0.5) == 2 + 3 * 0.5
    assert seconds([6, 0, 0], slots=3, latency=0.5) == 2.5


# Attention --------------------------------------------------------------------


def rate(shape: shapes.Prefill, heads_slowest: bool = False, **parameters) -> float:
    """TFLOP/s, all heads of a tile one after the other or all tiles of a head."""
    device = dataclasses.replace(H100, **parameters)
    seconds = attention.prefill_seconds(device, shape)
    if heads_slowest:
        tiles = range(shape.keys // 128, 0, -1)
        cycles = [
            attention.prefill_tile(device, prefill.Tuning(), shape.head_dim, blocks)
            for _ in range(shape.heads)
            for blocks in tiles
            for _ in range(shape.batch)
        ]
        seconds = attention.makespan(cycles, device.multiprocessors) / device.clock
    return shapes.rate(shape, seconds)


@pytest.mark.parametrize(
    ("pair", "tile", "published"),
    [(2700, 6750, (492, 568, 620, 636)), (2750, 4000, (532, 595, 629, 645))],
    ids=["tokamax", "cuDNN"],
)
def test_prefill_of_other_libraries(pair, tile, published):
    """The model is 4 to 6 % above them, and beyond 8k, where power limits them, beside them."""
    for keys, expected in zip((2048, 4096, 8192, 16384), published, strict=True):
        shape = causal(keys, batch=16384 // keys, heads=16)
        ratio = rate(shape, pair_cycles=pair, tile_cycles=tile) / expected
        assert abs(ratio - 1) < 0.02 if keys > 8192 else 1.03 < ratio < 1.07


@pytest.mark.parametrize(
    ("batch", "heads", "expected"),
    [(1, 32, (521, 609, 661)), (4, 32, (533, 613, 662)), (1, 8, (306, 613, 662))],
)
def test_prefill(batch, heads, expected):
    for keys, figure in zip((2048, 4096, 8192), expected, strict=True):
        assert rate(causal(keys, batch, heads)) == pytest.approx(figure, rel=0.02)


@pytest.mark.parametrize(("heads", "expected"), [(32, (429, 545, 629)), (8, (306, 400, 543))])
def test_prefill_with_the_heads_in_turn_is_slower(heads, expected):
    for keys, figure in zip((2048, 4096, 8192), expected, strict=True):
        shape = causal(keys, heads=heads)
        assert rate(shape, heads_slowest=True) == pytest.approx(figure, rel=0.02)
        assert rate(shape) >= rate(shape, heads_slowest=True)


def test_gradients_of_another_library():
    """Those of tokamax, whose two kernels have the same products."""
    for keys, published in ((4096, 408), (16384, 452)):
        shape = causal(keys, batch=16384 // keys, heads=16, kv_heads=16, gradient=True)
        seconds = attention.gradient_seconds(H100, shape)
        backward = shape.work * (shapes.BACKWARD - 1) / shapes.BACKWARD
        assert backward / seconds / 1e12 == pytest.approx(published, rel=0.02)


def test_documents_leave_work_out():
    whole, packed = causal(8192, 2), causal(8192, 2, packed=True)
    assert attention.seconds(H200, packed) < 0.5 * attention.seconds(H200, whole)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("decode 64x2k bf16", 140e-6), ("decode 1x32k bf16", 46e-6), ("decode 16x8k bf16", 147e-6)],
)
def test_decode(name, expected):
    (shape,) = (shape for shape in shapes.FULL if shape.name == name)
    assert attention.seconds(H200, shape) == pytest.approx(expected, rel=0.15)


def ragged_lengths(rows: int, microseconds: float, seed: int) -> list[int]:
    """Lognormal, at most about 11k positions, that the whole bandwidth reads in so long."""
    lengths = np.random.default_rng(seed).lognormal(0.0, 0.65, rows)
    total = microseconds * 1e-6 * H200.copy / POSITION
    return np.maximum(1, lengths / lengths.sum() * total).astype(int).tolist()


@pytest.mark.parametrize(
    ("rows", "ideal", "expected", "row_by_row"),
    [(16, 43, 49, 68), (64, 114, 117, 150), (256, 552, 557, 587)],
)
def test_ragged_rows(rows, ideal, expected, row_by_row):
    """Equal chunks keep the bandwidth in use until near the end, whatever the lengths: the mean of
    some draws, without what a block costs beside its bytes."""
    shape = shapes.Decode("", rows, 131_072, page=128)
    options = {
        "slots": H200.decode_slots * H200.multiprocessors,
        "latency": 0.0,
        "block_rate": H200.decode_block_rate,
        "bandwidth": H200.copy,
    }
    chunks, whole = [], []
    for seed in range(5):
        lengths = ragged_lengths(rows, ideal, seed)
        plan = attention.work_list(H200, shape, lengths)
        entries = np.asarray(plan.entries)
        tiles = (entries[:, 2] - entries[:, 1]) * plan.tile
        for found, positions in ((chunks, tiles), (whole, np.array(lengths))):
            sizes = np.repeat(positions * POSITION // 8, 8).tolist()
            found.append(1e6 * attention.reading_seconds(sizes, **options))
    assert np.mean(chunks) == pytest.approx(expected, rel=0.1)
    assert np.mean(chunks) < 0.99 * np.mean(whole) and np.mean(chunks) < 1.05 * ideal


# Steps ------------------------------------------------------------------------


def step_model(**options) -> tuple[StepModel, serving.PredictedRunner]:
    runner = serving.PredictedRunner(H200, LLAMA_8B, STUDENT, EngineOptions(**options))
    return runner.model, runner


@pytest.mark.parametrize(
    ("rows", "length", "milliseconds"), [(1, 1024, 5.2), (32, 2048, 7.2), (256, 2048, 25.5)]
)
def test_decode_step(rows, length, milliseconds):
    model, _ = step_model()
    assert 1e3 * model.decode_seconds([length] * rows, 131_072) == pytest.approx(
        milliseconds, rel=0.05
    )


def test_a_decode_step_takes_the_time_of_its_lengths_and_not_of_the_table():
    """With the default options: 64 rows, tables of 131,072 positions."""
    model, runner = step_model()
    keys = runner.shapes.table_pages * runner.shapes.page_size
    assert (runner.shapes.slots, keys) == (64, 131_072)
    short, long, full = (model.decode_seconds([length] * 64, keys) for length in (1024, 2048, 4096))
    assert model.decode_seconds([2048] * 64, 4096) == pytest.approx(long, rel=1e-3)
    read = 32 * 64 * POSITION * 1024 / H200.decode_bandwidth("bfloat16")
    assert long - short == pytest.approx(read, rel=0.15)
    assert full - long == pytest.approx(2 * read, rel=0.15)
    assert model.decode_seconds([2048] * 32 + [0] * 32, keys) == pytest.approx(short, rel=0.02)


def test_a_cut_by_the_room_of_the_table_would_show(monkeypatch):
    def by_room(q, k, length, page_table, *, tuning):
        """Every row in splits of 8 tiles of its table, whether it has positions there or not."""
        rows, tile = length.shape[0], 64
        cuts = page_table.shape[1] * k.shape[2] // tile // 8
        tiles = -(-length // tile)
        start = jnp.minimum(jnp.arange(cuts) * 8, tiles[:, None])
        entries = (
            jnp.arange(rows)[:, None] + 0 * start,
            start,
            jnp.minimum(start + 8, tiles[:, None]),
        )
        first = jnp.arange(rows) * cuts
        entries = jnp.stack(entries, axis=-1).reshape(-1, 3)
        return DecodePlan(entries, jnp.stack([first, first + cuts], axis=1), tile)

    shape = shapes.Decode("", 64, 131_072, page=128)
    right = attention.decode_seconds(H200, shape, [2048] * 64)
    monkeypatch.setattr(attention.decode, "plan", by_room)
    assert attention.decode_seconds(H200, shape, [2048] * 64) > 8 * right
    narrow = dataclasses.replace(shape, keys=2048)
    assert attention.decode_seconds(H200, narrow, [2048] * 64) < 1.2 * right


@pytest.mark.parametrize(
    ("before", "expected"), [(0, 83e-6), (2048, 178e-6), (8192, 469e-6), (32768, 1651e-6)]
)
def test_attention_of_a_chunk(before, expected):
    """16 pages of queries, and 32 without."""
    model, _ = step_model()
    tiles = [before + 128 * (page + 1) for page in range(16)]
    assert model._attention([*tiles, *[0] * 32]) == pytest.approx(expected, rel=0.05)


def test_a_chunk():
    model, _ = step_model()
    tiles = [128 * (page + 1) for page in range(16)]
    assert model.chunk_seconds(2048, tiles) == pytest.approx(27e-3, rel=0.05)
    assert (
        0
        < model.chunk_seconds(2048, [*tiles, *[0] * 32]) - model.chunk_seconds(2048, tiles)
        < 1.2e-3
    )


# Rows -------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
def test_every_row_of_the_kernels_has_a_prediction(device):
    assert device_model(device.kind) is device and device_model("cpu") is None
    for shape in shapes.FULL:
        found = command.row(device, shape)
        assert found["name"] == shape.name
        share = found["share_of_roofline"]
        assert 0.3 < share < 1, shape.name


def test_parts_of_serving_are_predicted_cell_by_cell():
    found = serving.predict(
        H200, "decode --input-len 256 --batch 1,4 --output-len 16 -r 3 --kv-cache-dtype fp8"
    )
    labels = ["256 in, 16 out, 1 prompts", "256 in, 16 out, 4 prompts"]
    assert [(row["label"], row["variant"]) for row in found["rows"]] == [
        (label, variant) for label in labels for variant in ("swiftkv", "teacher")
    ]
    assert not any("host_share" in row for row in found["rows"]), "the host takes no time"
    student, teacher = found["rows"][:2]
    assert student["speed_up"] == pytest.approx(
        teacher["seconds_per_output_token"] / student["seconds_per_output_token"]
    )


def test_calls_of_a_part_take_what_their_steps_take():
    """A chunk has tiles without queries too, and rows grow from call to call."""
    (row,) = serving.predict(H200, "prefill --input-len 2k -r 1 --swiftkv on")["rows"]
    tiles = [min(128 * (page + 1), 2047) for page in range(16)] + [0] * 2
    model, _ = step_model()
    assert row["seconds"] == pytest.approx(model.chunk_seconds(2048, tiles))

    flags = "decode --input-len 512 --batch 64 --output-len 512 -r 1 --swiftkv on"
    (row,) = serving.predict(H200, flags)["rows"]
    model, _ = step_model(max_model_len=1024)
    steps = [model.decode_seconds([length] * 64, 1024) for length in range(520, 1024, 8)]
    assert row["seconds_per_output_token"] == pytest.approx(np.mean(steps), rel=5e-3)
    assert steps[-1] > 1.1 * steps[0]


def test_requests_that_arrive_wait_for_those_before():
    def ttft(rate):
        flags = f"latency --input-len 2k --output-len 16 --request-rate {rate} --num-prompts 12"
        return serving.predict(H200, f"{flags} --max-num-seqs 4 --swiftkv on")["rows"][0]

    alone, crowded = ttft(0.5), ttft("inf")
    chunk = 27e-3
    assert chunk < alone["ttft_p50"] < 3 * chunk
    assert crowded["ttft_p50"] > 3 * alone["ttft_p50"]


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(serve.FULL, "decode", "decode --input-len 256 --output-len 16 -r 1")
    path = tmp_path / "predicted.json"
    assert command.main(["--only", "^(decode|decode 64x2k bf16)$", "-o", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["predicted_for"] == "h200" and document["device"]["platform"] == "cpu"
    assert [row["name"] for row in document["rows"]] == ["decode 64x2k bf16"]
    assert list(document["parts"]) == ["decode"]
    printed = capsys.readouterr().out
    headings = [line for line in printed.splitlines() if line.startswith("#")]
    assert headings and all("predicted" in heading for heading in headings)
    assert command.main(["--only", "nothing such"]) == 2
    assert command.main(["--only", "("]) == 2


# Beside measurements ----------------------------------------------------------


def test_serving_prints_both():
    flags = "decode --input-len 2k --batch 64 --output-len 64 -r 3"
    assert serve.FULL["decode-2k"] == flags
    predicted = {"decode-2k": serving.predict(H200, flags)}
    rows = [row | {"seconds": 2 * row["seconds"]} for row in predicted["decode-2k"]["rows"]]
    measured = {"decode-2k": {"rows": rows}, "latency": {"rows": rows}}
    lines = serve.beside_predictions(measured, predicted).splitlines()
    (target,) = (line for line in lines if "tokens/s" in line)
    assert target.split("|")[4].strip() == target.split("|")[5].strip() != ""
    assert sum(line.endswith("| 2.00 |") for line in lines) == 2
    assert sum(line.endswith("|  |  |") for line in lines) == 2, "a part without a prediction"
    assert serve.predicted_parts("cpu", ["decode-2k"]) == {}


def test_serving_predicts_in_a_process_without_the_device(monkeypatch):
    def run(argv, env, **_):
        assert argv[1:3] == ["-m", "benchmarks.predict"] and env["JAX_PLATFORMS"] == "cpu"
        return subprocess.CompletedProcess(argv, command.main(argv[3:]))

    fake = types.SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(serve, "subprocess", fake)
    parts = serve.predicted_parts(H200.kind, ["decode-2k"])
    assert parts == {"decode-2k": serving.predict(H200, serve.FULL["decode-2k"])}


def test_the_prediction_is_beside_the_time(monkeypatch, capsys):
    shape, key = shapes.SMOKE[0], jax.random.key(0)
    monkeypatch.setattr(rows, "device_model", lambda kind: H200)
    available = {
        name: lambda shape, name=name: candidates.Candidate(name, candidates.op(shape, "xla"))
        for name in ("hopper", "xla")
    }
    row = rows.measure_row(shape, available, key, serving.roofline(H200), SMOKE_PLAN)
    predicted = [result.get("predicted_seconds") for result in row["results"]]
    assert predicted == [attention.seconds(H200, shape), None]
    measured._print_row(row, "cpu")
    hopper, xla = (line.split() for line in capsys.readouterr().out.splitlines())
    assert " ".join(hopper[4:6]) == report.duration(attention.seconds(H200, shape))
    assert xla[4] == "-"
