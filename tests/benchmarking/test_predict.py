"""The simulator of the engine's schedule: calls take what their bytes and products take, and the
engine's loops add them up."""

import json

import numpy as np
import pytest

from benchmarks import serve
from benchmarks.predict import __main__ as command
from benchmarks.predict import model, serving
from benchmarks.predict.model import H100, H200, StepModel
from swiftkv_jax.infer.bench.summary import STUDENT
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.plan.presets import LLAMA_8B

POSITION = 2 * 8 * 128 * 2  # bytes of a position of Llama-3.1-8B in one layer, bfloat16


def step_model(device=H200, **options) -> StepModel:
    return serving.PredictedRunner(device, LLAMA_8B, STUDENT, EngineOptions(**options)).model


def test_blocks_start_when_a_multiprocessor_is_free():
    assert model.makespan([3, 3, 2, 2, 2], 2) == 7
    assert model.makespan([1, 1, 5], 2) == 6  # the longest last
    assert model.makespan([5, 1, 1], 2) == 5


@pytest.mark.parametrize(
    ("rows", "length", "milliseconds"), [(1, 1024, 5.2), (32, 2048, 7.2), (256, 2048, 25.5)]
)
def test_decode_step(rows, length, milliseconds):
    seconds = step_model().decode_seconds([length] * rows, 131_072)
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.05)


def test_a_decode_step_takes_the_time_of_its_lengths_and_not_of_the_table():
    predicted = step_model()
    short, long = (predicted.decode_seconds([length] * 64, 131_072) for length in (1024, 2048))
    assert predicted.decode_seconds([2048] * 64, 4096) == pytest.approx(long, rel=1e-3)
    read = 32 * 64 * POSITION * 1024 / H200.decode_bandwidth("bfloat16")
    assert long - short == pytest.approx(read, rel=0.15)
    half = predicted.decode_seconds([2048] * 32 + [0] * 32, 131_072)
    assert half == pytest.approx(short, rel=0.03)


def test_a_chunk():
    predicted, tiles = step_model(), [128 * (page + 1) for page in range(16)]
    assert predicted.chunk_seconds(2048, tiles) == pytest.approx(27e-3, rel=0.05)
    later = [6144 + tile for tile in tiles]
    assert predicted.chunk_seconds(2048, later) > 1.1 * predicted.chunk_seconds(2048, tiles)


def test_fp8_products_take_less_time():
    """Those of an H100 by XLA were measured: 19.5 ms a chunk, and 7.7 ms a step of 64 rows."""
    (row,) = serving.predict(H100, f"{serve.W8A8['prefill-w8a8']} --input-len 2k")["rows"]
    assert row["seconds"] == pytest.approx(19.5e-3, rel=0.15)
    flags = f"{serve.W8A8['decode-w8a8']} --batch 64"
    (row,) = serving.predict(H100, flags)["rows"]
    assert row["seconds_per_output_token"] == pytest.approx(7.7e-3, rel=0.15)


def test_calls_of_a_part_take_what_their_steps_take():
    """A chunk has tiles without queries too, and rows grow from call to call."""
    (row,) = serving.predict(H200, "prefill --input-len 2k -r 1 --swiftkv on")["rows"]
    tiles = [min(128 * (page + 1), 2047) for page in range(16)] + [0] * 2
    assert row["seconds"] == pytest.approx(step_model().chunk_seconds(2048, tiles))
    flags = "decode --input-len 512 --batch 64 --output-len 512 -r 1 --swiftkv on"
    (row,) = serving.predict(H200, flags)["rows"]
    predicted = step_model(max_model_len=1024)
    steps = [predicted.decode_seconds([length] * 64, 1024) for length in range(520, 1024, 8)]
    assert row["seconds_per_output_token"] == pytest.approx(np.mean(steps), rel=5e-3)


def test_requests_that_arrive_wait_for_those_before():
    def ttft(rate):
        flags = f"latency --input-len 2k --output-len 16 --request-rate {rate} --num-prompts 12"
        return serving.predict(H200, f"{flags} --max-num-seqs 4 --swiftkv on")["rows"][0][
            "ttft_p50"
        ]

    alone, crowded = ttft(0.5), ttft("inf")
    assert 27e-3 < alone < 3 * 27e-3 and crowded > 3 * alone


def test_the_command(tmp_path, capsys):
    path, flags = tmp_path / "predicted.json", serve.FULL["decode-2k"]
    assert command.main(["--only", "^decode-2k$", "-o", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["predicted_for"] == "h200"
    predicted = {"decode-2k": serving.predict(H200, flags)}
    assert document["parts"] == json.loads(json.dumps(predicted))
    student, teacher = predicted["decode-2k"]["rows"]
    assert "idle_share" not in student, "the host takes no time"
    assert (student["variant"], teacher["variant"]) == ("swiftkv", "teacher")
    assert "an H200, predicted: decode-2k" in capsys.readouterr().out
    assert command.main(["--only", "nothing such"]) == 2
