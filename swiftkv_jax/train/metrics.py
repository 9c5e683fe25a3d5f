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
    """`metrics.jsonl`, cut back to the step a resumed run starts from, so that every step stands there once.

    Evaluations at that step are cut too: the run makes them again.
    """

    def __init__(self, path: Path, *, first_step: int):
        kept = []
        if path.exists():
            kept = [line for line in path.read_text().splitlines(keepends=True) if _stays(line, first_step)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(path)
        self._file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _stays(line: str, first_step: int) -> bool:
    """Whole rows of steps the resumed run will not repeat."""
    try:
        row = json.loads(line)
        return line.endswith("\n") and (row["step"] < first_step or (row["step"] == first_step and "loss" in row))
    except (ValueError, KeyError, TypeError):
        return False


class Progress:
    """Loss, tokens per second and MFU while a run goes on. A bar on a terminal, lines elsewhere.

    Tokens count the padding of packed rows, which is computed like any other; MFU is the share of `matmul_rate`.
    """

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
        """Show `values` and the speed since the last report; returns tokens/s and MFU, or nothing before the clock has run."""
        shown, speeds = {name: f"{values[name]:.4f}" for name in ("loss", "agreement")}, {}
        if self._tokens:
            speed = self._tokens / (time.perf_counter() - self._since)
            speeds = {"tokens_per_second": speed, "mfu": speed * self._flops / self._rate}
            shown |= {"tokens/s": f"{speed:,.0f}", "MFU": f"{speeds['mfu']:.0%}"}
        self.restart_clock()
        if self._bar.disable:
            log(f"step {step}/{self._steps}  " + "  ".join(f"{name} {value}" for name, value in shown.items()))
        else:
            self._bar.set_postfix(shown)
        return speeds

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
