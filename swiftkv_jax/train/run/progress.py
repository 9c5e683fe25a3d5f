"""Speed of a run and the time it has left: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from ...plan.hardware import hardware_of
from ...plan.roofline import matmul_rate
from ...process.distributed import is_main_process

logger = logging.getLogger(__name__)

_SHOWN = {
    "loss": "loss",
    "kl": "KL",
    "agreement": "agreement",
    "logits_loss": "distillation loss",
    "hidden_loss": "hidden",
    "grad_norm": "grad norm",
}
_ON_BAR = "loss", "KL", "agreement", "tokens/s", "MFU", "grad norm", "hidden"
"""The figures beside a bar, those first that are shown where not all of them have room."""
_BAR = "{desc}: {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
COLUMNS = 110
"""Width of the bar and its figures on a wide terminal."""
_GROWS = 8
"""Columns kept free for a comma and for the times in the bar, which become longer."""
SECONDS_BETWEEN_LINES = 10.0


@dataclasses.dataclass(frozen=True)
class PeakFlops:
    """The peak rate to which MFU, the model FLOPs utilisation, is relative."""

    flops: float
    """FLOP/s of all devices together."""
    description: str
    """Origin of the number, for the settings of a run."""


def peak_flops(mesh: Mesh, dtype: jnp.dtype) -> PeakFlops:
    """The published peak of the mesh's devices where it is known, else what a large matrix product
    in `dtype` reaches here.

    Every device of every process counts once; those that a CPU emulates are one together.
    """
    device = mesh.devices.flat[0]
    count = 1 if device.platform == "cpu" else mesh.size  # emulated devices share their cores
    measured = matmul_rate(dtype)
    hardware = hardware_of(device.device_kind)
    product = f"a large {jnp.dtype(dtype)} matrix product reaches {measured / 1e12:.4g} TFLOP/s"
    if hardware is None:
        return PeakFlops(count * measured, f"{count} x {device.device_kind}: {product}")
    peak = f"published bfloat16 peak {hardware.flops / 1e12:.4g} TFLOP/s"
    return PeakFlops(count * hardware.flops, f"{count} x {hardware.name}: {peak}, {product}")


def _on_terminal() -> bool:
    return is_main_process() and sys.stderr is not None and sys.stderr.isatty()


def track[Item](
    items: Iterable[Item], what: str, total: int, unit: str = "batch"
) -> Iterator[Item]:
    """The items, of which there are `total`, counted when the next one is asked for: on a bar that
    goes away, or in plain lines, one at the start and then every `SECONDS_BETWEEN_LINES` at
    most."""
    units = f"{unit}es" if unit.endswith("ch") else f"{unit}s"
    on_terminal = _on_terminal()
    since = time.monotonic()
    if not on_terminal:
        logger.info("%s: %d %s", what, total, unit if total == 1 else units)
    with tqdm(
        desc=what,
        total=total,
        unit=unit,
        leave=False,
        disable=not on_terminal,
        dynamic_ncols=True,
        bar_format=_BAR,
    ) as bar:
        for number, item in enumerate(items):
            if number:
                bar.update()
                if not on_terminal and time.monotonic() - since >= SECONDS_BETWEEN_LINES:
                    since = time.monotonic()
                    logger.info("%s: %d of %d %s", what, number, total, units)
            yield item
        bar.update()


class Progress:
    """Losses, speed and time left while a run goes on. Process 0 of several shows them.

    `tokens_per_step` counts the rows of all processes with their padding, which is computed like
    any other token.
    """

    def __init__(
        self,
        *,
        first_step: int,
        steps: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak: PeakFlops,
    ):
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            unit="step",
            disable=not _on_terminal(),
            dynamic_ncols=True,
            bar_format=_BAR,
        )
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak = peak
        self._started = 0
        self._newest = None
        self.restart_clock()

    def advance(self, newest: Any) -> None:
        """Count one more step that was started. `newest` is an array that it returns; call this
        before earlier results are read.

        Accelerators then still compute it, while a CPU has often finished: that is queried, without
        waiting.
        """
        self._started += 1
        self._newest = newest
        self._bar.update()

    def restart_clock(self) -> None:
        """Restart the clock: compilation, evaluation and saving do not count as training time."""
        self._since, self._done_before = time.perf_counter(), self._steps_done()

    def report(
        self, step: int, values: Mapping[str, Any], *, useful_share: float
    ) -> dict[str, float]:
        """Show `values` and the speed since the last report; returns what belongs in the step's
        row.

        `useful_share` is the share of the step's tokens that are not padding. Returns
        tokens_per_second with the padding, useful_tokens_per_second without, mfu, and seconds since
        the last report; nothing before the clock has run.
        """
        shown = {
            label: f"{float(values[name]):.4f}" for name, label in _SHOWN.items() if name in values
        }
        if speed := self._speed(useful_share):
            shown |= {
                "tokens/s": f"{speed['tokens_per_second']:,.0f}",
                "MFU": f"{speed['mfu']:.1%}",
            }
        if not self._bar.disable:
            self._bar.set_postfix_str(self._fitting(shown))  # the bar says how long it will take
        else:
            if speed:
                left = (self._steps - step) * self._tokens_per_step / speed["tokens_per_second"]
                shown["left"] = tqdm.format_interval(left)
            numbers = "  ".join(f"{label} {value}" for label, value in shown.items())
            logger.info("step %d/%d  %s", step, self._steps, numbers)
        self.restart_clock()
        return speed

    def _fitting(self, shown: Mapping[str, str]) -> str:
        """Return as many of the figures as have room beside the bar, each of them whole."""
        about = self._bar.format_dict
        columns = min(about["ncols"] or COLUMNS, COLUMNS)
        taken = len(tqdm.format_meter(**{**about, "ncols": None, "postfix": None})) + _GROWS
        text = ""
        for label in (label for label in _ON_BAR if label in shown):
            longer = f"{text}  {label} {shown[label]}".strip()
            if taken + len(longer) <= columns:
                text = longer
        return text

    def _steps_done(self) -> int:
        pending = self._newest is not None and not self._newest.is_ready()
        return self._started - pending

    def _speed(self, useful_share: float) -> dict[str, float]:
        seconds = time.perf_counter() - self._since
        done = self._steps_done() - self._done_before
        if not done:
            return {}
        tokens_per_second = done * self._tokens_per_step / seconds
        return {
            "tokens_per_second": tokens_per_second,
            "useful_tokens_per_second": tokens_per_second * useful_share,
            "mfu": tokens_per_second * self._flops_per_token / self._peak.flops,
            "seconds": seconds,
        }

    def close(self) -> None:
        self._bar.close()
