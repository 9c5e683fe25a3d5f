"""`infer bench serve` against a server: what it counts is what the server did."""

import json
import sys

import pytest

from swiftkv_jax.infer.__main__ import main
from swiftkv_jax.infer.bench.cells import Timed
from swiftkv_jax.infer.bench.serve import _document, summary
from swiftkv_jax.infer.bench.serve_arguments import ServeBenchOptions


def bench(running, *arguments: str) -> int:
    small = "--input-len 12 --output-len 9 --num-prompts 10 --vocab-size 90 --num-warmups 1".split()
    return main(["bench", "serve", "--base-url", running.url, *small, *arguments])


def test_it_counts_what_the_server_did(start, tmp_path, capsys, monkeypatch):
    running = start(step_seconds=0.005)
    file = tmp_path / "result.json"
    flags = "--max-concurrency", "4", "-o", str(file), "--api-key", "sk-1"
    monkeypatch.setattr(sys, "argv", ["swiftkv", "infer", "bench", "serve", *flags])
    assert bench(running, *flags) == 0
    assert "sk-1" not in file.read_text()
    found = json.loads(file.read_text())
    assert found["command"].endswith(
        f"infer bench serve --max-concurrency 4 -o {file} --api-key '***'"
    )
    assert (found["completed"], found["failed"]) == (10, 0)
    assert found["output_tokens"] == 90 and found["prompt_tokens"] == 120
    assert running.metric("vllm:generation_tokens_total") == 90 + 9, "and one to warm up"
    assert found["ttft"]["p50"] <= found["e2e"]["p50"] <= found["e2e"]["p99"]
    assert len(found["requests"]) == 10 and 0 < found["client_cpu_share"] < 1
    # At most four at once
    spans = sorted((one["sent"], one["arrivals"][-1]) for one in found["requests"])
    assert max(sum(a <= at < b for a, b in spans) for at, _ in spans) <= 4
    assert "10 requests, 0 failed" in capsys.readouterr().out
    running.check_empty()


def test_arrivals_prefixes_and_files(start, tmp_path):
    running = start()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": [1, 2]}\n')
    assert bench(running, "--request-rate", "200", "--prefix-len", "8") == 0
    assert running.metric("vllm:prefix_cache_hits_total") >= 9 * 8
    assert bench(running, "--dataset", str(prompts), "--no-ignore-eos") == 0
    running.check_empty()


def test_failures_are_counted_and_named(start, capsys):
    running = start()
    assert bench(running, "--output-len", "500") == 1
    assert "the server refuses a request: 400" in capsys.readouterr().err
    assert bench(running, "--output-len", "500", "--num-warmups", "0") == 1
    assert "failed: 400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--base-url", "ftp://x"], 2, "is not like http://127.0.0.1:8000"),
        (["--base-url", "http://127.0.0.1:9"], 1, "no server at http://127.0.0.1:9"),
        (["-o", "no/where.json"], 2, "its folder does not exist"),
        (["-o", "."], 2, "exists already"),
        (["--prefix-len", "512"], 2, "--prefix-len 512 must be below"),
        (["--num-prompts", "0"], 2, "must be at least 1"),
        (["--vocab-size", "0"], 2, "--vocab-size 0: must be at least 1"),
        (["--max-concurrency", "-1"], 2, "--max-concurrency -1: must be at least 1"),
        (["--num-warmups", "-1"], 2, "--num-warmups -1: must be at least 0"),
        (["--request-rate", "nan"], 2, "--request-rate nan must be above 0"),
        (["--extra-body", "[1]"], 2, "--extra-body: must be an object in JSON, got '[1]'"),
        (["--extra-body", "{bad"], 2, "--extra-body: must be an object in JSON, got '{bad'"),
    ],
)
def test_mistakes_are_one_line(arguments, code, message, capsys):
    assert main(["bench", "serve", *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_connection_that_was_refused_moves_no_other_time():
    timed = [Timed(sent=1000.0, arrivals=[1000.5]), Timed(error="ConnectionRefusedError")]
    rows = _document(ServeBenchOptions(), {}, timed)["requests"]
    assert [(row["sent"], row["arrivals"]) for row in rows] == [(0.0, [0.5]), (None, [])]


def test_times_are_those_of_vllm():
    one = Timed(sent=1.0, arrivals=[1.5, 1.7, 2.1], num_tokens=7, num_prompt_tokens=3)
    assert one.ttft == pytest.approx(0.5) and one.e2e == pytest.approx(1.1)
    assert one.tpot == pytest.approx(0.1) and one.itl == pytest.approx([0.2, 0.4])
    found = summary([one, Timed(error="x")], 2.0)
    assert found["output_tokens_per_s"] == 3.5
    assert found["ttft"] == pytest.approx({"mean": 0.5, "p50": 0.5, "p90": 0.5, "p99": 0.5})
