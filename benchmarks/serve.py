"""Serving Llama-3.1-8B with random weights on one GPU or TPU: SwiftKV and its teacher, bfloat16 and
8-bit KV.

    python -m benchmarks.serve                 the most important parts, about ten minutes
    python -m benchmarks.serve --only latency  one of the others
    python -m benchmarks.serve --shapes smoke  a tiny model, also on a CPU, to see that all runs

Runs `python -m swiftkv_jax.infer bench` once for each part, in a process of its own, so that a
failure of one leaves the others: prefill over the prompt length, decoding over rows and context,
offline throughput, latency of requests that arrive; then the parts with 8-bit products, of which
the offline ones are the workloads that the authors and TensorRT-LLM publish. Then the targets
(`serve_targets`). JSON goes to `benchmarks/results/`. No part begins after --seconds; the document
names those that were left out. Exit code 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftkv_jax import cli
from swiftkv_jax.checkpoints.hf_config import config_to_hf
from swiftkv_jax.model.config import Config
from swiftkv_jax.process import provenance

from . import report
from .markdown import section, table
from .serve_targets import judge

TINY = Config(
    vocab_size=256,
    embed_dim=64,
    mlp_dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_key_value_layers=2,
)
# The most important first, should time run out. Names are those of the rows of the targets.
FULL = {
    "prefill-lengths": "prefill --input-len 300,500,1k,2k,8k -r 5",
    "prefill": "prefill --input-len 2k,8k,32k -r 5",
    "decode": "decode --input-len 1k --batch 1,64,256 --output-len 64 -r 3",
    "decode-2k": "decode --input-len 2k --batch 64 --output-len 64 -r 3",
    "decode-2k-fp8": "decode --input-len 2k --batch 64 --output-len 64 -r 3 --kv-cache-dtype fp8",
    "offline": "offline --input-len 2000 --output-len 250 --num-prompts 512 --max-num-seqs 256 -r "
    "1",
    "offline-fp8": "offline --input-len 2000 --output-len 250 --num-prompts 512 --max-num-seqs "
    "256 -r 1 --kv-cache-dtype fp8",
    # The first token of a prompt takes 2.3 ms more than its chunks and a decode step: with graphs?
    "prefill-no-graph": "prefill --input-len 500,2k --swiftkv on -r 5 --compiler-option "
    "xla_gpu_enable_command_buffer=",
    "prefill-fp8": "prefill --input-len 8k -r 3 --kv-cache-dtype fp8",
    "latency": "latency --input-len 2k --output-len 128 --request-rate 8 --num-prompts 128 "
    "--max-num-seqs 64 -r 1",
    "offline-2k": "offline --input-len 2k --output-len 128 --num-prompts 512 --max-num-seqs 256 -r "
    "1",
    "offline-2k-fp8": "offline --input-len 2k --output-len 128 --num-prompts 512 --max-num-seqs "
    "256 -r 1 --kv-cache-dtype fp8",
}
_W8A8 = (
    " --quantization fp8 --swiftkv on --compiler-option xla_gpu_autotune_level=0 "
    "--compiler-option xla_gpu_enable_triton_gemm=false"
)
"""FP8 products, compiled without XLA's autotuning, which takes longer than the measurement."""
W8A8 = {
    "prefill-w8a8": f"prefill --input-len 2k,8k,32k -r 5{_W8A8}",
    "decode-w8a8": f"decode --input-len 1k --batch 1,64,256 --output-len 64 -r 3{_W8A8}",
} | {
    f"offline-{name}-w8a8": f"offline --input-len {input_len} --output-len {output_len} "
    f"--num-prompts {prompts} --max-num-seqs {rows} -r 1 --kv-cache-dtype fp8{_W8A8}"
    for name, input_len, output_len, prompts, rows in (
        ("2000-256", 2000, 256, 1024, 384),
        ("2k-128", 2048, 128, 1500, 384),
        ("1k-1k", 1000, 1000, 768, 384),
        ("5k-500", 5000, 500, 384, 128),
    )
}
SMOKE = {
    "prefill": "prefill --input-len 32,64 -r 1",
    "decode-fp8": "decode --input-len 32 --batch 2 --output-len 16 -r 1 --kv-cache-dtype fp8",
    "latency": "latency --input-len 16 --output-len 4 --request-rate inf --num-prompts 4 "
    "--max-num-seqs 2 -r 1",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description="Prefill, decoding, throughput and latency."
    )
    report.add_flags(parser, tables=("full", "smoke"), seconds=540)
    parser.add_argument(
        "--attention",
        metavar="NAME",
        help="implementation of attention, not checked first (default: the device's, checked)",
    )
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args), parser)


def _main(args: argparse.Namespace) -> int:
    """Run all parts. This process uses no device: each part needs all of its memory."""
    start = time.monotonic()
    seed = report.new_seed(args.seed)
    if args.output is not None:
        report.check_writable(args.output)
    parts = dict[str, Any]()
    status = dict[str, str]()
    path = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config_to_hf(TINY)))
        model = str(folder) if args.shapes == "smoke" else "llama-3.1-8b"
        document: dict[str, Any] = {"seed": seed, "model": model, "status": status, "parts": parts}
        every = SMOKE if args.shapes == "smoke" else FULL | W8A8
        for part in report.select(list(every), args.only, "part"):
            left = args.seconds - (time.monotonic() - start)
            if left <= 0:
                status[part] = "left out: no time"
                continue
            command = (
                f"{every[part]} --config {shlex.quote(model)} --load-format dummy --seed {seed}"
            )
            if args.attention is not None:
                command += f" --attention {shlex.quote(args.attention)}"
            status[part], found = _run(part, shlex.split(command), folder / f"{part}.json", left)
            if found is not None:
                parts[part] = found
                if path is None:
                    document = _facts(found) | document
                    kind = found["device"]["kind"]
                    date = found["date"]
                    path = report.output_path(args, "serve", kind, date)
            report.write_json(path, document)
    if args.shapes == "full" and parts:
        judged = [each[:3] for each in judge(parts, document["device"]["kind"])]
        print(section("Targets", table(("", "release", "measured"), judged)))
    report.write_json(path, document)
    print("\n".join(f"{part}: {what}" for part, what in status.items()))
    return cli.ERROR if any(what.startswith("failed") for what in status.values()) else cli.OK


def _facts(part: dict[str, Any]) -> dict[str, Any]:
    """What a document says of its run, from the first part that was measured."""
    same = {name: part[name] for name in ("date", "device", "versions", "commit")}
    return {"benchmark": "serve", "command": provenance.command()} | same


def _run(
    part: str, flags: list[str], path: Path, seconds: float
) -> tuple[str, dict[str, Any] | None]:
    """Status of a part and its document, None if it failed. Its tables go to standard output."""
    print(f"\n## {part}\n", flush=True)
    command = [sys.executable, "-m", "swiftkv_jax.infer", "bench", *flags, "-o", str(path)]
    last = ""
    limit = seconds + 60
    with subprocess.Popen(command, cwd=report.ROOT, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(limit, process.kill)
        timer.daemon = True  # so that it does not keep a command that is interrupted
        timer.start()
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            last = line.strip() or last
    expired = not timer.is_alive()
    timer.cancel()
    if expired:
        return f"failed: not done {limit:.0f} s after it began", None
    if process.returncode != 0:
        return f"failed with exit code {process.returncode}: {last}", None
    return "done", json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
