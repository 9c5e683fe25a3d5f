"""What a run reports: one JSON line per logged step, and a progress bar or plain lines on stderr."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from ..cli import log


class MetricsLog:
    """`metrics.jsonl`, cut back to the step a resumed run starts from, so that every step stands there once."""

    def __init__(self, path: Path, *, first_step: int):
        kept = []
        if path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            kept = [line for line in lines if json.loads(line)["step"] <= first_step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(path)
        self._file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Progress:
    """Loss, tokens per second and MFU while a run goes on. A bar on a terminal, lines elsewhere."""

    def __init__(self, *, first_step: int, steps: int, flops_per_token: float, matmul_rate: float):
        self._bar = tqdm(total=steps, initial=first_step, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True)
        self._steps, self._flops, self._rate = steps, flops_per_token, matmul_rate
        self._since, self._tokens = time.perf_counter(), 0

    def advance(self, tokens: int) -> None:
        self._tokens += tokens
        self._bar.update()

    def restart_clock(self) -> None:
        """Forget the time so far: compilation and evaluation are not training speed."""
        self._since, self._tokens = time.perf_counter(), 0

    def report(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """Show `values` and the speed since the last report; returns the speed: tokens/s and MFU."""
        now = time.perf_counter()
        speed = self._tokens / (now - self._since) if self._tokens else 0.0
        self._since, self._tokens = now, 0
        mfu = speed * self._flops / self._rate
        shown = {name: f"{values[name]:.4f}" for name in ("loss", "agreement")} | {"tokens/s": f"{speed:,.0f}", "MFU": f"{mfu:.0%}"}
        if self._bar.disable:
            log(f"step {step}/{self._steps}  " + "  ".join(f"{name} {value}" for name, value in shown.items()))
        else:
            self._bar.set_postfix(shown)
        return {"tokens_per_second": speed, "mfu": mfu}

    def close(self) -> None:
        self._bar.close()


def measure_matmul_rate(dtype: jnp.dtype, devices: int) -> float:
    """FLOP/s of a large square matrix product in `dtype` on this machine, over all devices: the ceiling MFU refers to.

    Emulated CPU devices share the same cores, so there the rate of one is the rate of all.
    """
    on_cpu = jax.default_backend() == "cpu"
    size = 1024 if on_cpu else 8192
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    multiply(a, a).block_until_ready()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        multiply(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best * (1 if on_cpu else devices)
