"""What a run says of its steps, one step late, so that the devices never wait for the host to read
a number."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import DivergenceError
from .evaluation import LOSS
from .metrics import METRICS, MetricsLog, read_metrics
from .progress import Progress
from .recipe import Recipe
from .setup import say
from .step import learning_rate


class _Taken(NamedTuple):
    """A step whose numbers have not been read yet."""

    step: int
    values: dict[str, jax.Array]
    row_ids: list[str]


class Journal:
    """Metrics, progress and the check that every step's loss is finite."""

    def __init__(self, recipe: Recipe, progress: Progress, *, first_step: int, steps: int):
        self._recipe, self._progress, self._steps = recipe, progress, steps
        self._rate = learning_rate(recipe, steps)
        self._unread: _Taken | None = None
        self.held_out_losses = _losses(recipe.output_dir / METRICS, first_step)
        """Of every evaluation so far, those before a restart included."""
        self._metrics = MetricsLog(
            recipe.output_dir, first_step=first_step, report_to=recipe.report_to
        )

    def took(self, step: int, values: dict[str, jax.Array], row_ids: list[str]) -> None:
        """A step was started. Reads the one before. Raises `DivergenceError` if that went wrong."""
        self._progress.advance(values["loss"])
        self.settle()
        self._unread = _Taken(step, values, row_ids)

    def settle(self) -> None:
        """Read the last step now: nothing of a step that went wrong may be saved or exported.
        Raises `DivergenceError`."""
        if self._unread is None:
            return
        taken, self._unread = self._unread, None
        numbers = self._finite(taken)
        if taken.step % self._recipe.logging_steps == 0 or taken.step == self._steps:
            useful = numbers.pop("tokens") / (self._recipe.batch_size * self._recipe.max_length)
            numbers["learning_rate"] = float(jnp.asarray(self._rate(taken.step - 1)))
            self._metrics.write(
                {"step": taken.step}
                | numbers
                | self._progress.report(taken.step, numbers, useful_share=useful)
            )

    def _finite(self, taken: _Taken) -> dict[str, float]:
        numbers = {name: float(value) for name, value in taken.values.items()}
        if not np.isfinite(numbers["loss"]) or not np.isfinite(numbers["grad_norm"]):
            what = f"loss {numbers['loss']}, gradient norm {numbers['grad_norm']}"
            rows = ", ".join(taken.row_ids[:8]) + (", ..." if len(taken.row_ids) > 8 else "")
            place = f"checkpoints in {self._recipe.output_dir} are from before"
            raise DivergenceError(
                f"step {taken.step}: {what} on batch {taken.step - 1} (rows {rows}); {place}"
            )
        return numbers

    def evaluated(self, step: int, results: dict[str, float]) -> None:
        """Held-out numbers of the state after `step`."""
        say(
            f"step {step}: held-out "
            + "  ".join(
                f"{name.removeprefix('eval_')} {value:.4f}" for name, value in results.items()
            )
        )
        self._metrics.write({"step": step} | results)
        self.held_out_losses.append(results[LOSS])

    def close(self) -> None:
        """Writes what was read; a last step that was not is left out, as after a kill."""
        with contextlib.closing(self._metrics):
            self._progress.close()


def _losses(path: Path, first_step: int) -> list[float]:
    if not first_step or not path.exists():
        return []
    return [row[LOSS] for row in read_metrics(path) if LOSS in row and row["step"] <= first_step]
