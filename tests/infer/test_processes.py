"""Two processes on this machine over one mesh: each runs the same engine, one of them writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.free_port import free_port

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "llama-trained-4of8-group2-tied"
FLAGS = (
    "--max-tokens 6 --max-model-len 64 --max-num-seqs 2 --max-num-batched-tokens 16 "
    "--page-size 8 --decode-steps 2 --compile-cache none"
)
SECONDS = 300
"""In which a pair of processes has ended, also on a busy machine."""


def command(folder: Path, output: str, *flags: str) -> list[str]:
    files = ["-m", str(FIXTURE), "-i", str(folder / "in.jsonl"), "-o", str(folder / output)]
    return [sys.executable, "-m", "swiftkv_jax.infer", *files, *FLAGS.split(), *flags]


def rows(path: Path) -> list[dict]:
    return [
        {name: row[name] for name in ("id", "token_ids", "finish_reason")}
        for row in map(json.loads, path.read_text().splitlines())
    ]


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["2x1", "1x2"])
def test_two_processes_answer_like_one(mesh, tmp_path):
    prompts = [
        {"prompt_token_ids": [5 + i, *range(7, 7 + 3 * i)], "temperature": 0.8 * (i % 2), "seed": i}
        for i in range(6)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": "4",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    together = [
        "--mesh",
        mesh,
        "--coordinator-address",
        f"127.0.0.1:{free_port()}",
        "--num-processes",
        "2",
        "--process-id",
    ]
    pair = [
        subprocess.Popen(
            command(tmp_path, "two.jsonl", *together, str(i)),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        logs = [process.communicate(timeout=SECONDS)[1] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], logs
    assert "tokens/s" in logs[0] and "tokens/s" not in logs[1]  # one speaks
    one = subprocess.run(
        command(tmp_path, "one.jsonl"),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert one.returncode == 0, one.stderr
    assert rows(tmp_path / "two.jsonl") == rows(tmp_path / "one.jsonl")
