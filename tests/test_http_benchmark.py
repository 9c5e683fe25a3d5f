"""`python -m benchmarks.http` runs, and counts what it should."""

import asyncio
import json
import math
import types
from pathlib import Path

import pytest

from benchmarks import measurements
from benchmarks.http import host
from benchmarks.http.__main__ import main
from benchmarks.http.bars import TIMED, table_of_bars, verdicts
from benchmarks.http.cell import Cell
from benchmarks.http.client_floor import answering_at_once
from benchmarks.http.engines import TimedModelRunner, make_tokenizer, timed_engine
from benchmarks.http.spread import Spread, added, share
from benchmarks.http.summary import cost_of_http, summary, under_load
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.bench.http_client import Client


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
    assert 0 < cell["served"]["loop_seconds_per_chunk"] < 0.1
    assert 0 < cell["served"]["ttft_client"] < cell["served"]["ttft_alone_p50"]
    assert cell["prompts"] == "token ids" and not cell["client_is_the_limit"]
    assert len(cell["interpreter_seconds"]) == 2 and min(cell["interpreter_seconds"]) > 0
    assert 0 < share(cell).low <= share(cell).median <= share(cell).high
    assert cell["added_ttft_alone_p50"] == pytest.approx(
        cell["served"]["ttft_alone_p50"] - cell["bare"]["ttft_alone_p50"]
    )


def test_the_section_has_a_row_for_each_cell(result):
    rows = [line for line in cost_of_http(result, result).splitlines() if line.startswith("| 8 |")]
    assert len(rows) == 2


def test_the_page_of_the_server_has_the_figures():
    page = Path(__file__).parents[1] / "docs" / "server.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    cells = under_load(measurements.newest("HTTP"))
    lost = [f"{100 - share(cell).median:.1f}" for cell in cells]
    later = [f"{1e3 * cell['added_ttft_alone_p50']:.1f}" for cell in cells]
    half = [f"{1e3 * cell['added_ttft_half_p50']:.1f}" for cell in cells]
    idle = max(cell["served"]["idle_share"] for cell in cells)
    assert f"{min(lost)} to {max(lost)} % of the throughput" in text
    assert f"waits at most {100 * idle:.1f} % of the time" in text
    assert f"comes {min(later)} to {max(later)} ms later where nothing else runs" in text
    assert f"{min(half)} to {max(half)} ms later at half of the throughput" in text


def test_the_committed_result_keeps_to_the_bars_of_throughput():
    """Those of the time to the first token are missed, and the page says so."""
    document = measurements.newest("HTTP")
    for bar, figure, verdict in verdicts(document):
        if bar.what.startswith(("throughput", "device idle")):
            assert figure is not None and verdict == "met", bar.what
    lines = table_of_bars(document).splitlines()
    assert len(lines) == 2 + len(TIMED)
    assert all(line.endswith(("| met |", "| missed |", "| not measured |")) for line in lines[2:])


def test_a_gain_is_noise():
    runs = {
        kind: [{"tokens_per_s": rate, "ttft_alone_p50": ttft} for rate, ttft in values]
        for kind, values in {
            "bare": [(100.0, 0.010), (100.0, 0.012), (100.0, 0.011)],
            "served": [(96.0, 0.009), (101.0, 0.014), (98.0, 0.013)],
        }.items()
    }
    cell = {"rows": 8, "steps": 8, "added_ttft_alone_p50": 0.002, "runs": runs}
    cell |= {kind: runs[kind][2] for kind in runs}
    assert share(cell) == pytest.approx((98.0, 96.0, 101.0, False))
    spread = added(cell, "ttft_alone_p50")
    assert spread is not None
    assert spread == pytest.approx((2.0, -1.0, 2.0, False))
    assert "not resolved (-1.0 to +2.0 ms)" in summary([cell])
    (bar,) = [bar for bar in TIMED if bar.what == "first token alone, p50"]
    assert bar.verdict(spread) == "not resolved", "the bound, 1 ms, is within the noise"
    assert bar.verdict(Spread(2.0, 0.5, 2.5, True)) == "missed"
    assert bar.verdict(Spread(0.2, -0.5, 0.9, False)) == "met"
    cell["client_is_the_limit"] = True
    assert "at least 98.0%" in summary([cell])


def test_few_sequences_decode_one_token_a_call():
    shapes = TimedModelRunner(64, 8).shapes
    assert (shapes.single_step_rows, shapes.decode_steps) == (32, 8)
    assert TimedModelRunner(8, 8).shapes.single_step_rows == 8
    assert TimedModelRunner(64, 1).shapes.single_step_rows == 0, "there is no other call"


def test_prompts_as_text_have_as_many_tokens():
    args = types.SimpleNamespace(input_len=128)
    cell = Cell(timed_engine(8, 8), args, clients=1, text=True)  # type: ignore[arg-type]
    texts = [json.loads(line)["prompt"] for line in cell._texts(3, 0).splitlines()]
    tokenizer = make_tokenizer(1024)
    assert [len(tokenizer(text)["input_ids"]) for text in texts] == [128] * 3
    assert len(set(texts)) == 3


def test_the_client_is_answered_at_once():
    async def ask(url: str) -> list:
        client = Client(url)
        answers = [await client.complete({"prompt": [5] * 20_000}) for _ in range(3)]
        client.close()
        return answers

    with answering_at_once() as url:
        answers = asyncio.run(ask(url))
    assert [one.error for one in answers] == [None] * 3
    assert all(one.num_tokens == 1 and one.ttft > 0 for one in answers)


def test_a_busy_machine_is_refused(monkeypatch, capsys):
    host.check_load(0.5, load=0.4)
    with pytest.raises(UsageError, match="the load of this machine is 0.60, above"):
        host.check_load(0.5, load=0.6)
    host.check_load(math.inf, load=100.0)
    monkeypatch.setattr(host.os, "getloadavg", lambda: (3.0, 3.0, 3.0))
    assert main([]) == 2
    assert "--max-load inf" in capsys.readouterr().err


def test_other_processes_are_told_from_this_one(monkeypatch, tmp_path):
    stat, now, own = tmp_path / "stat", [100.0], [50.0]
    monkeypatch.setattr(host, "STAT", stat)
    monkeypatch.setattr(host.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(host, "_own_seconds", lambda: own[0])
    ticks = host.os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu 0 0 0 0 0 0 0 0 0 0\n")
    others = host.OtherProcesses()
    now[0], own[0] = 110.0, 54.0
    stat.write_text(f"cpu {10 * ticks} 0 {5 * ticks} {99 * ticks} 7 0 0 0 3 0\n")
    assert others.cores() == pytest.approx((15 - 4) / 10)


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
