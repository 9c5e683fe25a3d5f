"""`python -m benchmarks.http` runs, and counts what it should."""

import json
from pathlib import Path

import pytest

from benchmarks import measurements
from benchmarks.http.__main__ import main
from benchmarks.http.engines import TimedModelRunner, make_tokenizer
from benchmarks.http.summary import cost_of_http


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    file = tmp_path_factory.mktemp("http") / "result.json"
    assert main(["--quick", "--output", str(file)]) == 0
    return json.loads(file.read_text())


def test_both_run_the_same_requests(result, capsys):
    (cell,) = result["cells"]
    assert (cell["rows"], cell["steps"], cell["clients"]) == (8, 8, 12)
    for kind in ("bare", "served"):
        found = cell[kind]
        # 12 requests of 32 tokens: 4 calls of 32 ms for 8 rows, and as many for the other 4.
        assert 12 * 32 / found["tokens_per_s"] >= 8 * 0.032
        assert 0 <= found["idle_share"] < 1
        assert 0 < found["ttft_half_p50"] <= found["ttft_half_p99"]
        # At least a prompt of 128 tokens and a call.
        assert found["ttft_alone_p50"] >= 127 * 0.025 / 2048 + 0.004
    assert cell["share"] == cell["served"]["tokens_per_s"] / cell["bare"]["tokens_per_s"]
    assert cell["added_ttft_alone_p50"] == pytest.approx(
        cell["served"]["ttft_alone_p50"] - cell["bare"]["ttft_alone_p50"]
    )


def test_the_section_has_a_row_for_each_cell(result):
    rows = [line for line in cost_of_http(result, result).splitlines() if line.startswith("| 8 |")]
    assert len(rows) == 2


def test_the_page_of_the_server_has_the_figures():
    page = Path(__file__).parents[1] / "docs" / "server.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    cells = measurements.newest("HTTP")["cells"]
    lost = [f"{100 * (1 - cell['share']):.1f}" for cell in cells]
    later = [f"{1e3 * cell['added_ttft_alone_p50']:.1f}" for cell in cells]
    idle = max(cell["served"]["idle_share"] for cell in cells)
    assert f"{min(lost)} to {max(lost)} % of the throughput" in text
    assert f"waits at most {100 * idle:.1f} % of the time" in text
    assert f"comes {min(later)} to {max(later)} ms later" in text


def test_the_device_is_idle_from_the_end_of_a_call_to_the_next(monkeypatch):
    runner, now = TimedModelRunner(4, 8), 100.0
    monkeypatch.setattr("benchmarks.http.engines.time.perf_counter", lambda: now)
    assert runner._call(2.0) == 102.0
    assert runner._call(1.0) == 103.0, "calls run one after another"
    now = 104.5
    assert runner._call(1.0) == 105.5 and runner.idle_seconds == 1.5


@pytest.mark.parametrize("vocab_size", [1024, 32000])
def test_every_token_has_a_text(vocab_size):
    tokenizer = make_tokenizer(vocab_size)
    assert len(tokenizer) == vocab_size and tokenizer.eos_token_id == vocab_size - 1
    assert tokenizer.decode([0, 26, 702]) == "aaax702"
